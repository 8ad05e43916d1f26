"""All policies together: what a fault does to decisions, and how it ends."""

from __future__ import annotations

import pytest

from kvdepot.policy.breaker import BreakerState, Fault
from kvdepot.policy.decide import Ask, Mode, Run
from kvdepot.policy.policies import Policies
from kvdepot.policy.reasons import Reason

BLOCK_BYTES = 1 << 20
ASK = Ask(64 * 16 + 20, 16, [Run("disk", 64, BLOCK_BYTES)])
SIZE = 64 * BLOCK_BYTES


def load(policies: Policies, now: float, seconds: float, *, is_probe: bool = False) -> None:
    ticket = policies.load_began(SIZE, now, is_probe=is_probe)
    policies.load_ended(ticket, now + seconds, done_bytes=SIZE)


def trained(bandwidth: float = 1e9) -> Policies:
    policies = Policies()
    for tokens in (64, 256, 1024):
        policies.cost.computed(tokens, 0, 0.01 + 0.004 * tokens)
    for number in range(5):
        load(policies, float(number), SIZE / bandwidth)
    return policies


def test_a_healthy_tier_is_used():
    policies = trained()
    decision = policies.choose(ASK, 10.0)
    assert decision.choice.mode is Mode.LOAD
    policies.settle(decision, load_s=0.07, reused_blocks=64)
    assert decision.lost_s == 0.0
    totals = policies.totals()
    assert totals.loads == totals.decisions == 1
    assert totals.saved_s > 3.0
    assert policies.recent() == [decision]


def test_time_that_was_lost_is_recorded():
    policies = trained()
    decision = policies.choose(ASK, 10.0)
    policies.settle(decision, load_s=0.3, reused_blocks=0)
    assert decision.lost_s == pytest.approx(0.3)
    assert policies.totals().lost_s_max == pytest.approx(0.3)


def test_loads_before_this_one_are_ahead_of_it_unless_they_are_longer():
    policies = trained()
    policies.load_began(10 * BLOCK_BYTES, 10.0)
    policies.load_began(1000 * BLOCK_BYTES, 10.0)
    decision = policies.choose(ASK, 10.0)
    assert decision.ask.ahead_bytes == 10 * BLOCK_BYTES


def test_a_hung_tier_is_left_alone_after_a_few_loads_and_comes_back_by_itself():
    policies = trained()
    for number in range(3):
        ticket = policies.load_began(SIZE, 10.0 + number)
        policies.load_ended(ticket, 10.3 + number, done_bytes=0, fault=Fault.LATE)
    decision = policies.choose(ASK, 13.0)
    assert decision.choice.mode is Mode.COMPUTE
    assert decision.choice.reason is Reason.BREAKER
    # it hangs for half a minute; every second a request comes and asks whether a probe is due
    now, probes = 13.0, 0
    while now < 43.0:
        if policies.probe_due(now):
            probes += 1
            ticket = policies.load_began(BLOCK_BYTES, now, is_probe=True)
            policies.load_ended(ticket, now + 1, done_bytes=0, fault=Fault.LATE)
        now += 1.0
    assert 3 <= probes <= 20
    healed = now
    while policies.choose(ASK, now).choice.mode is Mode.COMPUTE:
        if policies.probe_due(now):
            load(policies, now, 0.07, is_probe=True)
        now += 0.5
    assert policies.breaker.state is BreakerState.CLOSED
    assert now - healed <= 10.0


def test_slow_storage_is_refused_and_found_well_within_ten_seconds_of_its_recovery():
    policies = trained()
    for number in range(6):
        load(policies, 10.0 + 20 * number, SIZE / 5e6)
    now = 200.0
    assert policies.choose(ASK, now).choice.reason is Reason.REFUSED_COST
    while now < 230.0:
        policies.choose(ASK, now)
        if policies.probe_due(now):
            ticket = policies.load_began(BLOCK_BYTES, now, is_probe=True)
            policies.load_ended(ticket, now + BLOCK_BYTES / 5e6, done_bytes=BLOCK_BYTES)
        now += 0.5
    assert policies.choose(ASK, now).choice.mode is Mode.COMPUTE
    healed = now
    while policies.choose(ASK, now).choice.mode is not Mode.LOAD:
        if policies.probe_due(now):
            ticket = policies.load_began(BLOCK_BYTES, now, is_probe=True)
            policies.load_ended(ticket, now + 0.001, done_bytes=BLOCK_BYTES)
        now += 0.5
        assert now - healed <= 10.0


def test_healthy_storage_is_not_probed():
    policies = trained()
    policies.choose(ASK, 10.0)
    assert not any(policies.probe_due(10.0 + second) for second in range(100))


def test_what_was_taken_back_teaches_nothing():
    policies = trained()
    before = policies.cost.read_s("disk", SIZE)
    for number in range(10):
        ticket = policies.load_began(SIZE, 10.0 + number)
        policies.load_ended(ticket, 10.0 + number, done_bytes=0, is_unwanted=True)
    assert policies.cost.read_s("disk", SIZE) == before
    assert policies.breaker.is_closed
    assert policies.ahead_bytes(SIZE) == 0


def test_a_probe_that_is_taken_back_does_not_stop_probing():
    policies = trained(5e6)
    assert policies.choose(ASK, 500.0).choice.mode is Mode.COMPUTE
    assert policies.probe_due(500.0)
    assert not policies.probe_due(501.0)
    ticket = policies.load_began(BLOCK_BYTES, 500.0, is_probe=True)
    policies.load_ended(ticket, 501.0, done_bytes=0, is_unwanted=True)
    assert policies.probe_due(520.0)


def test_a_few_corrupt_loads_open_the_breaker():
    policies = trained()
    for number in range(3):
        ticket = policies.load_began(SIZE, 10.0 + number)
        policies.load_ended(ticket, 10.1 + number, done_bytes=10, fault=Fault.CORRUPT)
    assert not policies.breaker.is_closed
    assert policies.breaker.reason == "corrupt"


def test_what_is_in_memory_is_used_while_the_breaker_is_open():
    policies = trained()
    for _ in range(3):
        policies.breaker.failed(10.0, Fault.ERROR)
    ask = ASK._replace(runs=[Run("host", 30, 0), Run("disk", 34, BLOCK_BYTES)])
    choice = policies.choose(ask, 10.1).choice
    assert (choice.mode, choice.blocks, choice.reason) == (Mode.COMPUTE, 30, Reason.BREAKER)
