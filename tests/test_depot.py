"""The depot over real tiers: what it stores it gives back, group by group, whatever the host buffer's size.

The toy engine is the oracle: it recomputes the right bytes of every block.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from kvdepot.depot import Depot
from kvdepot.errors import ConfigError, IdentityUnknown
from kvdepot.identity import UNDETERMINED
from kvdepot.keys import root_key
from kvdepot.testing.toy import ToyEngine, toy_identity
from kvdepot.units import MIB
from tests.pool_rig import pool_config, segment_files
from tests.tries import eventually

BLOCKS = 24
GROUPS = (4096, 8192, 5120)


@pytest.fixture
def engine() -> ToyEngine:
    return ToyEngine(GROUPS)


def store(depot: Depot, engine: ToyEngine, tokens: list[int], blocks: int = BLOCKS) -> int:
    def cut(group: int, index: int, row: memoryview) -> None:
        row[:] = engine.block(tokens, index, group)

    keys = engine.keys(tokens)[:blocks]
    return depot.store(keys, root_key(engine.identity.digest()), cut, tokens=16)


def restored(depot: Depot, engine: ToyEngine, tokens: list[int], blocks: int = BLOCKS) -> list[int]:
    """Restore and check every byte; how many blocks of each group came."""
    restore = depot.restore(engine.keys(tokens)[:blocks])
    counts = []
    for group, length in enumerate(GROUPS):
        row_bytes = depot.hosts[group].row_bytes
        count = 0
        for first, number, memory in restore.runs(group):
            assert first == count
            for i in range(number):
                data = memory[i * row_bytes : i * row_bytes + length]
                assert data == engine.block(tokens, first + i, group)
            count += number
        counts.append(count)
    restore.release()
    return counts


def open_depot(root: Path, engine: ToyEngine, host_bytes: int = MIB) -> Depot:
    return Depot.open(engine.identity, pool=pool_config(root), host_bytes=host_bytes)


def test_another_process_gets_every_byte_from_the_disk(tmp_path: Path, engine: ToyEngine) -> None:
    tokens = engine.prompt(1, BLOCKS)
    with open_depot(tmp_path / "p", engine) as depot:
        assert depot.lookup(engine.keys(tokens)).blocks == 0
        assert store(depot, engine, tokens) == BLOCKS * len(GROUPS)
        assert depot.lookup(engine.keys(tokens)).tiers == ("host",) * BLOCKS
        assert store(depot, engine, tokens) == 0
        assert depot.drain(60)
    with open_depot(tmp_path / "p", engine) as depot:
        hit = depot.lookup(engine.keys(tokens))
        assert hit == (BLOCKS, ("disk",) * BLOCKS)
        assert restored(depot, engine, tokens) == [BLOCKS] * len(GROUPS)
        assert depot.counters()["load_bytes_total"] == BLOCKS * sum(GROUPS)
        # and the next time from memory
        assert depot.lookup(engine.keys(tokens)).tiers == ("host",) * BLOCKS
        assert restored(depot, engine, tokens) == [BLOCKS] * len(GROUPS)
        assert depot.counters()["load_bytes_total"] == BLOCKS * sum(GROUPS)


@pytest.mark.parametrize("rows", [1, 2, 3, 7, 23])
def test_a_host_buffer_smaller_than_the_request_serves_it(
    tmp_path: Path, engine: ToyEngine, rows: int
) -> None:
    tokens = engine.prompt(2, BLOCKS)
    with open_depot(tmp_path / "p", engine) as depot:
        store(depot, engine, tokens)
        assert depot.drain(60)
    host_bytes = rows * (4096 + 8192 + 8192)
    with open_depot(tmp_path / "p", engine, host_bytes) as depot:
        for _ in range(2):
            assert restored(depot, engine, tokens) == [BLOCKS] * len(GROUPS)
        free, clean, used = depot.hosts[0].counts()
        assert used == 0
        assert free + clean == depot.hosts[0].row_count


def test_a_missing_block_of_one_group_ends_the_prefix(tmp_path: Path, engine: ToyEngine) -> None:
    tokens = engine.prompt(3, BLOCKS)
    with open_depot(tmp_path / "p", engine) as depot:
        store(depot, engine, tokens)
        assert depot.drain(60)
    for path in segment_files(tmp_path / "p"):
        # the payloads of the last blocks of the last group lie last
        content = bytearray(path.read_bytes())
        content[len(content) - 4096 - 8192 + 7] ^= 1
        path.write_bytes(content)
    with open_depot(tmp_path / "p", engine) as depot:
        assert depot.lookup(engine.keys(tokens)).blocks == BLOCKS
        counts = restored(depot, engine, tokens)
        assert min(counts) < BLOCKS
        assert depot.lookup(engine.keys(tokens)).blocks == min(counts)
        # what was damaged is stored anew and then whole again
        assert store(depot, engine, tokens) >= 1
        assert depot.lookup(engine.keys(tokens)).blocks == BLOCKS


def test_an_exception_while_cutting_gives_the_rows_back(tmp_path: Path, engine: ToyEngine) -> None:
    tokens = engine.prompt(4, BLOCKS)
    with open_depot(tmp_path / "p", engine) as depot:

        def cut(group: int, index: int, row: memoryview) -> None:
            if index == 5:
                raise RuntimeError("the engine failed")
            row[:] = engine.block(tokens, index, group)

        with pytest.raises(RuntimeError, match="the engine failed"):
            depot.store(engine.keys(tokens), root_key(engine.identity.digest()), cut, tokens=16)
        assert depot.hosts[0].counts()[2] == 0
        assert depot.lookup(engine.keys(tokens)).blocks == 0
        assert store(depot, engine, tokens) == BLOCKS * len(GROUPS)


def test_a_released_restore_gives_all_rows_back(tmp_path: Path, engine: ToyEngine) -> None:
    tokens = engine.prompt(5, BLOCKS)
    with open_depot(tmp_path / "p", engine) as depot:
        store(depot, engine, tokens)
        assert depot.drain(60)
    with open_depot(tmp_path / "p", engine) as depot:
        restore = depot.restore(engine.keys(tokens))
        next(iter(restore.runs(0)))
        restore.release()
        restore.release()
        assert depot.drain(60)

        def is_all_back():
            depot.drain(1)
            return all(host.counts()[2] == 0 for host in depot.hosts)

        assert eventually(is_all_back)


def test_without_a_pool_the_host_tier_serves(engine: ToyEngine) -> None:
    tokens = engine.prompt(6, 4)
    with Depot.open(engine.identity, pool=None, host_bytes=MIB) as depot:
        assert store(depot, engine, tokens, 4) == 4 * len(GROUPS)
        assert depot.lookup(engine.keys(tokens)) == (4, ("host",) * 4)
        assert restored(depot, engine, tokens, 4) == [4] * len(GROUPS)


def test_an_unknown_identity_and_a_tiny_buffer_are_errors_at_open(
    tmp_path: Path, engine: ToyEngine
) -> None:
    unknown = toy_identity(GROUPS, weights_fingerprint=UNDETERMINED)
    with pytest.raises(IdentityUnknown, match="weights_fingerprint"):
        Depot.open(unknown, pool=pool_config(tmp_path / "p"), host_bytes=MIB)
    assert not (tmp_path / "p").exists()
    with pytest.raises(ConfigError, match="does not hold one block"):
        open_depot(tmp_path / "p", engine, host_bytes=4096)
