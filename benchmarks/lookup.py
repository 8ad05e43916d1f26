"""Lookup of a chain of 1,000 keys in an index of a million blocks (or more), and the index's size.

python benchmarks/lookup.py --out benchmarks/results/lookup.json
"""

from __future__ import annotations

import time

import numpy as np
from common import environment, parser, percentile, report, summary

from kvdepot.keys import BlockKey
from kvdepot.pool.index import BlockIndex
from kvdepot.pool.segment import RECORD

#: as many blocks of 368,640 B as a 64 MiB segment holds
SEGMENT_BLOCKS = 180
CHAIN = 1000


def main() -> None:
    options = parser(__doc__ or "")
    options.add_argument("--blocks", type=int, nargs="*", default=[1_000_000, 10_000_000])
    options.set_defaults(repeats=200)
    args = options.parse_args()
    result = {
        "benchmark": "lookup",
        "chain_blocks": CHAIN,
        "sizes": [measure(blocks, args.repeats) for blocks in args.blocks],
        "environment": environment(),
    }
    report(result, args.out)


def measure(blocks: int, repeats: int) -> dict[str, object]:
    """One index size."""
    rng = np.random.default_rng(7)
    index = BlockIndex()
    began = time.perf_counter()
    kept: list[bytes] = []
    for segment in range(blocks // SEGMENT_BLOCKS + 1):
        records = np.zeros(SEGMENT_BLOCKS, dtype=RECORD)
        records["key"] = np.frombuffer(rng.bytes(32 * SEGMENT_BLOCKS), dtype="<u8").reshape(-1, 4)
        records["offset"] = (np.arange(SEGMENT_BLOCKS) * 90 + 1) * 4096
        records["length"] = 368_640
        index.insert(segment, records)
        if segment % 50 == 0:
            kept += [key.tobytes() for key in records["key"]]
    built_s = time.perf_counter() - began
    hits: list[float] = []
    misses: list[float] = []
    halves: list[float] = []
    absent = [BlockKey(rng.bytes(32)) for _ in range(CHAIN)]
    for _ in range(repeats):
        keys = [BlockKey(kept[i]) for i in rng.integers(0, len(kept), CHAIN)]
        hits.append(_timed(index, keys, CHAIN))
        misses.append(_timed(index, absent, 0))
        halves.append(_timed(index, keys[: CHAIN // 2] + absent[CHAIN // 2 :], CHAIN // 2))
    return {
        "blocks": len(index),
        "bytes_per_block": index.memory_bytes / len(index),
        "built_s": built_s,
        "whole_chain_ms": {**summary(hits), "p99": percentile(hits, 0.99)},
        "half_chain_ms": {**summary(halves), "p99": percentile(halves, 0.99)},
        "first_block_missing_ms": {**summary(misses), "p99": percentile(misses, 0.99)},
    }


def _timed(index: BlockIndex, keys: list[BlockKey], expected: int) -> float:
    began = time.perf_counter()
    found = index.prefix(keys)
    spent = time.perf_counter() - began
    if found != expected:
        raise RuntimeError(f"found {found} of {expected} blocks")
    return spent * 1e3


if __name__ == "__main__":
    main()
