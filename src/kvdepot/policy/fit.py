"""Seconds as a non-negative mix of a few features, fitted while running.

Two parts, because costs change in two ways. The *shape* says how seconds grow with the features; it
changes slowly, so it is a least-squares fit over many observations, in relative terms, so that short
and long ones count alike. The *level* says how much slower than that shape things are right now; it
moves within a few observations, because storage that turns a hundred times slower must be believed at
once. A prediction is shape times level.

Not thread-safe; its owner holds a lock.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import combinations

import msgspec

__all__ = ["CostFit", "FitState"]

#: after so many further observations, an old one counts half
_HALF_LIFE = 64.0
#: of the distance to what was just observed, the level takes this share
_LEVEL_STEP = 0.5
#: ... and this one when things turn out much better, because a fault that has ended costs every
#: request that is still refused
_LEVEL_STEP_DOWN = 0.75
_MUCH_BETTER = math.log(2)
_SPREAD_STEP = 0.2
#: a shape of many observations is solved anew only this often; its level is always of now
_SOLVE_EVERY = 8
_SETTLED = 16.0
#: where observations are too alike to tell features apart, the main one explains them
_RIDGE = 1e-3
_TINY_S = 1e-9


class FitState(msgspec.Struct, frozen=True, kw_only=True):
    """What is kept of a fit between runs: enough to begin where it ended, and to go on learning."""

    coefficients: tuple[float, ...]
    level: float
    spread: float


class CostFit:
    """``seconds = level x (c0 f0 + c1 f1 + ...)`` with all ``c >= 0``.

    Args:
        features: how many.
        main: the one that is believed in while observations are too alike to tell: seconds grow with
            tokens, or with bytes.
    """

    def __init__(self, features: int, *, main: int) -> None:
        self._count = features
        self._main = main
        self._gram = [[0.0] * features for _ in range(features)]
        self._aim = [0.0] * features
        self._weight = 0.0
        self._since_solved = 0
        self._coefficients: tuple[float, ...] = (0.0,) * features
        #: natural logarithm of how much slower than the shape things are now
        self._level = 0.0
        #: typical distance of the logarithm of an observation from its prediction
        self._spread = 0.0

    @property
    def is_known(self) -> bool:
        """Something was observed, or came from an earlier run."""
        return any(self._coefficients)

    @property
    def coefficients(self) -> tuple[float, ...]:
        """Of the shape, without the level."""
        return self._coefficients

    @property
    def level(self) -> float:
        """How many times slower than the shape things are now."""
        return math.exp(self._level)

    @property
    def spread(self) -> float:
        """Typical relative distance of an observation from its prediction: 0.1 is a tenth."""
        return math.expm1(self._spread)

    def seconds(self, features: Sequence[float], *, doubt: float = 0.0) -> float:
        """Predicted seconds; infinite when nothing is known.

        Args:
            features: non-negative.
            doubt: so many spreads are added, to be rather too slow than too fast.
        """
        if not any(self._coefficients):
            return math.inf
        shape = 0.0
        for coefficient, feature in zip(self._coefficients, features, strict=True):
            shape += coefficient * feature
        return shape * math.exp(self._level + doubt * self._spread)

    def observe(self, features: Sequence[float], seconds: float) -> None:
        """Learn that these features took so long."""
        seconds = max(seconds, _TINY_S)
        # the shape first, so that what it explains does not pass for a change of level
        self._learn_shape(features, seconds / math.exp(self._level))
        if self.is_known:
            self._move_level(features, seconds)

    def observe_at_least(self, features: Sequence[float], seconds: float) -> None:
        """Learn that these features took so long and were not done: the truth is this or more."""
        if not self.is_known:
            # the best that is known: without it, every request would try anew
            self.observe(features, seconds)
        elif seconds > self.seconds(features):
            self._move_level(features, seconds)

    def state(self) -> FitState:
        """For `restore`."""
        return FitState(coefficients=self._coefficients, level=self._level, spread=self._spread)

    def restore(self, state: FitState) -> None:
        """Begin with what an earlier run knew. It is forgotten quickly: hardware may have changed."""
        if len(state.coefficients) != self._count or not any(state.coefficients):
            return
        self._coefficients = state.coefficients
        self._level, self._spread = state.level, state.spread

    # below

    def _move_level(self, features: Sequence[float], seconds: float) -> None:
        shape = sum(c * f for c, f in zip(self._coefficients, features, strict=True))
        distance = math.log(seconds / max(shape, _TINY_S)) - self._level
        step = _LEVEL_STEP_DOWN if distance < -_MUCH_BETTER else _LEVEL_STEP
        self._spread += _SPREAD_STEP * (abs(distance) - self._spread)
        self._level += step * distance

    def _learn_shape(self, features: Sequence[float], seconds: float) -> None:
        keep = 0.5 ** (1.0 / _HALF_LIFE)
        scaled = [feature / seconds for feature in features]
        for row, left in zip(self._gram, scaled, strict=True):
            for column, right in enumerate(scaled):
                row[column] = row[column] * keep + left * right
        for index, feature in enumerate(scaled):
            self._aim[index] = self._aim[index] * keep + feature
        self._weight = self._weight * keep + 1.0
        self._since_solved += 1
        if self._weight < _SETTLED or self._since_solved >= _SOLVE_EVERY:
            self._since_solved = 0
            found = _solve(self._ridged(), self._aim)
            if any(found):
                self._coefficients = found

    def _ridged(self) -> list[list[float]]:
        return [
            [
                value * (1.0 + _RIDGE) if row == column and row != self._main else value
                for column, value in enumerate(values)
            ]
            for row, values in enumerate(self._gram)
        ]


def _solve(gram: Sequence[Sequence[float]], aim: Sequence[float]) -> tuple[float, ...]:
    """Least squares under non-negativity, by trying each set of features that may be above zero.

    With three features these are seven sets; the best feasible one is the answer, exactly.
    """
    count = len(aim)
    best: tuple[float, ...] = (0.0,) * count
    best_gain = 0.0
    for size in range(count, 0, -1):
        for chosen in combinations(range(count), size):
            values = _eliminate(
                [[gram[i][j] for j in chosen] for i in chosen], [aim[i] for i in chosen]
            )
            if values is None or min(values) < 0.0:
                continue
            # what this set takes off the sum of squares
            gain = sum(value * aim[i] for value, i in zip(values, chosen, strict=True))
            if gain > best_gain * (1 + 1e-12):
                best_gain = gain
                full = [0.0] * count
                for value, i in zip(values, chosen, strict=True):
                    full[i] = value
                best = tuple(full)
    return best


def _eliminate(matrix: list[list[float]], right: list[float]) -> list[float] | None:
    """Solve a small positive system; None when it is singular, as when all observations are alike."""
    size = len(right)
    scale = [math.sqrt(matrix[i][i]) for i in range(size)]
    if min(scale) <= 0.0:
        return None
    rows = [
        [matrix[i][j] / (scale[i] * scale[j]) for j in range(size)] + [right[i] / scale[i]]
        for i in range(size)
    ]
    for pivot in range(size):
        if rows[pivot][pivot] < 1e-9:
            return None
        for other in range(pivot + 1, size):
            factor = rows[other][pivot] / rows[pivot][pivot]
            for column in range(pivot, size + 1):
                rows[other][column] -= factor * rows[pivot][column]
    values = [0.0] * size
    for pivot in reversed(range(size)):
        rest = sum(rows[pivot][j] * values[j] for j in range(pivot + 1, size))
        values[pivot] = (rows[pivot][size] - rest) / rows[pivot][pivot]
    return [value / factor for value, factor in zip(values, scale, strict=True)]
