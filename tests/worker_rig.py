"""Worker tiers for tests: shared rows for the toy engine, and a storage that can be slowed down."""

from __future__ import annotations

import os
import struct
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from kvdepot.config import WorkerConfig
from kvdepot.io.buffers import ALIGNMENT, HostBuffer
from kvdepot.keys import BlockKey
from kvdepot.pool.worker import WorkerTier
from kvdepot.testing import checks_bytes, toy
from kvdepot.testing.damage import flip_byte
from kvdepot.testing.subject import TierSubject
from kvdepot.testing.toy import ToyEngine
from kvdepot.units import MIB, round_up
from kvdepot.urls import distinct_roots
from tests.children import ROOT
from tests.pool_rig import find_blocks, held_bytes, pool_config

SLOW_CHILD = ROOT / "tests" / "worker_slow_child.py"
#: a worker that comes back quickly, and is given up when it has stood still for longer than a busy
#: machine lets a process wait
QUICK = WorkerConfig(heartbeat_s=0.1, hang_s=4.0, backoff_s=0.05, backoff_s_max=0.2)


class Arena:
    """Shared memory from which every row of a test is cut, one after another."""

    def __init__(self, length_bytes: int = 512 * MIB) -> None:
        self.buffer = HostBuffer(length_bytes, is_shared=True)  # sparse: costs what is used
        self._lock = threading.Lock()
        self._end = 0

    def take(self, length_bytes: int) -> memoryview:
        """As `aligned_bytes`, but memory that a worker can reach."""
        with self._lock:
            start = self._end
            self._end += round_up(max(length_bytes, 1), ALIGNMENT)
            assert self._end <= self.buffer.length_bytes, "a larger arena is needed"
        return self.buffer.memory[start : start + length_bytes]


@contextmanager
def rows_in_an_arena() -> Iterator[Arena]:
    """The toy engine's rows, and those of the checks, lie in shared memory."""
    arena = Arena()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(toy, "aligned_bytes", arena.take)
        patch.setattr(checks_bytes, "bytearray", arena.take, raising=False)
        yield arena
    arena.buffer.close()


def open_worker(root: Path, engine: ToyEngine, arena: Arena) -> WorkerTier:
    """A small pool behind a worker."""
    return WorkerTier.open(pool_config(root), engine.identity, [arena.buffer], settings=QUICK)


def signal_worker(tier: WorkerTier, number: int) -> int:
    """Send a signal to the worker that serves now; its process id."""
    pid = tier.worker_pid
    assert pid is not None, "no worker serves"
    os.kill(pid, number)
    return pid


def is_running(pid: int) -> bool:
    """Whether there is such a process that is not a zombie."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state not in "ZX"


def children() -> set[int]:
    """Our child processes, zombies included."""
    found = set()
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            try:
                fields = Path(f"/proc/{entry}/stat").read_text().rpartition(")")[2].split()
            except (FileNotFoundError, ProcessLookupError):
                continue
            if int(fields[1]) == os.getpid():
                found.add(int(entry))
    return found


class WorkerSubject(TierSubject):
    """How the conformance checks reach a pool behind a worker."""

    arena: Arena
    discover_s = 30.0  # on a slow machine too

    def make_tier(self, folder, engine, *, capacity_bytes=None, store_bytes_max=None):
        folder.mkdir(parents=True, exist_ok=True)
        settings: dict[str, object] = {"segment_bytes": MIB}
        if capacity_bytes is not None:
            settings["capacity_bytes"] = capacity_bytes
        if store_bytes_max is not None:
            settings["write_queue_bytes"] = store_bytes_max
        return WorkerTier.open(
            pool_config(folder / "root", **settings),
            engine.identity,
            [self.arena.buffer],
            command=slow_command(folder / "pace"),
        )

    def damage(self, tier, key: BlockKey) -> None:
        for root in distinct_roots(tier._config.urls):
            found = find_blocks(Path(root.path), tier.identity.digest()).get(key)
            if found is not None:
                flip_byte(found.path, found.offset + found.length // 2)
                return
        raise AssertionError("the block is in no segment")

    def slow(self, tier, seconds):
        set_pace(Path(tier._command[-1]), seconds)

    def stored_bytes(self, folder):
        return held_bytes([folder / "root"])


def slow_command(pace: Path) -> tuple[str, ...]:
    """A worker whose storage takes as long as the file says."""
    set_pace(pace, 0.0)
    return (sys.executable, "-P", str(SLOW_CHILD), str(pace))


def set_pace(pace: Path, seconds: float) -> None:
    fresh = pace.with_suffix(".new")
    fresh.write_bytes(struct.pack("d", seconds))
    fresh.replace(pace)  # in one step: the worker reads it at any moment
