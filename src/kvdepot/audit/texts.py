"""Comparing two texts: where they part, where they meet again, and whether they say the same."""

from __future__ import annotations

import itertools
import json
import re
import unicodedata
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

__all__ = [
    "Meeting",
    "canonical_json",
    "common_prefix",
    "common_suffix",
    "json_blocks",
    "meeting",
    "normalised",
    "pieces",
    "reordered",
    "snapped",
    "with_canonical_json",
    "with_sorted_pieces",
]

_WORD = re.compile(r"[A-Za-z0-9_:./+@~-]")
_SHINGLE = 24
_WINDOWS = (600, 4000, 40_000)
_JSON_MIN = 24
_TRAILING = re.compile(r"[ \t\u00a0\u200b]+(?=\n|\Z)")


def common_prefix(left: str, right: str) -> int:
    """Characters that two texts have in common from the first on."""
    low, high = 0, min(len(left), len(right))
    step = 64
    while low < high:
        end = min(low + step, high)
        if left[low:end] != right[low:end]:
            high = end
            break
        low, step = end, step * 4
    while low < high:  # the difference is in [low, high)
        middle = (low + high + 1) // 2
        if left[low:middle] == right[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low


def common_suffix(left: str, right: str) -> int:
    """Characters that two texts have in common before their ends."""
    return common_prefix(left[::-1], right[::-1])


def snapped(text: str, at: int, start: int) -> int:
    """The start of the word, number or path that character `at` is in, not before `start`."""
    while at > start and _WORD.match(text[at - 1]):
        at -= 1
    return at


class Meeting(NamedTuple):
    """Where two texts agree again behind a break."""

    left: int
    right: int


def meeting(left: str, right: str, at: int) -> Meeting | None:
    """The first place behind `at` from which on at least 24 characters agree, at a word's end."""
    for window in _WINDOWS:
        found = _meeting(left, right, at, window)
        if found is not None:
            return found
        if at + window >= max(len(left), len(right)):
            break
    return None


def _meeting(left: str, right: str, at: int, window: int) -> Meeting | None:
    theirs: dict[str, int] = {}
    for place in range(at, min(at + window, len(right) - _SHINGLE + 1)):
        theirs.setdefault(right[place : place + _SHINGLE], place)
    for first in range(at, min(at + window, len(left) - _SHINGLE + 1)):
        other = theirs.get(left[first : first + _SHINGLE])
        if other is not None:
            return _at_word_end(left, right, at, Meeting(first, other))
    return None


def _at_word_end(left: str, right: str, at: int, met: Meeting) -> Meeting:
    """The first place where both agree, and behind the word that they meet in."""
    place, other = met
    while place > at and other > at and left[place - 1] == right[other - 1]:
        place, other = place - 1, other - 1
    while (
        max(place, other) > at
        and place < len(left)
        and other < len(right)
        and left[place] == right[other]
        and _WORD.match(left[place])
    ):
        place, other = place + 1, other + 1
    return Meeting(place, other)


def normalised(text: str) -> str:
    """Text without what people do not see: kinds of line ends, trailing blanks, BOMs, Unicode forms."""
    text = text.replace("\r\n", "\n").replace("\r", "\n").replace("\ufeff", "")
    text = _TRAILING.sub("", text)
    return text if text.isascii() else unicodedata.normalize("NFC", text)


def json_blocks(text: str) -> Iterator[tuple[int, int, Any]]:
    """Objects and arrays written as JSON in a text: start, end, value; the outermost ones."""
    decoder = json.JSONDecoder()
    at = 0
    for match in re.finditer(r"[{\[]", text):
        if match.start() < at:
            continue
        try:
            value, end = decoder.raw_decode(text, match.start())
        except (ValueError, RecursionError):
            continue
        if end - match.start() >= _JSON_MIN and isinstance(value, dict | list):
            yield match.start(), end, value
            at = end


def canonical_json(value: object) -> str:
    """One way to write a value: sorted keys, no escapes, fixed separators."""
    return json.dumps(value, sort_keys=True, ensure_ascii=False, separators=(", ", ": "))


def with_canonical_json(text: str) -> str:
    """A text with every JSON block in it written in the one way."""
    made: list[str] = []
    at = 0
    for start, end, value in json_blocks(text):
        made += [text[at:start], canonical_json(value)]
        at = end
    return "".join([*made, text[at:]])


#: how texts are built of pieces: a name, and what finds the pieces
_SPLITS: dict[str, re.Pattern[str]] = {
    "blocks": re.compile(r"<(?P<tag>[a-zA-Z_][\w-]*)(?: [^>\n]*)?>.*?</(?P=tag)>", re.DOTALL),
    "numbered": re.compile(r"(?m)^[ \t]*(?:\[\d+\]|\(?\d+[.):]|#\d+|[-*\u2022])[ \t]+\S[^\n]*"),
    "headed": re.compile(
        r"(?m)^(?:\[\d+\]|#{1,4} |(?:Document|Passage|Chunk|Source|Example|Memory)\b[^\n]*:)"
        r"[^\n]*(?:\n(?!\[\d+\]|#{1,4} |(?:Document|Passage|Chunk|Source|Example|Memory)\b)[^\n]+)*"
    ),
    "paragraphs": re.compile(r"[^\n]+(?:\n[^\n]+)*"),
    "lines": re.compile(r"[^\n]+"),
}
#: a number of its own, not a part of a word or of a pseudo-word
_ORDINAL = re.compile(r"(?<![\w~])\d+(?!\w)")
_HEAD_CHARS = 24


class _Piece(NamedTuple):
    start: int
    end: int
    text: str
    #: the text with a leading number left out, so that a renumbered piece is the same
    key: str


def pieces(text: str, split: str) -> list[_Piece]:
    """The pieces of a text that one way of splitting finds."""
    found = []
    for match in _SPLITS[split].finditer(text):
        piece = match[0]
        head = _ORDINAL.sub("#", piece[:_HEAD_CHARS], count=1)
        found.append(_Piece(match.start(), match.end(), piece, head + piece[_HEAD_CHARS:]))
    return found


def reordered(left: str, right: str) -> str | None:
    """The way of splitting by which two texts hold the same pieces in another order, or None.

    At least two pieces must have changed places, and the pieces that both have must make up half of the
    shorter text; nearly all of the longer one where nothing but line ends marks the pieces, because prose
    that overlaps by chance has lines in common as well.
    """
    for split in _SPLITS:
        ours, theirs = pieces(left, split), pieces(right, split)
        if len(ours) < 2 or len(theirs) < 2:
            continue
        places = {piece.key: number for number, piece in enumerate(theirs) if len(piece.key) >= 20}
        common = [piece for piece in ours if piece.key in places]
        order = [places[piece.key] for piece in common]
        if len(set(order)) < 2 or order == sorted(order):
            continue
        inversions = sum(later < earlier for earlier, later in itertools.pairwise(order))
        size = sum(len(piece.key) for piece in common)
        sizes = [sum(len(piece.key) for piece in each) for each in (ours, theirs)]
        least = 0.8 * max(sizes) if split in ("lines", "paragraphs") else 0.5 * min(sizes)
        if inversions and size >= least:
            return split
    return None


def with_sorted_pieces(text: str, split: str, rank: Callable[[str], Any]) -> str:
    """A text with its pieces in the order of `rank` of their keys; numbers stay where they are."""
    found = pieces(text, split)
    if len(found) < 2:
        return text
    ordered = sorted(found, key=lambda piece: rank(piece.key))
    made: list[str] = []
    at = 0
    for place, piece in zip(found, ordered, strict=True):
        written = piece.text
        number = _ORDINAL.search(place.text[:_HEAD_CHARS])
        if number and _ORDINAL.search(piece.text[:_HEAD_CHARS]):
            head = _ORDINAL.sub(number[0], piece.text[:_HEAD_CHARS], count=1)
            written = head + piece.text[_HEAD_CHARS:]
        made += [text[at : place.start], written]
        at = place.end
    return "".join([*made, text[at:]])
