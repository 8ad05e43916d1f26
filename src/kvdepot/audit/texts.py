"""Comparing two texts: where they part, where they meet again, and whether they say the same."""

from __future__ import annotations

import itertools
import json
import re
import unicodedata
from collections.abc import Callable, Collection, Iterator
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
    "with_sorted_json",
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
    return _with_json(text, lambda _, value: canonical_json(value))


def with_sorted_json(text: str) -> str:
    """A text with the keys of every JSON block sorted, and else written as before."""
    return _with_json(text, _sorted_as_written)


def _with_json(text: str, write: Callable[[str, Any], str]) -> str:
    made: list[str] = []
    at = 0
    for start, end, value in json_blocks(text):
        made += [text[at:start], write(text[start:end], value)]
        at = end
    return "".join([*made, text[at:]])


def _sorted_as_written(written: str, value: Any) -> str:
    """JSON in the style of a text: its indent, its separators, its escapes."""
    indent = re.search(r"\n([ \t]*)", written)
    item = "," if indent or ", " not in written else ", "
    return json.dumps(
        value,
        sort_keys=True,
        ensure_ascii=written.isascii(),
        indent=indent[1] if indent else None,
        separators=(item, ": " if '": ' in written else ":"),
    )


_NAMED = r"(?:Document|Doc|Passage|Chunk|Source|Context|Result|Item|Example|Memory)"
#: how texts are built of pieces: what finds a piece, or what a piece begins with
_WHOLE: dict[str, re.Pattern[str]] = {
    "blocks": re.compile(r"<(?P<tag>[a-zA-Z_][\w-]*)(?: [^>\n]*)?>.*?</(?P=tag)>", re.DOTALL),
    "paragraphs": re.compile(r"[^\n]+(?:\n[^\n]+)*"),
    "lines": re.compile(r"[^\n]+"),
}
_HEADS: dict[str, re.Pattern[str]] = {
    "numbered": re.compile(r"(?m)^[ \t]*(?:\[\d+\]|\(?\d+[.):]|#\d+)[ \t]+(?=\S)"),
    "headed": re.compile(rf"(?m)^(?:#{{1,4}} \S|\*\*{_NAMED}\b|{_NAMED}\b[^\n]{{0,40}}:)"),
    "bullets": re.compile(r"(?m)^[ \t]*[-*\u2022][ \t]+(?=\S)"),
}
_SPLITS = ("blocks", "numbered", "headed", "bullets", "paragraphs", "lines")
#: the number that a piece has from its place: ``[3]``, ``3.``, ``Document 3``, ``<doc id="3">``
_ORDINAL = re.compile(rf"^(\s*(?:<\w+ [^>\n]{{0,20}}?\"?|{_NAMED} #?|[\[(#]?))(\d+)(?![\w~])")


class _Piece(NamedTuple):
    start: int
    end: int
    text: str
    #: the text without the number that it has from its place, so that a renumbered piece is the same
    key: str


def pieces(text: str, split: str, known: Collection[str] = ()) -> list[_Piece]:
    """The pieces of a text that one way of splitting finds.

    Args:
        text: the whole text.
        split: one of the ways.
        known: keys of pieces seen elsewhere. Where pieces are told by their beginnings, the last one ends
            where a known one does; without one, at the first empty line.
    """
    if split in _WHOLE:
        spans = [match.span() for match in _WHOLE[split].finditer(text)]
    else:
        starts = [match.start() for match in _HEADS[split].finditer(text)]
        spans = [
            (start, start + len(text[start:end].rstrip()))
            for start, end in itertools.pairwise(starts)
        ]
        if starts:
            spans.append((starts[-1], _last_end(text, starts[-1], known)))
    return [_Piece(start, end, text[start:end], _key(text[start:end])) for start, end in spans]


def _key(piece: str) -> str:
    return _ORDINAL.sub(r"\1#", piece, count=1)


def _last_end(text: str, start: int, known: Collection[str]) -> int:
    rest = text[start:]
    number = _ORDINAL.match(rest)
    longer = len(number[2]) - 1 if number else 0
    key = _key(rest)
    fits = [len(each) for each in known if key.startswith(each)]
    if fits:
        return start + max(fits) + longer
    blank = rest.find("\n\n")
    return start + (blank if blank >= 0 else len(rest.rstrip()))


def reordered(left: str, right: str) -> list[str]:
    """The ways of splitting by which two texts hold the same pieces in another order.

    At least two pieces must have changed places, and the pieces that both have must make up half of the
    shorter text; nearly all of the longer one where nothing but line ends marks the pieces, because prose
    that overlaps by chance has lines in common as well.
    """
    return [split for split in _SPLITS if _is_reordered(left, right, split)]


def _is_reordered(left: str, right: str, split: str) -> bool:
    sides = [pieces(each, split) for each in (left, right)]
    known = {piece.key for side in sides for piece in side[:-1]}
    ours, theirs = (pieces(each, split, known) for each in (left, right))
    if len(ours) < 2 or len(theirs) < 2:
        return False
    places = {piece.key: number for number, piece in enumerate(theirs) if len(piece.key) >= 20}
    common = [piece for piece in ours if piece.key in places]
    order = [places[piece.key] for piece in common]
    if len(set(order)) < 2 or order == sorted(order):
        return False
    size = sum(len(piece.key) for piece in common)
    sizes = [sum(len(piece.key) for piece in each) for each in (ours, theirs)]
    least = 0.8 * max(sizes) if split in ("lines", "paragraphs") else 0.5 * min(sizes)
    return size >= least


def with_sorted_pieces(
    text: str, split: str, rank: Callable[[str], Any], known: Collection[str] = ()
) -> str:
    """A text with its pieces in the order of `rank` of their keys; numbers stay where they are."""
    found = pieces(text, split, known)
    if len(found) < 2:
        return text
    ordered = sorted(found, key=lambda piece: rank(piece.key))
    made: list[str] = []
    at = 0
    for place, piece in zip(found, ordered, strict=True):
        number = _ORDINAL.match(place.text)
        written = piece.text
        if number:
            written = _ORDINAL.sub(rf"\g<1>{number[2]}", written, count=1)
        made += [text[at : place.start], written]
        at = place.end
    return "".join([*made, text[at:]])
