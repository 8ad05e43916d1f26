"""Runs of blocks that are always touched together, folded into one edge of the prefix tree.

A child block is touched only with its parent, so equal numbers of touches mean the same requests.
Folding changes no curve: within an edge the tail leaves an LRU cache first.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from kvdepot.audit.blocklog import BlockLog
from kvdepot.audit.tokenlog import Ints, Reals

__all__ = ["EdgeLog", "edge_log"]


class EdgeLog(NamedTuple):
    """Touches of edges, request after request, from the root to the leaf."""

    #: (touches,): number of the edge
    edges: Ints
    #: (requests + 1,)
    starts: Ints
    #: (touches,): tokens of the edge
    tokens: Ints
    #: (touches,): the touch before of the same edge, -1 for the first
    previous: Ints
    #: (touches,): the touch after, the number of touches for the last
    following: Ints
    #: (touches,): the request of each touch
    requests_of: Ints
    times_s: Reals
    lengths: Ints

    @property
    def touches(self) -> int:
        """How many touches."""
        return len(self.edges)

    @property
    def total(self) -> int:
        """Tokens of all prompts."""
        return int(self.lengths.sum())

    def gaps_s(self) -> Reals:
        """(touches,): seconds since the touch before; infinite for the first."""
        now = self.times_s[self.requests_of]
        before = self.times_s[self.requests_of[np.maximum(self.previous, 0)]]
        return np.where(self.previous >= 0, now - before, np.inf)


def edge_log(log: BlockLog) -> EdgeLog:
    """Fold blocks into edges."""
    counts = np.bincount(log.blocks, minlength=len(log.first_touch))
    of_touch = counts[log.blocks]
    begins = np.ones(len(of_touch), np.bool_)
    begins[1:] = of_touch[1:] != of_touch[:-1]
    is_first = log.starts[:-1][np.diff(log.starts) > 0]
    begins[is_first] = True
    at = np.flatnonzero(begins)
    running = np.zeros(len(of_touch) + 1, np.int64)
    np.cumsum(log.tokens, out=running[1:])
    ends = np.append(at[1:], len(of_touch))
    tokens = running[ends] - running[at]
    # an edge is named by its first block
    _, edges = np.unique(log.blocks[at], return_inverse=True)
    starts = np.searchsorted(at, log.starts)
    previous, following = _neighbours(edges)
    return EdgeLog(
        edges, starts, tokens, previous, following, log.requests_of[at], log.times_s, log.lengths
    )


def _neighbours(edges: Ints) -> tuple[Ints, Ints]:
    order = np.argsort(edges, kind="stable")
    is_same = edges[order][1:] == edges[order][:-1]
    previous = np.full(len(edges), -1, np.int64)
    following = np.full(len(edges), len(edges), np.int64)
    previous[order[1:][is_same]] = order[:-1][is_same]
    following[order[:-1][is_same]] = order[1:][is_same]
    return previous, following
