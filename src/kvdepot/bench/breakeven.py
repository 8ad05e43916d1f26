"""Break-even: the curve of computing, the rate of reading, and what they promise against what came out."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations

import msgspec
import numpy as np

from kvdepot.bench.ceilings import Ceiling

__all__ = ["BreakEven", "Curve", "fit_curve", "predict"]


class Curve(msgspec.Struct, frozen=True, kw_only=True):
    """Seconds to compute a prompt of N tokens: ``a + b N + c N^2``, none of them negative."""

    a: float
    b: float
    c: float
    points: tuple[tuple[int, float], ...]

    def seconds(self, tokens: int, *, after: int = 0) -> float:
        """Seconds for the tokens behind a prefix that is there already."""
        return self.a + self.b * (tokens - after) + self.c * (tokens**2 - after**2)


class BreakEven(msgspec.Struct, frozen=True, kw_only=True):
    """Of one tier arm at one length."""

    arm: str
    length: int
    #: of KV for a token: by the model's config, and by the bytes written for a known number of tokens
    token_bytes: int | None
    stored_token_bytes: float | None
    #: prompt tokens a second when computing
    compute_rate: float
    #: bytes a second that the pool's files can be read at, at the best depth
    read_ceiling: float | None
    #: bytes a second below which reading never wins
    least_bandwidth: float | None
    predicted_speed_up: float | None
    measured_speed_up: float
    #: bytes a second that round R2 read with
    read_rate: float | None
    #: it may have been more: reading could not be told from computing, and has all of the TTFT
    is_least_rate: bool = False
    #: which ceiling is the least, and how many bytes a second it gives
    least_ceiling: Ceiling | None = None
    least_ceiling_rate: float | None = None
    #: of the least ceiling, what R2 read with
    ceiling_share: float | None = None


def fit_curve(points: Sequence[tuple[int, float]]) -> Curve | None:
    """Non-negative least squares of relative errors; None with fewer than two lengths."""
    if len({tokens for tokens, _ in points}) < 2:
        return None
    tokens = np.array([tokens for tokens, _ in points], dtype=float)
    seconds = np.array([seconds for _, seconds in points], dtype=float)
    features = np.stack([np.ones_like(tokens), tokens, tokens**2], axis=1)
    weighted = features / seconds[:, None]
    scale = weighted.max(axis=0)
    best: tuple[float, list[float]] | None = None
    # three coefficients: every set of those that are not zero can be tried
    for count in (1, 2, 3):
        for chosen in combinations(range(3), count):
            part = (weighted / scale)[:, chosen]
            solution = np.linalg.lstsq(part, np.ones(len(seconds)), rcond=None)[0]
            if (solution < 0).any():
                continue
            error = float(((part @ solution - 1) ** 2).sum())
            if best is None or error < best[0] - 1e-12:
                values = [0.0, 0.0, 0.0]
                for place, value in zip(chosen, solution, strict=True):
                    values[place] = float(value / scale[place])
                best = error, values
    if best is None:
        return None
    a, b, c = best[1]
    return Curve(a=a, b=b, c=c, points=tuple(points))


def predict(
    curve: Curve, *, prompt_tokens: int, reused_tokens: int, token_bytes: float, read_rate: float
) -> float:
    """Seconds to the first token when a prefix is read and the rest computed."""
    reading_s = token_bytes * reused_tokens / read_rate
    return reading_s + curve.seconds(prompt_tokens, after=reused_tokens)
