"""What the simulated world is made of."""

from __future__ import annotations

from typing import Literal, NamedTuple

from kvdepot.errors import ConfigError
from kvdepot.policy.admission import AdmissionSettings
from kvdepot.policy.ordering import AGEING_BYTES_PER_S

__all__ = ["Prefill", "SimSettings"]


class Prefill(NamedTuple):
    """How long the simulated engine computes: ``a + b n + c n (n + 2p)`` for n tokens behind p."""

    fixed_s: float = 0.0
    token_s: float = 1e-4
    pair_s: float = 0.0

    def seconds(self, tokens: float, position: float = 0.0) -> float:
        """For so many tokens behind so many others; 0 for none."""
        if tokens <= 0:
            return 0.0
        return self.fixed_s + self.token_s * tokens + self.pair_s * tokens * (tokens + 2 * position)

    def tokens(self, seconds: float, position: float = 0.0) -> float:
        """How many tokens behind `position` are computed within so many seconds."""
        left_s = seconds - self.fixed_s
        if left_s <= 0:
            return 0.0
        slope = self.token_s + 2 * self.pair_s * position
        if not self.pair_s:
            return left_s / slope
        root = (slope * slope + 4 * self.pair_s * left_s) ** 0.5
        return float((root - slope) / (2 * self.pair_s))


class SimSettings(NamedTuple):
    """One world. Capacities are in bytes; 0 is none of it."""

    prefill: Prefill = Prefill()
    block_tokens: int = 512
    token_bytes: int = 131_072
    instances: int = 1
    device_bytes: int = 0
    host_bytes: int = 0
    disk_bytes: int = 1 << 42
    read_bytes_per_s: float = 2e9
    read_latency_s: float = 0.002
    #: ``(from second, factor)``: what of the bandwidth is there from then on; 0 hangs
    factors: tuple[tuple[float, float], ...] = ()
    #: ``on``; ``load_all``: every hit is loaded, with no deadline, all at once; ``off``: no storage
    policies: Literal["on", "load_all", "off"] = "on"
    #: the engine computes the front of a prefix while its back is read
    can_meet: bool = False
    admission: AdmissionSettings = AdmissionSettings()
    ageing_bytes_per_s: float = AGEING_BYTES_PER_S
    #: the costs are known from the beginning, as after a restart
    is_trained: bool = False

    @property
    def block_bytes(self) -> int:
        """Of one block."""
        return self.block_tokens * self.token_bytes

    def check(self) -> None:
        """Refuse a world that cannot be.

        Raises:
            ConfigError: a value is out of range.
        """
        for name in ("block_tokens", "token_bytes", "instances", "read_bytes_per_s"):
            if getattr(self, name) <= 0:
                raise ConfigError(f"{name} must be positive, not {getattr(self, name)}")
        for name in ("device_bytes", "host_bytes", "disk_bytes", "read_latency_s"):
            if getattr(self, name) < 0:
                raise ConfigError(f"{name} cannot be negative: {getattr(self, name)}")
        if min(self.prefill) < 0 or self.prefill.token_s <= 0:
            raise ConfigError(f"prefill takes time: {self.prefill}")
        if list(self.factors) != sorted(self.factors):
            raise ConfigError("changes of the bandwidth must be in the order of time")
