"""What a cache of each size, or one that keeps blocks for a time, would have reused: exact, one pass.

LRU is a stack algorithm (Mattson, 1970): a touch hits in every cache larger than the tokens touched
since the touch before. A request touches its leaf first and its root last, so the cache stays
prefix-closed by itself. The distances are sums over a plane, computed level by level in numpy.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from kvdepot.audit.edges import EdgeLog
from kvdepot.audit.tokenlog import Ints, Reals

__all__ = ["Curve", "belady", "distances", "keep_curve", "lru_curve", "revisits"]


class Curve(NamedTuple):
    """Points of a curve."""

    #: tokens of capacity, or seconds
    at: list[float]
    #: tokens reused
    reused: list[int]


def distances(log: EdgeLog) -> Ints:
    """(touches,): tokens above each edge in the LRU stack when its request came; -1 for first touches.

    With touches in the order of recency, P the touch before and S the request's first touch, that is
    the tokens of the touches in (P, S) less those among them that were touched again before S.
    """
    count = log.touches
    begin = log.starts[log.requests_of]
    # within a request the root is the most recent: turn each request's touches round
    turned = begin + log.starts[log.requests_of + 1] - 1 - np.arange(count)
    tokens = log.tokens[turned]
    previous = np.where(log.previous >= 0, turned[log.previous], -1)[turned]
    running = np.zeros(count + 1, np.int64)
    np.cumsum(tokens, out=running[1:])
    between = running[begin] - running[previous + 1]
    distance = np.where(previous >= 0, between - _nested(previous, tokens, begin), -1)
    ordered: Ints = distance[turned]
    return ordered


def _nested(previous: Ints, tokens: Ints, begin: Ints) -> Ints:
    """For each touch, tokens of the touches before `begin` whose own touch before is behind `previous`.

    A sum over {k < begin, previous[k] > p}: the range of k is cut into blocks of powers of two, each
    sorted by `previous` with running sums.
    """
    count = len(previous)
    sums = np.zeros(count, np.int64)
    rank = previous + 1
    stride = count + 2
    level = 0
    while (1 << level) <= count:
        asks = np.flatnonzero(((begin >> level) & 1) & (previous >= 0))
        if len(asks):
            block = np.arange(count) >> level
            key = block * stride + rank
            order = np.argsort(key, kind="stable")
            ordered = key[order]
            running = np.zeros(count + 1, np.int64)
            np.cumsum(tokens[order], out=running[1:])
            wanted = (begin[asks] >> level) - 1
            low = np.searchsorted(ordered, wanted * stride + rank[asks], side="right")
            high = np.minimum((wanted + 1) << level, count)
            sums[asks] += running[high] - running[low]
        level += 1
    return sums


def lru_curve(log: EdgeLog, capacities: Sequence[float]) -> Curve:
    """Tokens that an LRU cache of each capacity (tokens) reuses."""
    distance = distances(log)
    is_again = distance >= 0
    distance, tokens = distance[is_again], log.tokens[is_again]
    reused = [
        int(np.clip(capacity - distance, 0, tokens).astype(np.int64).sum())
        for capacity in capacities
    ]
    return Curve(list(capacities), reused)


def keep_curve(log: EdgeLog, seconds: Sequence[float]) -> Curve:
    """Tokens reused when each block is kept for so long after its last use, whatever that takes."""
    gaps = log.gaps_s()
    return Curve(list(seconds), [int(log.tokens[gaps <= keep].sum()) for keep in seconds])


def revisits(log: EdgeLog) -> dict[str, float]:
    """Seconds since the last use at which tokens are reused: percentiles by tokens; empty for none."""
    gaps = log.gaps_s()
    is_again = np.isfinite(gaps)
    if not is_again.any():
        return {}
    order = np.argsort(gaps[is_again])
    ordered: Reals = gaps[is_again][order]
    running = np.cumsum(log.tokens[is_again][order])
    return {
        f"p{share}": float(ordered[np.searchsorted(running, running[-1] * share / 100)])
        for share in (50, 90, 95, 99)
    }


def belady(log: EdgeLog, capacity: float) -> int:
    """Tokens that a cache of `capacity` tokens reuses when it knows the future, and may refuse.

    What is used again last is dropped first, the deeper edge of equals; the bound for every policy.
    """
    held: dict[int, int] = {}
    due: dict[int, int] = {}
    heap: list[tuple[int, int, int]] = []
    used = reused = 0
    starts, edges = log.starts.tolist(), log.edges.tolist()
    tokens, following = log.tokens.tolist(), log.following.tolist()
    requests_of = log.requests_of.tolist()
    for request in range(len(starts) - 1):
        whole = True
        for touch in range(starts[request], starts[request + 1]):
            edge = edges[touch]
            have = held.get(edge, 0)
            if whole:
                reused += have
                whole = have == tokens[touch]
            used += tokens[touch] - have
            held[edge] = tokens[touch]
            after = following[touch]
            next_use = requests_of[after] if after < len(edges) else len(starts)
            due[edge] = next_use
            heapq.heappush(heap, (-next_use, -touch, edge))
        while used > capacity and heap:
            negative, _, edge = heap[0]
            if due.get(edge) != -negative or not held.get(edge):
                heapq.heappop(heap)
                continue
            drop = min(held[edge], int(np.ceil(used - capacity)))
            held[edge] -= drop
            used -= drop
    return reused
