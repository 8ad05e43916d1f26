"""What routing does to reuse: the same traffic over several instances, each with a cache of its own."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from kvdepot.audit.blocklog import BlockLog, block_log
from kvdepot.audit.curves import lru_curve
from kvdepot.audit.edges import edge_log
from kvdepot.audit.tokenlog import Ints

__all__ = ["FleetRow", "fleet", "follow_ups", "random_workers", "selected", "sticky_workers"]

_FOLLOWS_FROM = 0.5
_LOAD_CAP = 1.5


class FleetRow(NamedTuple):
    """Tokens reused by a fleet of `instances`."""

    instances: int
    random_private: int
    sticky_private: int
    shared: int
    #: the busiest instance's input tokens against the mean, with sticky routing
    sticky_load: float


def selected(log: BlockLog, requests: Ints) -> BlockLog:
    """The log of some requests alone; their numbers must ascend."""
    counts = np.diff(log.starts)[requests]
    starts = np.zeros(len(requests) + 1, np.int64)
    np.cumsum(counts, out=starts[1:])
    touches = np.repeat(log.starts[requests] - starts[:-1], counts) + np.arange(starts[-1])
    return block_log(
        log.blocks[touches],
        starts,
        tokens=log.tokens[touches],
        lengths=log.lengths[requests],
        times_s=log.times_s[requests],
        sessions=log.sessions[requests],
    )


def follow_ups(log: BlockLog) -> np.ndarray[tuple[int], np.dtype[np.bool_]]:
    """(requests,): whether a request extends an earlier one to that one's last block.

    Needs no session ids: the last block of some earlier request is one of this request's hits.
    """
    extends = np.zeros(log.requests, np.bool_)
    if not len(log.blocks):
        return extends
    # traces name a last block that may be partly full: it is no prefix of anything longer
    is_full = log.tokens == log.tokens.max()
    full = np.zeros(len(is_full) + 1, np.int64)
    np.cumsum(is_full, out=full[1:])
    counts = full[log.starts[1:]] - full[log.starts[:-1]]
    numbers = np.flatnonzero(counts)
    last = log.blocks[log.starts[numbers] + counts[numbers] - 1]
    ended_at = np.full(len(log.first_touch), log.requests, np.int64)
    np.minimum.at(ended_at, last, numbers)
    extends[log.requests_of[ended_at[log.blocks] < log.requests_of]] = True
    return extends


def random_workers(requests: int, instances: int) -> Ints:
    """A worker for each request, evenly by chance; the same at every call."""
    return np.random.default_rng(instances).integers(instances, size=requests)


def sticky_workers(log: BlockLog, instances: int) -> Ints:
    """A worker for each request: its session's, or the one that had the longest prefix, within a load cap.

    Without a session, a request follows the request whose last common block is its last hit, if the hit
    is at least half of its blocks: a common system prompt must not draw everything to one worker.
    """
    workers = np.zeros(log.requests, np.int64)
    load = [0] * instances
    of_session: dict[int, int] = {}
    holder = np.full(len(log.first_touch), -1, np.int64)
    hits = log.hit_blocks()
    done = 0
    for request in range(log.requests):
        first, end = int(log.starts[request]), int(log.starts[request + 1])
        session = int(log.sessions[request])
        worker = of_session.get(session, -1) if session >= 0 else -1
        if worker < 0 and hits[request] >= max(1, _FOLLOWS_FROM * (end - first)):
            worker = int(holder[log.blocks[first + hits[request] - 1]])
        if worker < 0 or load[worker] * instances > _LOAD_CAP * done + int(log.lengths[request]):
            lightest = min(range(instances), key=load.__getitem__)
            worker = lightest if worker < 0 or session < 0 else worker
        workers[request] = worker
        if session >= 0:
            of_session[session] = worker
        holder[log.blocks[first:end]] = worker
        load[worker] += int(log.lengths[request])
        done += int(log.lengths[request])
    return workers


def _private(log: BlockLog, workers: Ints, capacity: float) -> int:
    reused = 0
    for worker in np.unique(workers):
        part = selected(log, np.flatnonzero(workers == worker))
        reused += lru_curve(edge_log(part), [capacity]).reused[0]
    return reused


def fleet(log: BlockLog, instances: int, capacity: float, shared_capacity: float) -> FleetRow:
    """Reuse of a fleet.

    Args:
        log: the whole traffic.
        instances: how many engines.
        capacity: tokens that each one's own cache holds.
        shared_capacity: tokens of one cache that all of them use.
    """
    sticky = sticky_workers(log, instances)
    loads = np.bincount(sticky, weights=log.lengths, minlength=instances)
    return FleetRow(
        instances,
        _private(log, random_workers(log.requests, instances), capacity),
        _private(log, sticky, capacity),
        lru_curve(edge_log(log), [shared_capacity]).reused[0],
        float(loads.max() / max(loads.mean(), 1e-9)) if len(loads) else 1.0,
    )
