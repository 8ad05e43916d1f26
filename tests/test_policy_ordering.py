"""Whose bytes come next: short ones first, nobody starves; and how many bytes are in flight."""

from __future__ import annotations

import statistics

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvdepot.policy.budget import BudgetTuner
from kvdepot.policy.ordering import Lane, ReadOrder, StoreGate
from kvdepot.policy.prefetch import Waiting, plan_prefetch

MIB = 1 << 20


def serve(order: ReadOrder[str]) -> list[str]:
    served = []
    while (first := order.first()) is not None:
        number, item = first
        served.append(item)
        order.remove(number)
    return served


def test_the_shortest_remaining_goes_first():
    order: ReadOrder[str] = ReadOrder(ageing=1.0)
    order.add("long", 100, 0.0)
    order.add("short", 10, 0.0)
    order.add("middle", 50, 0.0)
    assert [item for _, item in order.in_order()] == ["short", "middle", "long"]
    assert serve(order) == ["short", "middle", "long"]


def test_equal_ones_are_served_as_they_came():
    order: ReadOrder[int] = ReadOrder()
    for number in range(8):
        order.add(number, 100, 0.0)
    assert [item for _, item in order.in_order()] == list(range(8))


def test_what_has_been_read_counts_no_more():
    order: ReadOrder[str] = ReadOrder(ageing=1.0)
    long = order.add("long", 100, 0.0)
    order.add("middle", 50, 0.0)
    order.grow(long, -60)
    assert serve(order) == ["long", "middle"]


def test_requests_go_before_prefetch_and_prefetch_before_probes():
    order: ReadOrder[str] = ReadOrder()
    order.add("probe", 1, 0.0, Lane.PROBE)
    order.add("prefetch", 10, 0.0, Lane.PREFETCH)
    order.add("request", 10**9, 5.0)
    assert serve(order) == ["request", "prefetch", "probe"]


def test_an_order_without_ageing_is_refused():
    with pytest.raises(ValueError, match="ageing"):
        ReadOrder(ageing=0.0)


def test_changes_of_what_is_gone_do_not_matter():
    order: ReadOrder[str] = ReadOrder()
    number = order.add("x", 1, 0.0)
    order.remove(number)
    order.remove(number)
    order.grow(number, 5)
    assert order.first() is None
    assert len(order) == 0


_arrivals = st.lists(st.tuples(st.floats(0, 100), st.integers(1, 10**6)), min_size=1, max_size=60)


@given(_arrivals, st.floats(1.0, 1e5))
def test_nobody_starves(arrivals, ageing):
    """A request is overtaken only by those that came within its own bytes over the ageing."""
    order: ReadOrder[tuple[float, int]] = ReadOrder(ageing=ageing)
    for at_s, size in arrivals:
        order.add((at_s, size), size, at_s)
    served = [item for _, item in order.in_order()]
    for place, (at_s, size) in enumerate(served):
        for earlier_at_s, _ in served[:place]:
            assert earlier_at_s <= at_s + size / ageing + 1e-6


def finish_times(sizes: list[int], rate: float, *, is_ordered: bool) -> list[float]:
    """When each has all its bytes, read one by one in order, or all at once."""
    if not is_ordered:
        # equal shares: each gets rate/n while n are left
        left, now, done = sorted(sizes), 0.0, []
        before = 0
        for place, size in enumerate(left):
            now += (size - before) * (len(left) - place) / rate
            before = size
            done.append(now)
        return done
    order: ReadOrder[int] = ReadOrder()
    for size in sizes:
        order.add(size, size, 0.0)
    now, done = 0.0, []
    for _, size in order.in_order():
        now += size / rate
        done.append(now)
    return done


def test_a_burst_of_equal_sessions_waits_half_as_long():
    sizes = [64 * MIB] * 16
    ordered = finish_times(sizes, 1e9, is_ordered=True)
    at_once = finish_times(sizes, 1e9, is_ordered=False)
    assert statistics.median(ordered) <= 0.6 * statistics.median(at_once)
    assert max(ordered) <= 1.05 * max(at_once)


# --- stores


def test_stores_wait_for_loads_but_not_for_ever():
    gate = StoreGate(hold_s=0.25)
    assert gate.may_store(0.0, are_loads_waiting=False)
    assert not gate.may_store(1.0, are_loads_waiting=True)
    assert not gate.may_store(1.2, are_loads_waiting=True)
    assert gate.may_store(1.25, are_loads_waiting=True)
    assert not gate.may_store(1.3, are_loads_waiting=True)
    assert gate.may_store(1.5, are_loads_waiting=True)
    assert gate.may_store(1.51, are_loads_waiting=False)


@given(st.lists(st.floats(0.001, 0.2), min_size=100, max_size=200))
def test_stores_get_their_share_under_endless_loads(gaps):
    gate = StoreGate(hold_s=0.25)
    now, last, longest = 0.0, 0.0, 0.0
    for gap in gaps:
        now += gap
        if gate.may_store(now, are_loads_waiting=True):
            longest = max(longest, now - last)
            last = now
    assert max(longest, now - last) <= 0.25 + 2 * 0.2


# --- the byte budget


def climb(tuner: BudgetTuner, rate_of, epochs: int = 60) -> int:
    """Feed a tuner from storage whose throughput depends on the bytes in flight."""
    now = 0.0
    for _ in range(epochs * 12):
        size = tuner.budget_bytes
        now += size / rate_of(size)
        tuner.read(now, size, is_more_waiting=True)
    return tuner.budget_bytes


@pytest.mark.parametrize("start", [4 * MIB, 32 * MIB, 256 * MIB])
@pytest.mark.parametrize("knee", [16 * MIB, 64 * MIB])
def test_the_budget_finds_the_knee_from_both_sides(start, knee):
    tuner = BudgetTuner(start, min_bytes=4 * MIB, max_bytes=512 * MIB)
    found = climb(tuner, lambda size: 1e9 * min(1.0, size / knee))
    assert knee / 2.5 <= found <= knee * 2.5


def test_the_budget_goes_down_where_too_much_in_flight_hurts():
    tuner = BudgetTuner(256 * MIB, min_bytes=4 * MIB, max_bytes=512 * MIB)
    found = climb(tuner, lambda size: 1e9 / (1 + size / (64 * MIB)))
    assert found <= 32 * MIB


def test_epochs_without_enough_to_read_say_nothing():
    tuner = BudgetTuner(32 * MIB, min_bytes=4 * MIB, max_bytes=512 * MIB)
    for number in range(1000):
        tuner.read(float(number), 1 * MIB, is_more_waiting=False)
    assert tuner.budget_bytes == 32 * MIB


@given(st.lists(st.tuples(st.floats(1e-6, 1.0), st.integers(1, 1 << 30)), max_size=200))
def test_the_budget_stays_within_its_bounds(reads):
    tuner = BudgetTuner(1, min_bytes=4 * MIB, max_bytes=64 * MIB)
    now = 0.0
    for gap, size in reads:
        now += gap
        tuner.read(now, size, is_more_waiting=True)
        assert 4 * MIB <= tuner.budget_bytes <= 64 * MIB


def test_an_impossible_budget_is_refused():
    with pytest.raises(ValueError, match="budget"):
        BudgetTuner(1, min_bytes=8, max_bytes=4)


# --- prefetch


def queue(*sizes: int, gap_s: float = 1.0) -> list[Waiting[int]]:
    return [
        Waiting(number, size, (number + 1) * gap_s, is_worth_it=True)
        for number, size in enumerate(sizes)
    ]


def test_prefetch_follows_the_queue_while_there_is_room():
    chosen = plan_prefetch(
        queue(10, 10, 10, 10), free_bytes=25, bytes_per_s=1000.0, loading_bytes=0
    )
    assert chosen == [0, 1]


def test_one_without_room_is_not_overtaken():
    chosen = plan_prefetch(queue(10, 100, 5), free_bytes=50, bytes_per_s=1e3, loading_bytes=0)
    assert chosen == [0]


def test_what_is_not_worth_loading_or_comes_too_soon_is_left_alone():
    waiting = queue(10, 10)
    waiting[0] = waiting[0]._replace(is_worth_it=False)
    assert plan_prefetch(waiting, free_bytes=50, bytes_per_s=1e3, loading_bytes=0) == [1]
    assert plan_prefetch(waiting, free_bytes=50, bytes_per_s=1e3, loading_bytes=10**6) == []
