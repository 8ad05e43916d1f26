"""Text to token ids, fast: cut where the tokenizer cuts anyway, and remember the pieces.

Prompts of one application consist of the same lines over and over. A text is cut at special tokens and
line ends that a non-space follows; each piece is tokenized once. Where tokenizers cut there differs, so
one prompt in a hundred is tokenized whole and compared: behind the line end, before it, at special
tokens only, and at last at the prompt's ends, whichever is exact.
"""

from __future__ import annotations

import importlib
import re
from collections.abc import Iterable, Sequence
from typing import Any, Protocol

import numpy as np

from kvdepot.audit.tokenlog import Ids
from kvdepot.errors import ConfigError

__all__ = [
    "SPECIAL",
    "Encoder",
    "FallbackEncoder",
    "ModelEncoder",
    "PieceMemo",
    "PseudoEncoder",
    "cut",
]

SPECIAL = re.compile(
    r"<\|[A-Za-z0-9_/]{1,40}\|>|<\uff5c[^<>\uff5c]{1,40}\uff5c>|</?s>|<(?:start|end)_of_turn>"
)
#: how a text between special tokens is cut, in the order in which it is tried
_CUTS: dict[str, re.Pattern[str] | None] = {
    "lines": re.compile(r"(?<=\n)(?=\S)"),
    "line starts": re.compile(r"(?=\n\S)"),
    "special tokens": None,
}
_WHOLE = "whole prompts"
_MEMO_BYTES = 512 << 20


class Encoder(Protocol):
    """Turns pieces of text into token ids."""

    #: for people
    name: str
    #: how wrong counts may be, for people; "" for the model's own tokenizer
    error: str

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
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

    _WORDS = re.compile(
        r"<\|[A-Za-z0-9_/]{1,40}\|>|</?s>| ?[^\W\d_]+|\d{1,3}|\n+|[ \t\r\f\v]+(?=\S)|\s+| ?(?:[^\s\w]|_){1,4}"
    )
    _LONGEST = 9

    def __init__(self) -> None:
        self._ids: dict[str, int] = {}
        self._words: dict[str, list[int]] = {}

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        return [self._one(text) for text in texts]

    def _one(self, text: str) -> list[int]:
        found: list[int] = []
        known = self._words
        words = [
            word for piece in cut(text, "special tokens") for word in self._WORDS.findall(piece)
        ]
        for word in words:
            ids = known.get(word)
            if ids is None:
                ids = known[word] = [
                    self._ids.setdefault(part, len(self._ids)) for part in self._parts(word)
                ]
            found += ids
        return found

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

    _WORDS = re.compile(r"~([0-9a-z]+)~(\d{1,7}) ?|(\s+|[^\s~]+|~)")

    def __init__(self) -> None:
        self._ids: dict[tuple[str, int], int] = {}

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        made = []
        for text in texts:
            ids: list[int] = []
            for match in self._WORDS.finditer(text):
                word, count = (match[1], int(match[2])) if match[1] else (match[3], 1)
                ids += [
                    self._ids.setdefault((word, number), len(self._ids)) for number in range(count)
                ]
            made.append(ids)
        return made


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

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        encoded = self._tokenizer.encode_batch_fast(list(texts), add_special_tokens=False)
        return [each.ids for each in encoded]

    def decode(self, ids: Sequence[int]) -> str:
        """The text of token ids, special tokens included."""
        return str(self._tokenizer.decode(list(ids), skip_special_tokens=False))


def cut(text: str, cuts: str = "lines") -> list[str]:
    """Pieces that together are `text`: special tokens alone, and what `cuts` makes of the rest."""
    if cuts == _WHOLE:
        return [text] if text else []
    lines = _CUTS[cuts]
    pieces: list[str] = []
    at = 0
    for match in SPECIAL.finditer(text):
        _add(pieces, text[at : match.start()], lines)
        pieces.append(match[0])
        at = match.end()
    _add(pieces, text[at:], lines)
    return pieces


def _add(pieces: list[str], text: str, lines: re.Pattern[str] | None) -> None:
    if not text:
        return
    if lines is None:
        pieces.append(text)
    else:
        pieces += filter(None, lines.split(text))


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
        self._known: dict[str, bytes] = {}
        self._bytes = 0

    def prompts(self, texts: Iterable[str]) -> list[Ids]:
        """Token ids of each prompt."""
        return [self._one(text) for text in texts]

    def verify(self, texts: Sequence[str]) -> None:
        """Compare with prompts tokenized whole, and cut less if that differs."""
        step = max(1, len(texts) // max(4, len(texts) // 100))
        whole = [(text, self.encoder.encode([text])[0]) for text in texts[::step][:200]]
        for cuts in (*_CUTS, _WHOLE):
            self.cuts = cuts
            self._known.clear()
            self._bytes = 0
            if all(self._one(text).tolist() == ids for text, ids in whole):
                return

    def _one(self, text: str) -> Ids:
        pieces = cut(text, self.cuts)
        known = self._known
        missing = [piece for piece in dict.fromkeys(pieces) if piece not in known]
        if missing:
            if self._bytes > _MEMO_BYTES or not self._keeps:
                known.clear()
                self._bytes = 0
                missing = list(dict.fromkeys(pieces))
            for piece, ids in zip(missing, self.encoder.encode(missing), strict=True):
                packed = np.array(ids, np.int32).tobytes()
                known[piece] = packed
                self._bytes += len(packed) + 2 * len(piece) + 150
        return np.frombuffer(b"".join([known[piece] for piece in pieces]), np.int32)
