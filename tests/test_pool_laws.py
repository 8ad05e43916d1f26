"""The laws: bytes right or absent, calls that never wait, a capacity that holds, accounts that add up.

Two writers of one name, jumping clocks, barriers inside the write and read path, several instances,
and processes that stop in the middle.
"""

from __future__ import annotations

import functools
import signal
import subprocess
import sys
import threading
import time
from types import SimpleNamespace

import pytest

from kvdepot.errors import ConfigError, PoolFull, WriterNameTaken
from kvdepot.io.localdisk import LocalDisk
from kvdepot.pool import root as pool_root
from kvdepot.pool.tier import PoolTier
from kvdepot.testing.faults import FaultDisk, FaultPlan
from kvdepot.testing.simclock import FakeClock
from kvdepot.testing.simdisk import SimDisk
from kvdepot.testing.toy import ToyEngine, ToyServer
from kvdepot.tiers import Outcome
from kvdepot.units import KIB, MIB
from tests.children import ROOT, SOURCE
from tests.pool_rig import ask, held_bytes, pool_config, put, segment_files, tmp_files
from tests.tries import eventually

DONE, MISS, DROPPED, FAILED = Outcome.DONE, Outcome.MISS, Outcome.DROPPED, Outcome.FAILED


@pytest.fixture
def engine():
    return ToyEngine((4096,))


def filled(root, engine, *, prompts=4, **settings):
    """A pool of a few prompts, closed."""
    with PoolTier.open(pool_config(root, **settings), engine.identity) as tier:
        for seed in range(prompts):
            assert set(put(tier, engine, engine.prompt(seed, 6))) == {DONE}


# names and clocks


def test_two_writers_of_one_name(tmp_path, engine, monkeypatch):
    monkeypatch.setattr(pool_root, "new_writer_name", lambda: "0123456789abcdef")
    root = tmp_path / "pool"
    tokens = [engine.prompt(seed, 6) for seed in range(3)]
    with PoolTier.open(pool_config(root), engine.identity) as first:
        put(first, engine, tokens[0])
        with pytest.raises(WriterNameTaken, match="0123456789abcdef") as caught:
            PoolTier.open(pool_config(root), engine.identity)
        assert caught.value.retryable
        put(first, engine, tokens[1])
        assert set(ask(first, engine, tokens[0])) == {DONE}
    # the name comes back after its holder has ended: its old segments are never written over
    before = {path: path.read_bytes() for path in segment_files(root)}
    with PoolTier.open(pool_config(root), engine.identity) as second:
        outcomes = [put(second, engine, tokens[2]) for _ in range(4)]
        assert DONE in outcomes[-1]
        for prompt in tokens[:2]:
            assert set(ask(second, engine, prompt)) == {DONE}
        ask(second, engine, tokens[2])
    assert {path: path.read_bytes() for path in before} == before
    assert tmp_files(root) == []


def has_all(tier, keys):
    return tier.lookup(keys) == len(keys)


@pytest.mark.parametrize("jump_s", [-1.6e9, -86_400.0, -3_600.0, 3_600.0, 3.2e9, 2.5e11])
def test_wall_clocks_that_jump(tmp_path, engine, jump_s):
    root = tmp_path / "pool"
    clock = FakeClock(is_running=True)
    with (
        PoolTier.open(pool_config(root), engine.identity, clock=clock) as tier,
        PoolTier.open(pool_config(root), engine.identity) as other,
    ):
        for seed in range(4):
            tokens = engine.prompt(seed, 6)
            assert set(put(tier, engine, tokens)) == {DONE}
            assert set(ask(tier, engine, tokens)) == {DONE}
            assert eventually(functools.partial(has_all, other, engine.keys(tokens)))
            assert set(ask(other, engine, tokens)) == {DONE}
            clock.jump_wall(jump_s / 4)
            tier.tick()
    with PoolTier.open(pool_config(root), engine.identity) as tier:
        for seed in range(4):
            assert set(ask(tier, engine, engine.prompt(seed, 6))) == {DONE}


def test_a_jump_of_the_clock_buries_nobody_alive(engine):
    """A writer on another host is judged by its silence, not by the hour it believes in."""
    disk = SimDisk(clock=FakeClock(wall_s=5e9))
    clock, remote_clock = FakeClock(), FakeClock()
    config = pool_config("/simulated", lease_s=30.0)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("kvdepot.pool.lease.host_boot_id", lambda: "another host")
        remote = PoolTier.open(
            config, engine.identity, disks=[disk.attach()], clock=remote_clock, has_threads=False
        )
        remote.store(engine.writes(engine.prompt(1, 3)))
        remote._writer.run_pending()  # taken and written, not yet published
    assert [name for name in disk.names() if name.startswith("tmp/")]
    local = PoolTier.open(
        config, engine.identity, disks=[disk.attach()], clock=clock, has_threads=False
    )
    for jump_s in (1e8, -2e8, 1e8):
        clock.jump_wall(jump_s)
        clock.advance(12.0)
        local.tick()
        remote_clock.advance(12.0)
        remote.tick()
        assert [name for name in disk.names() if name.startswith("tmp/")]
    # then it falls silent
    for _ in range(4):
        clock.advance(31.0)
        local.tick()
    assert [name for name in disk.names() if name.startswith("tmp/")] == []
    # and when it wakes up its store is lost, cleanly
    remote.run_pending(flush=True)
    assert remote.counters.snapshot()["segments_abandoned_total"] == 1
    assert local.lookup(engine.keys(engine.prompt(1, 3))) == 0


# in flight


@pytest.fixture
def slow_pool(tmp_path, engine):
    root = tmp_path / "pool"
    plan = FaultPlan()
    config = pool_config(root, read_threads=1)
    disk = FaultDisk(LocalDisk(root), plan)
    with PoolTier.open(config, engine.identity, disks=[disk]) as tier:
        yield SimpleNamespace(root=root, plan=plan, tier=tier)
        plan.clear()


@pytest.mark.parametrize("verb", ["create", "truncate", "write", "publish"])
def test_nothing_is_seen_before_it_is_published(slow_pool, engine, verb):
    tokens = engine.prompt(1, 4)
    config = pool_config(slow_pool.root)
    with PoolTier.open(config, engine.identity) as reader:
        barrier = slow_pool.plan.hold(verb)
        job = slow_pool.tier.store(engine.writes(tokens))
        if verb == "publish":
            threading.Thread(target=slow_pool.tier.drain, args=(30,), daemon=True).start()
        assert barrier.wait_reached()
        for _ in range(20):
            assert reader.lookup(engine.keys(tokens)) == 0
            assert set(ask(reader, engine, tokens)) == {MISS}
            reader.tick()
        barrier.open()
        assert slow_pool.tier.drain(60)
        assert set(job.outcomes) == {DONE}
        assert eventually(lambda: reader.lookup(engine.keys(tokens)) == 4)
        assert set(ask(reader, engine, tokens)) == {DONE}


def test_a_live_writer_that_stalls_is_not_swept(slow_pool, engine):
    """Age alone does not prove a writer dead: its lock does, and that is held."""
    barrier = slow_pool.plan.hold("publish")
    tokens = engine.prompt(1, 4)
    slow_pool.tier.store(engine.writes(tokens))
    assert barrier.wait_reached()
    with PoolTier.open(pool_config(slow_pool.root, lease_s=0.05), engine.identity) as other:
        for _ in range(10):
            time.sleep(0.06)
            other.tick()
        assert len(tmp_files(slow_pool.root)) == 1
        barrier.open()
        assert slow_pool.tier.drain(60)
    assert set(ask(slow_pool.tier, engine, tokens)) == {DONE}


def test_a_writer_whose_file_was_taken_away_loses_the_store_only(slow_pool, engine):
    barrier = slow_pool.plan.hold("publish", at=1)
    slow_pool.tier.store(engine.writes(engine.prompt(1, 4)))
    assert barrier.wait_reached()
    tmp_files(slow_pool.root)[0].unlink()
    barrier.open()
    assert slow_pool.tier.drain(60)
    assert slow_pool.tier.lookup(engine.keys(engine.prompt(1, 4))) == 0
    assert slow_pool.tier.counters.snapshot()["segments_abandoned_total"] == 1
    assert set(put(slow_pool.tier, engine, engine.prompt(2, 4))) == {DONE}


def test_an_eviction_does_not_disturb_a_read_in_flight(slow_pool, engine):
    tokens = engine.prompt(1, 6)
    put(slow_pool.tier, engine, tokens)
    ask(slow_pool.tier, engine, tokens)  # the file is open now
    barrier = slow_pool.plan.hold("read")
    reads = engine.reads(tokens)
    job = slow_pool.tier.load(reads)
    assert barrier.wait_reached()
    for path in segment_files(slow_pool.root):
        path.unlink()
    barrier.open()
    assert job.wait_settled(60)
    engine.check(reads, job.outcomes)
    assert set(job.outcomes) == {DONE}


@pytest.mark.parametrize("verb", ["read", "open", "write", "create", "publish", "files", "touch"])
def test_no_verb_waits_while_the_storage_hangs(slow_pool, engine, verb):
    """Law 3. The bound is wide for a busy test machine; a hung call would take for ever."""
    tier = slow_pool.tier
    tokens, fresh = engine.prompt(1, 32), engine.prompt(2, 32)
    put(tier, engine, tokens)
    keys = engine.keys(tokens)
    barrier = slow_pool.plan.hold(verb)
    took_s = []
    for _ in range(5):
        start_s = time.monotonic()
        assert tier.lookup(keys) == 32
        job = tier.load(engine.reads(tokens), deadline_s=0.05)
        tier.store(engine.writes(fresh))
        tier.touch(keys)
        tier.usage()
        took_s.append(time.monotonic() - start_s)
        assert job.wait(60)
        time.sleep(0.05)
    assert min(took_s) < 0.05
    barrier.open()


# accounts


def test_bytes_add_up(tmp_path, engine):
    root = tmp_path / "pool"
    plan = FaultPlan()
    # one reader, so that each segment file is opened once
    config = pool_config(root, read_threads=1)
    with PoolTier.open(config, engine.identity, disks=[FaultDisk(LocalDisk(root), plan)]) as tier:
        tokens = [engine.prompt(seed, 8) for seed in range(5)]
        jobs = [tier.store(engine.writes(prompt)) for prompt in tokens]
        assert tier.drain(60)
        assert [job.bytes_done for job in jobs] == [8 * 4096] * 5
        before = plan.bytes_moved["read"]
        reads = [tier.load(engine.reads(prompt)) for prompt in tokens]
        assert all(job.wait_settled(60) for job in reads)
        counters = tier.counters.snapshot()
        assert counters["store_bytes_total"] == counters["load_bytes_total"] == 5 * 8 * 4096
        assert counters["store_blocks_total"] == counters["load_blocks_total"] == 40
        assert sum(job.bytes_done for job in reads) == 5 * 8 * 4096
        # what came from the device: the blocks, and a header for each segment file
        headers = 4096 * len(segment_files(root))
        assert plan.bytes_moved["read"] - before == 5 * 8 * 4096 + headers
        assert tier.usage().used_bytes == sum(p.stat().st_size for p in segment_files(root))
        assert tier.usage().blocks == 40


def test_a_hit_makes_few_reads_and_no_writes(tmp_path, engine):
    root = tmp_path / "pool"
    plan = FaultPlan()
    config = pool_config(root, segment_bytes=MIB, discover_interval_s=60.0, lease_s=180.0)
    with PoolTier.open(config, engine.identity, disks=[FaultDisk(LocalDisk(root), plan)]) as tier:
        tokens = engine.prompt(1, 128)
        put(tier, engine, tokens)
        ask(tier, engine, tokens)
        before = plan.counts.copy()
        for _ in range(10):
            assert set(ask(tier, engine, tokens)) == {DONE}
        made = plan.counts - before
        assert set(made) == {"read"}
        assert made["read"] <= 10 * 4


def test_lookup_with_busy_threads(tmp_path, engine):
    """3,600 keys beside two spinning threads: one switch of the GIL a key would take 18 s."""
    small = ToyEngine((128,))
    with PoolTier.open(pool_config(tmp_path / "pool"), small.identity) as tier:
        tokens = small.prompt(1, 3600)
        put(tier, small, tokens)
        keys = small.keys(tokens)
        stop = threading.Event()

        def spin():
            while not stop.is_set():
                pass

        threads = [threading.Thread(target=spin, daemon=True) for _ in range(2)]
        for thread in threads:
            thread.start()
        took_s = []
        for _ in range(5):
            start_s = time.monotonic()
            assert tier.lookup(keys) == 3600
            took_s.append(time.monotonic() - start_s)
        stop.set()
        assert min(took_s) < 2.0


# capacity


def test_what_earlier_processes_left_counts_and_is_trimmed_before_serving(tmp_path, engine):
    root = tmp_path / "pool"
    filled(root, engine, prompts=30, segment_bytes=64 * KIB)
    assert (held_bytes([root]) or 0) > 512 * KIB
    config = pool_config(root, capacity_bytes=512 * KIB, segment_bytes=64 * KIB)
    with PoolTier.open(config, engine.identity) as tier:
        assert (held_bytes([root]) or 0) <= 512 * KIB
        assert 256 * KIB < tier.usage().used_bytes <= 512 * KIB
        newest = engine.prompt(29, 6)
        assert set(ask(tier, engine, newest)) == {DONE}


def test_other_models_blocks_count_against_the_same_capacity(tmp_path, engine):
    root = tmp_path / "pool"
    other = ToyEngine((8192,))
    settings = {"capacity_bytes": MIB, "segment_bytes": 64 * KIB}
    filled(root, other, prompts=12, **settings)
    with PoolTier.open(pool_config(root, **settings), engine.identity) as tier:
        assert tier.usage().used_bytes == sum(p.stat().st_size for p in segment_files(root))
        for seed in range(40):
            put(tier, engine, engine.prompt(seed, 12))
            assert (held_bytes([root]) or 0) <= MIB
        assert set(ask(tier, engine, engine.prompt(39, 12))) == {DONE}


def test_growth_reaches_a_plateau(tmp_path, engine):
    root = tmp_path / "pool"
    config = pool_config(root, capacity_bytes=MIB, segment_bytes=64 * KIB)
    with PoolTier.open(config, engine.identity) as tier:
        server = ToyServer(engine, tier)
        held = []
        for seed in range(100):
            server.ask(engine.prompt(seed, 8))
            held.append(held_bytes([root]) or 0)
        assert max(held) <= MIB
        assert min(held[50:]) > MIB // 2
    folders = [path for path in root.rglob("*") if path.is_dir()]
    assert len(folders) <= 8


def test_along_a_chain_the_suffix_goes_before_its_prefix(tmp_path, engine):
    """Stored in several calls, then squeezed: what is left of a prompt is its head."""
    root = tmp_path / "pool"
    config = pool_config(root, capacity_bytes=MIB, segment_bytes=32 * KIB)
    with PoolTier.open(config, engine.identity) as tier:
        for seed in range(24):
            tokens = engine.prompt(seed, 12)
            for end in (4, 8, 12):
                put(tier, engine, tokens[: end * engine.block_tokens])
        kept = 0
        for seed in range(24):
            keys = engine.keys(engine.prompt(seed, 12))
            present = [tier.lookup([key]) for key in keys]
            assert present == sorted(present, reverse=True), f"a gap in prompt {seed}: {present}"
            kept += sum(present)
        assert kept > 96


def simulated(engine, **settings):
    """A pool without threads, and the clock that it and its disk go by."""
    clock = FakeClock()
    disk = SimDisk(clock=clock)
    config = pool_config("/simulated", **settings)
    tiers = [
        PoolTier.open(config, engine.identity, disks=[handle], clock=clock, has_threads=False)
        for handle in (disk, disk.attach())
    ]
    return clock, *tiers


def put_now(tier, engine, tokens):
    job = tier.store(engine.writes(tokens))
    tier.run_pending(flush=True)
    return job.outcomes


def test_storing_a_suffix_does_not_evict_its_own_prefix(engine):
    """The prefix was stored long ago and used just now, which only this process's memory knows."""
    settings = {"capacity_bytes": 160 * KIB, "segment_bytes": 20 * KIB}
    clock, tier, _ = simulated(engine, **settings)
    tokens = engine.prompt(0, 6)
    put_now(tier, engine, tokens[: 3 * engine.block_tokens])
    for seed in range(1, 8):
        clock.advance(10.0)
        put_now(tier, engine, engine.prompt(seed, 3))
    assert tier.usage().used_bytes > 140 * KIB
    clock.advance(10.0)
    assert set(put_now(tier, engine, tokens)) == {DONE}
    assert tier.counters.snapshot()["segments_evicted_total"] > 0
    assert tier.lookup(engine.keys(tokens)) == 6


def test_a_late_look_finds_what_came_within_the_tick_of_the_last_one(engine):
    # a long lease, so that no look at everything comes in between
    clock, tier, other = simulated(engine, lease_s=180.0)
    put_now(tier, engine, engine.prompt(1, 3))
    other.tick()
    put_now(tier, engine, engine.prompt(2, 3))  # the folder's time is the same still
    clock.advance(5.0)
    other.tick()
    for seed in (1, 2):
        assert other.lookup(engine.keys(engine.prompt(seed, 3))) == 3


@pytest.mark.parametrize("capacity", [0, 1, 4096, 12_287])
def test_a_capacity_that_holds_no_block_is_refused(tmp_path, engine, capacity):
    with pytest.raises((ConfigError, PoolFull), match="capacity"):
        PoolTier.open(pool_config(tmp_path / "pool", capacity_bytes=capacity), engine.identity)


def test_two_instances_that_evict_at_once(tmp_path, engine):
    """Every file is deleted once, nobody stumbles over a missing one, both counts converge."""
    root = tmp_path / "pool"
    config = pool_config(
        root, capacity_bytes=512 * KIB, segment_bytes=32 * KIB, discover_interval_s=0.02
    )
    errors: list[BaseException] = []

    def serve(tier, first):
        try:
            server = ToyServer(engine, tier)
            for seed in range(first, first + 60):
                server.ask(engine.prompt(0, 2) + engine.prompt(seed % 40 + 1, 6))
        except BaseException as error:  # noqa: BLE001
            errors.append(error)

    with (
        PoolTier.open(config, engine.identity) as one,
        PoolTier.open(config, engine.identity) as two,
    ):
        threads = [
            threading.Thread(target=serve, args=arguments) for arguments in ((one, 0), (two, 20))
        ]
        for thread in threads:
            thread.start()
        while any(thread.is_alive() for thread in threads):
            assert (held_bytes([root]) or 0) <= 512 * KIB
            time.sleep(0.005)
        assert errors == []
        held = sum(path.stat().st_size for path in segment_files(root))
        assert eventually(lambda: {tier.usage().used_bytes for tier in (one, two)} == {held})
        evicted = [tier.counters.snapshot()["segments_evicted_total"] for tier in (one, two)]
        published = [tier.counters.snapshot()["segments_published_total"] for tier in (one, two)]
        assert sum(published) - sum(evicted) == len(segment_files(root))
    assert tmp_files(root) == []


BUSY = """
import sys
from kvdepot.pool.tier import PoolTier
from kvdepot.testing.toy import ToyEngine
from tests.pool_rig import pool_config, put
engine = ToyEngine((4096,))
config = pool_config(sys.argv[1], capacity_bytes=1 << 20, segment_bytes=64 << 10)
tier = PoolTier.open(config, engine.identity)
print("open", flush=True)
for seed in range(100, 1_000_000):
    put(tier, engine, engine.prompt(seed, 6))
"""


def test_a_process_that_is_stopped_in_the_middle(tmp_path, engine):
    """SIGSTOP may hit it while it cleans: the others drop stores rather than overrun or wait."""
    root = tmp_path / "pool"
    prelude = f"import sys; sys.path[:0] = [{str(SOURCE)!r}, {str(ROOT)!r}]\n"
    child = subprocess.Popen(
        [sys.executable, "-c", prelude + BUSY, str(root)], stdout=subprocess.PIPE, text=True
    )
    config = pool_config(root, capacity_bytes=MIB, segment_bytes=64 * KIB)
    try:
        assert child.stdout is not None
        assert child.stdout.readline() == "open\n"
        for _ in range(5):
            time.sleep(0.2)
            child.send_signal(signal.SIGSTOP)
            with PoolTier.open(config, engine.identity) as tier:
                for seed in range(4):
                    # whoever waited for the one that stands would wait without an end
                    assert set(put(tier, engine, engine.prompt(seed, 6))) <= {DONE, DROPPED}
                    ask(tier, engine, engine.prompt(seed, 6))
                assert (held_bytes([root]) or 0) <= MIB
            child.send_signal(signal.SIGCONT)
    finally:
        child.kill()
        child.communicate()
    with PoolTier.open(config, engine.identity) as tier:
        assert set(put(tier, engine, engine.prompt(50, 6))) == {DONE}
        assert set(ask(tier, engine, engine.prompt(50, 6))) == {DONE}
