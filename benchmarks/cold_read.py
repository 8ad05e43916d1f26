"""Cold read of one request, at several block sizes: the pool, fio, plain preadv, file per block.

All arms use O_DIRECT, so this machine's page cache plays no part; a cache below the virtual disk may,
for all arms alike. Arms are interleaved; rates are of payload bytes. The pool's arm includes opening
the segments, checking headers and verifying every block's checksum.

    python benchmarks/cold_read.py --out benchmarks/results/cold_read.json
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from common import (
    WorkFolder,
    chain,
    environment,
    identity_for,
    interleave,
    parser,
    random_rows,
    report,
    summary,
    writes_of,
)
from raw_disk import file_per_block_pieces, fio_path, fio_rate, raw_read_pieces, threaded_rate

from kvdepot.config import PoolConfig
from kvdepot.identity import Identity
from kvdepot.io.buffers import HostBuffer
from kvdepot.keys import BlockKey
from kvdepot.pool.tier import PoolTier
from kvdepot.tiers import Read
from kvdepot.units import KIB, MIB

BLOCK_BYTES = (64 * KIB, 256 * KIB, 368_640, MIB, 2 * MIB, 4 * MIB)
THREADS = 6


class Case(NamedTuple):
    """What was stored."""

    config: PoolConfig
    identity: Identity
    keys: list[BlockKey]
    rows: HostBuffer
    block_bytes: int


def main() -> None:
    options = parser(__doc__ or "")
    options.add_argument("--request-bytes", type=int, default=512 * MIB)
    options.add_argument("--block-bytes", type=int, nargs="*", default=BLOCK_BYTES)
    args = options.parse_args()
    with WorkFolder(args.folder) as folder:
        sizes = [
            measure(folder / str(size), size, args.request_bytes, args.repeats)
            for size in args.block_bytes
        ]
        result = {
            "benchmark": "cold_read",
            "unit": "GB/s of payload, median over repeats",
            "raw_readers": {
                "fio": "libaio, O_DIRECT, the same block size, depth 1, 8 and 32",
                "preadv": f"{THREADS} threads, O_DIRECT, units of 4 MiB and of the block size",
            },
            "request_bytes": args.request_bytes,
            "sizes": sizes,
            "least_ratio_to_best_raw": min(size["pool_to_best_raw"] for size in sizes),
            "least_ratio_to_file_per_block": min(size["pool_to_file_per_block"] for size in sizes),
            "environment": environment(folder),
        }
    report(result, args.out)


def measure(folder: Path, block_bytes: int, request_bytes: int, repeats: int) -> dict[str, Any]:
    """One block size."""
    folder.mkdir(parents=True)
    blocks = request_bytes // block_bytes
    length = blocks * block_bytes
    rows = random_rows(block_bytes, blocks)
    target = HostBuffer(length, is_prefaulted=True)
    identity = identity_for(block_bytes)
    keys, root = chain(identity, blocks)
    config = PoolConfig.of(str(folder / "pool"), write_queue_bytes=length + 1)
    with PoolTier.open(config, identity) as tier:
        tier.store(writes_of(keys, root, rows, block_bytes))
        if not tier.drain(120):
            raise RuntimeError("the pool did not take the blocks")
    case = Case(config, identity, keys, rows, block_bytes)
    _write_raw(folder, rows, length, block_bytes, blocks)
    fd = os.open(folder / "raw.bin", os.O_RDONLY | os.O_DIRECT)
    arms: dict[str, Callable[[], float]] = {
        "pool": lambda: _pool_rate(case, target),
        "preadv_4MiB": lambda: threaded_rate(
            raw_read_pieces(fd, target, length, 4 * MIB), length, THREADS
        ),
        "preadv_block": lambda: threaded_rate(
            raw_read_pieces(fd, target, length, block_bytes), length, THREADS
        ),
        "file_per_block": lambda: threaded_rate(
            file_per_block_pieces(folder / "files", target, block_bytes, blocks), length, THREADS
        ),
        "file_per_block_1_thread": lambda: threaded_rate(
            file_per_block_pieces(folder / "files", target, block_bytes, blocks), length, 1
        ),
    }
    if fio_path():
        for depth in (1, 8, 32):
            arms[f"fio_depth_{depth}"] = partial(
                fio_rate, folder / "raw.bin", length, block_bytes, mode="read", depth=depth
            )
    samples = interleave(arms, repeats)
    os.close(fd)
    rates = {name: summary([v / 1e9 for v in values]) for name, values in samples.items()}
    raw = {n: r["median"] for n, r in rates.items() if n.startswith(("fio", "preadv"))}
    fio = [r["median"] for n, r in rates.items() if n.startswith("fio")]
    pool = rates["pool"]["median"]
    return {
        "block_bytes": block_bytes,
        "rates": rates,
        "best_raw": max(raw, key=raw.__getitem__),
        "pool_to_best_raw": pool / max(raw.values()),
        "pool_to_best_fio": pool / max(fio) if fio else None,
        "pool_to_file_per_block": pool / rates["file_per_block"]["median"],
        "pool_to_file_per_block_1_thread": pool / rates["file_per_block_1_thread"]["median"],
    }


def _pool_rate(case: Case, target: HostBuffer) -> float:
    """A fresh tier, so that no file is open yet; timed from the call to the last verified block."""
    size = case.block_bytes
    length = len(case.keys) * size
    with PoolTier.open(case.config, case.identity) as tier:
        reads = [
            Read(key, target.memory[i * size : (i + 1) * size]) for i, key in enumerate(case.keys)
        ]
        began = time.perf_counter()
        job = tier.load(reads)
        job.wait()
        spent = time.perf_counter() - began
        if job.leading_done != len(case.keys):
            raise RuntimeError("blocks are missing")
    if target.memory[:length] != case.rows.memory[:length]:
        raise RuntimeError("wrong bytes")
    return length / spent


def _write_raw(folder: Path, rows: HostBuffer, length: int, block_bytes: int, blocks: int) -> None:
    (folder / "files").mkdir()
    with (folder / "raw.bin").open("wb") as file:
        file.write(rows.memory[:length])
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    for index in range(blocks):
        path = folder / "files" / f"{index:06d}.bin"
        fd = os.open(path, os.O_CREAT | os.O_WRONLY | os.O_DIRECT)
        os.pwritev(fd, [rows.memory[index * block_bytes : (index + 1) * block_bytes]], 0)
        os.close(fd)


if __name__ == "__main__":
    main()
