"""The saturation rate: the highest load that an engine keeps up with, found by doubling and halving."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence

from kvdepot.bench.loads import in_flight_series
from kvdepot.bench.rows import Row
from kvdepot.bench.runstats import median, trend

__all__ = ["find_saturation", "is_sustained"]

_SERVED_SHARE = 0.98
_TREND_P = 0.01
_STEPS = 10
_CLOSE = 1.1
_TRIALS_MAX = 14


def is_sustained(rows: Sequence[Row]) -> bool:
    """Whether an open loop was kept up with: nearly all was served in time, and no queue grew."""
    good = [row for row in rows if row.is_ok]
    if len(good) < len(rows) or len(good) < 3:
        return False
    early = sorted(good, key=lambda row: row.scheduled_s)[: max(3, len(good) // 3)]
    usual_s = median([row.ended_s - row.scheduled_s for row in early])
    last_s = max(row.scheduled_s for row in good)
    served = sum(row.ended_s <= last_s + 2 * usual_s for row in good)
    if served < _SERVED_SHARE * len(good):
        return False
    # the ramp in the beginning and what is left in the end are no trend
    spans = [(row.scheduled_s, row.ended_s) for row in good]
    times, means = in_flight_series(spans, steps=_STEPS)
    found = trend(times[1:-1], means[1:-1])
    return found.p > _TREND_P or found.slope <= 0


async def find_saturation(
    keeps_up: Callable[[float], Awaitable[bool]], *, start: float
) -> tuple[float, list[tuple[float, bool]]]:
    """The highest rate that is kept up with, within 10 %, and all trials.

    Args:
        keeps_up: tries a rate, requests a second.
        start: a first guess.
    """
    trials: list[tuple[float, bool]] = []

    async def tried(rate: float) -> bool:
        trials.append((rate, await keeps_up(rate)))
        return trials[-1][1]

    low, high = 0.0, start
    while len(trials) < _TRIALS_MAX and await tried(high):
        low, high = high, high * 2
    while len(trials) < _TRIALS_MAX and (low == 0 or high / low > _CLOSE):
        middle = high / 2 if low == 0 else (low * high) ** 0.5
        if await tried(middle):
            low = middle
        else:
            high = middle
    return low, trials
