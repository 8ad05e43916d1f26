"""vLLM's tier under the policies: what is loaded, for how long it is waited for, and what is learned.

Of `kvdepot.engines.vllm.patience`, alone on a clock of its own and in vLLM's managers.
"""

from __future__ import annotations

import errno
import time

import pytest

import tests.needs_vllm  # noqa: F401  # isort: skip

from kvdepot.engines.vllm.patience import Patience
from kvdepot.keys import BlockKey
from kvdepot.metrics import Counters
from kvdepot.policy.breaker import BreakerState, Fault
from kvdepot.testing.faults import FaultPlan
from kvdepot.testing.simclock import FakeClock
from kvdepot.tiers import Job, Outcome
from tests.vllm_rig import Ask, TierRig

pytestmark = pytest.mark.vllm

SIZE = 64 << 20


class Desk:
    """A patience on a clock of its own."""

    def __init__(self) -> None:
        self.clock = FakeClock()
        self.counters = Counters()
        self.patience = Patience(
            lambda length: 2.0 + length / 100e6, counters=self.counters, clock=self.clock
        )

    def compute(self, request: str, tokens: int, seconds: float) -> None:
        self.patience.looked_up(request, is_hit=False)
        self.patience.scheduled([request])
        self.clock.advance(seconds)
        self.patience.computed(request, tokens)

    def load(self, request: str, seconds: float, outcome: Outcome = Outcome.DONE) -> float | None:
        """One load of a thousand tokens; how long it was to be waited for."""
        wait = self.patience.wait_for(request, 10, 1000, SIZE)
        if wait.deadline_s is None:
            return None
        job = Job([BlockKey(bytes(32))], clock=self.clock)
        self.patience.began(job, SIZE, is_probe=wait.is_probe)
        self.clock.advance(seconds)
        job.resolve_run(0, [outcome], [SIZE])
        self.patience.collect(None)
        self.patience.finished(request)
        return wait.deadline_s


def test_before_anything_is_known_the_settings_say_how_long():
    assert Desk().load("a", 0.1) == pytest.approx(2.0 + SIZE / 100e6)


def test_prefill_is_learned_from_requests_that_found_nothing():
    desk = Desk()
    desk.compute("a", 1000, 10.0)
    cost = desk.patience.policies.cost
    assert cost.prefill_s(2000) == pytest.approx(20.0, rel=0.05)
    # one that found something, and one that nobody saw scheduled, say nothing
    desk.patience.scheduled(["b"])
    desk.clock.advance(1000.0)
    desk.patience.computed("b", 1000)
    assert cost.prefill_s(2000) == pytest.approx(20.0, rel=0.05)


def test_a_load_may_take_the_slack_or_twice_what_is_expected():
    desk = Desk()
    for number in range(6):
        desk.compute(f"c{number}", 1000, 10.0)
        desk.load(f"l{number}", 0.05)
    assert desk.load("x", 0.05) == pytest.approx(0.8, rel=0.1)
    for number in range(8):
        desk.load(f"s{number}", 1.0)
    longer = desk.load("y", 1.0)
    assert longer is not None
    assert 1.9 < longer < 2.7


def test_storage_that_is_slower_than_computing_is_left_alone_and_found_well_again():
    desk = Desk()
    for number in range(4):
        desk.compute(f"c{number}", 1000, 0.5)
    answers = [desk.load(f"l{number}", 5.0) for number in range(6)]
    assert None in answers
    assert desk.counters.snapshot()["reuse_ended_refused_cost_total"] > 0
    began = desk.clock.monotonic_s()
    in_row = number = 0
    while in_row < 3:
        number += 1
        in_row = in_row + 1 if desk.load(f"p{number}", 0.01) is not None else 0
        desk.clock.advance(0.5)
        assert desk.clock.monotonic_s() - began < 20


def test_errors_keep_requests_from_asking_until_a_probe_has_come():
    desk = Desk()
    for number in range(4):
        desk.compute(f"c{number}", 1000, 10.0)
    for number in range(3):
        desk.load(f"l{number}", 0.1, Outcome.FAILED)
    assert not desk.patience.may_load("other")
    desk.clock.advance(1.0)
    for number in range(2):
        assert desk.patience.may_load(f"probe{number}")
        assert not desk.patience.may_load("other")
        assert desk.load(f"probe{number}", 0.1) is not None
    assert desk.patience.may_load("other")


def test_each_request_that_the_breaker_keeps_from_loading_is_counted_once():
    desk = Desk()
    for number in range(4):
        desk.compute(f"c{number}", 1000, 10.0)
    for number in range(3):
        desk.load(f"l{number}", 0.1, Outcome.FAILED)
    for _step in range(5):
        assert not desk.patience.may_load("one")
        assert not desk.patience.may_load("other")
    assert desk.counters.snapshot()["reuse_ended_breaker_total"] == 2
    # an id may come again, as another request
    desk.patience.finished("one")
    assert not desk.patience.may_load("one")
    assert desk.counters.snapshot()["reuse_ended_breaker_total"] == 3


def test_room_is_compared_by_what_is_known_and_by_the_settings_before():
    desk = Desk()
    patience = desk.patience
    assert patience.load_s(SIZE) == pytest.approx(SIZE / 100e6)
    assert patience.compute_s(1000, 0, SIZE) == pytest.approx(2.0 + SIZE / 100e6)
    for number in range(4):
        desk.compute(f"c{number}", 1000, 10.0)
        desk.load(f"l{number}", 0.05)
    assert patience.load_s(SIZE) == pytest.approx(0.05, rel=0.2)
    assert patience.compute_s(2000, 0, SIZE) == pytest.approx(20.0, rel=0.1)


# --- in vLLM's own managers


def test_a_request_with_nothing_to_load_is_no_probe(tmp_path):
    plan = FaultPlan()
    with TierRig(tmp_path / "pool", plan=plan) as rig:
        rig.put(Ask("stored", 4))
        rig.forget_host()
        breaker = rig.tier.patience.policies.breaker
        breaker.trip(time.monotonic(), Fault.LATE)
        time.sleep(0.6)  # a probe is due
        states = []
        for prompt, chunks in (("new", 0), ("stored", 4)):
            assert rig.take(Ask(prompt, 4)) == chunks
            states.append(breaker.state)
        assert states == [BreakerState.OPEN, BreakerState.HALF_OPEN]


def test_a_request_behind_failing_storage_computes_at_once(tmp_path):
    plan = FaultPlan()
    with TierRig(tmp_path / "pool", plan=plan) as rig:
        for seed in range(6):
            rig.put(Ask(f"prompt {seed}", 4))
        rig.forget_host()
        plan.fail("read", errno.EIO)
        for seed in range(6):
            rig.take(Ask(f"prompt {seed}", 4))
        counters = rig.tier.counters.snapshot()
        assert counters["reuse_ended_failed_total"] >= 1
        plan.clear()
        give_up_at = time.monotonic() + 60
        number = 0
        while rig.take(Ask(f"prompt {number % 6}", 4)) < 4:
            rig.forget_host()
            assert time.monotonic() < give_up_at
            number += 1
            time.sleep(0.1)
