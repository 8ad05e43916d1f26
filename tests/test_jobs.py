"""kvdepot.tiers.Job: outcomes are final once, and buffers are the caller's again only when settled."""

from __future__ import annotations

import threading
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvdepot.clock import SystemClock
from kvdepot.keys import BlockKey
from kvdepot.testing.simclock import FakeClock
from kvdepot.tiers import Job, Outcome

FINAL = [outcome for outcome in Outcome if outcome is not Outcome.PENDING]
KEYS = [BlockKey(bytes([index]) * 32) for index in range(4)]


def make_job(count=4, **options):
    return Job([BlockKey(index.to_bytes(32, "big")) for index in range(count)], **options)


def in_thread(work):
    """Start `work` and give back a function that ends the thread and returns its result."""
    results = []
    thread = threading.Thread(target=lambda: results.append(work()))
    thread.start()

    def result(timeout_s=60):
        thread.join(timeout_s)
        assert not thread.is_alive(), "the thread still waits"
        return results[0]

    return result


def test_a_job_of_nothing_is_over_at_once():
    job = make_job(0)
    assert job.outcomes == ()
    assert job.is_decided
    assert job.is_settled
    assert job.finished_s == job.started_s
    assert job.wait(0)
    assert job.wait_settled(0)
    assert job.leading_done == 0
    assert not job.is_wanted
    assert not job.hold()


def test_outcomes_are_in_the_order_of_the_call():
    clock = FakeClock()
    job = Job(KEYS, clock=clock)
    assert job.keys == tuple(KEYS)
    assert job.outcomes == (Outcome.PENDING,) * 4
    clock.advance(1)
    assert job.resolve(2, Outcome.MISS)
    assert job.resolve(0, Outcome.DONE, 100)
    assert job.outcomes == (Outcome.DONE, Outcome.PENDING, Outcome.MISS, Outcome.PENDING)
    assert (job.leading_done, job.bytes_done) == (1, 100)
    assert not job.is_decided
    assert job.finished_s is None
    clock.advance(1)
    assert job.resolve(1, Outcome.DONE, 50)
    assert job.resolve(3, Outcome.DONE, 50)
    assert job.is_decided
    assert (job.leading_done, job.bytes_done) == (2, 200)
    assert job.finished_s == job.started_s + 2


@pytest.mark.parametrize("first", FINAL)
@pytest.mark.parametrize("second", FINAL)
def test_an_outcome_is_final_once(first, second):
    job = make_job(1)
    assert job.resolve(0, first, 10)
    assert not job.resolve(0, second, 10)
    job.resolve_all(second)
    job.cancel()
    assert job.outcomes == (first,)
    assert job.bytes_done == (10 if first is Outcome.DONE else 0)


def test_the_rest_can_be_resolved_at_once():
    job = make_job(3)
    job.resolve(1, Outcome.DONE, 8)
    job.resolve_all(Outcome.FAILED)
    assert job.outcomes == (Outcome.FAILED, Outcome.DONE, Outcome.FAILED)
    assert job.is_settled


# --- deadlines


def test_at_the_deadline_what_is_pending_is_late_and_stays_so():
    clock = FakeClock()
    job = make_job(3, deadline_s=5, clock=clock)
    job.resolve(0, Outcome.DONE, 10)
    clock.advance(4.999)
    assert job.is_wanted
    assert not job.is_decided
    clock.advance(0.001)
    assert job.outcomes == (Outcome.DONE, Outcome.LATE, Outcome.LATE)
    assert job.is_decided
    assert not job.is_wanted
    assert not job.resolve(1, Outcome.DONE, 10)
    assert (job.leading_done, job.bytes_done) == (1, 10)


@pytest.mark.parametrize(
    "look",
    [
        lambda job: job.outcomes,
        lambda job: job.is_decided,
        lambda job: job.is_settled,
        lambda job: job.is_wanted,
        lambda job: job.leading_done,
        lambda job: job.hold(),
        lambda job: job.resolve(0, Outcome.DONE, 10),
        lambda job: job.resolve_all(Outcome.DONE),
        lambda job: job.wait(0),
        lambda job: job.wait_settled(0),
    ],
)
def test_the_deadline_counts_whoever_looks_first(look):
    clock = FakeClock()
    job = make_job(2, deadline_s=5, clock=clock)
    clock.advance(5)
    look(job)
    assert job.outcomes == (Outcome.LATE, Outcome.LATE)
    assert job.bytes_done == 0


@pytest.mark.parametrize("deadline_s", [0, -1])
def test_a_deadline_that_has_passed_is_late_at_once(deadline_s):
    job = make_job(2, deadline_s=deadline_s, clock=FakeClock())
    assert job.outcomes == (Outcome.LATE, Outcome.LATE)
    assert not job.hold()


def test_a_jump_of_the_wall_clock_changes_nothing():
    clock = FakeClock()
    job = make_job(1, deadline_s=5, clock=clock)
    clock.jump_wall(10_000_000)
    assert job.is_wanted
    clock.jump_wall(-20_000_000)
    clock.advance(5)
    assert job.outcomes == (Outcome.LATE,)


def test_a_late_job_keeps_the_buffers_until_the_storage_lets_go():
    clock = FakeClock()
    job = make_job(2, deadline_s=5, clock=clock)
    assert job.hold()
    clock.advance(5)
    assert job.is_decided
    assert not job.is_settled
    assert not job.wait_settled(0)
    assert not job.hold()
    job.release()
    assert job.is_settled
    assert job.wait_settled(0)


def test_a_waiter_comes_back_at_the_deadline_though_nothing_answers():
    clock = SystemClock()
    began_s = clock.monotonic_s()
    job = make_job(2, deadline_s=0.1)
    assert job.wait(60)
    assert 0.1 <= clock.monotonic_s() - began_s < 30
    assert job.outcomes == (Outcome.LATE, Outcome.LATE)


def test_a_waiter_comes_back_at_its_own_time_limit():
    clock = SystemClock()
    began_s = clock.monotonic_s()
    job = make_job(2, deadline_s=600)
    assert not job.wait(0.1)
    assert not job.wait(0.05, first=1)
    assert not job.wait_settled(0.05)
    assert 0.2 <= clock.monotonic_s() - began_s < 30
    assert job.outcomes == (Outcome.PENDING, Outcome.PENDING)


# --- waiting and waking


def test_a_waiter_wakes_when_the_last_block_is_decided():
    job = make_job(2)
    result = in_thread(job.wait)
    job.resolve(1, Outcome.DONE)
    job.resolve(0, Outcome.MISS)
    assert result()


def test_a_waiter_for_the_first_blocks_does_not_wait_for_the_rest():
    job = make_job(4)
    result = in_thread(lambda: job.wait(first=2))
    job.resolve(3, Outcome.DONE)
    job.resolve(0, Outcome.DONE)
    assert not job.wait(0.02, first=2)
    job.resolve(1, Outcome.CORRUPT)
    assert result()
    assert job.outcomes[2] is Outcome.PENDING
    assert job.wait(0, first=0)
    assert not job.wait(0, first=3)
    assert not job.wait(0, first=99)


def test_a_waiter_for_buffers_wakes_at_the_last_release():
    job = make_job(1)
    assert job.hold()
    assert job.hold()
    result = in_thread(job.wait_settled)
    job.resolve(0, Outcome.DONE)
    job.release()
    assert not job.wait_settled(0.02)
    job.release()
    assert result()


def test_cancel_gives_up_the_rest_and_does_not_wait():
    job = make_job(3)
    job.resolve(0, Outcome.DONE, 10)
    assert job.hold()
    result = in_thread(job.wait_settled)
    job.cancel()
    job.cancel()
    assert job.outcomes == (Outcome.DONE, Outcome.CANCELLED, Outcome.CANCELLED)
    assert not job.is_wanted
    assert not job.is_settled
    assert not job.resolve(1, Outcome.DONE, 10)
    job.release()
    assert result()
    assert job.bytes_done == 10


def test_a_waiter_for_outcomes_wakes_at_a_cancel():
    job = make_job(3)
    result = in_thread(job.wait)
    job.cancel()
    assert result()


def test_threads_that_race_decide_every_block_once():
    # eight threads want to decide all blocks in different orders, one cancels midway
    count, threads = 2_000, 8
    job = make_job(count)
    wins = [0] * threads
    start = threading.Barrier(threads + 1)

    def decide(number):
        start.wait()
        for step in range(count):
            index = (step * 7 + number * 251) % count
            if job.hold():
                wins[number] += job.resolve(index, Outcome.DONE, 3)
                job.release()

    workers = [threading.Thread(target=decide, args=(number,)) for number in range(threads)]
    for worker in workers:
        worker.start()
    start.wait()
    job.wait(30, first=count // 2)
    job.cancel()
    assert job.wait_settled(30)
    for worker in workers:
        worker.join()
    done = job.outcomes.count(Outcome.DONE)
    assert sum(wins) == done
    assert job.bytes_done == 3 * done
    assert done + job.outcomes.count(Outcome.CANCELLED) == count


def test_a_buffer_is_never_claimed_after_the_job_is_settled():
    # the caller frees the rows when settled; a claim after that would write into freed memory
    for _ in range(200):
        job = make_job(1)
        freed = threading.Event()
        claimed_after: list[bool] = []

        def work(job=job, freed=freed, claimed_after=claimed_after):
            while job.hold():
                claimed_after.append(freed.is_set())
                job.release()

        worker = threading.Thread(target=work)
        worker.start()
        job.cancel()
        assert job.wait_settled(30)
        freed.set()
        worker.join(30)
        assert not any(claimed_after)


# --- against a model

_STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("resolve"), st.integers(0, 3), st.sampled_from(FINAL)),
        st.tuples(st.just("cancel")),
        st.tuples(st.just("advance"), st.floats(0, 4)),
        st.tuples(st.just("hold")),
        st.tuples(st.just("release")),
        st.tuples(st.just("resolve_all"), st.sampled_from(FINAL)),
    ),
    max_size=30,
)


def apply(job, clock, model, step):
    """One step on the job and on the model."""
    if model["now"] >= 10:
        model["outcomes"] = [o or Outcome.LATE for o in model["outcomes"]]
    match step:
        case ("resolve", index, outcome):
            is_first = model["outcomes"][index] is None
            assert job.resolve(index, outcome, 7) == is_first
            model["bytes"] += 7 if is_first and outcome is Outcome.DONE else 0
            model["outcomes"][index] = model["outcomes"][index] or outcome
        case ("resolve_all", outcome):
            job.resolve_all(outcome)
            model["outcomes"] = [o or outcome for o in model["outcomes"]]
        case ("cancel",):
            job.cancel()
            model["outcomes"] = [o or Outcome.CANCELLED for o in model["outcomes"]]
        case ("advance", seconds):
            clock.advance(seconds)
            model["now"] = clock.monotonic_s() - job.started_s
            if model["now"] >= 10:
                model["outcomes"] = [o or Outcome.LATE for o in model["outcomes"]]
        case ("hold",):
            held = job.hold()
            assert held == (None in model["outcomes"])
            model["users"] += held
        case ("release",) if model["users"]:
            job.release()
            model["users"] -= 1


@given(_STEPS)
def test_any_order_of_calls_agrees_with_a_model(steps):
    clock = FakeClock()
    job = make_job(4, deadline_s=10, clock=clock)
    model: dict[str, Any] = {"outcomes": [None] * 4, "users": 0, "now": 0.0, "bytes": 0}
    history = [job.outcomes]
    for step in steps:
        apply(job, clock, model, step)
        history.append(job.outcomes)
        expected = tuple(outcome or Outcome.PENDING for outcome in model["outcomes"])
        assert job.outcomes == expected
        assert job.is_decided == (Outcome.PENDING not in expected)
        assert job.is_settled == (job.is_decided and not model["users"])
        assert (job.finished_s is not None) == job.is_decided
        assert job.bytes_done == model["bytes"]
        assert job.wait(0) == job.is_decided
    for before, after in pairwise(history):
        assert all(b in (Outcome.PENDING, a) for b, a in zip(before, after, strict=True))
