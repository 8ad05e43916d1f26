"""What this machine has: processors, memory, shared memory."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import NamedTuple

from kvdepot.errors import PoolError
from kvdepot.io.filesystem import free_bytes_of

__all__ = ["SHARED_MEMORY", "Machine", "this_machine"]

#: where Linux has POSIX shared memory; in a container often 64 MB
SHARED_MEMORY = "/dev/shm"  # noqa: S108 - not a temporary file of ours
_CPUINFO = Path("/proc/cpuinfo")
_MEMINFO = Path("/proc/meminfo")
_NODES = Path("/sys/devices/system/node")


class Machine(NamedTuple):
    """A machine at one moment. What is not known is 0 or empty."""

    #: as the kernel names them, such as ``avx512f``
    cpu_flags: frozenset[str]
    #: that this process may run on
    cores: int
    #: with memory of their own
    numa_nodes: int
    #: what new processes can have without swapping
    memory_free_bytes: int
    shared_memory_free_bytes: int


def this_machine() -> Machine:
    """Look at this machine. Blocks on a few reads from the kernel's own file systems."""
    flags = re.search(r"^(?:flags|Features)\s*:(.*)$", _text(_CPUINFO), re.MULTILINE)
    free = re.search(r"^MemAvailable:\s*(\d+) kB$", _text(_MEMINFO), re.MULTILINE)
    try:
        shared = free_bytes_of(SHARED_MEMORY)
    except PoolError:
        shared = 0
    return Machine(
        cpu_flags=frozenset(flags[1].split()) if flags else frozenset(),
        cores=len(os.sched_getaffinity(0)),
        numa_nodes=max(sum(1 for _ in _NODES.glob("node[0-9]*")), 1),
        memory_free_bytes=int(free[1]) * 1024 if free else 0,
        shared_memory_free_bytes=shared,
    )


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
