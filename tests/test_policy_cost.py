"""Costs are learned from what was seen: quickly when things change, and never below zero."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvdepot.policy.cost import CostModel, CostState
from kvdepot.policy.fit import CostFit, FitState

GB = 1e9


def prefill(tokens: float, position: float = 0.0) -> float:
    return 0.02 + 4e-4 * tokens + 3e-8 * tokens * (tokens + 2 * position)


def trained() -> CostModel:
    cost = CostModel()
    for tokens in (128, 512, 2048, 8192, 300, 4000, 1000):
        cost.computed(tokens, 0, prefill(tokens))
    for size in (1 << 20, 1 << 24, 1 << 27):
        cost.loaded("disk", size, 0.001 + size / GB)
    return cost


# --- the fit


def test_nothing_is_known_before_anything_was_seen():
    cost = CostModel()
    assert cost.prefill_s(100) == math.inf
    assert cost.read_s("disk", 100) == math.inf
    assert cost.bandwidth("disk") == math.inf
    assert not cost.knows_prefill
    assert not cost.knows_reads("disk")
    assert cost.prefill_s(0) == cost.read_s("disk", 0) == 0.0


def test_one_observation_means_that_seconds_grow_with_tokens():
    cost = CostModel()
    cost.computed(64, 0, 0.64)
    assert cost.prefill_s(6400) == pytest.approx(64.0, rel=0.02)


@pytest.mark.parametrize(("tokens", "position"), [(100, 0), (6000, 0), (512, 7000), (20_000, 0)])
def test_prefill_is_learned_with_its_position(tokens, position):
    cost = trained()
    cost.computed(256, 4096, prefill(256, 4096))
    assert cost.prefill_s(tokens, position) == pytest.approx(prefill(tokens, position), rel=0.1)


def test_what_is_saved_is_the_difference():
    cost = trained()
    whole, rest = cost.prefill_s(4000), cost.prefill_s(1000, 3000)
    assert cost.saved_s(3000, 4000) == pytest.approx(whole - rest)
    assert cost.saved_s(0, 4000) == 0.0
    assert CostModel().saved_s(10, 20) == 0.0


def test_a_queue_makes_reads_slower():
    cost = trained()
    alone = cost.read_s("disk", 10_000_000)
    behind = cost.read_s("disk", 10_000_000, ahead_bytes=90_000_000)
    assert alone == pytest.approx(0.011, rel=0.1)
    assert behind == pytest.approx(0.101, rel=0.1)


def test_doubt_makes_reads_slower_only_where_they_vary():
    cost = trained()
    steady = cost.read_s("disk", 1 << 24, is_doubtful=True) / cost.read_s("disk", 1 << 24)
    for factor in (1, 3, 1, 5, 1, 4):
        cost.loaded("disk", 1 << 24, factor * 0.018)
    varying = cost.read_s("disk", 1 << 24, is_doubtful=True) / cost.read_s("disk", 1 << 24)
    assert steady < 1.1
    assert varying > 1.3


def test_storage_that_turns_slow_is_believed_within_a_few_loads():
    cost = trained()
    slow = (1 << 24) / 5e6
    for _ in range(4):
        cost.loaded("disk", 1 << 24, slow)
    assert cost.read_s("disk", 1 << 24) > slow / 2


def test_storage_that_is_well_again_is_believed_sooner():
    cost = trained()
    for _ in range(20):
        cost.loaded("disk", 1 << 24, (1 << 24) / 5e6)
    for _ in range(3):
        cost.loaded("disk", 1 << 24, 0.018)
    assert cost.read_s("disk", 1 << 24) < 0.04


def test_a_load_that_never_came_counts_as_at_least_as_slow():
    cost = trained()
    before = cost.read_s("disk", 1 << 24)
    cost.not_loaded("disk", 1 << 24, before / 2)  # it might have come in time
    assert cost.read_s("disk", 1 << 24) == before
    for _ in range(3):
        cost.not_loaded("disk", 1 << 24, 10.0)
    assert cost.read_s("disk", 1 << 24) > 1.0


def test_tiny_passes_and_loads_teach_nothing():
    cost = CostModel()
    cost.computed(1, 0, 5.0)
    cost.loaded("disk", 100, 5.0)
    assert not cost.knows_prefill
    assert not cost.knows_reads("disk")


def test_a_restart_knows():
    cost = trained()
    fresh = CostModel()
    fresh.restore(cost.state())
    assert fresh.prefill_s(3000) == pytest.approx(cost.prefill_s(3000))
    assert fresh.read_s("disk", 1 << 24) == pytest.approx(cost.read_s("disk", 1 << 24))
    # and goes on learning: this machine is ten times slower
    for tokens in (128, 512, 2048, 8192):
        fresh.computed(tokens, 0, 10 * prefill(tokens))
    assert fresh.prefill_s(3000) == pytest.approx(10 * prefill(3000), rel=0.2)


def test_what_this_process_saw_is_not_replaced_by_a_stored_state():
    cost = trained()
    cost.restore(CostState(version=1, prefill=_flat(9.0), reads={"disk": _flat(9.0, 2)}))
    assert cost.prefill_s(1000) == pytest.approx(prefill(1000), rel=0.1)
    assert cost.read_s("disk", 1 << 24) == pytest.approx(0.018, rel=0.1)


def test_a_state_of_another_version_or_shape_is_ignored():
    for state in (
        CostState(version=99, prefill=_flat(1.0), reads={}),
        CostState(version=1, prefill=_flat(1.0, 2), reads={}),
        CostState(version=1, prefill=_flat(0.0), reads={}),
    ):
        cost = CostModel()
        cost.restore(state)
        assert not cost.knows_prefill


def _flat(value: float, features: int = 3) -> FitState:
    return FitState(coefficients=(value,) * features, level=0.0, spread=0.0)


def test_the_model_can_be_described():
    found = trained().describe()
    assert found["disk_bytes_per_s"] == pytest.approx(GB, rel=0.05)
    assert found["prefill_tokens_per_s_at_4096"] == pytest.approx(4096 / prefill(4096), rel=0.1)


_seconds = st.floats(1e-6, 1e4)
_sizes = st.integers(1, 1 << 34)


@given(st.lists(st.tuples(_sizes, _seconds), min_size=1, max_size=30), _sizes)
def test_predictions_are_finite_and_positive_whatever_was_seen(observed, size):
    fit = CostFit(2, main=1)
    for length, seconds in observed:
        fit.observe((1.0, float(length)), seconds)
    assert min(fit.coefficients) >= 0.0
    assert 0.0 < fit.seconds((1.0, float(size))) < math.inf


@given(
    st.floats(0, 1),
    st.floats(1e-6, 1e-2),
    st.floats(0, 1e-7),
    st.lists(st.integers(16, 100_000), max_size=20),
)
def test_a_true_model_is_found(constant, linear, square, lengths):
    fit = CostFit(3, main=1)

    def truth(n: int) -> float:
        return constant + linear * n + square * n * n

    lengths = [16, 256, 4096, 65_536, *lengths]
    for _ in range(3):
        for n in lengths:
            fit.observe((1.0, n, n * n), truth(n))
    for n in lengths:
        assert fit.seconds((1.0, n, n * n)) == pytest.approx(truth(n), rel=0.15)
