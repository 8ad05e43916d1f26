"""Which root a write thread works for next: in turn, but not one that refuses or that hangs.

A root may have only its share of the threads at once. So a root that hangs holds its own threads, and
the stores go on to the others.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from kvdepot.clock import Clock
from kvdepot.errors import PoolError, PoolFull
from kvdepot.pool.filling import FillingSegment
from kvdepot.pool.root import Root

__all__ = ["NextRoot", "RootState", "Turns"]

log = logging.getLogger(__name__)

#: after a root refused, it is left alone for so long; stores go to the other roots or are dropped
_PAUSE_S = 1.0


class RootState:
    """What the write threads know of one root."""

    def __init__(self, root: Root, *, writes: int) -> None:
        self.root = root
        #: a write call's place. Fewer than threads: were all of them to write at once, all would end
        #: at once too, and the device would wait while they checksum
        self.write_places = threading.BoundedSemaphore(writes)
        #: guards `open` and the segment in it; held over the file calls that open a segment
        self.lock = threading.Lock()
        self.open: FillingSegment | None = None
        #: write threads that are busy with this root now
        self.threads = 0
        self.paused_until_s = float("-inf")
        #: why it was paused last
        self.refusal: PoolError | None = None


class NextRoot(NamedTuple):
    """The answer to whose turn it is."""

    #: None when there is no root to work for now
    state: RootState | None
    #: whether any root takes stores, be it busy
    is_any_open: bool


class Turns:
    """The roots of a writer, and the threads that are busy with each. Thread-safe.

    Args:
        roots: where segments go, in turn.
        threads: so many may be busy with one root at once.
        writes: so many of them may be in a write call.
    """

    def __init__(self, roots: Sequence[Root], clock: Clock, *, threads: int, writes: int) -> None:
        self._states = [RootState(root, writes=writes) for root in roots]
        self._clock = clock
        self._threads = threads
        self._lock = threading.Lock()
        self._turn = 0

    def __iter__(self) -> Iterator[RootState]:
        return iter(self._states)

    def has_place(self, state: RootState) -> bool:
        """Whether one more thread may work for a root."""
        return state.threads < self._threads

    def enter_next(self) -> NextRoot:
        """Begin work for the next root that takes stores and has a place; pair with `leave`."""
        now_s = self._clock.monotonic_s()
        is_any_open = False
        with self._lock:
            for _ in self._states:
                self._turn = (self._turn + 1) % len(self._states)
                state = self._states[self._turn]
                if state.paused_until_s > now_s:
                    continue
                is_any_open = True
                if self.has_place(state):
                    state.threads += 1
                    return NextRoot(state, is_any_open)
        return NextRoot(None, is_any_open)

    def enter(self, state: RootState) -> bool:
        """Begin work for a root; False, and nothing to `leave`, when it has no place."""
        with self._lock:
            if not self.has_place(state):
                return False
            state.threads += 1
            return True

    def leave(self, state: RootState) -> None:
        """End of what `enter` or `enter_next` began."""
        with self._lock:
            state.threads -= 1

    def pause(self, state: RootState, error: PoolError) -> None:
        """A root refused: leave it alone for a while."""
        state.refusal = error
        state.paused_until_s = self._clock.monotonic_s() + _PAUSE_S
        level = logging.DEBUG if isinstance(error, PoolFull) else logging.WARNING
        place = state.root.disk.place
        log.log(level, "%s takes no stores for %.0f s: %s", place, _PAUSE_S, error)

    @property
    def is_full(self) -> bool:
        """Whether a root refused for want of room."""
        return any(isinstance(state.refusal, PoolFull) for state in self._states)
