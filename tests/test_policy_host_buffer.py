"""Restores in flight fit into the host buffer, all of each or nothing, and none waits for ever."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from kvdepot.policy.host_buffer import Claim, HostAdmission, HostAdvice, RoomMode

GIB = 1 << 30


def total_of(compute_s: float, restored_s: float, blocks: int):
    """Seconds to the end of a prompt, by how many of its blocks are restored."""
    return lambda k: compute_s + (restored_s - compute_s) * k / blocks


def test_two_restores_never_hold_half_of_what_they_need():
    host = HostAdmission(6)
    first = host.take(4, until_s=1.0)
    assert first is not None
    assert host.take(4, until_s=1.0) is None
    host.give_back(first)
    host.give_back(first)
    assert host.in_use_bytes == 0
    assert host.take(4, until_s=2.0) is not None


def test_room_for_stores_is_never_given_to_restores():
    host = HostAdmission(10, reserve_bytes=4)
    assert host.take(7, until_s=1.0) is None
    assert host.take(6, until_s=1.0) is not None


def test_waiting_is_chosen_when_it_is_short_against_computing():
    host = HostAdmission(100)
    host.take(80, until_s=10.5)
    choice = host.choose(10.0, 50, 1, total_of(20.0, 1.0, 50), slack_s=1.6)
    assert choice.mode is RoomMode.WAIT
    assert choice.blocks == 50
    assert choice.wait_s == 0.5
    assert choice.wait_s <= choice.patience_s <= 2 * 0.5 + 1.6


def test_the_part_that_fits_is_chosen_when_waiting_is_long():
    host = HostAdmission(100)
    host.take(60, until_s=100.0)
    choice = host.choose(0.0, 50, 1, total_of(20.0, 1.0, 50), slack_s=1.6)
    assert (choice.mode, choice.blocks) == (RoomMode.NOW, 40)


def test_computing_is_chosen_when_nothing_fits_for_long():
    host = HostAdmission(100)
    host.take(100, until_s=100.0)
    assert host.choose(0.0, 50, 1, total_of(20.0, 1.0, 50), slack_s=1.6).mode is RoomMode.COMPUTE


def test_who_came_earlier_goes_first_and_counts_as_holding_room():
    host = HostAdmission(100)
    host.take(60, until_s=1.0)
    total = total_of(20.0, 1.0, 30)
    assert host.choose(0.0, 30, 1, total, slack_s=1.6).mode is RoomMode.NOW
    earlier = Claim(90, until_s=3.0)
    choice = host.choose(0.0, 30, 1, total, slack_s=1.6, claims=[earlier])
    assert (choice.mode, choice.wait_s) == (RoomMode.WAIT, 3.0)
    quick = total_of(2.0, 1.0, 30)
    choice = host.choose(0.0, 30, 1, quick, slack_s=0.1, claims=[earlier])
    assert choice.mode is RoomMode.COMPUTE, "no part of what the earlier one waits for"


def test_who_has_waited_for_long_enough_waits_no_more():
    host = HostAdmission(100)
    host.take(80, until_s=10.5)
    total = total_of(20.0, 1.0, 50)
    choice = host.choose(10.0, 50, 1, total, slack_s=1.6, may_wait=False)
    assert (choice.mode, choice.blocks) == (RoomMode.NOW, 20)
    host.take(20, until_s=10.5)
    choice = host.choose(10.0, 50, 1, total, slack_s=1.6, may_wait=False)
    assert choice.mode is RoomMode.COMPUTE


def test_a_restore_larger_than_the_buffer_uses_what_fits():
    host = HostAdmission(30)
    choice = host.choose(0.0, 50, 1, total_of(20.0, 1.0, 50), slack_s=1.6)
    assert (choice.mode, choice.blocks) == (RoomMode.NOW, 30)


def test_what_fits_goes_at_once():
    choice = HostAdmission(64).choose(0.0, 50, 1, total_of(20.0, 1.0, 50), slack_s=0.0)
    assert (choice.mode, choice.blocks, choice.wait_s) == (RoomMode.NOW, 50, 0.0)


def test_the_advice_names_the_size_that_the_workload_needs():
    host = HostAdmission(2 * GIB)
    assert host.advice() == HostAdvice(0, 0, 0)
    assert host.advice().text() == ""
    host.take(1 * GIB, until_s=1.0)
    for _ in range(19):
        host.fell_short(2 * GIB, 100)
    host.fell_short(500 * GIB, 1)
    advice = host.advice()
    assert advice.host_bytes == 3 * GIB
    assert advice.tokens == 1900
    assert advice.text().startswith(
        "host buffer of 3 GiB would have avoided 1900 recomputed tokens"
    )


@given(
    st.lists(st.tuples(st.integers(1, 40), st.floats(0, 10)), max_size=20),
    st.integers(1, 60),
    st.floats(0.01, 100),
    st.floats(0.0, 100),
)
def test_the_buffer_is_never_overcommitted_and_the_choice_never_worse(
    held, blocks, compute_s, restored_s
):
    host = HostAdmission(100)
    for size, until_s in held:
        host.take(size, until_s=until_s)
    assert host.in_use_bytes <= 100
    total = total_of(compute_s, restored_s, blocks)
    choice = host.choose(0.0, blocks, 1, total, slack_s=0.0)
    if choice.mode is RoomMode.NOW:
        assert host.take(choice.blocks, until_s=1.0) is not None
        if choice.blocks < blocks:
            assert total(choice.blocks) <= compute_s + 1e-9
    if choice.mode is RoomMode.WAIT:
        assert choice.wait_s + total(blocks) < compute_s
        assert choice.patience_s + total(blocks) <= compute_s + 1e-9
