"""The only source of time, so that tests can own it.

`monotonic_s` measures spans (deadlines, leases, ages). `wall_s` is used for names and records that
people read; nothing correct may depend on it, because wall clocks jump and differ between hosts.
"""

from __future__ import annotations

import time
from typing import Protocol

__all__ = ["Clock", "SystemClock"]


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
