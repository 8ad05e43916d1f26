"""Load, meet or compute: what is expected to be quickest, with the reason."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvdepot.policy.cost import CostModel
from kvdepot.policy.decide import Ask, Mode, Run, decide
from kvdepot.policy.reasons import Reason

BLOCK = 16
BLOCK_BYTES = 1 << 20


def cost_of(bandwidth: float, *, latency: float = 0.001, token_s: float = 0.002) -> CostModel:
    cost = CostModel()
    for tokens in (64, 256, 1024, 4096):
        cost.computed(tokens, 0, token_s * tokens + 1e-8 * tokens * tokens)
    for size in (1 << 20, 1 << 23, 1 << 26):
        cost.loaded("disk", size, latency + size / bandwidth)
    return cost


def ask(blocks: int = 64, *, near: int = 0, extra: int = 20, **fields) -> Ask:
    runs = [Run("host", near, 0)] if near else []
    runs.append(Run("disk", blocks - near, BLOCK_BYTES))
    return Ask(blocks * BLOCK + extra, BLOCK, runs, **fields)


def test_fast_storage_is_read():
    choice = decide(ask(), cost_of(2e9))
    assert choice.mode is Mode.LOAD
    assert choice.blocks == 64
    assert choice.reason is None
    assert choice.read_bytes == 64 * BLOCK_BYTES
    assert choice.expected_s < choice.compute_s / 10


def test_slow_storage_is_refused_with_the_reason():
    choice = decide(ask(), cost_of(5e6))
    assert choice.mode is Mode.COMPUTE
    assert choice.blocks == 0
    assert choice.reason is Reason.REFUSED_COST
    assert choice.read_bytes == 0


def test_a_tiny_hit_that_costs_more_to_fetch_is_computed():
    choice = decide(ask(1, extra=1), cost_of(2e9, latency=0.5))
    assert choice.mode is Mode.COMPUTE
    assert choice.reason is Reason.REFUSED_COST


def test_what_is_in_memory_is_used_whatever_the_storage_is_like():
    choice = decide(ask(near=40), cost_of(5e6))
    assert choice.mode is Mode.COMPUTE
    assert choice.blocks == 40
    assert choice.compute_s == pytest.approx(cost_of(5e6).prefill_s(24 * BLOCK + 20, 40 * BLOCK))


def test_a_queue_in_front_can_make_computing_quicker():
    cost = cost_of(200e6)
    assert decide(ask(), cost).mode is Mode.LOAD
    assert decide(ask(ahead_bytes=10 << 30), cost).mode is Mode.COMPUTE


def test_waiting_for_the_engine_makes_loads_free():
    cost = cost_of(25e6)
    assert decide(ask(), cost).mode is Mode.COMPUTE
    assert decide(ask(idle_s=60.0), cost).mode is Mode.LOAD


def test_before_anything_is_known_a_load_is_tried_within_a_fixed_time():
    choice = decide(ask(), CostModel())
    assert choice.mode is Mode.LOAD
    assert choice.slack_s == 1.0
    cost = CostModel()
    cost.computed(1000, 0, 2.0)
    choice = decide(ask(), cost)
    assert choice.mode is Mode.LOAD
    assert choice.slack_s < 0.1 * choice.compute_s


def test_an_engine_that_can_meets_in_the_middle_at_break_even():
    cost = cost_of(BLOCK_BYTES / (BLOCK * 0.002))
    sequential = decide(ask(), cost)
    both = decide(ask(can_meet=True), cost)
    assert both.mode is Mode.MEET
    assert 0 < both.meet_block < both.blocks
    assert both.expected_s <= 0.8 * min(sequential.expected_s, sequential.compute_s)


def test_fast_storage_is_loaded_and_not_met():
    assert decide(ask(can_meet=True), cost_of(4e9)).mode is Mode.LOAD


def test_layered_loads_must_fit_into_the_slack():
    assert decide(ask(is_layered=True), cost_of(2e9)).mode is Mode.LOAD
    assert decide(ask(is_layered=True), cost_of(100e6)).mode is Mode.COMPUTE
    assert decide(ask(is_layered=True, can_meet=True), cost_of(100e6)).mode is Mode.MEET


def test_only_the_near_part_is_loaded_when_the_far_tier_is_slow():
    cost = cost_of(2e9)
    for size in (1 << 20, 1 << 23, 1 << 26):
        cost.loaded("object", size, 5.0 + size / 1e6)
    runs = [Run("disk", 40, BLOCK_BYTES), Run("object", 24, BLOCK_BYTES)]
    choice = decide(Ask(64 * BLOCK + 20, BLOCK, runs), cost)
    assert (choice.mode, choice.blocks) == (Mode.LOAD, 40)
    assert choice.reason is Reason.REFUSED_COST


_bandwidths = st.floats(1e5, 1e11)


@given(
    _bandwidths,
    st.integers(1, 300),
    st.integers(0, 64),
    st.booleans(),
    st.integers(0, 1 << 34),
)
def test_a_choice_is_never_expected_to_be_slower_than_computing(
    bandwidth, blocks, extra, can_meet, ahead
):
    question = ask(blocks, extra=extra, can_meet=can_meet, ahead_bytes=ahead)
    choice = decide(question, cost_of(bandwidth))
    assert choice.expected_s <= choice.compute_s * (1 + 1e-9)
    assert 0 <= choice.blocks <= blocks
    assert choice.slack_s <= 0.1 * choice.compute_s
    assert math.isfinite(choice.load_s)
    assert (choice.mode is Mode.COMPUTE) == (choice.read_bytes == 0)
    if choice.mode is Mode.MEET:
        assert 0 <= choice.meet_block <= choice.blocks
