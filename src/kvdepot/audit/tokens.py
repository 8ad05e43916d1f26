"""Text to token ids, fast: cut where the tokenizer cuts anyway, and remember the pieces.

Prompts of one application consist of the same lines over and over. A text is cut at special tokens and
line ends that a non-space follows, and new lines into words; each piece is tokenized once. Where
tokenizers cut there differs, so what `kvdepot.audit.cuts` offers is tried on texts made to break it, and
on one prompt in a hundred: behind the line end, before it, at special tokens only, and at last at the
prompt's ends, whichever is exact.
"""

from __future__ import annotations

import importlib
import json
import re
from collections.abc import Iterable, Sequence
from typing import Any, Protocol

import numpy as np

from kvdepot.audit.cuts import LINES, SPECIAL, WHOLE, WORDS, cut, probes, special_pattern
from kvdepot.audit.tokenlog import Ids
from kvdepot.errors import ConfigError

__all__ = ["Encoder", "FallbackEncoder", "ModelEncoder", "PieceMemo", "PseudoEncoder"]

_MEMO_BYTES = 512 << 20
#: from so many words on, words that do not come again are no longer remembered
_WORDS_TRIED = 20_000
#: characters that are handed to a tokenizer at once; several such are worked on at the same time
_BATCH_CHARS = 1 << 16
#: special and added tokens that probes are made of
_MARKS = 64
_LOOK_ALIKES = ("<|x|>", "</s>", "<s>", "<x>", "[X]")


class Encoder(Protocol):
    """Turns pieces of text into token ids."""

    #: for people
    name: str
    #: how wrong counts may be, for people; "" for the model's own tokenizer
    error: str
    #: whether it is so slow that words are worth remembering, and cuts by rules before it looks at words
    splits: bool
    #: special and added tokens, as many as are worth trying cuts with
    marks: Sequence[str]
    #: finds special tokens
    special: re.Pattern[str] | None

    def encode(self, texts: Sequence[str]) -> list[Ids]:
        """Token ids of each text, without tokens that are added to a prompt's ends."""


class FallbackEncoder:
    """Counts tokens without a model: words, numbers, spaces and signs, long words in parts.

    The same text always gives the same ids, so what is shared and where it breaks is exact to the word;
    only the number of tokens is an estimate.
    """

    name = "built-in fallback"
    error = (
        "token counts are estimates: within 15 % for English prose and code, further off elsewhere"
    )
    splits = False
    marks: Sequence[str] = ()
    special: re.Pattern[str] | None = SPECIAL

    _WORDS = re.compile(
        r"<\|[A-Za-z0-9_/]{1,40}\|>|</?s>| ?[^\W\d_]+|\d{1,3}|\n+|[ \t\r\f\v]+(?=\S)|\s+| ?(?:[^\s\w]|_){1,4}"
    )
    _LONGEST = 9

    def __init__(self) -> None:
        self._ids: dict[str, int] = {}
        self._words: dict[str, list[int]] = {}

    def encode(self, texts: Sequence[str]) -> list[Ids]:
        return [np.array(self._one(text), np.int32) for text in texts]

    def _one(self, text: str) -> list[int]:
        found: list[int] = []
        known = self._words
        words = [
            word for piece in cut(text, "special tokens") for word in self._WORDS.findall(piece)
        ]
        for word in words:
            ids = known.get(word)
            if ids is None:
                ids = known[word] = self._new(word)
            found += ids
        return found

    def _new(self, word: str) -> list[int]:
        known = self._ids
        if len(word) <= self._LONGEST and word.isascii():
            return [known.setdefault(word, len(known))]
        return [known.setdefault(part, len(known)) for part in self._parts(word)]

    def _parts(self, word: str) -> list[str]:
        if word.startswith("<"):
            return [word]
        if word.isascii():
            size = self._LONGEST
        elif max(word) > "\u2e80":  # East Asian signs: about two thirds of a token each
            size = 2
        else:
            size = 3
        return [word[at : at + size] for at in range(0, len(word), size)]


class PseudoEncoder:
    """For audit traces: a pseudo-word says how many tokens it stands for (``~k3f09ab~12``)."""

    name = "audit trace"
    error = ""
    splits = False
    marks: Sequence[str] = ()
    special: re.Pattern[str] | None = SPECIAL

    _WORDS = re.compile(r"~([0-9a-z]+)~(\d{1,7}) ?|(\s+|[^\s~]+|~)")
    _ONE = re.compile(r"~([0-9a-z]+)~1")

    def __init__(self) -> None:
        self._ids: dict[tuple[str, int], int] = {}
        #: words of one token: a log of ids has no others
        self._ones: dict[str, int] = {}

    def encode(self, texts: Sequence[str]) -> list[Ids]:
        return [np.array(self._of_ones(text) or self._of_any(text), np.int32) for text in texts]

    def _of_ones(self, text: str) -> list[int] | None:
        """Ids of words of one token each, with a blank between them; None for any other text."""
        words = text.split(" ")
        known = self._ones
        # in their order: the numbers of words, and so the anchors, are the same in every run
        for word in [each for each in dict.fromkeys(words) if each not in known]:
            match = self._ONE.fullmatch(word)
            if match is None:
                return None
            known[word] = self._ids.setdefault((match[1], 0), len(self._ids))
        return [known[word] for word in words]

    def _of_any(self, text: str) -> list[int]:
        ids: list[int] = []
        for match in self._WORDS.finditer(text):
            word, count = (match[1], int(match[2])) if match[1] else (match[3], 1)
            ids += [self._ids.setdefault((word, number), len(self._ids)) for number in range(count)]
        return ids


class ModelEncoder:
    """The model's own tokenizer, from the text of its ``tokenizer.json``.

    Raises:
        ConfigError: the library is not installed, or the text is no tokenizer.
    """

    error = ""

    def __init__(self, source: str, name: str) -> None:
        self.name = name
        try:
            library = importlib.import_module("tokenizers")
        except ImportError as error:
            raise ConfigError(
                "a model's tokenizer needs the tokenizers library",
                hint="pip install 'kvdepot[audit]', or leave out --model for an estimate",
            ) from error
        try:
            self._tokenizer: Any = library.Tokenizer.from_str(source)
        except Exception as error:
            raise ConfigError(f"{name}: tokenizer.json cannot be used: {error}") from error
        self._tokenizer.no_padding()
        self._tokenizer.no_truncation()
        parts = json.loads(source)
        self.splits: bool = parts.get("pre_tokenizer") is not None
        added = parts.get("added_tokens") or []
        marks = [each["content"] for each in sorted(added, key=_is_plain)]
        self.marks: Sequence[str] = [*marks[:_MARKS], *_LOOK_ALIKES]
        self.special = special_pattern(
            (each["content"], bool(each.get("rstrip")))
            for each in added
            if not each.get("lstrip") and not each.get("single_word")
        )
        #: a special token that parts texts which are tokenized together, and its id
        self._between = next(filter(self._parts, filter(_is_plain, added)), None)

    def _parts(self, token: dict[str, Any]) -> bool:
        """Whether a token leaves what is before and behind it as it is."""
        if not token["special"] or token["normalized"]:
            return False
        sides = ("a", " a", "\na", "7. b ", " \n")
        alone = [each.tolist() for each in self._each(sides)]
        both = self._each([f"{one}{token['content']}{one}" for one in sides])
        return all(
            ids.tolist() == [*one, token["id"], *one] for ids, one in zip(both, alone, strict=True)
        )

    def encode(self, texts: Sequence[str]) -> list[Ids]:
        if self._between is None or len(texts) < 2:
            return self._each(texts)
        mark, number = self._between["content"], self._between["id"]
        groups: list[list[str]] = [[]]
        chars = 0
        for text in texts:
            if chars > _BATCH_CHARS:
                groups.append([])
                chars = 0
            groups[-1].append(text)
            chars += len(text) + 16
        made: list[Ids] = []
        # an object of the library for each short text would take longer than the tokenizing
        for group, ids in zip(
            groups, self._each([mark.join(each) for each in groups]), strict=True
        ):
            ends = [*np.flatnonzero(ids == number).tolist(), len(ids)]
            if len(ends) != len(group):  # the mark stands in a text
                made += self._each(group)
                continue
            starts = [0, *(end + 1 for end in ends)]
            made += [ids[start:end] for start, end in zip(starts, ends, strict=False)]
        return made

    def _each(self, texts: Sequence[str]) -> list[Ids]:
        encoded = self._tokenizer.encode_batch_fast(list(texts), add_special_tokens=False)
        return [np.array(each.ids, np.int32) for each in encoded]

    def decode(self, ids: Sequence[int]) -> str:
        """The text of token ids, special tokens included."""
        return str(self._tokenizer.decode(list(ids), skip_special_tokens=False))


def _is_plain(token: dict[str, Any]) -> bool:
    """Whether an added token takes no white space with it, and holds none."""
    takes = any(token.get(each) for each in ("lstrip", "rstrip", "single_word"))
    return not takes and not re.search(r"\s", token["content"])


class PieceMemo:
    """Tokenizes prompts piece by piece. Keeps what it saw, up to half a GiB.

    Args:
        encoder: tokenizes pieces.
        keeps: False for prompts of one piece each, which do not come again.
    """

    def __init__(self, encoder: Encoder, *, keeps: bool = True) -> None:
        self._keeps = keeps
        self.encoder = encoder
        #: where prompts are cut; see `verify`
        self.cuts = "lines"
        #: how new pieces are cut further; "" for not at all
        self.words = ""
        self._known: dict[str, bytes] = {}
        self._bytes = 0
        self._words_seen = self._words_new = 0

    def fresh(self) -> PieceMemo:
        """One that cuts in the same way, and has seen nothing."""
        made = PieceMemo(self.encoder, keeps=self._keeps)
        made.cuts, made.words = self.cuts, self.words
        return made

    def prompts(self, texts: Iterable[str]) -> list[Ids]:
        """Token ids of each prompt."""
        return [self._one(text) for text in texts]

    def verify(self, texts: Sequence[str]) -> None:
        """Compare with prompts tokenized whole, and with probes; cut less if anything differs."""
        step = max(1, len(texts) // max(4, len(texts) // 100))
        chosen = [*texts[::step][:200], *probes(self.encoder.marks)]
        whole = [(text, self.encoder.encode([text])[0].tobytes()) for text in chosen]
        self.words = ""
        for cuts in (*LINES, WHOLE):
            self.cuts = cuts
            if self._is_exact(whole):
                break
        if not self.encoder.splits or self.cuts == WHOLE:
            return
        for words in WORDS:
            self.words = words
            if self._is_exact(whole):
                return
        self.words = ""
        self._forget()

    def _is_exact(self, whole: Sequence[tuple[str, bytes]]) -> bool:
        self._forget()
        exact = all(self._one(text).tobytes() == ids for text, ids in whole)
        self._words_seen = self._words_new = 0
        return exact

    def _forget(self) -> None:
        self._known.clear()
        self._bytes = 0

    def _one(self, text: str) -> Ids:
        pieces = cut(text, self.cuts, self.encoder.special)
        known = self._known
        missing = [piece for piece in dict.fromkeys(pieces) if piece not in known]
        if missing:
            if self._bytes > _MEMO_BYTES or not self._keeps:
                self._forget()
                missing = list(dict.fromkeys(pieces))
            self._learn(missing)
        return np.frombuffer(b"".join([known[piece] for piece in pieces]), np.int32)

    def _learn(self, pieces: Sequence[str]) -> None:
        """Tokenize pieces that are not known."""
        if not self.words:
            self._encode(pieces)
            return
        found, special = WORDS[self.words].findall, self.encoder.special
        lines = [
            [piece] if special is not None and special.match(piece) else found(piece)
            for piece in pieces
        ]
        words = dict.fromkeys(word for line in lines for word in line)
        new = [word for word in words if word not in self._known]
        self._words_seen += sum(map(len, lines))
        self._words_new += len(new)
        if self._words_seen > _WORDS_TRIED and 2 * self._words_new > self._words_seen:
            self._encode(pieces)
            return
        self._encode(new)
        known = self._known
        for piece, line in zip(pieces, lines, strict=True):
            self._keep(piece, b"".join([known[word] for word in line]))

    def _encode(self, pieces: Sequence[str]) -> None:
        for piece, ids in zip(pieces, self.encoder.encode(pieces), strict=True):
            self._keep(piece, ids.tobytes())

    def _keep(self, piece: str, packed: bytes) -> None:
        self._known[piece] = packed
        self._bytes += len(packed) + 2 * len(piece) + 150
