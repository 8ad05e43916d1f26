"""Stores on their way: a queue that is bounded in bytes and hands out long runs.

An item waits here, is taken by a write thread, and *arrives* when its segment is published, or when it
is lost or taken back. Its caller's memory counts against the bound until its bytes are written. A key
that is on its way is not taken a second time.

Thread-safe; nothing here makes a file call.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from typing import NamedTuple

from kvdepot.clock import Clock
from kvdepot.keys import BlockKey
from kvdepot.pool.filling import Item
from kvdepot.tiers import Job, Outcome, Write

__all__ = ["Offered", "WriteQueue"]

#: a run waits so long for more blocks, so that callers who store block by block make long writes
_LINGER_S = 0.002


class Offered(NamedTuple):
    """What became of the blocks of one store, in numbers."""

    taken: int
    present: int
    full: int
    closed: int


class WriteQueue:
    """The queue between a tier's callers and its write threads.

    Args:
        clock: measures lingering and draining.
        unit_bytes: bytes of a run.
        bytes_max: bytes of stores that hold their callers' memory; more are dropped.
    """

    def __init__(self, clock: Clock, *, unit_bytes: int, bytes_max: int) -> None:
        self._clock = clock
        self._unit_bytes = unit_bytes
        self._bytes_max = bytes_max
        self._wake = threading.Condition()
        self._items: deque[Item] = deque()
        self._held_bytes = 0
        self._waiting_bytes = 0
        self._waiting_since_s = 0.0
        #: queued, or written and not yet published; each with its number, the oldest first
        self._on_their_way: dict[BlockKey, int] = {}
        self._taken = 0
        self._flushers = 0
        self._is_closed = False

    @property
    def held_bytes(self) -> int:
        """Bytes of stores that hold their caller's memory."""
        return self._held_bytes

    @property
    def is_closed(self) -> bool:
        """Nothing is taken any more."""
        return self._is_closed

    # callers

    def offer(self, job: Job, writes: Sequence[Write], positions: Sequence[int]) -> Offered:
        """Take the blocks at `positions`; what is on its way or does not fit is resolved at once."""
        taken = present = full = closed = 0
        with self._wake:
            for position in positions:
                write = writes[position]
                if self._is_closed:
                    job.resolve(position, Outcome.DROPPED)
                    closed += 1
                elif write.key in self._on_their_way:
                    job.resolve(position, Outcome.DONE)
                    present += 1
                elif self._held_bytes + write.data.nbytes > self._bytes_max:
                    job.resolve(position, Outcome.DROPPED)
                    full += 1
                else:
                    self._append(Item(job, position, write, write.data.nbytes))
                    taken += 1
            # one thread lingers; the others are woken when there is a run for each
            self._wake.notify(1 + self._waiting_bytes // self._unit_bytes)
        return Offered(taken, present, full, closed)

    def drain(self, timeout_s: float) -> bool:
        """Have everything flushed; block until all that was taken has arrived, or time ran out.

        What is taken later is not waited for, so that others who go on storing do not matter.
        """
        give_up_at_s = self._clock.monotonic_s() + timeout_s
        with self._wake:
            last = self._taken
            self._flushers += 1
            self._wake.notify_all()
            try:
                while self._oldest() <= last:
                    left_s = give_up_at_s - self._clock.monotonic_s()
                    if left_s <= 0:
                        return False
                    self._wake.wait(min(left_s, threading.TIMEOUT_MAX))
            finally:
                self._flushers -= 1
        return True

    def close(self) -> list[Item]:
        """Take nothing more; what no thread has taken yet is handed back, and is still on its way."""
        with self._wake:
            self._is_closed = True
            left, self._items = list(self._items), deque()
            self._waiting_bytes = 0
            self._held_bytes -= sum(item.length_bytes for item in left)
            self._wake.notify_all()
        return left

    # write threads

    def take(self) -> list[Item]:
        """A run of blocks, up to one unit; empty when nothing waits."""
        with self._wake:
            return self._take()

    def wait(self, idle_s: Callable[[], float | None]) -> tuple[list[Item], bool]:
        """A run when one is ready, else an empty one after at most `idle_s()` seconds.

        Returns:
            The run, and whether open segments are to be sealed now because somebody drains.
        """
        with self._wake:
            run = [] if self._is_lingering() else self._take()
            if not run and not self._is_closed:
                if self._flushers and not self._items:
                    # the others' runs are still being written; whoever ends one notifies
                    return run, True
                self._wake.wait(_LINGER_S if self._items else idle_s())
                run = [] if self._is_lingering() else self._take()
            return run, bool(self._flushers) and not self._items

    def wait_for_others(self, timeout_s: float) -> None:
        """While draining: until another thread has brought something to its end."""
        with self._wake:
            self._wake.wait(timeout_s)

    def put_back(self, items: Sequence[Item]) -> bool:
        """Return the end of a run that was let go, to be taken first; False when the queue is closed."""
        with self._wake:
            if self._is_closed:
                return False
            self._items.extendleft(reversed(items))
            size = sum(item.length_bytes for item in items)
            self._held_bytes += size
            self._waiting_bytes += size
        return True

    def let_go(self, items: Sequence[Item]) -> None:
        """The items' bytes are written (or never will be): their memory is the callers' again."""
        with self._wake:
            self._held_bytes -= sum(item.length_bytes for item in items)

    def arrive(self, items: Sequence[Item]) -> None:
        """The items are on their way no more: published, lost or taken back."""
        with self._wake:
            for item in items:
                self._on_their_way.pop(item.write.key, None)
            self._wake.notify_all()

    # callers hold the lock

    def _append(self, item: Item) -> None:
        self._taken += 1
        self._on_their_way[item.write.key] = self._taken
        if not self._items:
            self._waiting_since_s = self._clock.monotonic_s()
        self._items.append(item)
        self._held_bytes += item.length_bytes
        self._waiting_bytes += item.length_bytes

    def _oldest(self) -> int:
        """The number of the oldest item on its way; above all others when there is none."""
        return next(iter(self._on_their_way.values()), self._taken + 1)

    def _take(self) -> list[Item]:
        run: list[Item] = []
        size = 0
        while self._items:
            size += self._items[0].padded_bytes
            if run and size > self._unit_bytes:
                break
            item = self._items.popleft()
            self._waiting_bytes -= item.length_bytes
            run.append(item)
        return run

    def _is_lingering(self) -> bool:
        """Whether what waits should wait for more."""
        if self._flushers or self._is_closed or self._waiting_bytes >= self._unit_bytes:
            return False
        return self._clock.monotonic_s() - self._waiting_since_s < _LINGER_S
