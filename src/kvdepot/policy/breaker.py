"""A circuit breaker: stops asking storage that fails or hangs, and finds out by itself when it is well.

    CLOSED     reads go on; failures are counted
    OPEN       nothing is asked; after a while one read is let through as a probe
    HALF_OPEN  a probe is under way; some good ones in a row close the breaker, a bad one opens it again

There is always a way back: waiting times are bounded, and a probe that never answers is replaced by
another one. Time comes from outside. Thread-safe; nothing here blocks.
"""

from __future__ import annotations

import threading
from collections import deque
from enum import Enum
from typing import NamedTuple

__all__ = ["Breaker", "BreakerSettings", "BreakerState", "Fault", "Leave"]


class BreakerState(Enum):
    """Whether a place is asked."""

    CLOSED = "closed"
    OPEN = "open"
    HALF_OPEN = "half-open"


class Fault(Enum):
    """What was wrong with a read."""

    ERROR = "error"
    CORRUPT = "corrupt"
    #: nothing came by the deadline
    LATE = "late"


class Leave(Enum):
    """The answer to whether a read may be made."""

    YES = "yes"
    #: this one only, and its outcome must be told with ``is_probe``
    PROBE = "probe"
    NO = "no"


class BreakerSettings(NamedTuple):
    """When it opens and how it comes back."""

    #: so many failures in a row open it; one or two are an accident
    failures_in_row: int = 3
    #: or this share of the last `window` reads, when so many were seen at least
    failure_share: float = 0.5
    window: int = 16
    #: an outcome counts for so long
    memory_s: float = 60.0
    #: the wait before the first probe; doubled after each bad one
    pause_s: float = 0.5
    #: at most; a fault's end is noticed within about twice this time
    pause_s_max: float = 4.0
    #: a probe that has not answered by then is followed by another one
    probe_timeout_s: float = 4.0
    #: good probes in a row that close it
    probes: int = 2


class Breaker:
    """One breaker, for one tier or one root."""

    def __init__(self, settings: BreakerSettings = BreakerSettings()) -> None:
        self._settings = settings
        self._lock = threading.Lock()
        self._state = BreakerState.CLOSED
        self._outcomes: deque[tuple[float, Fault | None]] = deque(maxlen=settings.window)
        self._in_row = 0
        self._pause_s = settings.pause_s
        self._probe_at_s = 0.0
        self._good_probes = 0
        self._reason = ""
        #: times that it opened from closed
        self.openings = 0

    @property
    def state(self) -> BreakerState:
        """Now."""
        return self._state

    @property
    def is_closed(self) -> bool:
        """Reads go on as usual."""
        return self._state is BreakerState.CLOSED

    @property
    def reason(self) -> str:
        """Why it opened last; empty while it never did."""
        return self._reason

    def next_probe_s(self, now_s: float) -> float:
        """Seconds until a read would be let through; 0 when one would be now."""
        with self._lock:
            return 0.0 if self._state is BreakerState.CLOSED else max(self._probe_at_s - now_s, 0.0)

    def may_read(self, now_s: float) -> Leave:
        """Ask before a read. After `Leave.PROBE`, tell the outcome with ``is_probe``."""
        with self._lock:
            if self._state is BreakerState.CLOSED:
                return Leave.YES
            if now_s < self._probe_at_s:
                return Leave.NO
            # one that stays silent is given up here, and the next one goes out
            self._state = BreakerState.HALF_OPEN
            self._probe_at_s = now_s + self._settings.probe_timeout_s
            return Leave.PROBE

    def succeeded(self, now_s: float, *, is_probe: bool = False) -> None:
        """A read came in time and verified."""
        with self._lock:
            if self._state is BreakerState.CLOSED:
                self._outcomes.append((now_s, None))
                self._in_row = 0
                return
            if not is_probe:
                return  # it began before the breaker opened, and says nothing about now
            self._good_probes += 1
            self._probe_at_s = now_s
            if self._good_probes >= self._settings.probes:
                self._close()

    def failed(self, now_s: float, fault: Fault, *, is_probe: bool = False) -> None:
        """A read gave an error, did not verify, or did not come."""
        with self._lock:
            if self._state is BreakerState.CLOSED:
                self._outcomes.append((now_s, fault))
                self._in_row += 1
                if self._is_too_much(now_s):
                    self.openings += 1
                    self._open(now_s, fault)
            elif is_probe:
                self._pause_s = min(2 * self._pause_s, self._settings.pause_s_max)
                self._open(now_s, fault)

    def trip(self, now_s: float, fault: Fault) -> None:
        """Open at once: what happened leaves no doubt, as a read that hangs while no other one ends."""
        with self._lock:
            if self._state is BreakerState.CLOSED:
                self.openings += 1
                self._open(now_s, fault)

    # below; the lock is held

    def _is_too_much(self, now_s: float) -> bool:
        settings = self._settings
        if self._in_row >= settings.failures_in_row:
            return True
        recent = [fault for at_s, fault in self._outcomes if now_s - at_s <= settings.memory_s]
        bad = len(recent) - recent.count(None)
        return len(recent) == settings.window and bad >= settings.failure_share * len(recent)

    def _open(self, now_s: float, fault: Fault) -> None:
        self._state = BreakerState.OPEN
        self._reason = fault.value
        self._good_probes = 0
        self._probe_at_s = now_s + self._pause_s

    def _close(self) -> None:
        self._state = BreakerState.CLOSED
        self._outcomes.clear()
        self._in_row = 0
        self._pause_s = self._settings.pause_s
