"""Loads are read in the order in which they were asked for, however many threads read.

An engine asks for a prompt's first layers first and waits for them while the others load. Threads that
each planned a load of their own once put the rest of the first load behind all the others, and the
engine waited until nearly everything was there.
"""

from __future__ import annotations

import time

import pytest

from kvdepot.config import PoolConfig
from kvdepot.io.buffers import aligned_bytes
from kvdepot.keys import BlockKey, block_keys, root_key
from kvdepot.pool.index import BlockIndex
from kvdepot.pool.read_queue import Task
from kvdepot.pool.reader import Reader
from kvdepot.pool.tier import PoolTier
from kvdepot.tiers import Outcome, Read, Write
from tests.identities import IDENTITY

BLOCK_BYTES = 4096
LOADS = 4
#: more than one step of planning
BLOCKS = 300


@pytest.fixture
def chains(tmp_path):
    """A pool with a few long chains, and their keys."""
    digest = IDENTITY.digest()
    root = root_key(digest)
    found: list[list[BlockKey]] = []
    with PoolTier.open(PoolConfig.of(str(tmp_path / "pool")), IDENTITY) as tier:
        for number in range(LOADS):
            keys = block_keys(digest, [number + 1] * (16 * BLOCKS), 16)
            data = aligned_bytes(BLOCK_BYTES)
            writes = [
                Write(key, parent, data, 16)
                for key, parent in zip(keys, [root, *keys[:-1]], strict=True)
            ]
            assert tier.store(writes).wait_settled(30)
            found.append(keys)
        assert tier.drain(30)
    return tmp_path / "pool", found


def test_units_wait_in_the_order_of_the_loads(chains, monkeypatch):
    pool, keys = chains
    taken = []
    take, locate = Reader._take, BlockIndex.locate

    def noted(self):
        # called with the reader's lock held, so the order is the true one
        work = take(self)
        if isinstance(work, Task):
            taken.append((work.unit.job, work.unit.first))
        return work

    def slow(self, *args):
        time.sleep(0.005)  # long enough for the other threads to find the other loads
        return locate(self, *args)

    monkeypatch.setattr(Reader, "_take", noted)
    monkeypatch.setattr(BlockIndex, "locate", slow)
    config = PoolConfig.of(str(pool), read_unit_bytes=16 * BLOCK_BYTES, read_threads=4)
    with PoolTier.open(config, IDENTITY) as tier:
        jobs = [
            tier.load([Read(key, aligned_bytes(BLOCK_BYTES)) for key in chain]) for chain in keys
        ]
        for job in jobs:
            assert job.wait_settled(30)
            assert set(job.outcomes) == {Outcome.DONE}
    order = [(jobs.index(job), first) for job, first in taken]
    assert {load for load, _ in order} == set(range(LOADS))
    assert order == sorted(order)


def test_a_load_that_cannot_be_planned_does_not_stop_the_next_one(chains, monkeypatch):
    pool, keys = chains
    locate = BlockIndex.locate

    def broken(self, wanted):
        if keys[0][0] in wanted:
            raise RuntimeError("a bug")
        return locate(self, wanted)

    monkeypatch.setattr(BlockIndex, "locate", broken)
    with PoolTier.open(PoolConfig.of(str(pool)), IDENTITY) as tier:
        bad, good = (
            tier.load([Read(key, aligned_bytes(BLOCK_BYTES)) for key in chain])
            for chain in keys[:2]
        )
        assert bad.wait_settled(30)
        assert good.wait_settled(30)
    assert set(bad.outcomes) == {Outcome.FAILED}
    assert set(good.outcomes) == {Outcome.DONE}
