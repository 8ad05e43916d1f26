"""Whose bytes are read next: the request with the least left to read, unless another has waited long.

At equal bandwidth the order alone decides how long a burst waits: read all at once, everybody has
everything at the end; read one after the other, the median has it at half time.

A request's rank is ``bytes left + ageing x time of arrival``, lowest first, within its lane. A newcomer
must therefore have fewer bytes left by what ageing has given to those before it: a request with R bytes
left is overtaken only by requests that come within ``R / ageing`` seconds, so none starves.

Pure; time comes from outside. Not thread-safe; its owner holds a lock.
"""

from __future__ import annotations

import heapq
from enum import IntEnum
from typing import Generic, NamedTuple, TypeVar

__all__ = ["AGEING_BYTES_PER_S", "Lane", "ReadOrder", "StoreGate"]

_T = TypeVar("_T")

#: A tenth of what one NVMe drive reads: later and smaller requests may go first for about ten times as
#: long as a request takes alone.
AGEING_BYTES_PER_S = 256 * 2**20


class Lane(IntEnum):
    """What a read is for; a lane is served only when those before it are empty."""

    #: a request waits for it
    REQUEST = 0
    #: a request in the engine's queue will want it
    PREFETCH = 1
    #: to find out how the storage does
    PROBE = 2


class _Entry(NamedTuple):
    lane: int
    rank: float
    number: int


class ReadOrder(Generic[_T]):
    """The requests of one root that have something left to read.

    Args:
        ageing: bytes that waiting for a second is worth.
    """

    def __init__(self, ageing: float = AGEING_BYTES_PER_S) -> None:
        if ageing <= 0:
            raise ValueError(f"without ageing a large request could wait for ever: {ageing}")
        self._ageing = ageing
        self._next_number = 0
        self._heap: list[_Entry] = []
        self._items: dict[int, tuple[_T, _Entry]] = {}

    def __len__(self) -> int:
        return len(self._items)

    def add(self, item: _T, length_bytes: int, now_s: float, lane: Lane = Lane.REQUEST) -> int:
        """A request with so many bytes to read; the number by which it is known."""
        number = self._next_number
        self._next_number += 1
        entry = _Entry(int(lane), length_bytes + self._ageing * now_s, number)
        self._items[number] = (item, entry)
        heapq.heappush(self._heap, entry)
        return number

    def grow(self, number: int, length_bytes: float) -> None:
        """More of a request has become known (negative: has been handed out)."""
        found = self._items.get(number)
        if found is None:
            return
        item, entry = found
        entry = entry._replace(rank=entry.rank + length_bytes)
        self._items[number] = (item, entry)
        heapq.heappush(self._heap, entry)

    def remove(self, number: int) -> None:
        """A request has nothing left, or is not wanted any more. Unknown numbers do not matter."""
        self._items.pop(number, None)

    def first(self) -> tuple[int, _T] | None:
        """Number and item of whose turn it is; None when nobody waits."""
        while self._heap:
            entry = self._heap[0]
            found = self._items.get(entry.number)
            if found is not None and found[1] == entry:
                return entry.number, found[0]
            heapq.heappop(self._heap)  # removed, or ranked anew since
        return None

    def in_order(self) -> list[tuple[int, _T]]:
        """All that wait, whose turn it is first."""
        ranked = sorted((entry, number) for number, (_, entry) in self._items.items())
        return [(number, self._items[number][0]) for _, number in ranked]


class StoreGate:
    """Loads before stores: while loads wait, stores hold still, but not for ever.

    A store that never goes on fills the queue, and then everything is dropped; so after
    `hold_s` one run is let through, and the next one waits as long again.

    Args:
        hold_s: how long stores wait for loads at most.
    """

    def __init__(self, hold_s: float = 0.25) -> None:
        self._hold_s = hold_s
        self._held_since_s: float | None = None

    def may_store(self, now_s: float, *, are_loads_waiting: bool) -> bool:
        """Ask before a run of blocks is written."""
        if not are_loads_waiting:
            self._held_since_s = None
            return True
        if self._held_since_s is None:
            self._held_since_s = now_s
            return False
        if now_s - self._held_since_s < self._hold_s:
            return False
        self._held_since_s = now_s
        return True
