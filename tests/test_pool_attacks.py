"""Attacks on a pool that are not damage and not a crash: misuse, hung roots, a pool deleted in use."""

from __future__ import annotations

import logging
import os
import shutil
import threading
from random import Random
from typing import Any

import numpy as np
import pytest

from kvdepot.clock import SystemClock
from kvdepot.errors import ConfigError, CorruptSegment, PoolFull, PoolUnavailable
from kvdepot.io.disk import Space
from kvdepot.io.localdisk import LocalDisk
from kvdepot.keys import BlockKey
from kvdepot.pool.index import BlockIndex
from kvdepot.pool.segment import (
    RECORD,
    SegmentName,
    SegmentStamp,
    decode_footer,
    decode_trailer,
    encode_tail,
)
from kvdepot.pool.tier import PoolTier
from kvdepot.pool.turns import Turns
from kvdepot.pool.write_queue import WriteQueue
from kvdepot.testing.faults import FaultDisk, FaultPlan
from kvdepot.testing.simclock import FakeClock
from kvdepot.testing.toy import ToyEngine
from kvdepot.tiers import Job, Outcome, Read
from tests.pool_rig import VERBS, ask, find_blocks, pool_config, put, segment_files
from tests.tries import eventually

BLOCK_BYTES = 8192


@pytest.fixture
def engine():
    return ToyEngine((BLOCK_BYTES,))


@pytest.fixture(autouse=True)
def no_error_is_logged(caplog):
    """Whatever a caller or the storage does, a traceback in the log is a bug of ours."""
    with caplog.at_level(logging.ERROR, logger="kvdepot"):
        yield
    found = [r for when in ("setup", "call") for r in caplog.get_records(when)]
    assert [r.getMessage() for r in found if r.levelno >= logging.ERROR] == []


# misuse is refused on the caller's thread and harms nobody else


@pytest.mark.parametrize(
    "changes",
    [
        {"tokens": -1},
        {"tokens": 1 << 32},
        {"tokens": None},
        {"key": BlockKey(b"short")},
        {"parent": BlockKey(b"")},
        {"data": memoryview(bytearray(2 * BLOCK_BYTES))[::2]},
    ],
)
def test_a_store_that_makes_no_sense_is_refused_and_spoils_no_other(tmp_path, engine, changes):
    with PoolTier.open(pool_config(tmp_path / "pool"), engine.identity) as tier:
        good = tier.store(engine.writes(engine.prompt(1, 4)))
        with pytest.raises((ValueError, TypeError), match=r"block|data|integer"):
            tier.store([engine.writes(engine.prompt(2, 1))[0]._replace(**changes)])
        assert tier.drain(60)
        assert set(good.outcomes) == {Outcome.DONE}
        assert set(ask(tier, engine, engine.prompt(1, 4))) == {Outcome.DONE}


@pytest.mark.parametrize(
    "row",
    [memoryview(bytes(BLOCK_BYTES)), memoryview(bytearray(2 * BLOCK_BYTES))[::2]],
    ids=["read-only", "with gaps"],
)
def test_a_row_that_cannot_be_filled_is_refused(tmp_path, engine, row):
    with PoolTier.open(pool_config(tmp_path / "pool"), engine.identity) as tier:
        put(tier, engine, engine.prompt(1, 2))
        key = engine.keys(engine.prompt(1, 2))[0]
        with pytest.raises(ValueError, match="row"):
            tier.load([Read(key, row)])
        with pytest.raises(ValueError, match="keys"):
            tier.load([Read(BlockKey(b"short"), memoryview(bytearray(BLOCK_BYTES)))])
        with pytest.raises(ValueError, match="keys"):
            tier.touch([BlockKey(b"short")])


def test_rows_of_any_item_and_shape_are_filled(tmp_path, engine):
    with PoolTier.open(pool_config(tmp_path / "pool"), engine.identity) as tier:
        prompt = engine.prompt(1, 2)
        put(tier, engine, prompt)
        arrays: list[Any] = [
            np.zeros((4, BLOCK_BYTES // 16), np.float32),
            np.zeros(BLOCK_BYTES // 8),
        ]
        job = tier.load(
            [Read(k, memoryview(a)) for k, a in zip(engine.keys(prompt), arrays, strict=True)]
        )
        assert job.wait_settled(60)
        assert [a.tobytes() for a in arrays] == [engine.block(prompt, i) for i in range(2)]


def test_a_view_released_too_early_costs_that_block_alone(tmp_path, engine, caplog):
    plan = FaultPlan()
    disk = FaultDisk(LocalDisk(tmp_path / "pool", direct="off"), plan)
    with PoolTier.open(pool_config(tmp_path / "pool"), engine.identity, disks=[disk]) as tier:
        for seed in range(4):
            barrier = plan.hold("write", at=1)
            ahead = tier.store(engine.writes(engine.prompt(10 + seed, 2)))
            assert barrier.wait_reached()
            write = engine.writes(engine.prompt(seed, 1))[0]
            job = tier.store([write])
            write.data.release()
            plan.clear()
            assert job.wait_settled(60)
            assert job.outcomes == (Outcome.FAILED,)
            assert set(ahead.outcomes) == {Outcome.DONE}
        assert set(put(tier, engine, engine.prompt(20, 2))) == {Outcome.DONE}
        assert tier._writer.queued_bytes == 0
        assert tier.counters.snapshot()["dropped_error_total"] == 4
    # here alone it is the caller whose error is told
    assert {r.getMessage() for r in caplog.records if r.levelno >= logging.ERROR} == {
        "writing failed"
    }
    caplog.clear()


# waits and intervals that the system cannot count


@pytest.mark.parametrize("seconds", [float("inf"), 1e300, 1e10])
def test_waits_without_end_are_waits(tmp_path, engine, seconds):
    with PoolTier.open(pool_config(tmp_path / "pool"), engine.identity) as tier:
        job = tier.store(engine.writes(engine.prompt(1, 4)))
        assert job.wait_settled(seconds)
        assert tier.drain(seconds)
        load = tier.load(engine.reads(engine.prompt(1, 4)), deadline_s=seconds)
        assert load.wait(seconds)
        assert set(load.outcomes) == {Outcome.DONE}
        tier.close(seconds)


def test_a_deadline_that_is_no_number_is_refused():
    with pytest.raises(ValueError, match="NaN"):
        Job([BlockKey(bytes(32))], deadline_s=float("nan"))


@pytest.mark.parametrize("name", ["segment_age_s", "discover_interval_s", "lease_s"])
@pytest.mark.parametrize("seconds", [float("inf"), float("nan"), 1e10, 0.0])
def test_intervals_must_be_countable(name, seconds):
    with pytest.raises(ConfigError, match=name):
        pool_config("/pool", **{name: seconds})


# what a hostile footer may say


@pytest.mark.parametrize("length", [4096, 0xFFFFFFFF])
@pytest.mark.parametrize("offset", [(1 << 63) - 4096, 1 << 63, (1 << 64) - 4096])
def test_a_footer_whose_sums_overflow_is_refused(offset, length):
    records = np.zeros(1, dtype=RECORD)
    records["offset"], records["length"] = offset, length
    stamp = SegmentStamp(bytes(32), bytes(16), SegmentName("ab" * 8, 1))
    tail = encode_tail(stamp, records, 8192)
    trailer = decode_trailer(tail[-128:], 8192 + tail.nbytes)
    with pytest.raises(CorruptSegment):
        decode_footer(trailer, tail[: records.nbytes])


def test_a_look_at_many_keys_does_not_hold_the_view_throughout(monkeypatch):
    index = BlockIndex()
    keys = [BlockKey(n.to_bytes(32, "little")) for n in range(10_000)]
    records = np.zeros(len(keys), dtype=RECORD)
    records["key"] = np.frombuffer(b"".join(keys), "<u8").reshape(-1, 4)
    records["offset"], records["length"] = 4096, 4096
    index.insert(1, records[::2])
    looks = []
    find = index._find

    def looking(words):
        looks.append(len(words))
        return find(words)

    monkeypatch.setattr(index, "_find", looking)
    at = index.locate(keys)
    assert at.is_present.tolist() == [n % 2 == 0 for n in range(10_000)]
    assert index.contains(keys) == at.is_present.tolist()
    assert max(looks) <= 2048


# one of two roots hangs


class TwoRoots:
    """A tier over two roots with a plan each, and the prompts that lie on one root alone."""

    def __init__(self, folder, engine):
        self.plans = [FaultPlan(), FaultPlan()]
        places = [folder / "a", folder / "b"]
        disks = [
            FaultDisk(LocalDisk(place, direct="off"), plan)
            for place, plan in zip(places, self.plans, strict=True)
        ]
        self.engine = engine
        self.tier = PoolTier.open(
            pool_config(*places, read_threads=2, write_threads=2, segment_age_s=0.05),
            engine.identity,
            disks=disks,
        )
        prompts = [engine.prompt(seed, 2) for seed in range(16)]
        for prompt in prompts:
            put(self.tier, engine, prompt)
        held = [find_blocks(place, engine.digest).keys() for place in places]
        self.prompts_on = [
            [prompt for prompt in prompts if engine.keys(prompt)[0] in keys] for keys in held
        ]

    def hang_first(self, *verbs):
        return [self.plans[0].hold(verb) for verb in verbs]


@pytest.fixture
def two_roots(tmp_path, engine):
    rig = TwoRoots(tmp_path, engine)
    yield rig
    for plan in rig.plans:
        plan.clear()
    rig.tier.close(5)


def test_reads_of_a_hung_root_do_not_take_the_other_root_s_threads(two_roots, engine):
    barrier = two_roots.hang_first("read")[0]
    stuck = [two_roots.tier.load(engine.reads(p)) for p in two_roots.prompts_on[0]]
    assert len(stuck) > 4  # more than all threads
    assert barrier.wait_reached()
    for prompt in two_roots.prompts_on[1]:
        assert set(ask(two_roots.tier, engine, prompt)) == {Outcome.DONE}
    assert not any(job.is_decided for job in stuck)
    two_roots.plans[0].clear()
    assert all(job.wait_settled(60) for job in stuck)


def test_a_root_has_places_for_its_share_of_the_threads(two_roots):
    clock = FakeClock()
    turns = Turns(two_roots.tier.roots, clock, threads=2, writes=2)
    first, second = turns
    taken = [turns.enter_next().state for _ in range(4)]
    assert sorted(map(id, taken)) == sorted(map(id, [first, first, second, second]))
    assert turns.enter_next() == (None, True)  # all busy
    assert not turns.enter(first)
    turns.leave(second)
    assert [turns.enter_next().state for _ in range(2)] == [second, None]
    turns.pause(second, PoolFull("no room"))
    turns.leave(second)
    assert turns.enter_next() == (None, True)  # the one that takes stores is busy
    turns.pause(first, PoolUnavailable("an error"))
    assert turns.enter_next() == (None, False)
    assert turns.is_full
    clock.advance(2)
    assert turns.enter_next().state is second


def test_stores_go_to_the_other_root_while_one_hangs(two_roots, engine):
    two_roots.hang_first("create", "publish", "files", "beat", "space", "touch")
    tier = two_roots.tier
    stores = []
    for n in range(12):
        stores.append(tier.store(engine.writes(engine.prompt(100 + n, 2))))
        stores[-1].wait_settled(0.2)  # so that each is a run of its own
    # the first root's two threads, with a run each
    assert eventually(lambda: sum(not store.is_settled for store in stores) <= 2)
    late = tier.store(engine.writes(engine.prompt(99, 2)))
    assert late.wait_settled(60)
    assert set(late.outcomes) == {Outcome.DONE}
    listed = two_roots.plans[1].counts["files"]
    assert eventually(
        lambda: two_roots.plans[1].counts["files"] > listed + 3
    )  # house is kept there
    assert eventually(lambda: tier.lookup(engine.keys(engine.prompt(99, 2))) == 2)
    two_roots.plans[0].clear()
    assert tier.drain(60)


def test_closing_ends_in_time_and_decides_everything_though_a_root_hangs(two_roots, engine):
    tier = two_roots.tier
    two_roots.hang_first(*VERBS)
    loads = [tier.load(engine.reads(prompt)) for prompt in two_roots.prompts_on[0]]
    stores = [tier.store(engine.writes(engine.prompt(200 + n, 2))) for n in range(8)]
    closers = [threading.Thread(target=tier.close, args=(0.5,)) for _ in range(2)]
    for closer in closers:
        closer.start()
    for closer in closers:
        closer.join(60)
        assert not closer.is_alive()
    assert all(job.is_decided for job in (*loads, *stores))
    two_roots.plans[0].clear()
    assert all(job.wait_settled(60) for job in (*loads, *stores))


# many callers


def test_drain_does_not_wait_for_what_others_store_later(engine):
    queue = WriteQueue(SystemClock(), unit_bytes=1 << 20, bytes_max=1 << 20)

    def take(seed):
        writes = engine.writes(engine.prompt(seed, 2))
        queue.offer(Job([write.key for write in writes]), writes, range(2))
        return queue.take()

    earlier = take(1)
    drained = []
    drainer = threading.Thread(target=lambda: drained.append(queue.drain(60)))
    drainer.start()
    assert eventually(lambda: queue.wait(lambda: 0.001)[1])
    later = take(2)
    queue.arrive(earlier)
    drainer.join(60)
    assert drained == [True]
    assert not queue.drain(0)
    queue.arrive(later)
    assert queue.drain(0)


@pytest.mark.parametrize("seed", range(3))
def test_every_block_of_every_call_is_in_one_counter(tmp_path, engine, seed):
    plan = FaultPlan(seed)
    disk = FaultDisk(LocalDisk(tmp_path / "pool", direct="off"), plan)
    config = pool_config(
        tmp_path / "pool",
        capacity_bytes=512 << 10,
        segment_bytes=64 << 10,
        segment_age_s=0.01,
        write_queue_bytes=64 << 10,
        write_threads=4,
    )
    random = Random(seed)
    stored = loaded = 0
    with PoolTier.open(config, engine.identity, disks=[disk]) as tier:
        for verb in ("create", "open", "write", "publish", "truncate", "read"):
            plan.fail(verb, share=0.05)
        plan.short("write", share=0.05)
        plan.flip(share=0.1)
        for _ in range(40):
            prompt = engine.prompt(random.randrange(12), random.randrange(1, 12))
            reads, writes = engine.reads(prompt), engine.writes(prompt)
            jobs = [tier.store(writes), tier.load(reads, deadline_s=random.choice([None, 0.001]))]
            stored, loaded = stored + len(writes), loaded + len(reads)
            if random.random() < 0.2:
                jobs[0].cancel()
            assert all(job.wait_settled(60) for job in jobs)
            engine.check(reads, jobs[1].outcomes)
        plan.clear()
        assert tier.drain(60)
        count = tier.counters.snapshot()
    dropped = sum(count[name] for name in count if name.startswith("dropped_"))
    kinds = ("blocks", "present_blocks", "cancelled_blocks")
    assert dropped + sum(count[f"store_{kind}_total"] for kind in kinds) == stored
    fates = ("blocks", "missing_blocks", "failed_blocks", "late_blocks", "given_up_blocks")
    bad = count["corrupt_blocks_total"]
    assert bad + sum(count[f"load_{fate}_total"] for fate in fates) == loaded


# somebody removes files under a running pool


@pytest.mark.parametrize("what", ["lease", "tmp", "ns", "."])
def test_writers_outlive_the_removal_of_the_pool_s_folders(tmp_path, engine, what):
    clock, root = FakeClock(), tmp_path / "pool"
    config = pool_config(root, lease_s=30)
    tiers = [
        PoolTier.open(config, engine.identity, clock=clock, has_threads=False) for _ in range(2)
    ]
    shutil.rmtree(root / what)
    for _ in range(12):  # two minutes: every lease that is not renewed is over
        clock.advance(10)
        for tier in tiers:
            tier.tick()
    for number, tier in enumerate(tiers):
        tier.store(engine.writes(engine.prompt(number, 2)))
        tier.run_pending()
    for tier in tiers:  # a segment is open in both while both sweep
        tier.roots[0]._due_s.clear()
        tier.tick()
    for number, tier in enumerate(tiers):
        tier.run_pending(flush=True)
        assert tier.lookup(engine.keys(engine.prompt(number, 2))) == 2
        assert tier.counters.snapshot()["leftovers_swept_total"] == 0
    assert (root / "pool.json").exists()
    assert len(list(root.glob("ns/*/identity.json"))) == 1
    for tier in tiers:
        tier.close()
    assert list((root / "lease").iterdir()) == []


def test_a_copy_in_a_forked_child_takes_nothing_from_its_parent(tmp_path, engine):
    root = tmp_path / "pool"
    tier = PoolTier.open(pool_config(root), engine.identity, has_threads=False)
    child = os.fork()
    if child == 0:
        load = tier.load(engine.reads(engine.prompt(1, 2)))
        store = tier.store(engine.writes(engine.prompt(1, 2)))
        tier.close()
        is_idle = {*load.outcomes, *store.outcomes} == {Outcome.MISS, Outcome.DROPPED}
        os._exit(0 if is_idle and load.is_settled and store.is_settled else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert len(list((root / "lease").iterdir())) == 1
    tier.close()


# room


class Spacious(LocalDisk):
    """A disk with a free space of the test's making."""

    free_bytes = 1 << 40

    def space(self):
        return Space(self.free_bytes, 1 << 41, None, None)


@pytest.fixture
def filled(tmp_path, engine):
    """A pool of twenty segments, on a disk with a free space of the test's making."""
    disk = Spacious(tmp_path / "pool", direct="off")
    config = pool_config(tmp_path / "pool", free_bytes_min=1 << 30)
    tier = PoolTier.open(config, engine.identity, disks=[disk], has_threads=False)
    for seed in range(20):
        store_now(tier, engine, seed)
    assert len(segment_files(tmp_path / "pool")) == 20
    yield tier, disk
    tier.close()


def store_now(tier, engine, seed):
    job = tier.store(engine.writes(engine.prompt(seed, 4)))
    tier.run_pending(flush=True)
    return job.outcomes


def test_space_that_comes_back_late_does_not_empty_the_pool(tmp_path, engine, filled):
    # others have the files that go still open, so removing them frees nothing yet
    tier, disk = filled
    disk.free_bytes = (1 << 30) + tier.roots[0].segment_bytes - 1
    assert set(store_now(tier, engine, 99)) == {Outcome.DROPPED}
    assert len(segment_files(tmp_path / "pool")) == 19
    disk.free_bytes += 1 << 20
    assert eventually(lambda: Outcome.DONE in store_now(tier, engine, 99))


def test_claims_that_exceed_the_capacity_evict_nothing(tmp_path, engine, filled):
    tier, _ = filled
    (tmp_path / "pool/tmp" / f"{'a' * 16}-00000001-999999999999999.tmp").touch()
    assert set(store_now(tier, engine, 99)) == {Outcome.DROPPED}
    assert len(segment_files(tmp_path / "pool")) == 20


def test_what_writers_have_claimed_counts_against_the_free_space(tmp_path, engine, filled):
    tier, disk = filled
    segment_bytes = tier.roots[0].segment_bytes
    disk.free_bytes = (1 << 30) + 2 * segment_bytes
    (tmp_path / "pool/tmp" / f"{'a' * 16}-00000001-{segment_bytes}.tmp").touch()
    assert set(store_now(tier, engine, 99)) == {Outcome.DONE}
    assert len(segment_files(tmp_path / "pool")) == 21
    (tmp_path / "pool/tmp" / f"{'b' * 16}-00000001-1.tmp").touch()
    store_now(tier, engine, 98)
    assert len(segment_files(tmp_path / "pool")) < 22


def test_uses_in_the_future_do_not_keep_segments_for_ever(tmp_path, engine, filled):
    tier, disk = filled
    old = segment_files(tmp_path / "pool")
    for path in old:
        os.utime(path, (4e9, 4e9))  # the storage's clock was wrong, and has been set back
    store_now(tier, engine, 50)
    disk.free_bytes = (1 << 30) + tier.roots[0].segment_bytes - 40_000
    store_now(tier, engine, 51)
    kept = segment_files(tmp_path / "pool")
    assert len(set(old) - set(kept)) >= 1
    assert tier.lookup(engine.keys(engine.prompt(50, 4))) == 4
