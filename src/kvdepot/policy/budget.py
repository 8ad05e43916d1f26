"""How many bytes of reads to keep in flight on one root, found by climbing while running.

Too few leave the storage idle; too many only wait in its queue, where no order can be changed any more.
The budget is moved a step, the throughput of the next epoch says whether that was right, and equal
throughput is a reason to go down. Epochs in which there was not enough to read say nothing.

Pure; time comes from outside. Not thread-safe; its owner holds a lock.
"""

from __future__ import annotations

__all__ = ["BudgetTuner"]

_STEP = 1.5
#: less of a difference than this is noise
_EQUAL = 0.05
#: an epoch has this many budgets' worth of bytes, so that what is in flight at its borders matters little
_EPOCH_BUDGETS = 8
#: epochs at a bottom or a top before the other direction is tried again: workloads change
_REST_EPOCHS = 8


class BudgetTuner:
    """The byte budget of one root.

    Args:
        start_bytes: at first.
        min_bytes: never less; one unit, so that something can always be read.
        max_bytes: never more.
    """

    def __init__(self, start_bytes: int, *, min_bytes: int, max_bytes: int) -> None:
        if not 0 < min_bytes <= max_bytes:
            raise ValueError(f"a budget between {min_bytes} and {max_bytes} bytes is none")
        self._min = min_bytes
        self._max = max_bytes
        self._budget = min(max(start_bytes, min_bytes), max_bytes)
        self._best = self._budget
        self._best_rate = 0.0
        self._is_up = True
        self._rest = 0
        self._epoch_bytes = 0
        self._epoch_start_s: float | None = None

    @property
    def budget_bytes(self) -> int:
        """Bytes that may be in flight now."""
        return self._budget

    def read(self, now_s: float, length_bytes: int, *, is_more_waiting: bool) -> None:
        """So many bytes have arrived; whether others waited for the budget meanwhile."""
        if not is_more_waiting:
            self._epoch_start_s = None
            return
        if self._epoch_start_s is None:
            self._epoch_start_s, self._epoch_bytes = now_s, 0
            return
        self._epoch_bytes += length_bytes
        span_s = now_s - self._epoch_start_s
        if self._epoch_bytes >= _EPOCH_BUDGETS * self._budget and span_s > 0:
            self._end_epoch(self._epoch_bytes / span_s)
            self._epoch_start_s, self._epoch_bytes = now_s, 0

    def _end_epoch(self, rate: float) -> None:
        if self._rest:
            # settled: watch the rate, and look around again after a while
            self._rest -= 1
            self._best_rate = rate
            if not self._rest:
                self._move()
            return
        if self._budget == self._best:
            self._best_rate = rate
            self._move()
            return
        is_better = rate > self._best_rate * (1 + _EQUAL)
        is_equal = rate >= self._best_rate * (1 - _EQUAL)
        if is_better or (is_equal and self._budget < self._best):
            self._best, self._best_rate = self._budget, rate
            self._move()
        else:
            # a step too far: back to the best, and next time the other way
            self._budget = self._best
            self._is_up = not self._is_up
            self._rest = _REST_EPOCHS

    def _move(self) -> None:
        step = _STEP if self._is_up else 1 / _STEP
        moved = min(max(int(self._best * step), self._min), self._max)
        if moved == self._best:
            self._is_up = not self._is_up
            self._rest = _REST_EPOCHS
        self._budget = moved
