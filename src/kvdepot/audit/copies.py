"""Pass 2: the shared body behind the break, wherever it stands in the other prompt.

Anchors are content-defined: a hash of 24 tokens is kept where it is 0 modulo 16, so a run of shared
text has the same anchors in every prompt. An index maps an anchor to its first holder; only text that
nobody had is inserted. A prompt is read once: at a known anchor the run is compared with the holder's
tokens and extended both ways, and reading goes on behind it, so the work grows with the pieces.
"""

from __future__ import annotations

from bisect import bisect_left
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from kvdepot.audit.prefix import common_length
from kvdepot.audit.tokenlog import Ids, Ints, TokenLog

__all__ = ["ANCHOR_TOKENS", "Bodies", "Piece", "anchors", "bodies", "copied"]

ANCHOR_TOKENS = 24
_ONE_IN = np.uint64(16)
_BASE = 0x9E3779B97F4A7C15 | 1
_WORD = (1 << 64) - 1
_SESSION_SHARE = 0.6
_SHIFT = 32


class Piece(NamedTuple):
    """Tokens [first, last) of a request that `donor` has at `donor_first`."""

    first: int
    last: int
    donor: int
    donor_first: int


class Bodies(NamedTuple):
    """What each request shares behind its prefix hit."""

    #: (requests,): tokens behind the hit that an earlier request has, at another place or behind a break
    copied: Ints
    #: (requests,): the earlier request that has most of them, -1 for none
    donors: Ints


def _power(exponent: int) -> np.uint64:
    return np.uint64(pow(_BASE, exponent, 1 << 64))


def anchors(ids: Ids) -> tuple[Ints, npt.NDArray[np.uint64]]:
    """Positions and hashes of the anchors of one prompt: on average one in 16 positions."""
    if len(ids) < ANCHOR_TOKENS:
        return np.empty(0, np.int64), np.empty(0, np.uint64)
    # ids are small and near each other: spread them over the word before they are added up
    one = (ids.astype(np.uint64) + np.uint64(1)) * np.uint64(0xBF58476D1CE4E5B9)
    one ^= one >> np.uint64(29)
    eight = _doubled(_doubled(_doubled(one, 1), 2), 4)
    sixteen = _doubled(eight, 8)
    hashes = sixteen[: len(ids) - ANCHOR_TOKENS + 1] * _power(8) + eight[16:]
    hashes ^= hashes >> np.uint64(31)
    hashes *= np.uint64(0x94D049BB133111EB)
    hashes ^= hashes >> np.uint64(30)
    positions = np.flatnonzero(hashes % _ONE_IN == 0)
    return positions, hashes[positions]


def _doubled(sums: npt.NDArray[np.uint64], width: int) -> npt.NDArray[np.uint64]:
    """Hashes of runs of `width` tokens to those of runs twice as long."""
    return sums[:-width] * _power(width) + sums[width:]


def _common_backward(left: Ids, right: Ids, most: int) -> int:
    """How many tokens before the ends of two arrays are equal, at most `most`."""
    most = min(most, len(left), len(right))
    if most <= 0:
        return 0
    return common_length(left[::-1][:most], right[::-1][:most])


class _Index:
    """Anchors of all text seen so far, each with its first holder."""

    def __init__(self, log: TokenLog) -> None:
        self._log = log
        self._holders: dict[int, int] = {}

    def read(
        self, request: int, begin: int, positions: list[int], hashes: list[int]
    ) -> list[Piece]:
        """The pieces of a prompt from token `begin` on that are held by earlier ones."""
        ids = self._log.prompt(request)
        pieces = []
        at = begin
        number = bisect_left(positions, begin)
        get = self._holders.get
        while number < len(positions):
            held = get(hashes[number])
            if held is None:
                number += 1
                continue
            piece = self._extended(ids, positions[number], held, at)
            if piece is None:
                number += 1
                continue
            pieces.append(piece)
            at = piece.last
            number = max(number + 1, bisect_left(positions, at, number))
        return pieces

    def _extended(self, ids: Ids, position: int, held: int, at: int) -> Piece | None:
        donor, donor_position = held >> _SHIFT, held & ((1 << _SHIFT) - 1)
        theirs = self._log.prompt(donor)
        ahead = common_length(ids[position:], theirs[donor_position:])
        if ahead < ANCHOR_TOKENS:  # another text with this hash
            return None
        back = _common_backward(ids[:position], theirs[:donor_position], position - at)
        return Piece(position - back, position + ahead, donor, donor_position - back)

    def insert(
        self, request: int, begin: int, positions: list[int], hashes: list[int], pieces: list[Piece]
    ) -> None:
        """Add the anchors of what is new: from `begin` on, and in no piece."""
        at = begin
        base = request << _SHIFT
        for first, last in [(piece.first, piece.last) for piece in pieces] + [(1 << 62, 0)]:
            number = bisect_left(positions, at)
            while number < len(positions) and positions[number] + ANCHOR_TOKENS <= first:
                self._holders.setdefault(hashes[number], base | positions[number])
                number += 1
            # anchors that straddle a piece's borders are new as well
            while number < len(positions) and positions[number] < first:
                self._holders.setdefault(hashes[number], base | positions[number])
                number += 1
            at = max(at, last - ANCHOR_TOKENS)


def bodies(log: TokenLog, hit_tokens: Ints) -> Bodies:
    """Find for every request what it shares behind its prefix hit, and with whom.

    Args:
        log: in the order of time.
        hit_tokens: (requests,): tokens reused from the first on.
    """
    index = _Index(log)
    copied_tokens = np.zeros(log.requests, np.int64)
    donors = np.full(log.requests, -1, np.int64)
    last_of: dict[int, int] = {}
    for request in range(log.requests):
        ids = log.prompt(request)
        begin = int(hit_tokens[request])
        positions, hashes = _listed(ids)
        pieces = index.read(request, begin, positions, hashes)
        index.insert(request, begin, positions, hashes, pieces)
        session = int(log.sessions[request])
        if pieces:
            total, donor = _vote(pieces)
            before = last_of.get(session, -1) if session >= 0 else -1
            if before >= 0 and before != donor:
                same = copied(ids[begin:], log.prompt(before))
                if same >= _SESSION_SHARE * total:
                    donor = before
            copied_tokens[request], donors[request] = total, donor
        if session >= 0:
            last_of[session] = request
    return Bodies(copied_tokens, donors)


def _listed(ids: Ids) -> tuple[list[int], list[int]]:
    positions, hashes = anchors(ids)
    return positions.tolist(), hashes.tolist()


def _vote(pieces: list[Piece]) -> tuple[int, int]:
    """Copied tokens, and the donor of most of them; the latest of equals."""
    votes: dict[int, int] = {}
    for piece in pieces:
        votes[piece.donor] = votes.get(piece.donor, 0) + piece.last - piece.first
    return sum(votes.values()), max(votes, key=lambda donor: (votes[donor], donor))


def copied(ids: Ids, donor: Ids) -> int:
    """Tokens of one array, in runs of at least `ANCHOR_TOKENS`, that another has anywhere."""
    pair = TokenLog(
        np.concatenate([donor, ids]),
        np.array([0, len(donor), len(donor) + len(ids)]),
        np.zeros(2, np.int64),
        np.zeros(2),
        np.zeros(2, np.int64) - 1,
    )
    index = _Index(pair)
    index.insert(0, 0, *_listed(donor), [])
    return sum(piece.last - piece.first for piece in index.read(1, 0, *_listed(ids)))
