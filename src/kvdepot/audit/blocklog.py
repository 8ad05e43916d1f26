"""Prompts as chains of blocks: what a prefix cache sees, whether they came as tokens or as a trace.

A block's number stands for everything up to its end, so two prompts share a prefix exactly as far as
their block numbers agree. Reuse, capacity curves, keep times and routing all read from here.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from kvdepot.audit.tokenlog import Ints, Reals

__all__ = ["BlockLog", "block_log", "chained"]


class BlockLog(NamedTuple):
    """One touch is one block of one request; touches are in the order of the requests."""

    #: (touches,): number of the block, dense from 0
    blocks: Ints
    #: (requests + 1,): where each request's touches begin
    starts: Ints
    #: (touches,): tokens in the block
    tokens: Ints
    #: (requests,): tokens of the prompt, with the rest that fills no block
    lengths: Ints
    times_s: Reals
    sessions: Ints
    #: (blocks,): the first touch of each block
    first_touch: Ints
    #: (touches,): the request of each touch
    requests_of: Ints

    @property
    def requests(self) -> int:
        """How many prompts."""
        return len(self.starts) - 1

    @property
    def total(self) -> int:
        """Tokens of all prompts."""
        return int(self.lengths.sum())

    def is_hit(self) -> np.ndarray[tuple[int], np.dtype[np.bool_]]:
        """(touches,): whether an earlier request had the block. Hits of a request are its first touches."""
        return self.requests_of[self.first_touch[self.blocks]] < self.requests_of

    def hit_blocks(self) -> Ints:
        """(requests,): blocks reused by a cache that keeps everything."""
        return _sums(self.is_hit().astype(np.int64), self.starts)

    def hit_tokens(self) -> Ints:
        """(requests,): tokens reused by a cache that keeps everything."""
        return _sums(np.where(self.is_hit(), self.tokens, 0), self.starts)


def _sums(values: Ints, starts: Ints) -> Ints:
    running = np.zeros(len(values) + 1, np.int64)
    np.cumsum(values, out=running[1:])
    return running[starts[1:]] - running[starts[:-1]]


def block_log(
    keys: Ints, starts: Ints, *, tokens: Ints, lengths: Ints, times_s: Reals, sessions: Ints
) -> BlockLog:
    """Number the blocks of chained keys.

    Args:
        keys: (touches,): equal keys mean equal prefixes. Requests must be in the order of their time.
        starts: (requests + 1,).
        tokens: (touches,).
        lengths: (requests,).
        times_s: (requests,).
        sessions: (requests,).
    """
    order = np.argsort(keys, kind="stable")
    ordered = keys[order]
    is_new = np.ones(len(keys), np.bool_)
    np.not_equal(ordered[1:], ordered[:-1], out=is_new[1:])
    del ordered
    blocks = np.empty(len(keys), np.int64)
    blocks[order] = np.cumsum(is_new) - 1
    first_touch = order[is_new]  # stable: the first of equal keys is the earliest
    requests_of = np.repeat(np.arange(len(starts) - 1), np.diff(starts))
    return BlockLog(blocks, starts, tokens, lengths, times_s, sessions, first_touch, requests_of)


def chained(ids: Sequence[Sequence[int]], salts: Sequence[int] | None = None) -> list[list[int]]:
    """Numbers for prefixes of content ids: equal exactly where everything before is equal too.

    Args:
        ids: per request, ids that name a piece by its content alone, or chained ids already.
        salts: per request, what separates requests that must not share; by default nothing.
    """
    numbers: dict[tuple[int, int], int] = {}
    made = []
    for request, pieces in enumerate(ids):
        parent = -1 - (salts[request] if salts is not None else 0)
        chain = []
        for piece in pieces:
            parent = numbers.setdefault((parent, piece), len(numbers))
            chain.append(parent)
        made.append(chain)
    return made
