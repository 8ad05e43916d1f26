"""The only source of time, so that tests can own it.

`monotonic_s` measures spans (deadlines, leases, ages). `wall_s` is used for names and records that
people read; nothing correct may depend on it, because wall clocks jump and differ between hosts.
"""

from __future__ import annotations

import threading
import time
from typing import Protocol

__all__ = ["Clock", "SystemClock", "TimeLeft"]


class Clock(Protocol):
    """Time as the code sees it. Thread-safe."""

    def monotonic_s(self) -> float:
        """Seconds that never go back; the zero point means nothing."""

    def wall_s(self) -> float:
        """Seconds since the Unix epoch; may jump."""


class SystemClock:
    """The operating system's clocks."""

    def monotonic_s(self) -> float:
        return time.monotonic()

    def wall_s(self) -> float:
        return time.time()


class TimeLeft:
    """What is left of a time that several waits share; of real time, as waits for threads are."""

    def __init__(self, timeout_s: float) -> None:
        self._end_s = time.monotonic() + timeout_s

    def __call__(self, *, at_least_s: float = 0.0) -> float:
        """Seconds that are left; not more than the system can wait."""
        return min(max(self._end_s - time.monotonic(), at_least_s), threading.TIMEOUT_MAX)
