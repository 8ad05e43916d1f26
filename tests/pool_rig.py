"""Pools for tests: small, on any disk, and looked at from outside."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

from kvdepot.clock import SystemClock
from kvdepot.config import PoolConfig
from kvdepot.io.disk import Disk
from kvdepot.io.localdisk import LocalDisk
from kvdepot.keys import BlockKey
from kvdepot.pool.catalog import Catalog
from kvdepot.pool.segments import read_records
from kvdepot.pool.tier import PoolTier
from kvdepot.testing.damage import flip_byte
from kvdepot.testing.faults import FaultDisk, FaultPlan
from kvdepot.testing.subject import TierSubject
from kvdepot.testing.toy import ToyEngine
from kvdepot.tiers import Outcome
from kvdepot.units import KIB, MIB

VERBS = (
    "create",
    "open",
    "read_small",
    "publish",
    "remove",
    "files",
    "touch",
    "space",
    "lock",
    "read",
    "write",
    "truncate",
    "sync",
    "beat",
    "release",
)


def pool_config(*roots: str | Path, **settings: Any) -> PoolConfig:
    """A small quick pool that asks nothing of the machine's free space."""
    defaults: dict[str, Any] = {
        "capacity_bytes": 64 * MIB,
        "free_bytes_min": 0,
        "free_inodes_min": 0,
        "segment_bytes": 256 * KIB,
        "segment_age_s": 0.2,
        "discover_interval_s": 0.1,
        "lease_s": 1.0,
        "read_threads": 2,
        "write_threads": 1,
    }
    return PoolConfig.of(*map(str, roots), **{**defaults, **settings})


class FoundBlock(NamedTuple):
    """Where a block lies, by the footers on the disk."""

    path: Path
    offset: int
    length: int


def find_blocks(root: Path, digest: bytes) -> dict[BlockKey, FoundBlock]:
    """Every block that a footer of this root names, past any tier."""
    disk = LocalDisk(root, direct="off", is_read_only=True)
    catalog = Catalog(disk, SystemClock())
    catalog.refresh(is_full=True)
    found = {}
    for entry in catalog.entries():
        records = read_records(disk, entry, digest)
        for record in () if records is None else records:
            place = FoundBlock(root / entry.path, int(record["offset"]), int(record["length"]))
            found[BlockKey(record["key"].tobytes())] = place
    return found


def segment_files(root: Path) -> list[Path]:
    return sorted(root.glob("ns/*/*/*.kvseg"))


def tmp_files(root: Path) -> list[Path]:
    return sorted((root / "tmp").glob("*"))


def held_bytes(roots: Sequence[Path]) -> int | None:
    """Bytes of all segments, finished or not; None while files come and go too fast to count.

    Two equal looks make one sample: every file in it was there at the moment between them.
    """
    for _ in range(20):
        first, second = _snapshot(roots), _snapshot(roots)
        if first.keys() == second.keys():
            return sum(map(min, first.values(), second.values()))
    return None


def _snapshot(roots: Sequence[Path]) -> dict[str, int]:
    """Length by writer and sequence, which a segment keeps from its claim to its eviction.

    Inodes would not do: they are used again at once.
    """
    found: dict[str, int] = {}
    for root in roots:
        for path in _walk(root):
            try:
                length = os.stat(path, follow_symlinks=False).st_size
            except FileNotFoundError:
                continue
            name = os.path.basename(path)
            found[f"{root}/{name[:25]}"] = length  # 16 digits, a dash, 8 digits
    return found


def _walk(root: Path) -> Iterator[str]:
    # first where segments come from, then where they go: one that moves meanwhile is seen once
    for folder in ("tmp", "ns"):
        for place, _, names in os.walk(root / folder):
            yield from (f"{place}/{name}" for name in names if not name.endswith(".json"))


class PoolSubject(TierSubject):
    """How the conformance checks reach a pool on local folders."""

    counts_io = True
    discover_s = 30.0  # on a slow machine too
    roots = 1
    direct: Literal["auto", "on", "off"] = "auto"

    def folders(self, folder: Path) -> list[Path]:
        return [folder / f"root{number}" for number in range(self.roots)]

    def make_tier(self, folder, engine, *, capacity_bytes=None, store_bytes_max=None):
        folder.mkdir(parents=True, exist_ok=True)
        settings: dict[str, Any] = {}
        if capacity_bytes is not None:
            settings["capacity_bytes"] = capacity_bytes // self.roots
        if store_bytes_max is not None:
            settings["write_queue_bytes"] = store_bytes_max
        plan = FaultPlan()
        folders = self.folders(folder)
        disks: list[Disk] = [
            FaultDisk(LocalDisk(path, direct=self.direct), plan) for path in folders
        ]
        config = pool_config(*folders, **{"segment_bytes": MIB, **settings})
        return PoolTier.open(config, engine.identity, disks=disks)

    def damage(self, tier, key):
        for root in tier.roots:
            found = find_blocks(Path(root.disk.place), bytes.fromhex(root.namespace)).get(key)
            if found is not None:
                flip_byte(found.path, found.offset + found.length // 2)
                return
        raise AssertionError("the block is in no segment")

    def slow(self, tier, seconds):
        plan = tier.roots[0].disk.plan
        plan.clear()
        for verb in VERBS if seconds else ():
            plan.delay(verb, seconds)

    def io_calls(self, tier):
        return tier.roots[0].disk.plan.total_here

    def stored_bytes(self, folder):
        return held_bytes(self.folders(folder))


def ask(tier: PoolTier, engine: ToyEngine, tokens: Sequence[int]) -> tuple[Outcome, ...]:
    """Load a whole prompt whatever lookup says, and hold every DONE row against the oracle."""
    reads = engine.reads(tokens)
    job = tier.load(reads)
    assert job.wait_settled(30), "a load did not settle"
    engine.check(reads, job.outcomes)
    return job.outcomes


def put(tier: PoolTier, engine: ToyEngine, tokens: Sequence[int]) -> tuple[Outcome, ...]:
    """Store a whole prompt and wait until it is visible or lost."""
    job = tier.store(engine.writes(tokens))
    assert job.wait_settled(30), "a store did not settle"
    assert tier.drain(30), "drain did not end"
    return job.outcomes
