"""What all benchmarks share: interleaved arms, medians with spread, the environment, one JSON result."""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from kvdepot.identity import CacheGroup, Identity
from kvdepot.io.buffers import HostBuffer
from kvdepot.keys import BlockKey, block_keys, root_key
from kvdepot.tiers import Write

BLOCK_TOKENS = 16


def identity_for(block_bytes: int) -> Identity:
    """An identity with one group of that block size; the bytes are random, no model is behind them."""
    group = CacheGroup(
        name="all",
        kind="full",
        layers=(0,),
        kv_heads=1,
        key_dim=1,
        value_dim=1,
        block_bytes=block_bytes,
    )
    return Identity(
        model_name="benchmark",
        weights_fingerprint="none: random bytes",
        model_dtype="float32",
        kv_dtype="float32",
        kv_layout="opaque",
        groups=(group,),
        block_tokens=BLOCK_TOKENS,
        attention="none",
        engine="benchmark",
        engine_version="1",
        adapter_version=1,
    )


def chain(identity: Identity, blocks: int, seed: int = 0) -> tuple[list[BlockKey], BlockKey]:
    """Keys of a prompt of so many blocks, and their root."""
    tokens = np.random.default_rng(seed).integers(0, 50_000, blocks * BLOCK_TOKENS)
    digest = identity.digest()
    return block_keys(digest, tokens.tolist(), BLOCK_TOKENS), root_key(digest)


def random_rows(block_bytes: int, blocks: int) -> HostBuffer:
    """Incompressible bytes in page-aligned memory."""
    buffer = HostBuffer(block_bytes * blocks, is_prefaulted=True)
    rng = np.random.default_rng(1)
    step = 1 << 24
    for start in range(0, buffer.length_bytes, step):
        part = buffer.memory[start : start + step]
        part[:] = rng.bytes(part.nbytes)
    return buffer


def writes_of(
    keys: Sequence[BlockKey], root: BlockKey, rows: HostBuffer, block_bytes: int
) -> list[Write]:
    """One write per key from neighbouring rows."""
    parents = [root, *keys[:-1]]
    return [
        Write(key, parent, rows.memory[i * block_bytes : (i + 1) * block_bytes], BLOCK_TOKENS)
        for i, (key, parent) in enumerate(zip(keys, parents, strict=True))
    ]


def interleave(arms: Mapping[str, Callable[[], float]], repeats: int) -> dict[str, list[float]]:
    """Run the arms in turn, forwards and backwards (ABBA), so that drift hits all alike."""
    samples: dict[str, list[float]] = {name: [] for name in arms}
    for turn in range(repeats):
        names = list(arms) if turn % 2 == 0 else list(arms)[::-1]
        for name in names:
            samples[name].append(arms[name]())
    return samples


def summary(values: Sequence[float]) -> dict[str, float]:
    """Median and spread."""
    ordered = sorted(values)
    return {
        "median": statistics.median(ordered),
        "min": ordered[0],
        "max": ordered[-1],
        "n": len(ordered),
    }


def percentile(values: Sequence[float], share: float) -> float:
    """The value that `share` of the samples do not exceed."""
    ordered = sorted(values)
    return ordered[min(int(share * len(ordered)), len(ordered) - 1)]


def paired_ratio(
    rows: Sequence[tuple[Sequence[float], Sequence[float]]], share: float = 0.5
) -> dict[str, Any]:
    """How a quantile of one arm compares with that of the base, where both did the same in turn.

    Args:
        rows: of each turn, the base's values and the other arm's.
        share: which quantile.

    Returns:
        Both, their ratio, and its 90 % bootstrap interval, in which turns are drawn as wholes: a ratio
        whose interval ends below a bar is under it at a level of 5 %.
    """
    source = np.random.default_rng(1)
    base, other = _quantiles(rows, share)
    drawn = [
        _quantiles([rows[number] for number in numbers], share)
        for numbers in source.integers(0, len(rows), (1000, len(rows)))
    ]
    ends = np.quantile([value / from_base for from_base, value in drawn], [0.05, 0.95])
    return {
        "base": round(base, 4),
        "arm": round(other, 4),
        "ratio": round(other / base, 3),
        "interval": [round(float(end), 3) for end in ends],
        "n": len(rows),
    }


def _quantiles(
    rows: Sequence[tuple[Sequence[float], Sequence[float]]], share: float
) -> tuple[float, float]:
    base = np.quantile([value for row in rows for value in row[0]], share)
    other = np.quantile([value for row in rows for value in row[1]], share)
    return float(base), float(other)


def environment(folder: str | Path | None = None) -> dict[str, Any]:
    """What a reader must know of the machine to judge the numbers."""
    found: dict[str, Any] = {
        "python": platform.python_version(),
        "kernel": platform.release(),
        "machine": platform.machine(),
        "processor": _processor(),
        "cores": os.cpu_count(),
        "load_average": os.getloadavg(),
        "commit": _commit(),
        "command": "python " + " ".join([Path(sys.argv[0]).name, *sys.argv[1:]]),
    }
    if folder is not None:
        found["file_system"] = _file_system(folder)
    return found


def _processor() -> str:
    for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return platform.processor()


def _commit() -> str:
    done = subprocess.run(
        ["git", "describe", "--always", "--dirty"], capture_output=True, text=True, check=False
    )
    return done.stdout.strip()


def _file_system(folder: str | Path) -> str:
    done = subprocess.run(
        ["df", "--output=fstype", str(folder)], capture_output=True, text=True, check=False
    )
    return done.stdout.split()[-1] if done.returncode == 0 else "unknown"


def parser(description: str) -> argparse.ArgumentParser:
    """The options that every benchmark has."""
    options = argparse.ArgumentParser(description=description)
    options.add_argument("--folder", help="where the files go; default: a temporary folder")
    options.add_argument("--repeats", type=int, default=7)
    options.add_argument("--out", help="also write the JSON to this file")
    return options


class WorkFolder:
    """A folder of our own below the user's, removed in the end."""

    def __init__(self, parent: str | None) -> None:
        # not the default temporary folder: that is memory on many systems
        self.path = Path(tempfile.mkdtemp(prefix="kvdepot-bench-", dir=parent or Path.cwd()))

    def __enter__(self) -> Path:
        return self.path

    def __exit__(self, *_: object) -> None:
        shutil.rmtree(self.path, ignore_errors=True)


def report(result: Mapping[str, Any], out: str | None) -> None:
    """Print the result as JSON, and keep it if asked to."""
    text = json.dumps(result, indent=2) + "\n"
    sys.stdout.write(text)
    if out:
        Path(out).write_text(text, encoding="utf-8")
