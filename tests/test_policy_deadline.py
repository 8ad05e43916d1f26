"""No load makes a request slower than computing by more than the slack, whatever the storage does."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvdepot.policy.deadline import SLACK_SHARE, EarnedDeadline, slack_of


def test_a_load_that_stands_still_is_given_up_after_the_slack():
    deadline = EarnedDeadline(10.0, 0.5, lambda blocks: blocks * 1.0)
    assert not deadline.is_over(10.4, 0)
    assert deadline.is_over(10.5, 0)


def test_blocks_that_came_earn_the_prefill_that_they_save():
    deadline = EarnedDeadline(0.0, 0.5, lambda blocks: blocks * 1.0)
    assert deadline.until_s(3) == 3.5
    assert not deadline.is_over(3.4, 3)
    assert deadline.is_over(3.6, 3)


def test_the_slack_is_a_share_of_computing():
    assert slack_of(10.0) == pytest.approx(10.0 * SLACK_SHARE)
    assert slack_of(math.inf) == 1.0
    assert SLACK_SHARE < 0.10


@given(
    st.lists(st.floats(0, 5, allow_subnormal=False), min_size=1, max_size=40),
    st.floats(1e-3, 2),
)
def test_never_slower_than_computing_by_more_than_the_slack(gaps, block_s):
    """Any bandwidth trace: block i arrives `gaps[i]` seconds after the one before it, or never."""
    total = len(gaps)
    compute_s = total * block_s
    slack_s = slack_of(compute_s)
    deadline = EarnedDeadline(0.0, slack_s, lambda blocks: blocks * block_s)
    now, blocks = 0.0, 0
    for gap in gaps:
        if now + gap > deadline.until_s(blocks):
            now = deadline.until_s(blocks)
            break
        now += gap
        blocks += 1
    finished_s = now + (total - blocks) * block_s
    assert finished_s <= compute_s * (1 + SLACK_SHARE) + 1e-9


def test_waiting_for_others_does_not_count_while_the_storage_delivers():
    deadline = EarnedDeadline(10.0, 0.5, lambda blocks: blocks * 1.0, queue_s=2.0)
    assert deadline.until_s(0) == 10.5
    assert deadline.until_s(0, heard_s=11.5) == 12.0
    # it has become silent: the slack is all that is left
    assert deadline.is_over(12.0, 0, heard_s=11.5)
    # and never longer than twice what was expected
    assert deadline.until_s(0, heard_s=100.0) == 14.5
    # from its turn on, it has to earn
    assert deadline.until_s(1, heard_s=200.0) == 15.5


def test_a_storage_that_was_heard_before_the_load_gives_no_credit():
    deadline = EarnedDeadline(10.0, 0.5, lambda blocks: blocks * 1.0, queue_s=2.0)
    assert deadline.until_s(0, heard_s=3.0) == 10.5
