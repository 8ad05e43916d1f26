"""What a plan will do and how long that takes, before it is started. Pure.

The times are of requests one after the other, at rates that the user gives: a budget, not a forecast. What
runs at once in a load takes no longer, and an engine that batches takes less.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import msgspec

from kvdepot.bench.blocks import (
    Block,
    count_of,
    lengths_of,
    rounds_of,
    schedule,
    warmed_lengths,
)
from kvdepot.bench.contention import noise_order
from kvdepot.bench.peaktest import LOAD_WARMUPS, TRIAL_REQUESTS
from kvdepot.bench.plan import Arm, Load, Plan, Round, Traffic

__all__ = ["Costs", "Phase", "budget_of"]

#: trials until a saturation rate is found, as a rule
_TRIALS = 10


class Costs(NamedTuple):
    """What an engine takes on the machine in question."""

    #: seconds until it takes requests, with its end before
    start_s: float
    #: prompt tokens a second when computing
    prefill_rate: float
    #: seconds for each output token
    output_s: float
    #: seconds around each round: counters that come to rest, stores that become visible
    edge_s: float


class Phase(msgspec.Struct, frozen=True, kw_only=True):
    """One round or load point of one arm, in all its runs."""

    part: str
    arm: str
    starts: int
    warmups: int
    requests: int
    #: prompt tokens that have to be computed, with those of warm-up requests
    computed_tokens: int
    seconds: float


class _Work(NamedTuple):
    """Of one run."""

    starts: int
    warmups: int
    requests: int
    computed_tokens: int
    output_tokens: int
    #: that the plan itself takes, whatever the engine: think times, arrivals at a rate
    idle_s: float = 0.0


def budget_of(plan: Plan, arms: Sequence[Arm], costs: Costs) -> list[Phase]:
    """The phases of a plan, in the order in which they first come.

    A load that replays a whole trace is not in it: how many requests that has, the plan does not say.
    """
    found: dict[tuple[str, str], Phase] = {}
    for part, arm, work in [*_rounds(plan, arms), *_peak(plan, arms), *_contention(plan, arms)]:
        seconds = (
            work.starts * costs.start_s
            + work.computed_tokens / costs.prefill_rate
            + work.output_tokens * costs.output_s
            + costs.edge_s
            + work.idle_s
        )
        before = found.get((part, arm.name)) or Phase(
            part=part, arm=arm.name, starts=0, warmups=0, requests=0, computed_tokens=0, seconds=0.0
        )
        found[part, arm.name] = Phase(
            part=part,
            arm=arm.name,
            starts=before.starts + work.starts,
            warmups=before.warmups + work.warmups,
            requests=before.requests + work.requests,
            computed_tokens=before.computed_tokens + work.computed_tokens,
            seconds=before.seconds + seconds,
        )
    return list(found.values())


def _rounds(plan: Plan, arms: Sequence[Arm]) -> Iterator[tuple[str, Arm, _Work]]:
    for block in schedule(plan, arms):
        for index, each in enumerate(rounds_of(plan, block)):
            yield each.name, block.arm, _round(plan, block, index, each)


def _round(plan: Plan, block: Block, index: int, each: Round) -> _Work:
    lengths, count = lengths_of(plan, each), count_of(plan, each)
    warm = plan.warmup_requests * sorted(warmed_lengths(plan, block, index))
    requests = len(lengths) * count
    # what is found is not computed; a question is
    is_found = each.salts == "stored"
    asked = requests * plan.question_tokens if is_found else sum(lengths) * count
    return _Work(
        starts=int(index == 0 or each.restarts),
        warmups=len(warm),
        requests=requests,
        computed_tokens=sum(warm) + asked,
        output_tokens=(len(warm) + requests) * plan.output_tokens,
    )


def _peak(plan: Plan, arms: Sequence[Arm]) -> Iterator[tuple[str, Arm, _Work]]:
    if plan.peak is None:
        return
    for _ in range(plan.peak.runs):
        for arm in (each for each in arms if each.role in plan.peak.roles):
            for load in plan.peak.loads:
                work = _load(load, plan.peak.traffic, arm)
                if work is not None:
                    yield load.name, arm, work


def _contention(plan: Plan, arms: Sequence[Arm]) -> Iterator[tuple[str, Arm, _Work]]:
    if plan.contention is None:
        return
    for arm in (each for each in arms if each.role in plan.contention.roles):
        for noise in noise_order(plan.contention.noises, seed=plan.seed):
            work = _load(plan.contention.load, plan.contention.traffic, arm)
            if work is not None:
                yield f"{plan.contention.load.name}, {noise.name}", arm, work


def _load(load: Load, traffic: Traffic, arm: Arm) -> _Work | None:
    if load.kind == "trace":
        return None
    turns, requests = traffic.turns, load.requests or traffic.sessions * traffic.turns
    starts = 1
    if load.kind == "saturation":
        requests = _TRIALS * (load.requests or TRIAL_REQUESTS)
    elif load.kind == "storm":
        turns, requests, starts = 2, 2 * load.connections, 2
    base = traffic.common_tokens + traffic.document_tokens
    if arm.role == "recompute":
        computed = requests * (base + traffic.turn_tokens * (turns + 1) // 2)
    else:
        computed = requests // turns * base + requests * traffic.turn_tokens
    warm = LOAD_WARMUPS
    return _Work(
        starts=starts,
        warmups=warm,
        requests=requests,
        computed_tokens=computed + warm * (base + traffic.turn_tokens),
        output_tokens=(requests + warm) * traffic.output_tokens,
        idle_s=traffic.think_s * (turns - 1) if load.kind in ("closed", "open") else 0.0,
    )
