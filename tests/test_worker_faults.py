"""The worker tier in bad times: the worker is killed, stops, hangs in storage, or does not listen."""

from __future__ import annotations

import os
import random
import signal
import socket
import threading
import time

import pytest

from kvdepot.config import WorkerConfig
from kvdepot.io.childprocess import ChildProcess
from kvdepot.pool import worker
from kvdepot.pool.worker import WorkerTier
from kvdepot.testing.toy import ToyEngine, ToyServer
from kvdepot.tiers import Outcome, Write
from kvdepot.units import MIB
from tests.pool_rig import pool_config
from tests.tries import eventually, in_some_try
from tests.worker_rig import (
    QUICK,
    children,
    is_running,
    open_worker,
    rows_in_an_arena,
    set_pace,
    signal_worker,
    slow_command,
)

#: a hang that no test waits for
PATIENT = WorkerConfig(heartbeat_s=0.1, hang_s=60.0, backoff_s=0.05)
MARK = b"\x55" * 4096
#: generous: these machines are small, busy and shared; the aim is 1 ms
CALL_S_MAX = 0.05


@pytest.fixture
def arena():
    with rows_in_an_arena() as found:
        yield found


@pytest.fixture
def engine():
    return ToyEngine((4096,))


@pytest.fixture
def stored(tmp_path, arena, engine):
    """A pool with one prompt in it."""
    tokens = engine.prompt(1, 8)
    with open_worker(tmp_path, engine, arena) as tier:
        assert tier.store(engine.writes(tokens)).wait_settled(60)
        assert tier.drain(60)
    return tokens


def is_back(tier, engine, tokens):
    return eventually(lambda: tier.lookup(engine.keys(tokens)) == len(engine.keys(tokens)))


def load_all(tier, engine, tokens):
    reads = engine.reads(tokens)
    job = tier.load(reads)
    assert job.wait_settled(60)
    engine.check(reads, job.outcomes)
    return set(job.outcomes)


# --- killed


def test_a_killed_worker_is_replaced_and_nothing_wrong_is_ever_served(tmp_path, arena):
    engine = ToyEngine((16_384, 1024))
    prompts = [engine.prompt(seed, 6) for seed in range(6)]
    source = random.Random(5)
    stop = threading.Event()
    errors = []
    with open_worker(tmp_path, engine, arena) as tier:

        def serve(seed):
            own = random.Random(seed)
            server = ToyServer(engine, tier)
            try:
                while not stop.is_set():
                    server.ask(own.choice(prompts))
                    stop.wait(0.01)  # the arena is not endless
            except BaseException as error:  # noqa: BLE001
                errors.append(error)

        threads = [threading.Thread(target=serve, args=(seed,)) for seed in range(2)]
        for thread in threads:
            thread.start()
        kills = 0
        while kills < 5 and not errors:
            assert eventually(lambda: tier.worker_pid is not None)
            time.sleep(source.uniform(0.0, 0.2))
            killed = signal_worker(tier, signal.SIGKILL)
            kills += 1
            while tier.worker_pid == killed and not errors:
                time.sleep(0.01)
        stop.set()
        for thread in threads:
            thread.join(60)
        assert not errors
        assert eventually(lambda: tier.worker_pid is not None)
        for tokens in prompts:
            assert tier.store(engine.writes(tokens)).wait_settled(60)
        assert tier.drain(60)
        for tokens in prompts:
            assert load_all(tier, engine, tokens) == {Outcome.DONE}
        assert tier.counters.snapshot()["worker_restarts_total"] == 5
    assert not list((tmp_path / "tmp").glob("*"))


def test_open_jobs_of_a_killed_worker_are_failed_and_their_rows_come_back(tmp_path, arena, engine):
    tokens = engine.prompt(1, 4)
    pace = tmp_path / "pace"
    with WorkerTier.open(
        pool_config(tmp_path / "kv"),
        engine.identity,
        [arena.buffer],
        settings=WorkerConfig(backoff_s=30.0),
        command=slow_command(pace),
    ) as tier:
        assert tier.store(engine.writes(tokens)).wait_settled(60)
        assert tier.drain(60)
        set_pace(pace, 30.0)
        reads = engine.reads(tokens)
        load = tier.load(reads)
        store = tier.store(engine.writes(engine.prompt(2, 4)))
        assert not load.wait_settled(0.3)
        drained = []
        waiter = threading.Thread(target=lambda: drained.append(tier.drain(60)))
        waiter.start()
        time.sleep(0.1)
        signal_worker(tier, signal.SIGKILL)
        for job in (load, store):
            assert job.wait_settled(60)
            assert set(job.outcomes) == {Outcome.FAILED}
        waiter.join(60)
        assert drained == [False]
        # until the replacement serves, nothing is found and nothing waits
        assert tier.lookup(engine.keys(tokens)) == 0
        assert set(tier.load(engine.reads(tokens)).outcomes) == {Outcome.MISS}
        assert set(tier.store(engine.writes(tokens)).outcomes) == {Outcome.DROPPED}
        tier.touch(engine.keys(tokens))
        assert tier.drain(0.0)
        assert tier.usage().blocks == 0
        assert tier.usage().capacity_bytes == 64 * MIB
        counts = tier.counters.snapshot()
        assert counts["load_failed_blocks_total"] == counts["dropped_error_total"] == 4
        assert counts["dropped_no_worker_total"] == counts["load_missing_blocks_total"] == 4
        start_s = time.monotonic()
    assert time.monotonic() - start_s < 25, "closing waited for the next try"


def test_counts_of_a_killed_worker_are_kept_and_not_counted_twice(tmp_path, arena, engine, stored):
    with open_worker(tmp_path, engine, arena) as tier:
        for loaded in (8, 16):
            assert is_back(tier, engine, stored)
            assert load_all(tier, engine, stored) == {Outcome.DONE}
            # what is counted just after an outcome comes with the next heartbeat
            while tier.counters.snapshot()["load_blocks_total"] < loaded:
                time.sleep(0.01)
            signal_worker(tier, signal.SIGKILL)
            assert eventually(lambda: tier.lookup(engine.keys(stored)) == 0)
        assert tier.counters.snapshot()["load_blocks_total"] == 16


def test_a_worker_that_cannot_come_back_is_tried_again_and_again(tmp_path, arena, engine, stored):
    with open_worker(tmp_path, engine, arena) as tier:
        hidden = tmp_path.parent / f"{tmp_path.name}-hidden"
        tmp_path.rename(hidden)
        tmp_path.write_text("no folder")
        signal_worker(tier, signal.SIGKILL)
        assert eventually(lambda: tier.worker_pid is None)
        time.sleep(0.5)  # several tries
        assert tier.worker_pid is None
        tmp_path.unlink()
        hidden.rename(tmp_path)
        assert is_back(tier, engine, stored)
        assert load_all(tier, engine, stored) == {Outcome.DONE}
        assert tier.counters.snapshot()["worker_restarts_total"] == 1


def test_a_death_is_seen_although_another_process_holds_the_channel_open(
    tmp_path, arena, engine, stored, monkeypatch
):
    # a process forked from the engine at the wrong moment has the worker's end too: no end of file
    kept = []
    socketpair = socket.socketpair

    def keeping():
        ours, theirs = socketpair()
        kept.append(theirs.dup())
        return ours, theirs

    monkeypatch.setattr(socket, "socketpair", keeping)
    with open_worker(tmp_path, engine, arena) as tier:
        killed = signal_worker(tier, signal.SIGKILL)
        assert eventually(lambda: tier.worker_pid not in (None, killed))
        assert is_back(tier, engine, stored)
    for end in kept:
        end.close()


# --- stopped


def test_a_stopped_worker_makes_nobody_wait_and_is_replaced(tmp_path, arena, engine, stored):
    with open_worker(tmp_path, engine, arena) as tier:
        pid = signal_worker(tier, signal.SIGSTOP)
        reads = engine.reads(stored)
        job = tier.load(reads, deadline_s=0.2)
        assert tier.lookup(engine.keys(stored)) == 8
        assert job.wait(60)
        assert tier.worker_pid == pid, "the deadline ends the wait, and not what comes of the hang"
        assert set(job.outcomes) == {Outcome.LATE}
        # the stopped process may go on at any moment, and write
        assert not job.is_settled
        assert job.wait_settled(60)
        assert not is_running(pid)
        for read in reads:
            read.into[:] = MARK
        assert is_back(tier, engine, stored)
        assert load_all(tier, engine, stored) == {Outcome.DONE}
        assert all(bytes(read.into) == MARK for read in reads)
        assert tier.counters.snapshot()["worker_restarts_total"] == 1


def test_verbs_are_quick_while_the_worker_stands_and_its_queue_fills_up(
    tmp_path, arena, engine, stored
):
    settings = WorkerConfig(heartbeat_s=0.1, hang_s=60.0, backoff_s=0.05, queue_rows=64)
    with WorkerTier.open(
        pool_config(tmp_path), engine.identity, [arena.buffer], settings=settings
    ) as tier:
        keys = engine.keys(stored)
        reads = engine.reads(stored)
        writes = engine.writes(engine.prompt(2, 8))
        signal_worker(tier, signal.SIGSTOP)
        spans = []
        jobs = []

        def timed(verb, *arguments):
            start_s = time.perf_counter()
            result = verb(*arguments)
            spans.append(time.perf_counter() - start_s)
            return result

        for _ in range(3000):
            assert timed(tier.lookup, keys) == 8
            jobs.append(timed(tier.load, reads))
            jobs.append(timed(tier.store, writes))
            timed(tier.touch, keys)
            timed(tier.usage)
            timed(jobs[-2].cancel)
        spans.sort()
        assert spans[int(0.99 * len(spans))] < CALL_S_MAX
        # what found no room was refused at once, and says so
        outcomes = {outcome for job in jobs for outcome in job.outcomes}
        assert outcomes == {
            Outcome.CANCELLED,
            Outcome.FAILED,
            Outcome.DROPPED,
            Outcome.PENDING,
        }
        counts = tier.counters.snapshot()
        assert counts["load_failed_blocks_total"] > 0
        assert counts["dropped_queue_full_total"] > 0
        signal_worker(tier, signal.SIGCONT)
        for job in jobs:
            assert job.wait_settled(60)
        assert tier.drain(60)
        assert load_all(tier, engine, engine.prompt(2, 8)) == {Outcome.DONE}


def test_what_waits_to_be_sent_is_settled_at_once_when_it_is_given_up(
    tmp_path, arena, engine, stored
):
    with WorkerTier.open(
        pool_config(tmp_path), engine.identity, [arena.buffer], settings=PATIENT
    ) as tier:
        pid = signal_worker(tier, signal.SIGSTOP)
        reads = engine.reads(stored)
        jobs = [tier.load(reads) for _ in range(3000)]  # far more than a socket holds
        waiting = [tier.load(reads, deadline_s=0.1), tier.store(engine.writes(engine.prompt(2, 2)))]
        waiting[1].cancel()
        assert waiting[1].is_settled
        assert waiting[0].wait_settled(60)
        assert set(waiting[0].outcomes) == {Outcome.LATE}
        assert not jobs[0].is_settled
        os.kill(pid, signal.SIGCONT)
        for job in jobs:
            assert job.wait_settled(60)
        assert tier.drain(60)
        assert tier.lookup(engine.keys(engine.prompt(2, 2))) == 0


def test_closing_a_tier_whose_worker_stands_is_bounded(tmp_path, arena, engine, stored):
    tier = WorkerTier.open(pool_config(tmp_path), engine.identity, [arena.buffer], settings=PATIENT)
    pid = signal_worker(tier, signal.SIGSTOP)
    jobs = [tier.load(engine.reads(stored)), tier.store(engine.writes(engine.prompt(2, 4)))]
    start_s = time.monotonic()
    tier.close(timeout_s=0.2)
    assert time.monotonic() - start_s < PATIENT.hang_s / 2
    assert not is_running(pid)
    assert all(job.is_settled for job in jobs)
    tier.close()


def test_rows_stay_held_as_long_as_a_killed_worker_exists(
    tmp_path, arena, engine, stored, monkeypatch
):
    # as in a call that the kernel cannot interrupt: killed, and still there
    monkeypatch.setattr(ChildProcess, "kill", lambda process: None)
    monkeypatch.setattr(worker, "_DYING_MAX", 2)
    monkeypatch.setattr(worker, "_KILLED_WAIT_S", 0.3)
    with open_worker(tmp_path, engine, arena) as tier:
        pids = [signal_worker(tier, signal.SIGSTOP)]
        job = tier.load(engine.reads(stored))
        assert job.wait(60)
        assert set(job.outcomes) == {Outcome.FAILED}
        assert is_back(tier, engine, stored), "the next worker does not wait for the last one"
        assert load_all(tier, engine, stored) == {Outcome.DONE}
        assert not job.is_settled
        # with so many that do not go away, one more would hang too
        while len(pids) < worker._DYING_MAX:
            assert eventually(lambda: tier.worker_pid not in (None, *pids))
            pids.append(signal_worker(tier, signal.SIGSTOP))
        assert eventually(lambda: tier.worker_pid is None)
        time.sleep(0.5)
        assert tier.worker_pid is None
        assert not job.is_settled
        os.kill(pids[0], signal.SIGKILL)
        assert job.wait_settled(60)
        assert is_back(tier, engine, stored)
        start_s = time.monotonic()
    # those that do not go away would be waited for without an end
    assert time.monotonic() - start_s < 30
    for pid in pids[1:]:
        os.kill(pid, signal.SIGKILL)
    assert eventually(lambda: not children() & set(pids))


# --- storage that hangs


def test_a_worker_that_sits_in_one_read_is_given_up_and_the_rows_come_back(tmp_path, arena, engine):
    tokens = engine.prompt(1, 4)
    pace = tmp_path / "pace"
    settings = WorkerConfig(heartbeat_s=0.1, hang_s=30.0, stuck_s=2.0, backoff_s=0.05)
    with WorkerTier.open(
        pool_config(tmp_path / "kv"),
        engine.identity,
        [arena.buffer],
        settings=settings,
        command=slow_command(pace),
    ) as tier:
        assert tier.store(engine.writes(tokens)).wait_settled(60)
        assert tier.drain(60)
        set_pace(pace, 60.0)
        job = tier.load(engine.reads(tokens))
        assert job.wait_settled(60)
        assert set(job.outcomes) == {Outcome.FAILED}
        set_pace(pace, 0.0)
        assert is_back(tier, engine, tokens)
        # a machine that stands still for so long looks like one more hang
        assert eventually(lambda: load_all(tier, engine, tokens) == {Outcome.DONE})
        assert tier.counters.snapshot()["worker_restarts_total"] >= 1


def test_a_long_job_that_makes_progress_is_not_taken_for_a_hang(tmp_path, arena):
    engine = ToyEngine((65_536,))
    tokens = engine.prompt(1, 8)
    pace = tmp_path / "pace"
    settings = WorkerConfig(heartbeat_s=0.1, hang_s=30.0, stuck_s=4.0, backoff_s=0.05)
    config = pool_config(tmp_path / "kv", read_threads=1, read_unit_bytes=65_536, segment_bytes=MIB)
    with WorkerTier.open(
        config, engine.identity, [arena.buffer], settings=settings, command=slow_command(pace)
    ) as tier:
        assert tier.store(engine.writes(tokens)).wait_settled(60)
        assert tier.drain(60)
        set_pace(pace, 0.6)
        start_s = time.monotonic()
        assert load_all(tier, engine, tokens) == {Outcome.DONE}
        assert time.monotonic() - start_s > settings.stuck_s
        set_pace(pace, 0.0)
        assert tier.counters.snapshot()["worker_restarts_total"] == 0


def test_partial_results_come_before_the_end(tmp_path, arena):
    engine = ToyEngine((65_536,))
    tokens = engine.prompt(1, 6)
    pace = tmp_path / "pace"
    config = pool_config(tmp_path / "kv", read_threads=1, read_unit_bytes=65_536, segment_bytes=MIB)
    with WorkerTier.open(
        config, engine.identity, [arena.buffer], settings=QUICK, command=slow_command(pace)
    ) as tier:
        assert tier.store(engine.writes(tokens)).wait_settled(60)
        assert tier.drain(60)

        def attempt():
            set_pace(pace, 0.2)
            reads = engine.reads(tokens)
            job = tier.load(reads)
            assert job.wait(60, first=2)
            assert not job.is_decided
            assert job.leading_done in (2, 3)
            set_pace(pace, 0.0)
            assert job.wait_settled(60)
            engine.check(reads, job.outcomes)

        in_some_try(attempt)


def test_a_store_that_is_taken_back_while_it_waits_frees_its_room(tmp_path, arena, engine):
    pace = tmp_path / "pace"
    config = pool_config(tmp_path / "kv", write_queue_bytes=4 * 4096)
    with WorkerTier.open(
        config, engine.identity, [arena.buffer], settings=PATIENT, command=slow_command(pace)
    ) as tier:
        for round_number in range(3):
            signal_worker(tier, signal.SIGSTOP)
            jobs = [
                tier.store(engine.writes(engine.prompt(10 * round_number + seed, 2)))
                for seed in range(3)
            ]
            assert set(jobs[2].outcomes) == {Outcome.DROPPED}
            for job in jobs:
                job.cancel()
            signal_worker(tier, signal.SIGCONT)
            for job in jobs:
                assert job.wait_settled(60)
        writes = engine.writes(engine.prompt(99, 4))

        def is_room():  # the worker's own queue lets go a moment later
            job = tier.store(writes)
            return job.wait_settled(60) and set(job.outcomes) == {Outcome.DONE}

        assert eventually(is_room)


def test_a_row_that_the_parent_should_not_have_sent_ends_the_worker(
    tmp_path, arena, engine, monkeypatch
):
    # the pair of the parent's own check: a wrong place would cost memory safety
    with open_worker(tmp_path, engine, arena) as tier:
        pid = tier.worker_pid
        wrong = [(0, arena.buffer.length_bytes - 1)]
        monkeypatch.setattr(tier._shared, "places", lambda rows: wrong)
        write = engine.writes(engine.prompt(1, 1))[0]
        job = tier.store([Write(write.key, write.parent, write.data, 16)])
        assert job.wait_settled(60)
        assert set(job.outcomes) == {Outcome.FAILED}
        assert eventually(lambda: tier.worker_pid not in (None, pid))
