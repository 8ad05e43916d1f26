"""Law 6: what is counted agrees with what the kernel says this process moved.

/proc/self/io counts the bytes that this process made the block layer read and write. With O_DIRECT
nothing comes from or stays in the page cache, so both sides must agree but for frames and metadata.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from kvdepot.keys import root_key
from kvdepot.pool.tier import PoolTier
from kvdepot.testing.toy import ToyEngine
from kvdepot.tiers import Read, Write
from kvdepot.units import KIB, MIB
from tests.pool_rig import pool_config, segment_files

BLOCK_BYTES = 256 * KIB
BLOCKS = 64


def moved_bytes() -> tuple[int, int]:
    fields = dict(
        line.split(": ") for line in Path("/proc/self/io").read_text(encoding="ascii").splitlines()
    )
    return int(fields["read_bytes"]), int(fields["write_bytes"])


def test_reused_bytes_are_what_the_device_moved() -> None:
    # not below the default temporary folder, which may be memory
    folder = Path.cwd() / f".device-bytes-{os.getpid()}"
    engine = ToyEngine((BLOCK_BYTES,))
    tokens = engine.prompt(1, BLOCKS)
    keys = engine.keys(tokens)
    digest = engine.identity.digest()
    data = [memoryview(bytearray(os.urandom(BLOCK_BYTES))) for _ in keys]
    writes = [
        Write(key, parent, row, 16)
        for key, parent, row in zip(keys, [root_key(digest), *keys], data, strict=False)
    ]
    config = pool_config(folder, capacity_bytes=256 * MIB, segment_bytes=4 * MIB)
    try:
        with PoolTier.open(config, engine.identity) as tier:
            if not tier.roots[0].disk.is_direct:
                pytest.skip(f"no O_DIRECT here: {tier.roots[0].disk.place}")
            before = moved_bytes()
            tier.store(writes)
            assert tier.drain(60)
            written = moved_bytes()[1] - before[1]
            stored = tier.counters.snapshot()["store_bytes_total"]
        assert stored == BLOCKS * BLOCK_BYTES
        frames = sum(path.stat().st_size for path in segment_files(folder)) - stored
        assert stored <= written <= stored + frames + 2 * MIB
        with PoolTier.open(config, engine.identity) as tier:
            before = moved_bytes()
            rows = [memoryview(bytearray(BLOCK_BYTES)) for _ in keys]
            job = tier.load([Read(key, row) for key, row in zip(keys, rows, strict=True)])
            assert job.wait(60)
            read = moved_bytes()[0] - before[0]
            loaded = tier.counters.snapshot()["load_bytes_total"]
        assert rows == data
        assert loaded == stored
        # headers and footers of the segments, once each
        assert loaded <= read <= loaded + frames + MIB
    finally:
        for path in sorted(folder.rglob("*"), reverse=True):
            path.rmdir() if path.is_dir() else path.unlink()
        folder.rmdir()
