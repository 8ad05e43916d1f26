"""Disks that misbehave: `FaultDisk` follows a `FaultPlan`, `dying_disk` ends the process for real.

Both wrap what they are given and add nothing of their own, so the code under test sees a `Disk`.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Literal, TypeVar, cast

from kvdepot.io.disk import Disk, DiskFile, DiskLock, FileInfo, Space
from kvdepot.io.localdisk import LocalDisk
from kvdepot.testing.faultplan import Barrier, Call, FaultPlan, Verdict

__all__ = [
    "DEATH_POINTS",
    "Barrier",
    "Call",
    "FaultDisk",
    "FaultFile",
    "FaultLock",
    "FaultPlan",
    "dying_disk",
]

_T = TypeVar("_T")

#: Where `dying_disk` can end the process: a verb, and before it, half way, or after it. ``linked`` is
#: between the link and the unlink of a publish.
DEATH_POINTS = (
    "lock:before",
    "lock:after",
    "create:before",
    "create:after",
    "write:before",
    "write:half",
    "write:after",
    "truncate:before",
    "truncate:after",
    "sync:before",
    "sync:after",
    "publish:before",
    "publish:linked",
    "publish:after",
    "touch:before",
    "touch:after",
    "beat:before",
    "beat:after",
    "remove:before",
    "remove:after",
    "release:before",
    "release:after",
)


class FaultDisk:
    """`Disk` over another, with the faults of a plan. Thread-safe if the other one is.

    Args:
        disk: what serves the calls that the plan lets through.
        plan: asked before every call; it may be shared between disks.
    """

    def __init__(self, disk: Disk, plan: FaultPlan) -> None:
        self._disk = disk
        self.plan = plan

    @property
    def place(self) -> str:
        """Where the disk below is."""
        return self._disk.place

    @property
    def is_direct(self) -> bool:
        """Whether the disk below skips the page cache."""
        return self._disk.is_direct

    def create(self, name: str, reserve_bytes: int) -> FaultFile:
        make = lambda: self._disk.create(name, reserve_bytes)  # noqa: E731
        return FaultFile(self._run("create", name, make), self.plan, name)

    def open(self, name: str) -> FaultFile | None:
        file = self._run("open", name, lambda: self._disk.open(name))
        return None if file is None else FaultFile(file, self.plan, name)

    def read_small(self, name: str, limit_bytes: int = 1 << 20) -> bytes | None:
        return self._run("read_small", name, lambda: self._disk.read_small(name, limit_bytes))

    def publish(self, source: str, target: str) -> bool:
        return self._run("publish", source, lambda: self._disk.publish(source, target))

    def remove(self, name: str) -> bool:
        return self._run("remove", name, lambda: self._disk.remove(name))

    def files(self, folder: str) -> list[FileInfo]:
        return self._run("files", folder, lambda: self._disk.files(folder))

    def touch(self, name: str) -> bool:
        return self._run("touch", name, lambda: self._disk.touch(name))

    def space(self) -> Space:
        return self._run("space", ".", self._disk.space)

    def lock(self, name: str, text: bytes) -> FaultLock | None:
        lock = self._run("lock", name, lambda: self._disk.lock(name, text))
        return None if lock is None else FaultLock(lock, self.plan, name)

    def close(self) -> None:
        """Closes the disk below."""
        self._disk.close()

    def _run(self, verb: str, name: str, call: Callable[[], _T]) -> _T:
        return _run(self.plan, verb, name, call)


class FaultFile:
    """`DiskFile` over another, with the faults of a plan."""

    def __init__(self, file: DiskFile, plan: FaultPlan, name: str) -> None:
        self._file = file
        self._plan = plan
        self._name = name

    @property
    def length_bytes(self) -> int:
        """Length of the file below."""
        return self._file.length_bytes

    def read(self, offset: int, parts: Sequence[memoryview]) -> int:
        wanted = sum(part.nbytes for part in parts)
        verdict = self._plan.meet("read", self._name, offset, wanted)
        _raise(verdict)
        got = self._file.read(offset, _first(parts, wanted // 2) if verdict.is_short else parts)
        if verdict.is_flip:
            for part in _first(parts, got):
                part[0] ^= 0x10
        self._plan.moved("read", got)
        _end(verdict)
        return got

    def write(self, offset: int, parts: Sequence[memoryview]) -> None:
        wanted = sum(part.nbytes for part in parts)
        verdict = self._plan.meet("write", self._name, offset, wanted)
        if verdict.is_short or verdict.at_half:
            self._file.write(offset, _first(parts, wanted // 2))
            for action in verdict.at_half:
                action()
        _raise(verdict)
        self._file.write(offset, parts)
        self._plan.moved("write", wanted)
        _end(verdict)

    def truncate(self, length_bytes: int) -> None:
        _run(self._plan, "truncate", self._name, lambda: self._file.truncate(length_bytes))

    def sync(self) -> None:
        _run(self._plan, "sync", self._name, self._file.sync)

    def close(self) -> None:
        """Closes the file below."""
        self._file.close()


class FaultLock:
    """`DiskLock` over another, with the faults of a plan."""

    def __init__(self, lock: DiskLock, plan: FaultPlan, name: str) -> None:
        self._lock = lock
        self._plan = plan
        self._name = name

    def beat(self, text: bytes) -> None:
        _run(self._plan, "beat", self._name, lambda: self._lock.beat(text))

    def release(self) -> None:
        _run(self._plan, "release", self._name, self._lock.release)


def dying_disk(
    root: str | Path,
    point: str,
    *,
    nth: int = 1,
    when: Callable[[Call], bool] | None = None,
    direct: Literal["auto", "on", "off"] = "auto",
) -> FaultDisk:
    """A `LocalDisk` on which this process ends by SIGKILL, for tests in child processes.

    Args:
        root: the root folder.
        point: one of `DEATH_POINTS`.
        nth: die at the n-th call of that verb that `when` likes.
        when: only calls for which it is true count.
        direct: as for `LocalDisk`.

    Raises:
        ValueError: there is no such point.
    """
    if point not in DEATH_POINTS:
        raise ValueError(f"no such point to die at: {point}; there are {', '.join(DEATH_POINTS)}")
    verb, _, phase = point.partition(":")
    plan = FaultPlan()
    disk = _LinkDisk(root, direct=direct)
    if phase == "linked":
        # the inner disk knows when it has linked; the plan knows which call is to die
        plan.act(verb, lambda call: disk.die_when_linked(), at=nth, when=when)  # noqa: ARG005
    else:
        phase = cast("Literal['before', 'half', 'after']", phase)
        plan.act(verb, lambda call: _die(), phase=phase, at=nth, when=when)  # noqa: ARG005
    return FaultDisk(disk, plan)


class _LinkDisk(LocalDisk):
    """Can end the process between the two system calls of a publish."""

    _is_doomed = False

    def die_when_linked(self) -> None:
        self._is_doomed = True

    def _link(self, old: Path, new: Path) -> None:
        super()._link(old, new)
        if self._is_doomed:
            _die()


def _die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _run(plan: FaultPlan, verb: str, name: str, call: Callable[[], _T]) -> _T:
    verdict = plan.meet(verb, name)
    _raise(verdict)
    result = call()
    _end(verdict)
    return result


def _raise(verdict: Verdict) -> None:
    if verdict.error is not None:
        raise verdict.error


def _end(verdict: Verdict) -> None:
    for action in verdict.at_end:
        action()


def _first(parts: Sequence[memoryview], length_bytes: int) -> list[memoryview]:
    """The parts cut to their first `length_bytes` bytes."""
    found = []
    for part in parts:
        piece = part.cast("B")[:length_bytes]
        if piece.nbytes:
            found.append(piece)
        length_bytes -= piece.nbytes
    return found
