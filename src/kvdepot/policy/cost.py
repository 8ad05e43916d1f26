"""What computing and reading cost, in seconds: one model per depot, fitted while running.

Prefill of n tokens behind p others: ``a + b n + c n (n + 2p)``, the last for attention over all that
comes before. Reading b bytes behind q queued ones: ``latency + (q + b) / bandwidth``.

Pure: seconds come in from outside. Thread-safe; every call takes microseconds.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Mapping

import msgspec

from kvdepot.policy.fit import CostFit, FitState

__all__ = ["COST_STATE_VERSION", "CostModel", "CostState"]

COST_STATE_VERSION = 1

#: shorter passes measure the engine's step, not its prefill
_TOKENS_MIN = 8
#: loads of less say nothing about bandwidth, and their time is the scheduler's
_BYTES_MIN = 4096
#: one doubt is one spread: about five reads in six are quicker than that
_DOUBT = 1.0


class CostState(msgspec.Struct, frozen=True, kw_only=True):
    """What is kept with the pool, so that a restart knows."""

    version: int
    prefill: FitState
    reads: dict[str, FitState]


class CostModel:
    """Prefill and read costs of one engine over its tiers."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._prefill = CostFit(3, main=1)
        self._reads: dict[str, CostFit] = {}

    # computing

    @property
    def knows_prefill(self) -> bool:
        """A prefill was observed, or is known from an earlier run."""
        return self._prefill.is_known

    def prefill_s(self, tokens: int, position: int = 0) -> float:
        """Seconds to compute `tokens` tokens behind `position` others; infinite when unknown."""
        if tokens <= 0:
            return 0.0
        return self._prefill.seconds((1.0, tokens, tokens * (tokens + 2.0 * position)))

    def saved_s(self, tokens: int, prompt_tokens: int) -> float:
        """Seconds that the first `tokens` of a prompt being there take off its prefill."""
        if tokens <= 0:
            return 0.0
        whole_s = self.prefill_s(prompt_tokens)
        return (
            whole_s - self.prefill_s(prompt_tokens - tokens, tokens) if whole_s < math.inf else 0.0
        )

    def computed(self, tokens: int, position: int, seconds: float) -> None:
        """Learn from a prefill that nothing but computing was part of."""
        if tokens >= _TOKENS_MIN:
            with self._lock:
                self._prefill.observe((1.0, tokens, tokens * (tokens + 2.0 * position)), seconds)

    # reading

    def knows_reads(self, tier: str) -> bool:
        """A load from this tier was observed, or is known from an earlier run."""
        fit = self._reads.get(tier)
        return fit is not None and fit.is_known

    def read_s(
        self, tier: str, length_bytes: int, *, ahead_bytes: int = 0, is_doubtful: bool = False
    ) -> float:
        """Seconds until so many bytes are there, behind others; infinite when unknown.

        Args:
            tier: where they are.
            length_bytes: payload.
            ahead_bytes: what is asked of the tier already and will be served first.
            is_doubtful: rather too slow than too fast.
        """
        if length_bytes <= 0:
            return 0.0
        fit = self._reads.get(tier)
        if fit is None:
            return math.inf
        return fit.seconds(
            (1.0, float(length_bytes + ahead_bytes)), doubt=_DOUBT if is_doubtful else 0.0
        )

    def bandwidth(self, tier: str) -> float:
        """Bytes a second of long reads now; infinite when unknown."""
        fit = self._reads.get(tier)
        if fit is None or not fit.coefficients[1]:
            return math.inf
        return 1.0 / (fit.coefficients[1] * fit.level)

    def loaded(self, tier: str, length_bytes: int, seconds: float, *, ahead_bytes: int = 0) -> None:
        """Learn from a load that came whole."""
        if length_bytes >= _BYTES_MIN:
            with self._lock:
                self._fit(tier).observe((1.0, float(length_bytes + ahead_bytes)), seconds)

    def not_loaded(
        self, tier: str, length_bytes: int, seconds: float, *, ahead_bytes: int = 0
    ) -> None:
        """Learn from a load that had not come after so long."""
        with self._lock:
            features = (1.0, float(max(length_bytes, _BYTES_MIN) + ahead_bytes))
            self._fit(tier).observe_at_least(features, seconds)

    # between runs

    def state(self) -> CostState:
        """What a restart should know."""
        with self._lock:
            return CostState(
                version=COST_STATE_VERSION,
                prefill=self._prefill.state(),
                reads={tier: fit.state() for tier, fit in self._reads.items()},
            )

    def restore(self, state: CostState) -> None:
        """Begin with what an earlier run knew; what this one has seen itself stays."""
        if state.version != COST_STATE_VERSION:
            return
        with self._lock:
            if not self._prefill.is_known:
                self._prefill.restore(state.prefill)
            for tier, fit_state in state.reads.items():
                if not self._fit(tier).is_known:
                    self._fit(tier).restore(fit_state)

    def describe(self) -> Mapping[str, float]:
        """The model in numbers that people know, for logs and metrics."""
        found = {
            "prefill_tokens_per_s_at_4096": 4096 / self.prefill_s(4096)
            if self.knows_prefill
            else 0.0,
            "prefill_spread": self._prefill.spread,
        }
        for tier, fit in list(self._reads.items()):
            if fit.is_known:
                found[f"{tier}_bytes_per_s"] = self.bandwidth(tier)
                found[f"{tier}_latency_s"] = fit.coefficients[0] * fit.level
                found[f"{tier}_spread"] = fit.spread
        return found

    def _fit(self, tier: str) -> CostFit:
        return self._reads.setdefault(tier, CostFit(2, main=1))
