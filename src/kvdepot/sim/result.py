"""What a simulation came to, in numbers that can be compared with a real run's."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import TYPE_CHECKING

import msgspec
import numpy as np

from kvdepot.policy.decide import Mode

if TYPE_CHECKING:
    from kvdepot.sim.world import World

__all__ = ["Percentiles", "SimResult", "Tally", "percentiles", "result_of"]


class Percentiles(msgspec.Struct, frozen=True, kw_only=True):
    """Seconds; all zero when there were none."""

    count: int
    mean: float
    p50: float
    p90: float
    p95: float
    p99: float
    largest: float


class SimResult(msgspec.Struct, frozen=True, kw_only=True):
    """One simulated run. Token counts are of prompts."""

    requests: int
    ttft_s: Percentiles
    first_ask_ttft_s: Percentiles
    follow_up_ttft_s: Percentiles
    prompt_tokens: int
    computed_tokens: int
    #: reused tokens by the tier that they came from
    reused_tokens: dict[str, int]
    #: reused of all prompt tokens
    token_share: float
    #: computed tokens against those that nobody had asked before
    amplification: float
    read_bytes: int
    written_bytes: int
    evicted_blocks: int
    #: requests by how they got their prefix, and by the reason that ended their reuse
    modes: dict[str, int]
    reasons: dict[str, int]
    saved_s: float
    lost_s: float
    #: busy time over all engines and of the storage, as shares of the run
    engine_busy: float
    storage_busy: float
    span_s: float
    host_advice: str
    write_only: str


class Tally:
    """Collects while a simulation runs."""

    def __init__(self) -> None:
        self.first_asks = array("d")
        self.follow_ups = array("d")
        self.prompt_tokens = self.computed_tokens = self.new_tokens = 0
        self.reused = {"device": 0, "host": 0, "disk": 0}
        self.written_bytes = 0

    def answered(self, ttft_s: float, *, is_follow_up: bool) -> None:
        """A first token was given out."""
        (self.follow_ups if is_follow_up else self.first_asks).append(ttft_s)


def percentiles(values: Sequence[float] | array[float]) -> Percentiles:
    """Of any number of values."""
    if not len(values):
        return Percentiles(count=0, mean=0.0, p50=0.0, p90=0.0, p95=0.0, p99=0.0, largest=0.0)
    numbers = np.asarray(values, dtype=np.float64)
    p50, p90, p95, p99 = (float(each) for each in np.percentile(numbers, (50, 90, 95, 99)))
    return Percentiles(
        count=len(numbers),
        mean=float(numbers.mean()),
        p50=p50,
        p90=p90,
        p95=p95,
        p99=p99,
        largest=float(numbers.max()),
    )


def result_of(world: World) -> SimResult:
    """What a world that has run came to."""
    tally, policies = world.tally, [each.policies for each in world.instances]
    span_s = max(world.now_s - world.began_s, 1e-9)
    totals = [each.totals() for each in policies]
    modes = {
        Mode.LOAD.value: sum(each.loads for each in totals),
        Mode.MEET.value: sum(each.meets for each in totals),
        Mode.COMPUTE.value: sum(each.computes for each in totals),
    }
    reasons: dict[str, int] = {}
    for each in policies:
        for reason, count in each.misses.requests().items():
            reasons[reason.value] = reasons.get(reason.value, 0) + count
    warnings = [each.write_only.verdict(each.misses.requests()).warning for each in policies]
    busy_s = sum(each.busy_s for each in world.instances)
    return SimResult(
        requests=len(tally.first_asks) + len(tally.follow_ups),
        ttft_s=percentiles(tally.first_asks + tally.follow_ups),
        first_ask_ttft_s=percentiles(tally.first_asks),
        follow_up_ttft_s=percentiles(tally.follow_ups),
        prompt_tokens=tally.prompt_tokens,
        computed_tokens=tally.computed_tokens,
        reused_tokens=dict(tally.reused),
        token_share=sum(tally.reused.values()) / max(tally.prompt_tokens, 1),
        amplification=tally.computed_tokens / max(tally.new_tokens, 1),
        read_bytes=round(world.storage.read_bytes),
        written_bytes=tally.written_bytes,
        evicted_blocks=world.disk.evicted,
        modes=modes,
        reasons=reasons,
        saved_s=sum(each.saved_s for each in totals),
        lost_s=sum(each.lost_s for each in totals),
        engine_busy=busy_s / (span_s * len(world.instances)),
        storage_busy=world.storage.busy_s / span_s,
        span_s=span_s,
        host_advice=max(each.room.advice() for each in world.instances).text(),
        write_only=next(filter(None, warnings), ""),
    )
