"""A depot over a pool whose disk has faults, with the toy engine as the oracle of the bytes."""

from __future__ import annotations

import time
from typing import Self

from kvdepot import chunks, plans
from kvdepot.clock import SystemClock
from kvdepot.config import PoolConfig
from kvdepot.depot import Depot
from kvdepot.host import HostRows
from kvdepot.io.localdisk import LocalDisk
from kvdepot.keys import root_key
from kvdepot.metrics import Counters
from kvdepot.policy.policies import Policies
from kvdepot.policy.reasons import Reason
from kvdepot.pool.tier import PoolTier
from kvdepot.testing.faults import FaultDisk, FaultPlan
from kvdepot.testing.toy import ToyEngine
from tests.pool_rig import pool_config

BLOCKS = 32
GROUPS = (4096, 8192)


class Rig:
    """A depot on a disk with faults, whose engine takes `token_s` for a token.

    Computing takes so long that a load pays even where a busy machine has stood still in it.
    """

    def __init__(
        self, folder, engine: ToyEngine, *, token_s: float = 0.1, rows: int = 64, **policies
    ):
        self.engine = engine
        self.faults = FaultPlan()
        config: PoolConfig = pool_config(folder)
        counters = Counters()
        disks = [FaultDisk(LocalDisk(folder), self.faults)]
        pool = PoolTier.open(config, engine.identity, disks=disks, counters=counters)
        hosts = [HostRows(length, rows * 8192) for length in GROUPS]
        self.depot = Depot(
            engine.identity,
            pool,
            hosts,
            counters=counters,
            clock=SystemClock(),
            policies=Policies(**policies),
        )
        for tokens in (64, 256, 1024):
            self.depot.computed(tokens, 0, token_s * tokens)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_):
        self.faults.clear()
        self.depot.close()

    def store(self, tokens, **settings) -> int:
        def cut(group, index, row):
            row[:] = self.engine.block(tokens, index, group)

        root = root_key(self.engine.digest)
        return self.depot.store(self.engine.keys(tokens), root, cut, tokens=16, **settings)

    def plan(self, tokens, **settings) -> plans.Plan:
        return self.depot.plan(self.engine.keys(tokens), prompt_tokens=len(tokens), **settings)

    def read(self, found: chunks.ChunkRestore, tokens, *, timeout_s: float = 60.0) -> list[int]:
        """All blocks that come, checked; their numbers in the order of their coming."""
        came: list[int] = []
        give_up_at = time.monotonic() + timeout_s
        while not found.is_over and time.monotonic() < give_up_at:
            chunk = found.poll()
            if chunk is None:
                found.wait(0.05)
                continue
            for group, rows in enumerate(chunk.rows):
                for index, row in enumerate(rows):
                    assert row == self.engine.block(tokens, chunk.first + index, group)
            came += range(chunk.first, chunk.first + chunk.blocks)
        return came

    def wait_until_planned(self, tokens, *, timeout_s: float = 60.0) -> bool:
        """Until requests get the whole prefix again, as they come ten times a second."""
        give_up_at = time.monotonic() + timeout_s
        while time.monotonic() < give_up_at:
            plan = self.plan(tokens)
            if plan.blocks == BLOCKS:
                return True
            self.depot.finished(plan, reused_blocks=plan.blocks, load_s=0.0)
            time.sleep(0.1)
        return False

    def ended(self, reason: Reason) -> int:
        return self.depot.counters()[f"reuse_ended_{reason.value}_total"]
