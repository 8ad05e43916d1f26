"""The tier's numbers in vLLM's metrics: the pool's counters, its size, and the scheduler's waits."""

from __future__ import annotations

from vllm.distributed.kv_transfer.kv_connector.v1.offloading.metrics import (
    OffloadingConnectorStats,
)
from vllm.v1.kv_offload.base import (
    OffloadingCounterMetadata,
    OffloadingGaugeMetadata,
    OffloadingMetricMetadata,
)

from kvdepot.clock import Clock
from kvdepot.engines.vllm.calls import CallTimes
from kvdepot.metrics import METRICS, Counters
from kvdepot.tiers import Tier

__all__ = ["CALLS", "ENGINE_COUNTERS", "ENGINE_GAUGES", "PREFIX", "TierStats", "metric_definitions"]

#: before the names of `kvdepot.metrics`
PREFIX = "kvdepot_"
#: of each method that vLLM calls on its scheduler's thread: name -> help text; label ``method``
CALLS = {
    "scheduler_calls_total": "calls of the tier on the scheduler's thread",
    "scheduler_call_seconds_total": "seconds that these calls took",
    "scheduler_slow_calls_total": "of these calls, those that took more than a millisecond",
    "scheduler_call_errors_total": "of these calls, those that failed and were answered by a miss",
}
#: name -> help text
ENGINE_COUNTERS = {
    "uncacheable_requests_total": "requests not cached: an adapter or an image is not known by content",
    "host_waits_total": "requests that waited for room in the host tier",
    "host_short_requests_total": "requests that found too little room in the host tier",
    "host_short_tokens_total": "tokens computed for want of room in the host tier",
    "resets_total": "resets of vLLM's caches",
    "resets_checked_total": "of these, those after which the model's files were found unchanged",
}
#: name -> help text
ENGINE_GAUGES = {
    "pool_open": "1 while the pool is open, 0 while nothing is stored or loaded",
    "pool_blocks": "blocks of this model in the pool, as far as this process knows",
    "pool_used_bytes": "bytes of all segments in the pool",
    "pool_capacity_bytes": "bytes that segments may take up",
    "index_bytes": "memory of the index and the write queue",
    "active_jobs": "loads and stores on their way",
    "write_only": "1 while next to nothing of what was stored ever comes back",
    "late_blocks": "blocks of loads that nobody waits for any more and whose rows are still in use",
}
_LABEL = "method"
#: vLLM asks in every step, and sends what it gets to another process
_INTERVAL_S = 0.25


def metric_definitions() -> dict[str, OffloadingMetricMetadata]:
    """All metrics of a tier, for vLLM to register."""
    found: dict[str, OffloadingMetricMetadata] = {}
    for name, text in ({**METRICS, **ENGINE_COUNTERS}).items():
        found[PREFIX + name] = OffloadingCounterMetadata(documentation=text, labelnames=("tier",))
    for name, text in CALLS.items():
        found[PREFIX + name] = OffloadingCounterMetadata(
            documentation=text, labelnames=("tier", _LABEL)
        )
    for name, text in ENGINE_GAUGES.items():
        found[PREFIX + name] = OffloadingGaugeMetadata(documentation=text, labelnames=("tier",))
    return found


class TierStats:
    """What changed since the last time. On the scheduler's thread."""

    def __init__(self, counters: Counters, times: CallTimes, clock: Clock, tier: str) -> None:
        self._counters = counters
        self._times = times
        self._clock = clock
        self._tier = tier
        #: by the names of `ENGINE_COUNTERS`
        self.counts = dict.fromkeys(ENGINE_COUNTERS, 0)
        #: the gauge ``write_only``
        self.is_write_only = False
        self._told: dict[tuple[str, str], float] = {}
        self._next_s = 0.0

    @property
    def is_due(self) -> bool:
        """Whether it is time for new numbers."""
        return self._clock.monotonic_s() >= self._next_s

    def take(self, pool: Tier | None, jobs: int, late: int) -> OffloadingConnectorStats | None:
        """Numbers for vLLM; None where it is too soon for new ones."""
        if not self.is_due:
            return None
        self._next_s = self._clock.monotonic_s() + _INTERVAL_S
        stats = OffloadingConnectorStats()
        for name, count in (self._counters.snapshot() | self.counts).items():
            self._tell(stats, name, count)
        for method in self._times.counts:
            self._tell(stats, "scheduler_calls_total", self._times.calls(method), method)
            self._tell(stats, "scheduler_call_seconds_total", self._times.seconds[method], method)
            self._tell(stats, "scheduler_slow_calls_total", self._times.slow_calls(method), method)
        for method, count in self._times.errors.items():
            self._tell(stats, "scheduler_call_errors_total", count, method)
        gauges = {
            "pool_open": float(pool is not None),
            "write_only": float(self.is_write_only),
            "active_jobs": jobs,
            "late_blocks": late,
        }
        if pool is not None:
            usage = pool.usage()
            gauges |= {
                "pool_blocks": usage.blocks,
                "pool_used_bytes": usage.used_bytes,
                "pool_capacity_bytes": usage.capacity_bytes,
                "index_bytes": usage.memory_bytes,
            }
        for name, value in gauges.items():
            stats.set_gauge(PREFIX + name, value, (self._tier,))
        return stats

    def _tell(
        self, stats: OffloadingConnectorStats, name: str, value: float, method: str = ""
    ) -> None:
        change = value - self._told.get((name, method), 0)
        if change > 0:
            self._told[name, method] = value
            labels = (self._tier, method) if method else (self._tier,)
            stats.increase_counter(PREFIX + name, change, labels)
