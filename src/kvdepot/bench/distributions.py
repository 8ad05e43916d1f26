"""The one distribution that the statistics need beyond numpy: Student's t."""

from __future__ import annotations

import math

__all__ = ["t_sf"]

_STEPS_MAX = 300
_TINY = 1e-300
_CLOSE = 1e-15


def t_sf(t: float, freedom: float) -> float:
    """P(T > t) of Student's t; exact to about ten digits."""
    half = 0.5 * _beta_share(freedom / (freedom + t * t), freedom / 2, 0.5)
    return half if t >= 0 else 1 - half


def _beta_share(x: float, a: float, b: float) -> float:
    """The regularised incomplete beta function, by its continued fraction."""
    if x <= 0:
        return 0.0
    if x >= 1:
        return 1.0
    log_front = (
        math.lgamma(a + b) - math.lgamma(a) - math.lgamma(b) + a * math.log(x) + b * math.log1p(-x)
    )
    # the fraction converges fast on this side of the mean, and by symmetry there is no other
    if x < (a + 1) / (a + b + 2):
        return math.exp(log_front) * _fraction(x, a, b) / a
    return 1 - math.exp(log_front) * _fraction(1 - x, b, a) / b


def _fraction(x: float, a: float, b: float) -> float:
    """Lentz's evaluation."""
    c, d = 1.0, 1 / _not_zero(1 - (a + b) * x / (a + 1))
    result = d
    for m in range(1, _STEPS_MAX):
        even = m * (b - m) * x / ((a + 2 * m - 1) * (a + 2 * m))
        odd = -(a + m) * (a + b + m) * x / ((a + 2 * m) * (a + 2 * m + 1))
        factor = 1.0
        for term in (even, odd):
            d = 1 / _not_zero(1 + term * d)
            c = _not_zero(1 + term / c)
            factor = c * d
            result *= factor
        if abs(factor - 1) < _CLOSE:
            break
    return result


def _not_zero(value: float) -> float:
    return value if abs(value) > _TINY else _TINY
