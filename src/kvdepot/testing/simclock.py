"""A clock that a test owns: both faces can be set, run, stand still and jump."""

from __future__ import annotations

import threading

from kvdepot.clock import SystemClock

__all__ = ["FakeClock"]


class FakeClock:
    """`kvdepot.clock.Clock` whose monotonic and wall faces move independently. Thread-safe.

    Args:
        monotonic_s: first reading of the monotonic face.
        wall_s: first reading of the wall face, seconds since the Unix epoch.
        is_running: both faces advance with real time between the changes made here. Leave it False
            for code that only reads the clock; code that waits for a span on a thread needs it True,
            because a wait for a clock that stands still never ends.
    """

    def __init__(
        self,
        monotonic_s: float = 1_000.0,
        wall_s: float = 1_700_000_000.0,
        *,
        is_running: bool = False,
    ) -> None:
        self._lock = threading.Lock()
        self._is_running = is_running
        start_s = self._real_s()
        self._monotonic_ahead_s = monotonic_s - start_s
        self._wall_ahead_s = wall_s - start_s

    def monotonic_s(self) -> float:
        """Seconds that never go back."""
        with self._lock:
            return self._real_s() + self._monotonic_ahead_s

    def wall_s(self) -> float:
        """Seconds since the Unix epoch, by this clock; may have jumped."""
        with self._lock:
            return self._real_s() + self._wall_ahead_s

    def advance(self, seconds: float) -> None:
        """Let time pass: both faces move forward by `seconds`.

        Raises:
            ValueError: `seconds` is negative; time does not run backwards, only wall clocks jump.
        """
        if seconds < 0:
            raise ValueError(f"time cannot pass backwards: {seconds}; use jump_wall")
        with self._lock:
            self._monotonic_ahead_s += seconds
            self._wall_ahead_s += seconds

    def jump_wall(self, seconds: float) -> None:
        """Move the wall face alone, forward or back, as NTP or an operator does."""
        with self._lock:
            self._wall_ahead_s += seconds

    def set_wall(self, wall_s: float) -> None:
        """Set the wall face alone."""
        with self._lock:
            self._wall_ahead_s = wall_s - self._real_s()

    def _real_s(self) -> float:
        return SystemClock().monotonic_s() if self._is_running else 0.0
