"""Jobs that are handed to a thread: what can happen before that thread has seen them.

The thread is held by a step that waits (`Gate`). Of kvdepot.engines.vllm.handover, .moving and .jobs.
"""

from __future__ import annotations

import threading
import time

import pytest

import tests.needs_vllm  # noqa: F401  # isort: skip

from vllm.v1.kv_offload.base import LookupResult

from kvdepot.engines.vllm.handover import Handover, Step
from kvdepot.engines.vllm.moving import LOAD_CHUNKS, STORE_CHUNKS
from kvdepot.testing.damage import flip_byte
from tests.pool_rig import find_blocks
from tests.tries import in_one_try_of
from tests.vllm_rig import Ask, TierRig, row_identity

pytestmark = pytest.mark.vllm

#: three parts of a load and a bit
LONG = 3 * LOAD_CHUNKS + 5
#: half of the host tier may wait to be written
ROWS = 2 * LONG


class Gate:
    """Keeps a handover's thread from seeing what is put behind it."""

    def __init__(self, handover: Handover) -> None:
        self._open = threading.Event()
        self._reached = threading.Event()
        assert handover.put(self._step)
        assert self._reached.wait(60)

    def open(self) -> None:
        self._open.set()

    def _step(self) -> bool:
        self._reached.set()
        assert self._open.wait(60)
        return False


@pytest.fixture
def rig(tmp_path):
    with TierRig(tmp_path / "pool", rows=ROWS) as made:
        yield made


def noted_stores(rig, monkeypatch):
    """The sizes of all stores that the pool is given from now on."""
    sizes = []
    store = rig.tier.pool.store

    def noted(writes):
        sizes.append(len(writes))
        return store(writes)

    monkeypatch.setattr(rig.tier.pool, "store", noted)
    return sizes


def test_a_lookup_right_after_a_store_is_a_miss_and_does_not_wait(rig):
    gate = Gate(rig.tier.jobs._handover)
    ask = Ask("a", 4)
    rig.begin(ask)
    rig.store(ask)
    assert rig.tier.lookup(ask.keys[0], ask.context) is LookupResult.MISS
    assert rig.hits(Ask("a", 4)) == 4, "vLLM has it in its host tier"
    assert rig.tier.jobs.rows_storing == 4
    gate.open()
    rig.end(ask)
    rig.wait_idle()
    assert rig.tier.pool.drain(60)
    rig.forget_host()
    assert rig.take(Ask("a", 4)) == 4


def test_a_reset_does_not_wait_for_the_thread_and_nothing_is_stored_later(rig, monkeypatch):
    sizes = noted_stores(rig, monkeypatch)
    gate = Gate(rig.tier.jobs._handover)
    ask = Ask("a", 4)
    rig.begin(ask)
    rig.store(ask)
    assert not rig.tier.jobs.quiesce(0.05), "its rows are promised to the thread"
    rig.manager.reset_cache()
    assert len(rig.tier.jobs) == 0
    gate.open()
    rig.tier.jobs.close(60)
    assert sizes == [], "the rows are others' by now"


def test_a_reset_between_two_parts_ends_the_job_behind_the_first(rig, monkeypatch):
    sizes = noted_stores(rig, monkeypatch)
    jobs = rig.tier.jobs
    held: list[threading.Event] = []
    begin = rig.tier.pool.store

    def first_part(writes):
        job = begin(writes)
        # what comes behind the first part waits at the gate
        if not held:
            held.append(threading.Event())
            assert held[0].wait(60)
        return job

    monkeypatch.setattr(rig.tier.pool, "store", first_part)
    ask = Ask("a", LONG)
    rig.begin(ask)
    rig.store(ask)
    while not held:
        time.sleep(0.001)
    began_s = time.monotonic()
    threading.Timer(0.2, held[0].set).start()
    rig.manager.reset_cache()
    assert time.monotonic() - began_s >= 0.15, "the part that is being begun is waited for"
    jobs.close(60)
    assert sizes == [STORE_CHUNKS]


def test_what_was_submitted_before_the_end_is_stored(tmp_path):
    with TierRig(tmp_path / "pool", rows=ROWS) as rig:
        gate = Gate(rig.tier.jobs._handover)
        ask = Ask("a", LONG)
        rig.begin(ask)
        rig.store(ask)
        threading.Timer(0.2, gate.open).start()
    with TierRig(tmp_path / "pool", rows=ROWS) as rig:
        assert rig.take(Ask("a", LONG)) == LONG


def test_an_end_that_the_thread_does_not_reach_is_short_and_touches_no_row(tmp_path, monkeypatch):
    rig = TierRig(tmp_path / "pool", close_s=0.2)
    sizes = noted_stores(rig, monkeypatch)
    gate = Gate(rig.tier.jobs._handover)
    ask = Ask("a", 4)
    rig.begin(ask)
    rig.store(ask)
    began_s = time.monotonic()
    rig.manager.shutdown()
    assert time.monotonic() - began_s < 30
    assert rig.tier.jobs.quiesce(0.0)
    gate.open()
    rig.tier.jobs._handover._thread.join(60)
    assert sizes == []


def test_a_request_that_ends_before_the_thread_has_seen_its_store_keeps_its_rows(rig):
    gate = Gate(rig.tier.jobs._handover)
    ask = Ask("a", 4)
    rig.tier.request_extras[ask.context.req_id] = b"lora" + b"1" * 32
    rig.begin(ask)
    rig.store(ask)
    rig.end(ask)
    assert rig.tier.request_extras == {}
    rig.step()
    assert rig.manager._jobs, "vLLM must not give the rows to others"
    gate.open()
    rig.wait_idle()
    assert rig.tier.pool.drain(60)
    rig.forget_host()
    assert rig.take(Ask("a", 4)) == 0, "it was stored under the keys of its adapter"
    again = Ask("a", 4)
    rig.tier.request_extras[again.context.req_id] = b"lora" + b"1" * 32
    assert rig.take(again) == 4


def test_a_pool_that_closes_before_the_thread_has_seen_a_store_ends_it(rig):
    gate = Gate(rig.tier.jobs._handover)
    ask = Ask("a", 4)
    rig.begin(ask)
    rig.store(ask)
    rig.tier._refuse("for a test")
    gate.open()
    rig.end(ask)
    rig.wait_idle()
    assert rig.tier.counters.snapshot()["dropped_closed_total"] == 4


@pytest.mark.parametrize("io", ["threads", "process"])
def test_a_long_job_comes_back_whole(tmp_path, io):
    with TierRig(tmp_path / "pool", rows=ROWS, io=io) as rig:
        rig.put(Ask("a", LONG))
        rig.forget_host()
        assert rig.take(Ask("a", LONG)) == LONG
        counts = rig.tier.counters.snapshot()
        assert counts["load_blocks_total"] == counts["store_blocks_total"] == LONG


def test_a_damaged_block_in_a_later_part_ends_the_prefix_there(tmp_path):
    identity = row_identity()
    bad = 2 * LOAD_CHUNKS + 3
    with TierRig(tmp_path / "pool", rows=ROWS, identity=identity) as rig:
        ask = Ask("a", LONG)
        rig.put(ask)
        key = rig.tier._blocks(ask.context).key(ask.keys[bad])
        place = find_blocks(tmp_path / "pool", identity.digest())[key]
        flip_byte(place.path, place.offset + 100)
        rig.forget_host()
        assert rig.take(Ask("a", LONG)) == bad


@in_one_try_of(5)
def test_parts_that_the_thread_reaches_too_late_are_given_up(tmp_path):
    with TierRig(tmp_path / "pool", rows=ROWS) as rig:
        rig.put(Ask("a", LONG))
        rig.forget_host()
        gate = Gate(rig.tier.jobs._handover)
        rig.tier.settings = rig.tier.settings.__class__(
            pool=rig.tier.settings.pool, load_deadline_s=0.2, load_bytes_per_s_min=10**12
        )
        ask = Ask("a", LONG)
        rig.begin(ask)
        assert rig.hits(ask) is None
        time.sleep(0.3)
        assert rig.hits(ask) is None, "the rows of what was not begun are still promised"
        gate.open()
        assert rig.wait_hits(ask) == LOAD_CHUNKS, "the first part came"
        assert rig.tier.lookup(ask.keys[LOAD_CHUNKS], ask.context) is LookupResult.MISS
        rig.end(ask)
        rig.wait_idle()


def test_a_bug_behind_the_first_part_fails_the_job_and_is_counted(rig, monkeypatch):
    rig.put(Ask("a", LONG))
    rig.forget_host()
    load = rig.tier.pool.load
    calls = []

    def broken(reads, **named):
        calls.append(len(reads))
        if len(calls) > 1:
            raise RuntimeError("bug")
        return load(reads, **named)

    monkeypatch.setattr(rig.tier.pool, "load", broken)
    assert rig.take(Ask("a", LONG)) == LOAD_CHUNKS
    assert rig.tier.times.errors == {"submit_load": 1}


def test_uses_are_passed_on_and_lost_where_there_are_too_many(rig, monkeypatch):
    touched = []
    monkeypatch.setattr(rig.tier.pool, "touch", lambda keys: touched.append(len(keys)))
    rig.tier.jobs._handover._offers_max = 3  # of which the gate is one
    gate = Gate(rig.tier.jobs._handover)
    ask = Ask("a", LONG)
    for _ in range(5):
        rig.tier.touch(ask.keys, ask.context)
    gate.open()
    rig.tier.jobs.close(60)
    assert touched == [LONG, LONG]


def test_a_handover_works_in_order_survives_a_bug_and_takes_nothing_once_closed():
    handover = Handover()
    done: list[str] = []

    def broken():
        raise RuntimeError("bug")

    def two_steps():
        done.append("two")
        return done.count("two") < 2

    def last_step() -> bool:
        done.append("last")
        return False

    assert handover.put(two_steps)
    assert handover.put(broken)
    assert handover.put(last_step)
    assert handover.close(60)
    assert done == ["two", "two", "last"]
    assert not handover.put(two_steps)
    assert Handover().close(0.0)


def test_a_load_goes_between_two_steps_of_a_store():
    handover = Handover()
    done: list[str] = []
    gate = Gate(handover)

    def steps(name: str, count: int) -> Step:
        def step() -> bool:
            done.append(name)
            return done.count(name) < count

        return step

    def store() -> bool:
        done.append("store")
        if done.count("store") == 2:
            assert handover.put(steps("load", 2), is_urgent=True)
        return done.count("store") < 4

    handover.put(store)
    handover.put(steps("touch", 1))
    gate.open()
    while len(done) < 7:
        time.sleep(0.001)
    assert handover.close(60)
    assert done == ["store", "store", "load", "load", "store", "store", "touch"]
