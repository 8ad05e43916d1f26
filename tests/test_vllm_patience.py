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
        self.patience.began(job, SIZE, wait)
        self.clock.advance(seconds)
        job.resolve_run(0, [outcome], [SIZE])
        self.patience.collect(None)
        self.patience.finished(request)
        return wait.deadline_s

    def ask(self, request: str, takes_s: float) -> float:
        """A request of a thousand tokens that take 10 s to compute, and whose load would take so long.

        Returns:
            How long it takes altogether.
        """
        wait = self.patience.wait_for(request, 10, 1000, SIZE)
        if wait.deadline_s is None:
            self.clock.advance(10.0)
            self.patience.finished(request)
            return 10.0
        job = Job([BlockKey(bytes(32))], clock=self.clock)
        self.patience.began(job, SIZE, wait)
        is_late = takes_s > wait.deadline_s
        load_s = min(takes_s, wait.deadline_s)
        waited_s = min(load_s, wait.patience_s)
        self.clock.advance(load_s)
        job.resolve_run(0, [Outcome.LATE if is_late else Outcome.DONE], [0 if is_late else SIZE])
        self.patience.collect(None)
        if not is_late and load_s <= wait.patience_s:
            self.patience.finished(request)
            return waited_s
        self.clock.advance(max(waited_s + 10.0 - load_s, 0.0))
        self.patience.finished(request)
        return waited_s + 10.0


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


def test_one_request_pays_for_storage_that_has_become_slow():
    desk = Desk()
    for number in range(4):
        desk.compute(f"c{number}", 1000, 10.0)
        desk.ask(f"l{number}", 0.7)
    slow = [desk.ask(f"s{number}", 60.0) for number in range(40)]
    assert slow[0] == pytest.approx(10.0 + 2 * 0.7, rel=0.1)
    assert max(slow[1:]) <= 10.0 * 1.09


@pytest.mark.parametrize("takes_s", [0.2, 1.0, 2.5])
def test_loads_are_trusted_again_also_where_none_fits_into_the_slack(takes_s):
    """The slack is 0.8 s: probes that were given up after it would never find out."""
    desk = Desk()
    for number in range(4):
        desk.compute(f"c{number}", 1000, 10.0)
        desk.ask(f"l{number}", takes_s)
    for number in range(20):
        desk.ask(f"s{number}", 60.0)
    # computing takes 10 s, so a request comes that often
    well = [desk.ask(f"w{number}", takes_s) for number in range(8)]
    assert well[-3:] == [pytest.approx(takes_s)] * 3


def test_storage_that_is_late_now_and_then_is_waited_for_less_and_less():
    desk = Desk()
    for number in range(4):
        desk.compute(f"c{number}", 1000, 10.0)
        desk.ask(f"l{number}", 1.0)
    asked = [desk.ask(f"s{number}", 60.0 if number % 5 == 0 else 1.0) for number in range(100)]
    lost = [seconds for seconds in asked if seconds > 10.0 * 1.09]
    assert len(lost) <= 6


def test_a_load_that_goes_on_without_its_request_is_counted_as_late():
    desk = Desk()
    for number in range(4):
        desk.compute(f"c{number}", 1000, 10.0)
        desk.ask(f"l{number}", 1.0)
    desk.ask("late", 60.0)
    counted = desk.counters.snapshot()["reuse_ended_deadline_total"]
    assert desk.ask("left", 1.0) > 10.0
    assert desk.counters.snapshot()["reuse_ended_deadline_total"] == counted + 1


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
