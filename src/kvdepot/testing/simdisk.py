"""A disk in memory that a test owns: live and durable bytes, and a crash at the n-th mutating call.

Every write goes to the live bytes; only `sync` makes a file's bytes durable, and names become durable
when their folder settles, which a seeded generator decides. `crash(seed)` builds one of the images
that a power loss may leave: each unsynced sector on its own old, new or zero, file lengths old, new
or between, names old or new. `attach()` gives what is left after kill -9 instead: all live bytes.

A handle that has died raises `SimulatedCrash` on every call and can change nothing any more. It is a
`PoolUnavailable` and not a bare BaseException, so that the worker threads of the code under test wind
down in their own error paths; whatever they do then, the image is frozen.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Literal, get_args

from kvdepot.clock import Clock, SystemClock
from kvdepot.errors import PoolDenied, PoolFull, PoolUnavailable
from kvdepot.io.buffers import ALIGNMENT
from kvdepot.io.disk import FileInfo, Space
from kvdepot.testing.simmedia import Media, Node, folder_of, parents_of
from kvdepot.units import GIB, round_up

__all__ = ["CRASH_PHASES", "CrashPhase", "SimDisk", "SimFile", "SimLock", "SimulatedCrash"]

#: how much of the last call happens: nothing, a part (half a write, a link without the unlink), all
CrashPhase = Literal["before", "half", "after"]
CRASH_PHASES: tuple[CrashPhase, ...] = get_args(CrashPhase)


class SimulatedCrash(PoolUnavailable):
    """The process or machine that used this handle is dead."""


class SimDisk:
    """`kvdepot.io.disk.Disk` in memory: one process's handle on simulated media. Thread-safe.

    Args:
        capacity_bytes: what the media holds; more is `PoolFull`.
        inodes_max: files and folders it holds; more is `PoolFull`.
        sector_bytes: what is written whole or not at all: 512 or 4,096.
        seed: decides which folder changes settle.
        clock: the storage's clock (wall); files get their times from it.
        crash_at: the handle dies in its n-th mutating call, counted from 1; 0 means never.
        crash_phase: how much of that call happens.
        is_direct: what the handle says of itself; it changes nothing.
    """

    def __init__(
        self,
        *,
        capacity_bytes: int = GIB,
        inodes_max: int = 100_000,
        sector_bytes: int = 4096,
        seed: int = 0,
        clock: Clock | None = None,
        crash_at: int = 0,
        crash_phase: CrashPhase = "before",
        is_direct: bool = False,
    ) -> None:
        media = Media(capacity_bytes, inodes_max, sector_bytes, seed, clock or SystemClock())
        self._begin(media, crash_at, crash_phase, is_direct=is_direct)

    def _begin(
        self, media: Media, crash_at: int, crash_phase: CrashPhase, *, is_direct: bool
    ) -> None:
        self._media = media
        with media.lock:
            media.handles += 1
            self.place = f"sim://{media.handles}"
        self.is_direct = is_direct
        self.is_dead = False
        #: calls so far by verb, reads included
        self.counts: Counter[str] = Counter()
        #: mutating calls so far
        self.mutations = 0
        self._crash_at = crash_at
        self._crash_phase: CrashPhase = crash_phase

    # what a test does to it

    def attach(self, *, crash_at: int = 0, crash_phase: CrashPhase = "before") -> SimDisk:
        """The handle of another process on the same media, or of the next one after kill -9."""
        other = SimDisk.__new__(SimDisk)
        other._begin(self._media, crash_at, crash_phase, is_direct=self.is_direct)
        return other

    def kill(self) -> None:
        """The process dies now: its locks are free, its calls raise. Live bytes stay. Idempotent."""
        with self._media.lock:
            self.is_dead = True
            for node in self._media.names.values():
                if node.holder is self:
                    node.holder = None

    def crash(self, seed: int) -> SimDisk:
        """A handle on an image that a power loss now may leave; this disk is not changed."""
        with self._media.lock:
            image = self._media.survivor(seed)
        other = SimDisk.__new__(SimDisk)
        other._begin(image, 0, "before", is_direct=self.is_direct)
        return other

    def settle(self) -> None:
        """Make all that is live durable, as a long quiet time does."""
        with self._media.lock:
            self._media.durable_names = dict(self._media.names)
            for node in self._media.names.values():
                node.settle()

    def names(self) -> list[str]:
        """Every file's name, sorted, for a test to look at."""
        with self._media.lock:
            return sorted(self._media.names)

    def content(self, name: str) -> bytes:
        """A file's live bytes, past all counters; KeyError when absent."""
        with self._media.lock:
            return bytes(self._media.names[name].live)

    def plant(self, name: str, content: bytes) -> None:
        """Put a file there or replace its bytes in place, durable, past all counters and limits."""
        media = self._media
        with media.lock:
            node = media.names.get(name) or media.new_node()
            node.assign(bytearray(content), media.now_ns())
            media.names[name] = media.durable_names[name] = node
            media.add_folders(parents_of(name))
            media.stamp(name)

    # the verbs

    def create(self, name: str, reserve_bytes: int) -> SimFile:
        with self._mutating("create", name) as is_half:
            self._refuse_taken(name, "create")
            self._make_folders(name)
            self._need(inodes=1)
            node = self._media.new_node()
            self._media.names[name] = node
            if not is_half:
                try:
                    self._need(length_bytes=reserve_bytes)
                except PoolFull:
                    del self._media.names[name]
                    raise
                node.resize(reserve_bytes)
            self._media.name_changed(name)
            return SimFile(self, node, name)

    def open(self, name: str) -> SimFile | None:
        with self._reading("open", name):
            node = self._media.names.get(name)
            return None if node is None else SimFile(self, node, name)

    def read_small(self, name: str, limit_bytes: int = 1 << 20) -> bytes | None:
        with self._reading("read_small", name):
            node = self._media.names.get(name)
            if node is None:
                return None
            if len(node.live) > limit_bytes:
                raise PoolDenied(f"{name} is larger than {limit_bytes} bytes", path=name)
            return bytes(node.live)

    def publish(self, source: str, target: str) -> bool:
        names = self._media.names
        with self._mutating("publish", source) as is_half:
            if target in names or _checked(target) in self._media.folders:
                return False
            if source not in names:
                raise PoolUnavailable(f"publish {target}: ENOENT: no {source}", path=target)
            self._make_folders(target)
            names[target] = names[source]
            if not is_half:
                del names[source]
            self._media.name_changed(source, target)
            return True

    def remove(self, name: str) -> bool:
        media = self._media
        with self._mutating("remove", name):
            if name in media.names:
                del media.names[name]
                media.name_changed(name)
                return True
            inside = name + "/"
            is_used = any(other.startswith(inside) for other in (*media.names, *media.folders))
            if name not in media.folders or is_used:
                return False
            media.remove_folder(name)
            return True

    def files(self, folder: str) -> list[FileInfo]:
        media = self._media
        with self._reading("files", folder):
            entries = [
                FileInfo(
                    name=_last(name),
                    length_bytes=len(node.live),
                    mtime_ns=node.mtime_ns,
                    is_folder=False,
                    is_regular=True,
                    inode=node.number,
                    allocated_bytes=len(node.live),
                )
                for name, node in media.names.items()
                if folder_of(name) == folder
            ]
            return entries + [
                FileInfo(_last(name), 0, mtime_ns, True, False)  # noqa: FBT003
                for name, mtime_ns in media.folders.items()
                if folder_of(name) == folder
            ]

    def touch(self, name: str) -> bool:
        with self._mutating("touch", name):
            node = self._media.names.get(name)
            if node is not None:
                node.mtime_ns = self._media.now_ns()
            return node is not None

    def space(self) -> Space:
        media = self._media
        with self._reading("space", "."):
            return Space(
                max(0, media.capacity_bytes - media.used_bytes()),
                media.capacity_bytes,
                max(0, media.inodes_max - media.used_inodes()),
                media.inodes_max,
            )

    def lock(self, name: str, text: bytes) -> SimLock | None:
        media = self._media
        with self._mutating("lock", name) as is_half:
            node = media.names.get(name)
            if node is not None and node.holder is not None:
                return None
            if node is None:
                self._refuse_taken(name, "lock")
                self._make_folders(name)
                self._need(inodes=1)
                node = media.names[name] = media.new_node()
                media.name_changed(name)
            node.holder = self
            if not is_half:
                node.assign(bytearray(text), media.now_ns())
            return SimLock(self, node, name)

    def close(self) -> None:
        """Nothing is held between calls."""

    # shared by the verbs, the files and the locks; callers need not hold the media's lock

    @contextmanager
    def _reading(self, verb: str, name: str) -> Iterator[None]:
        with self._media.lock:
            self._enter(verb, name)
            yield

    @contextmanager
    def _mutating(self, verb: str, name: str) -> Iterator[bool]:
        """One mutating call; yields whether it is to stop half way because the handle dies in it."""
        with self._media.lock:
            self._enter(verb, name)
            self.mutations += 1
            is_last = self.mutations == self._crash_at
            if is_last and self._crash_phase == "before":
                self._die(verb, name)
            yield is_last and self._crash_phase == "half"
            if is_last:
                self._die(verb, name)

    def _enter(self, verb: str, name: str) -> None:
        _checked(name)
        if self.is_dead:
            raise SimulatedCrash(f"{verb} {name}: the process is dead", path=name)
        self.counts[verb] += 1

    def _die(self, verb: str, name: str) -> None:
        self.kill()
        raise SimulatedCrash(
            f"died {self._crash_phase} call {self._crash_at}: {verb} {name}", path=name
        )

    def _need(self, *, inodes: int = 0, length_bytes: int = 0) -> None:
        """Refuse what does not fit."""
        media = self._media
        if media.used_inodes() + inodes > media.inodes_max:
            raise PoolFull(f"{self.place}: ENOSPC: no inodes left", path=self.place)
        wanted = round_up(length_bytes, ALIGNMENT)
        if wanted and media.used_bytes() + wanted > media.capacity_bytes:
            raise PoolFull(f"{self.place}: ENOSPC: no space left", path=self.place)

    def _make_folders(self, name: str) -> None:
        missing = [folder for folder in parents_of(name) if folder not in self._media.folders]
        for folder in missing:
            if folder in self._media.names:
                raise PoolDenied(f"{folder}: ENOTDIR: a file where a folder is due", path=folder)
        self._need(inodes=len(missing))
        self._media.add_folders(missing)

    def _refuse_taken(self, name: str, verb: str) -> None:
        if name in self._media.names or name in self._media.folders:
            raise PoolDenied(f"{verb} {name}: EEXIST: the name is taken", path=name)


class SimFile:
    """`DiskFile` over one simulated file; it outlives the removal of its name. Thread-safe."""

    def __init__(self, disk: SimDisk, node: Node, name: str) -> None:
        self._disk = disk
        self._node = node
        self._name = name
        self.length_bytes = len(node.live)

    def read(self, offset: int, parts: Sequence[memoryview]) -> int:
        with self._disk._reading("read", self._name):
            done = 0
            for part in parts:
                piece = self._node.live[offset + done : offset + done + part.nbytes]
                part.cast("B")[: len(piece)] = piece
                done += len(piece)
            return done

    def write(self, offset: int, parts: Sequence[memoryview]) -> None:
        data = b"".join(parts)
        with self._disk._mutating("write", self._name) as is_half:
            growth = offset + len(data) - len(self._node.live)
            self._disk._need(length_bytes=max(0, growth))
            self._node.write(offset, data[: len(data) // 2] if is_half else data)
            self._node.mtime_ns = self._disk._media.now_ns()
            self.length_bytes = max(self.length_bytes, len(self._node.live))

    def truncate(self, length_bytes: int) -> None:
        with self._disk._mutating("truncate", self._name):
            self._disk._need(length_bytes=max(0, length_bytes - len(self._node.live)))
            self._node.resize(length_bytes)
            self.length_bytes = length_bytes

    def sync(self) -> None:
        with self._disk._mutating("sync", self._name) as is_half:
            if not is_half:
                self._node.settle()

    def close(self) -> None:
        """The bytes stay as they are."""


class SimLock:
    """`DiskLock` that ends with its holder's death."""

    def __init__(self, disk: SimDisk, node: Node, name: str) -> None:
        self._disk = disk
        self._node = node
        self._name = name
        self._is_held = True

    def beat(self, text: bytes) -> None:
        with self._disk._mutating("beat", self._name) as is_half:
            self._node.assign(bytearray(text[: len(text) // 2] if is_half else text), 0)
            self._node.mtime_ns = self._disk._media.now_ns()

    def release(self) -> None:
        if not self._is_held:
            return
        with self._disk._mutating("release", self._name):
            self._is_held = False
            self._node.holder = None
            if self._disk._media.names.get(self._name) is self._node:
                del self._disk._media.names[self._name]
                self._disk._media.name_changed(self._name)


def _checked(name: str) -> str:
    """Callers must stay inside the root, whatever they found in a file or a listing."""
    parts = name.split("/")
    is_inside = name == "." or all(part not in ("", ".", "..") for part in parts)
    if not is_inside or "\0" in name:
        raise AssertionError(f"a name outside the root reached the disk: {name!r}")
    return name


def _last(name: str) -> str:
    return name.rpartition("/")[2]
