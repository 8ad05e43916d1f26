"""Percentiles that come with what is known about them.

A percentile of few values is an order statistic that may as well be another one. The interval here is
made of two order statistics, chosen by the binomial distribution alone: it holds whatever the values
are distributed like, as long as they are independent. Where the sample is too small for an upper end,
there is none, and the percentile is not printed as one but as "max of n".
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache

import msgspec

__all__ = ["CONFIDENCE", "Quantile", "interval_ranks", "quantile"]

#: two-sided
CONFIDENCE = 0.95


class Quantile(msgspec.Struct, frozen=True):
    """A quantile of `n` values. `low` and `high` are None where no value bounds it at 95 %."""

    q: float
    n: int
    value: float
    low: float | None
    high: float | None
    #: largest of the values: what is printed in place of a quantile without an upper end
    maximum: float

    @property
    def is_bounded(self) -> bool:
        """It may be printed as a percentile."""
        return self.high is not None

    def covers(self, value: float) -> bool:
        """The interval has two ends and the value in it."""
        return self.low is not None and self.high is not None and self.low <= value <= self.high


def quantile(values: Sequence[float], q: float) -> Quantile:
    """The quantile of a sample, linear between order statistics, with its 95 % interval.

    Args:
        values: at least one, in any order, without NaN.
        q: in (0, 1).

    Raises:
        ValueError: no values.
    """
    if not values:
        raise ValueError("a quantile of no values")
    ordered = sorted(values)
    position = q * (len(ordered) - 1)
    below = math.floor(position)
    above = min(below + 1, len(ordered) - 1)
    value = ordered[below] + (position - below) * (ordered[above] - ordered[below])
    low, high = interval_ranks(len(ordered), q)
    return Quantile(
        q=q,
        n=len(ordered),
        value=value,
        low=None if low is None else ordered[low - 1],
        high=None if high is None else ordered[high - 1],
        maximum=ordered[-1],
    )


@lru_cache(maxsize=4096)
def interval_ranks(n: int, q: float) -> tuple[int | None, int | None]:
    """Ranks, from 1, of the order statistics that bound a quantile with 95 %, 2.5 % at each side.

    None where even the smallest, or the largest, of `n` values does not bound it.
    """
    tail = (1 - CONFIDENCE) / 2
    low: int | None = None
    high: int | None = None
    # the number of values below the quantile is binomial (n, q)
    cumulative = 0.0
    for below in range(n):
        cumulative += _binomial(n, below, q)
        if cumulative <= tail:
            low = below + 1
        if high is None and cumulative >= 1 - tail:
            high = below + 1
            break
    return low, high


def _binomial(n: int, k: int, p: float) -> float:
    log_ways = math.lgamma(n + 1) - math.lgamma(k + 1) - math.lgamma(n - k + 1)
    return math.exp(log_ways + k * math.log(p) + (n - k) * math.log1p(-p))
