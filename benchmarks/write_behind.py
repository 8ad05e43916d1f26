"""Write-behind: the rate at which a pool takes blocks, and what a store costs its caller.

Arms, interleaved, O_DIRECT everywhere: the pool (from the first store to the last published segment,
checksums included; once with one `store` call for the request, once with one call a block), fio, plain
pwritev threads into a reserved file. The caller's time is that of the calls with one block each, while
the writing goes on behind them.

    python benchmarks/write_behind.py --out benchmarks/results/write_behind.json
"""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from common import (
    WorkFolder,
    chain,
    environment,
    identity_for,
    interleave,
    parser,
    percentile,
    random_rows,
    report,
    summary,
    writes_of,
)
from raw_disk import fio_path, fio_rate, raw_write_pieces, threaded_rate

from kvdepot.config import PoolConfig
from kvdepot.pool.tier import PoolTier
from kvdepot.units import MIB

BLOCK_BYTES = (368_640, MIB, 4 * MIB)


def main() -> None:
    options = parser(__doc__ or "")
    options.add_argument("--request-bytes", type=int, default=1024 * MIB)
    args = options.parse_args()
    with WorkFolder(args.folder) as folder:
        sizes = [
            measure(folder / str(size), size, args.request_bytes, args.repeats)
            for size in BLOCK_BYTES
        ]
        result = {
            "benchmark": "write_behind",
            "unit": "GB/s of payload, median over repeats; caller's time in ms per block",
            "sizes": sizes,
            "least_ratio_to_raw": min(size["pool_to_best_raw"] for size in sizes),
            "greatest_caller_ms_p99": max(size["caller_ms"]["p99"] for size in sizes),
            "environment": environment(folder),
        }
    report(result, args.out)


def measure(folder: Path, block_bytes: int, request_bytes: int, repeats: int) -> dict[str, Any]:
    """One block size."""
    folder.mkdir(parents=True)
    blocks = request_bytes // block_bytes
    length = blocks * block_bytes
    rows = random_rows(block_bytes, blocks)
    identity = identity_for(block_bytes)
    caller_s: list[float] = []

    def pool(*, is_one_call: bool) -> float:
        place = folder / "pool"
        config = PoolConfig.of(str(place), write_queue_bytes=length + 1)
        keys, root = chain(identity, blocks)
        writes = writes_of(keys, root, rows, block_bytes)
        with PoolTier.open(config, identity) as tier:
            began = time.perf_counter()
            if is_one_call:
                tier.store(writes)
            else:
                for write in writes:
                    call = time.perf_counter()
                    tier.store([write])
                    caller_s.append(time.perf_counter() - call)
            if not tier.drain(120):
                raise RuntimeError("the pool did not take the blocks")
            spent = time.perf_counter() - began
            if tier.lookup(keys) != blocks:
                raise RuntimeError("blocks are missing")
        shutil.rmtree(place)
        return length / spent

    def raw() -> float:
        path = folder / "raw.bin"
        fd = os.open(path, os.O_CREAT | os.O_WRONLY | os.O_DIRECT)
        try:
            os.posix_fallocate(fd, 0, length)
            return threaded_rate(raw_write_pieces(fd, rows, length, 4 * MIB), length, 2)
        finally:
            os.close(fd)
            path.unlink()

    def fio() -> float:
        path = folder / "fio.bin"
        try:
            return fio_rate(path, length, 4 * MIB, mode="write", depth=8)
        finally:
            path.unlink(missing_ok=True)

    arms: dict[str, Callable[[], float]] = {
        "pool": lambda: pool(is_one_call=True),
        "pool_block_by_block": lambda: pool(is_one_call=False),
        "pwritev": raw,
    }
    if fio_path():
        arms["fio"] = fio
    samples = interleave(arms, repeats)
    rates = {name: summary([v / 1e9 for v in values]) for name, values in samples.items()}
    best = max(rate["median"] for name, rate in rates.items() if "pool" not in name)
    return {
        "block_bytes": block_bytes,
        "rates": rates,
        "pool_to_best_raw": rates["pool"]["median"] / best,
        "pool_block_by_block_to_best_raw": rates["pool_block_by_block"]["median"] / best,
        "caller_ms": {
            "median": percentile(caller_s, 0.5) * 1e3,
            "p99": percentile(caller_s, 0.99) * 1e3,
            "max": max(caller_s) * 1e3,
            "n": len(caller_s),
        },
    }


if __name__ == "__main__":
    main()
