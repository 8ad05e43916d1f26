"""What a process has learned is there for the next one, and never in anybody's way."""

from __future__ import annotations

import errno

import pytest

from kvdepot.depot import Depot
from kvdepot.io.localdisk import LocalDisk
from kvdepot.keys import root_key
from kvdepot.pool.notebook import Notebook
from kvdepot.pool.tier import PoolTier
from kvdepot.testing.faults import FaultDisk, FaultPlan
from kvdepot.testing.toy import ToyEngine
from tests.pool_rig import pool_config

NAMESPACE = "ab" * 32


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "ns" / NAMESPACE).mkdir(parents=True)
    (tmp_path / "tmp").mkdir()
    return tmp_path


def notes(folder):
    return sorted(path.name for path in (folder / "ns" / NAMESPACE).iterdir())


def test_the_last_note_is_read(folder):
    disk = LocalDisk(folder)
    book = Notebook(disk, NAMESPACE)
    assert book.read() is None
    book.write()
    assert notes(folder) == []
    for text in (b"one", b"two"):
        book.keep(text)
        book.write()
    assert Notebook(disk, NAMESPACE).read() == b"two"
    assert notes(folder) == ["costs-00000002.json"]
    assert list((folder / "tmp").iterdir()) == []


def test_foreign_files_are_neither_read_nor_removed(folder):
    place = folder / "ns" / NAMESPACE
    for name in ("costs-1.json", "costs-00000001.json.bak", "identity.json"):
        (place / name).write_bytes(b"theirs")
    book = Notebook(LocalDisk(folder), NAMESPACE)
    assert book.read() is None
    book.keep(b"ours")
    book.write()
    assert len(notes(folder)) == 4


def test_a_storage_that_refuses_loses_the_note_and_nothing_else(folder):
    plan = FaultPlan()
    disk = FaultDisk(LocalDisk(folder), plan)
    book = Notebook(disk, NAMESPACE)
    plan.fail("files", errno.EIO)
    assert book.read() is None
    plan.clear()
    plan.fail("publish", errno.EIO)
    book.keep(b"text")
    with pytest.raises(Exception, match="EIO"):
        book.write()
    plan.clear()
    book.write()
    assert notes(folder) == []


def test_a_note_is_small(folder):
    with pytest.raises(ValueError, match="too long"):
        Notebook(LocalDisk(folder), NAMESPACE).keep(bytes(1 << 20))


def test_a_restart_knows_the_costs(tmp_path):
    engine = ToyEngine([4096])
    tokens = engine.prompt(1, 8)

    def cut(group, index, row):
        row[:] = engine.block(tokens, index, group)

    def opened():
        return Depot.open(engine.identity, pool=pool_config(tmp_path / "p"), host_bytes=1 << 20)

    with opened() as depot:
        assert not depot.policies.cost.knows_prefill
        depot.computed(128, 0, 1.28)
        depot.store(engine.keys(tokens), root_key(engine.digest), cut, tokens=16)
        assert depot.drain(10)
    with opened() as depot:
        assert depot.policies.cost.prefill_s(1000) == pytest.approx(10.0, rel=0.05)
        assert depot.lookup(engine.keys(tokens)).blocks == 8


def test_a_note_that_is_no_state_is_found_out_anew(tmp_path):
    engine = ToyEngine([4096])
    with PoolTier.open(pool_config(tmp_path / "p"), engine.identity) as tier:
        tier.remember(b"{nonsense")
    with Depot.open(engine.identity, pool=pool_config(tmp_path / "p"), host_bytes=1 << 20) as depot:
        assert not depot.policies.cost.knows_prefill


def test_a_worker_process_passes_notes_on(tmp_path):
    engine = ToyEngine([4096])
    config = pool_config(tmp_path / "p")

    def opened():
        return Depot.open(engine.identity, pool=config, host_bytes=1 << 20, io="process")

    with opened() as depot:
        depot.computed(128, 0, 1.28)
    with opened() as depot:
        assert depot.policies.cost.prefill_s(1000) == pytest.approx(10.0, rel=0.05)
