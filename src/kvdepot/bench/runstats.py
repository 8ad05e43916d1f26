"""Statistics whose unit is the run, one start of an engine: requests of one run are correlated.

Ratios are taken on the log scale. "Equal" needs evidence of its own (`equivalence`): that no
difference was found does not say that there is none.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
import numpy as np

from kvdepot.bench.distributions import t_sf

__all__ = [
    "DRAWS",
    "EQUIVALENCE_MARGIN",
    "Equivalence",
    "Estimate",
    "Trend",
    "equivalence",
    "holm",
    "median",
    "ratio",
    "trend",
]

_Array = np.ndarray[Any, np.dtype[np.float64]]

DRAWS = 10_000
EQUIVALENCE_MARGIN = 0.10
_TAIL = 2.5
_SEED = 20_261


class Estimate(msgspec.Struct, frozen=True, kw_only=True):
    """A value with its 95 % interval over runs; `low` and `high` are None with a single run."""

    value: float
    low: float | None
    high: float | None
    #: of the arm with fewer runs
    runs: int
    #: two-sided, of the hypothesis that a ratio is 1; None where it was not asked for
    p: float | None = None

    def covers(self, value: float) -> bool:
        """The interval is known and has the value in it."""
        return self.low is not None and self.high is not None and self.low <= value <= self.high


class Equivalence(msgspec.Struct, frozen=True, kw_only=True):
    """Two one-sided tests of a ratio against 1 - margin and 1 + margin."""

    ratio: float
    #: the larger of the two one-sided p values; None with fewer than two runs in an arm
    p: float | None
    is_equal: bool
    margin: float


class Trend(msgspec.Struct, frozen=True, kw_only=True):
    """A straight line through values over time, and the one-sided p of a slope above 0."""

    slope: float
    p: float


def median(values: Sequence[float]) -> float:
    """The middle value, or the mean of the two middle ones."""
    return float(np.median(np.asarray(values, dtype=float)))


def ratio(over: Sequence[float], under: Sequence[float], *, seed: int = _SEED) -> Estimate:
    """Geometric mean of one arm's runs over that of another's, with a run-level bootstrap interval.

    Args:
        over: one positive statistic for each run.
        under: the same of the other arm; arms need not have as many runs.
        seed: of the draws, so that a report is the same when it is made again.

    Raises:
        ValueError: an arm without runs, or a value that is not positive.
    """
    a, b = _logs(over), _logs(under)
    value = math.exp(float(a.mean() - b.mean()))
    runs = min(len(a), len(b))
    if runs < 2:
        return Estimate(value=value, low=None, high=None, runs=runs)
    rng = np.random.default_rng(seed)
    drawn = _drawn_means(a, rng) - _drawn_means(b, rng)
    low, high = np.exp(np.percentile(drawn, [_TAIL, 100 - _TAIL]))
    return Estimate(value=value, low=float(low), high=float(high), runs=runs, p=_difference_p(a, b))


def equivalence(
    over: Sequence[float],
    under: Sequence[float],
    *,
    margin: float = EQUIVALENCE_MARGIN,
    alpha: float = 0.05,
) -> Equivalence:
    """Whether two arms are equal within a margin on the log ratio (TOST, Welch).

    Raises:
        ValueError: as `ratio`.
    """
    a, b = _logs(over), _logs(under)
    difference = float(a.mean() - b.mean())
    if min(len(a), len(b)) < 2:
        return Equivalence(ratio=math.exp(difference), p=None, is_equal=False, margin=margin)
    error, freedom = _welch(a, b)
    limit = math.log1p(margin)
    if error == 0:
        p = 0.0 if abs(difference) < limit else 1.0
    else:
        # the first asks whether the ratio is above the lower limit, the second below the upper one
        p = max(
            t_sf((difference + limit) / error, freedom),
            t_sf((limit - difference) / error, freedom),
        )
    return Equivalence(ratio=math.exp(difference), p=p, is_equal=p < alpha, margin=margin)


def holm(p_values: Mapping[str, float]) -> dict[str, float]:
    """Holm's adjusted p values of a family of tests, in the order given."""
    ordered = sorted(p_values.items(), key=lambda item: item[1])
    adjusted: dict[str, float] = {}
    largest = 0.0
    for index, (name, p) in enumerate(ordered):
        largest = max(largest, min(1.0, (len(ordered) - index) * p))
        adjusted[name] = largest
    return {name: adjusted[name] for name in p_values}


def trend(times_s: Sequence[float], values: Sequence[float]) -> Trend:
    """Least-squares slope per second, and the p of the hypothesis that it is not above 0.

    Values that were taken close to one another say the same thing twice: average them over stretches
    of time before.

    Raises:
        ValueError: fewer than three points, or all at one time.
    """
    x, y = np.asarray(times_s, dtype=float), np.asarray(values, dtype=float)
    spread = float(((x - x.mean()) ** 2).sum()) if x.size else 0.0
    if x.size < 3 or spread == 0:
        raise ValueError("a trend needs three points at different times")
    slope = float(((x - x.mean()) * (y - y.mean())).sum() / spread)
    left = y - y.mean() - slope * (x - x.mean())
    freedom = x.size - 2
    error = math.sqrt(float((left**2).sum()) / freedom / spread)
    if error == 0:
        return Trend(slope=slope, p=0.0 if slope > 0 else 1.0)
    return Trend(slope=slope, p=t_sf(slope / error, freedom))


def _logs(values: Sequence[float]) -> _Array:
    array = np.asarray(values, dtype=float)
    if array.size == 0 or not (array > 0).all():
        raise ValueError("a ratio needs runs, and positive values")
    logs: _Array = np.log(array)
    return logs


def _drawn_means(values: _Array, rng: np.random.Generator) -> _Array:
    drawn: _Array = values[rng.integers(0, values.size, (DRAWS, values.size))].mean(axis=1)
    return drawn


def _welch(a: _Array, b: _Array) -> tuple[float, float]:
    """Standard error of the difference of means, and its degrees of freedom."""
    parts = a.var(ddof=1) / a.size, b.var(ddof=1) / b.size
    total = float(sum(parts))
    if total == 0:
        return 0.0, 1.0
    freedom = total**2 / (parts[0] ** 2 / (a.size - 1) + parts[1] ** 2 / (b.size - 1))
    return math.sqrt(total), float(freedom)


def _difference_p(a: _Array, b: _Array) -> float:
    error, freedom = _welch(a, b)
    difference = abs(float(a.mean() - b.mean()))
    if error == 0:
        return 1.0 if difference == 0 else 0.0
    return min(1.0, 2 * t_sf(difference / error, freedom))
