"""`kvdepot.pool.root`, `kvdepot.pool.reservation`, `kvdepot.pool.segment_table` and `kvdepot.restore`,
where other tests do not go: claims of several writers, a pool deleted while in use, crowded folders,
wrong clocks, uses of prefixes.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from kvdepot.clock import SystemClock
from kvdepot.errors import ConfigError, PoolFull, PoolUnavailable
from kvdepot.io.localdisk import LocalDisk
from kvdepot.metrics import Counters
from kvdepot.pool import lease as lease_module
from kvdepot.pool import root as root_module
from kvdepot.pool.lease import LeaseHolder, LeaseWatch
from kvdepot.pool.root import Root
from kvdepot.pool.tier import PoolTier
from kvdepot.testing.simclock import FakeClock
from kvdepot.testing.toy import ToyEngine
from kvdepot.tiers import Outcome
from tests.pool_rig import pool_config, segment_files, tmp_files
from tests.tries import eventually


class NoListener:
    def segment_added(self, root, entry) -> None: ...
    def segment_removed(self, root, entry) -> None: ...
    def parents_of_segments(self, root):
        return {}

    def bad_segments(self, root):
        return []


@pytest.fixture
def engine() -> ToyEngine:
    return ToyEngine((4096,))


def open_root(folder: Path, engine: ToyEngine, **settings) -> Root:
    root = Root(
        LocalDisk(folder),
        pool_config(folder, **settings),
        engine.identity,
        clock=SystemClock(),
        counters=Counters(),
        listener=NoListener(),
    )
    root.start(index_s=1)
    return root


def test_two_writers_claims_never_add_up_to_more_than_the_capacity(
    tmp_path: Path, engine: ToyEngine
) -> None:
    size = 64 * 1024
    ours = open_root(tmp_path, engine, capacity_bytes=8 * size)
    theirs = open_root(tmp_path, engine, capacity_bytes=8 * size)
    taken = [root.admit(size) for root in (ours, theirs) * 4]
    for root in (ours, theirs):
        with pytest.raises(PoolFull, match="no room"):
            root.admit(size)
    assert sum(path.stat().st_size for path in tmp_files(tmp_path)) == 8 * size
    ours.withdraw(taken[0])
    assert theirs.admit(size).length_bytes == size
    for root in (ours, theirs):
        root.close()


def test_a_writer_name_is_its_own(tmp_path: Path, engine: ToyEngine) -> None:
    roots = [open_root(tmp_path, engine) for _ in range(5)]
    assert len({root.writer for root in roots}) == 5
    for root in roots:
        root.close()
        root.close()
    assert list((tmp_path / "lease").iterdir()) == []


def test_a_pool_deleted_while_in_use_begins_anew(tmp_path: Path, engine: ToyEngine) -> None:
    place = tmp_path / "pool"
    config = pool_config(place)
    tokens = engine.prompt(1, 8)
    with PoolTier.open(config, engine.identity) as tier:
        tier.store(engine.writes(tokens))
        assert tier.drain(60)
        shutil.rmtree(place)
        assert eventually(lambda: tier.lookup(engine.keys(tokens)) == 0)
        reads = engine.reads(tokens)
        job = tier.load(reads)
        assert job.wait(60)
        assert set(job.outcomes) == {Outcome.MISS}
        assert eventually((place / "pool.json").exists)
        tier.store(engine.writes(tokens))
        assert tier.drain(60)
        assert tier.lookup(engine.keys(tokens)) == 8
    with PoolTier.open(config, engine.identity) as tier:
        assert tier.lookup(engine.keys(tokens)) == 8
        reads = engine.reads(tokens)
        job = tier.load(reads)
        assert job.wait(60)
        engine.check(reads, job.outcomes)


def test_a_crowded_folder_gets_a_successor(
    tmp_path: Path, engine: ToyEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(root_module, "_FOLDER_ENTRIES_MAX", 3)
    # a clock that stands still, so that no hour ends in the middle
    config = pool_config(tmp_path)
    with PoolTier.open(config, engine.identity, clock=FakeClock(), has_threads=False) as tier:
        for seed in range(10):
            tier.store(engine.writes(engine.prompt(seed, 1)))
            tier.run_pending(flush=True)
    folders = {path.parent.name for path in segment_files(tmp_path)}
    assert len(folders) == 4
    assert all(len(list((tmp_path / "ns").glob(f"*/{name}/*"))) <= 3 for name in folders)
    with PoolTier.open(config, engine.identity) as tier:
        for seed in range(10):
            assert tier.lookup(engine.keys(engine.prompt(seed, 1))) == 1


@pytest.mark.parametrize("wall_s", [-1e9, 0, 4e9, 253402300800 + 1e9])
def test_a_wrong_clock_does_not_hide_segments(
    tmp_path: Path, engine: ToyEngine, wall_s: float
) -> None:
    clock = FakeClock()
    clock.set_wall(wall_s)
    tokens = engine.prompt(1, 4)
    with (
        PoolTier.open(pool_config(tmp_path), engine.identity) as reader,
        PoolTier.open(
            pool_config(tmp_path), engine.identity, clock=clock, has_threads=False
        ) as writer,
    ):
        writer.store(engine.writes(tokens))
        writer.run_pending(flush=True)
        assert eventually(lambda: reader.lookup(engine.keys(tokens)) == 4)


def test_an_orphaned_claim_is_removed_later(
    tmp_path: Path, engine: ToyEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A claim counts against everybody; a short error while it is removed must not keep it for ever."""
    root = open_root(tmp_path, engine)
    reservation = root.admit(64 * 1024)

    def refuse(name: str) -> bool:
        raise PoolUnavailable("EIO")

    with monkeypatch.context() as patch:
        patch.setattr(root.disk, "remove", refuse)
        root.withdraw(reservation)
        assert len(tmp_files(tmp_path)) == 1
    root.tick()
    assert tmp_files(tmp_path) == []
    root.close()


def test_a_folder_under_two_names_is_refused(tmp_path: Path, engine: ToyEngine) -> None:
    (tmp_path / "pool").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "pool")
    with pytest.raises(ConfigError, match="the same pool"):
        PoolTier.open(pool_config(tmp_path / "pool", tmp_path / "link"), engine.identity)
    assert list((tmp_path / "pool" / "lease").glob("*")) == []


def test_chains_are_known_again_after_a_restart(tmp_path: Path, engine: ToyEngine) -> None:
    """Segments are read newest first, so a parent's segment is found after its child's."""
    tokens = engine.prompt(1, 4)
    config = pool_config(tmp_path, segment_bytes=3 * 4096)
    with PoolTier.open(config, engine.identity) as tier:
        for write in engine.writes(tokens):
            tier.store([write])
            assert tier.drain(60)
    with PoolTier.open(config, engine.identity) as tier:
        (root,) = tier.roots
        found = tier._table.parents_of_segments(root)
        by_sequence = {
            entry.name.sequence: [parent.name.sequence for parent in parents]
            for entry, parents in found.items()
        }
    assert by_sequence == {1: [], 2: [1], 3: [2], 4: [3]}


def test_without_a_boot_id_nobody_is_of_the_same_boot(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two hosts that cannot say their boot id must not take each other's free locks for deaths."""
    monkeypatch.setattr(lease_module, "host_boot_id", lambda: "")
    clock = FakeClock()
    disk = LocalDisk(tmp_path)
    holder = LeaseHolder(disk, "a" * 16, holder="a" * 16, pid=1)
    holder.release()
    (tmp_path / "lease" / ("a" * 16 + ".lease")).write_bytes(
        b'{"holder":"a","boot_id":"","pid":1,"beats":0}'
    )
    watch = LeaseWatch(disk, clock, lease_s=30)
    assert not watch.is_dead("a" * 16)
    clock.advance(29)
    assert not watch.is_dead("a" * 16)
    clock.advance(2)
    assert watch.is_dead("a" * 16)


def test_uses_are_written_down_prefix_last(tmp_path: Path, engine: ToyEngine) -> None:
    """So that another process, which knows only mtimes, also drops the suffix before its prefix."""
    tokens = engine.prompt(1, 6)
    config = pool_config(tmp_path, segment_bytes=3 * 4096)
    with PoolTier.open(config, engine.identity) as tier:
        for write in engine.writes(tokens):
            tier.store([write])
            assert tier.drain(60)
        paths = sorted(segment_files(tmp_path), key=lambda path: path.name)
        assert len(paths) == 6
        for path in paths:
            os.utime(path, ns=(1, 1))
        tier.touch(engine.keys(tokens))
    times = [path.stat().st_mtime_ns for path in paths]
    assert min(times) > 1
    assert times == sorted(times, reverse=True)
