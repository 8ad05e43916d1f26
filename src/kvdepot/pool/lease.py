"""Leases: who is alive among the writers of a pool.

A writer holds ``lease/<writer>.lease``: an flock on a file with a small text that it renews. Whether a
writer is dead is decided in this order:

1. Same host since the same boot: the kernel knows. The flock is free exactly when the holder is dead.
2. Elsewhere: by silence that we observed ourselves, on our own monotonic clock. A lease whose text and
   mtime have not changed for `lease_s` is over. Wall clocks of hosts are never compared: they jump.

A wrongly buried writer loses only the segment that it was writing: its rename fails and it drops the
store.
"""

from __future__ import annotations

import logging
import secrets

import msgspec

from kvdepot.clock import Clock
from kvdepot.errors import PoolError, WriterNameTaken
from kvdepot.io.disk import Disk, DiskLock
from kvdepot.io.host import host_boot_id

__all__ = ["LEASE_FOLDER", "LEASE_SUFFIX", "LeaseHolder", "LeaseWatch", "new_writer_name"]

log = logging.getLogger(__name__)

LEASE_FOLDER = "lease"
LEASE_SUFFIX = ".lease"


class _LeaseText(msgspec.Struct, frozen=True, kw_only=True):
    """What a lease file says."""

    holder: str
    boot_id: str
    pid: int
    beats: int


class LeaseHolder:
    """A lease that this process holds. Used by one thread at a time.

    Raises:
        WriterNameTaken: a live holder has the name.
        PoolError: the storage refused.
    """

    def __init__(self, disk: Disk, name: str, *, holder: str, pid: int) -> None:
        self.name = name
        self._disk = disk
        self._path = f"{LEASE_FOLDER}/{name}{LEASE_SUFFIX}"
        self._text = _LeaseText(holder=holder, boot_id=host_boot_id(), pid=pid, beats=0)
        self._lock: DiskLock | None = disk.lock(self._path, msgspec.json.encode(self._text))
        if self._lock is None:
            raise WriterNameTaken(
                f"{disk.place}: the lease {name!r} is held by a live process",
                hint="let the name be chosen, or stop the other process",
            )

    def beat(self) -> None:
        """Show life; take the lease anew if somebody has removed its file.

        Without the file the others would count this writer as dead and sweep what it is writing.
        """
        self._text = msgspec.structs.replace(self._text, beats=self._text.beats + 1)
        text = msgspec.json.encode(self._text)
        if self._lock is not None and self._disk.read_small(self._path) is not None:
            self._lock.beat(text)
            return
        self.release()
        # None while another process looks whether it is free: then the next beat takes it
        self._lock = self._disk.lock(self._path, text)

    def release(self) -> None:
        """End the lease. Idempotent."""
        if self._lock is not None:
            self._lock.release()
            self._lock = None


class LeaseWatch:
    """Decides which holders are dead. Used by one thread at a time."""

    def __init__(self, disk: Disk, clock: Clock, *, lease_s: float) -> None:
        self._disk = disk
        self._clock = clock
        self._lease_s = lease_s
        #: holder -> what we last saw of it, and when it last changed on our clock
        self._seen: dict[str, tuple[object, float]] = {}

    def names(self) -> set[str]:
        """Names of all lease files."""
        return {
            info.name.removesuffix(LEASE_SUFFIX)
            for info in self._disk.files(LEASE_FOLDER)
            if info.is_regular and info.name.endswith(LEASE_SUFFIX)
        }

    def is_dead(self, name: str) -> bool:
        """Whether the holder of a lease is known to be dead. May make file calls.

        A name without a lease file counts as silent, not as dead at once: on a network file system
        the file may be there and not yet visible.
        """
        path = f"{LEASE_FOLDER}/{name}{LEASE_SUFFIX}"
        try:
            content = self._disk.read_small(path)
        except PoolError:
            return False
        ours = host_boot_id()
        if content is not None and ours and _boot_id(content) == ours:
            return self._is_lock_free(path, content)
        stamp = (content, self._mtime(name) if content is not None else 0)
        now_s = self._clock.monotonic_s()
        seen = self._seen.get(name)
        if seen is None or seen[0] != stamp:
            self._seen[name] = (stamp, now_s)
            return False
        return now_s - seen[1] >= self._lease_s

    def bury(self, name: str) -> None:
        """Remove a dead holder's lease file."""
        self._disk.remove(f"{LEASE_FOLDER}/{name}{LEASE_SUFFIX}")
        self._seen.pop(name, None)

    def _is_lock_free(self, path: str, content: bytes) -> bool:
        lock = self._disk.lock(path, content)
        if lock is None:
            return False
        lock.release()
        return True

    def _mtime(self, name: str) -> int:
        for info in self._disk.files(LEASE_FOLDER):
            if info.name == name + LEASE_SUFFIX:
                return info.mtime_ns
        return 0


def new_writer_name() -> str:
    """16 hexadecimal digits from the system's randomness; never from a seedable generator."""
    return secrets.token_hex(8)


def _boot_id(content: bytes) -> str:
    try:
        return msgspec.json.decode(content, type=_LeaseText).boot_id
    except msgspec.MsgspecError:
        return ""
