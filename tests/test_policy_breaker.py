"""The breaker opens on trouble, and always finds its way back."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvdepot.policy.breaker import Breaker, BreakerSettings, BreakerState, Fault, Leave

SETTINGS = BreakerSettings()


def opened(fault: Fault = Fault.ERROR) -> Breaker:
    breaker = Breaker()
    for _ in range(SETTINGS.failures_in_row):
        breaker.failed(0.0, fault)
    return breaker


def test_an_accident_does_not_open_it():
    breaker = Breaker()
    breaker.failed(0.0, Fault.ERROR)
    breaker.failed(0.0, Fault.ERROR)
    breaker.succeeded(0.1)
    breaker.failed(0.2, Fault.ERROR)
    assert breaker.is_closed
    assert breaker.may_read(0.3) is Leave.YES
    assert breaker.next_probe_s(0.3) == 0.0


@pytest.mark.parametrize("fault", Fault)
def test_failures_in_a_row_open_it_and_the_reason_is_visible(fault):
    breaker = opened(fault)
    assert breaker.state is BreakerState.OPEN
    assert breaker.reason == fault.value
    assert breaker.openings == 1
    assert breaker.may_read(0.1) is Leave.NO
    assert 0 < breaker.next_probe_s(0.1) <= SETTINGS.pause_s


def test_a_tenth_of_errors_does_not_open_it_and_a_half_does():
    breaker = Breaker()
    for number in range(200):
        if number % 10:
            breaker.succeeded(number * 0.01)
        else:
            breaker.failed(number * 0.01, Fault.ERROR)
    assert breaker.is_closed
    for number in range(SETTINGS.window):
        (breaker.failed(3.0, Fault.ERROR) if number % 2 else breaker.succeeded(3.0))
    assert not breaker.is_closed


def test_one_probe_at_a_time_and_good_ones_close_it():
    breaker = opened()
    assert breaker.may_read(1.0) is Leave.PROBE
    assert breaker.may_read(1.0) is Leave.NO
    assert breaker.state is BreakerState.HALF_OPEN
    breaker.succeeded(1.1, is_probe=True)
    assert breaker.may_read(1.1) is Leave.PROBE
    breaker.succeeded(1.2, is_probe=True)
    assert breaker.is_closed
    assert breaker.may_read(1.2) is Leave.YES


def test_a_bad_probe_makes_the_wait_longer_up_to_a_bound():
    breaker = opened()
    now = 0.0
    waits = []
    for _ in range(8):
        wait = breaker.next_probe_s(now)
        waits.append(wait)
        now += wait
        assert breaker.may_read(now) is Leave.PROBE
        breaker.failed(now, Fault.ERROR, is_probe=True)
    assert waits == sorted(waits)
    assert waits[-1] == SETTINGS.pause_s_max


def test_a_probe_that_never_answers_is_followed_by_another():
    breaker = opened(Fault.LATE)
    assert breaker.may_read(1.0) is Leave.PROBE
    assert breaker.may_read(1.0 + SETTINGS.probe_timeout_s) is Leave.PROBE


def test_what_began_before_it_opened_says_nothing_about_now():
    breaker = opened()
    breaker.succeeded(0.1)
    breaker.succeeded(0.1)
    breaker.failed(0.1, Fault.LATE)
    assert breaker.state is BreakerState.OPEN
    assert breaker.reason == "error"


_steps = st.lists(
    st.tuples(st.floats(0, 30), st.sampled_from(["ask", "good", "bad", "probe good", "probe bad"])),
    max_size=60,
)


@given(_steps)
def test_it_always_recovers_within_a_bounded_time(steps):
    """Whatever has happened, storage that is well again closes it; requests come once a second."""
    breaker = Breaker()
    now = 0.0
    for wait, what in steps:
        now += wait
        if what == "ask":
            breaker.may_read(now)
        elif "good" in what:
            breaker.succeeded(now, is_probe="probe" in what)
        else:
            breaker.failed(now, Fault.ERROR, is_probe="probe" in what)
    healed = now
    while not breaker.is_closed:
        now += 1.0
        leave = breaker.may_read(now)
        if leave is Leave.PROBE:
            breaker.succeeded(now + 0.01, is_probe=True)
        assert now - healed <= SETTINGS.pause_s_max + SETTINGS.probe_timeout_s + SETTINGS.probes + 1


def test_what_leaves_no_doubt_opens_it_at_once():
    breaker = Breaker()
    breaker.trip(0.0, Fault.LATE)
    assert breaker.state is BreakerState.OPEN
    assert breaker.openings == 1
    breaker.trip(0.1, Fault.ERROR)
    assert breaker.reason == "late"
