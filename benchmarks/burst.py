"""Sixteen sessions return at once: read in order against read all at once, at equal bytes and bandwidth.

The disk is slowed to a fixed rate, so that both arms move the same bytes at the same bandwidth and only
the order differs. "At once" asks for the sessions' blocks in turn, as one thread per session does; "in
order" asks for each session's blocks as one load, all sixteen at the same moment.
"""

from __future__ import annotations

import statistics
import time
from functools import partial
from pathlib import Path
from typing import Any

from common import WorkFolder, environment, interleave, parser, report

from kvdepot.config import PoolConfig
from kvdepot.io.buffers import HostBuffer
from kvdepot.io.localdisk import LocalDisk
from kvdepot.keys import BlockKey, block_keys, root_key
from kvdepot.pool.tier import PoolTier
from kvdepot.testing.faults import FaultDisk, FaultPlan
from kvdepot.testing.toy import toy_identity
from kvdepot.tiers import Job, Read, Write

SESSIONS = 16
BLOCKS = 64
BLOCK_BYTES = 256 * 1024
#: of the slowed disk
_BYTES_PER_S = 400e6


class Burst:
    """A pool with the sessions' blocks, on a disk of fixed bandwidth."""

    def __init__(self, folder: Path) -> None:
        self.identity = toy_identity([BLOCK_BYTES])
        self.faults = FaultPlan()
        # one unit is one block, so that both arms make the same calls
        config = PoolConfig.of(str(folder), read_unit_bytes=BLOCK_BYTES, capacity_bytes=1 << 32)
        disks = [FaultDisk(LocalDisk(folder), self.faults)]
        self.tier = PoolTier.open(config, self.identity, disks=disks)
        self.rows = HostBuffer(SESSIONS * BLOCKS * BLOCK_BYTES, is_prefaulted=True)
        digest = self.identity.digest()
        self.chains: list[list[BlockKey]] = []
        for session in range(SESSIONS):
            keys = block_keys(digest, [session] * (16 * BLOCKS), 16)
            parents = [root_key(digest), *keys[:-1]]
            self.tier.store(
                [Write(k, p, self._row(0, 0), 16) for k, p in zip(keys, parents, strict=True)]
            ).wait_settled(60)
            self.chains.append(keys)
        if not self.tier.drain(60):
            raise RuntimeError("the sessions could not be stored")
        self.faults.throttle("read", _BYTES_PER_S)

    def _row(self, session: int, block: int) -> memoryview:
        start = (session * BLOCKS + block) * BLOCK_BYTES
        return self.rows.memory[start : start + BLOCK_BYTES]

    def _read(self, session: int, block: int) -> Read:
        return Read(self.chains[session][block], self._row(session, block))

    def in_order(self) -> list[float]:
        """Seconds until each session has all its blocks; each is one load."""
        began_s = time.monotonic()
        jobs = [
            [self.tier.load([self._read(session, block) for block in range(BLOCKS)])]
            for session in range(SESSIONS)
        ]
        return self._waited(jobs, began_s)

    def at_once(self) -> list[float]:
        """The same with the sessions' blocks in turn."""
        began_s = time.monotonic()
        jobs: list[list[Job]] = [[] for _ in range(SESSIONS)]
        for block in range(BLOCKS):
            for session in range(SESSIONS):
                jobs[session].append(self.tier.load([self._read(session, block)]))
        return self._waited(jobs, began_s)

    @staticmethod
    def _waited(jobs: list[list[Job]], began_s: float) -> list[float]:
        ends: list[float] = []
        for session in jobs:
            for job in session:
                if not job.wait_settled(120):
                    raise RuntimeError("a load did not end")
            ends.append(max(job.finished_s or 0.0 for job in session) - began_s)
        return sorted(ends)


def main() -> None:
    arguments = parser(__doc__ or "").parse_args()
    with WorkFolder(arguments.folder) as folder:
        burst = Burst(folder / "pool")
        runs: dict[str, list[list[float]]] = {"in_order": [], "at_once": []}

        def arm(name: str) -> float:
            runs[name].append(getattr(burst, name)())
            return runs[name][-1][-1]

        interleave({name: partial(arm, name) for name in runs}, arguments.repeats)
        burst.tier.close()
        medians = {
            name: statistics.median(statistics.median(each) for each in found)
            for name, found in runs.items()
        }
        last = {name: statistics.median(each[-1] for each in found) for name, found in runs.items()}
        result: dict[str, Any] = {
            "benchmark": "burst",
            "sessions": SESSIONS,
            "bytes_per_session": BLOCKS * BLOCK_BYTES,
            "median_s": {name: round(value, 4) for name, value in medians.items()},
            "last_s": {name: round(value, 4) for name, value in last.items()},
            "median_ratio": round(medians["in_order"] / medians["at_once"], 3),
            "last_ratio": round(last["in_order"] / last["at_once"], 3),
            "environment": environment(folder),
        }
    report(result, arguments.out)


if __name__ == "__main__":
    main()
