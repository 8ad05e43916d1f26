"""The seam between a pool and the storage under one root. Tests own the world through it.

`Disk` is what a pool needs: seven verbs over names relative to the root, and files with positioned,
vectored reads and writes. Calls block; they are made only from worker threads. Absence is `None` or
False. Everything else that can go wrong arrives as one of three errors: `PoolFull`, `PoolDenied`,
`PoolUnavailable`. Names use ``/`` and never leave the root.

`kvdepot.io.localdisk` is the real one; `kvdepot.testing.simdisk` keeps live and durable bytes in
memory and crashes at call n; `kvdepot.testing.faults` wraps either.
"""

from __future__ import annotations

import errno
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple, Protocol

from kvdepot.errors import PoolDenied, PoolError, PoolFull, PoolUnavailable

__all__ = ["Disk", "DiskFile", "DiskLock", "FileInfo", "Space", "translate", "translated"]


class FileInfo(NamedTuple):
    """One directory entry. `mtime_ns` is by the storage's clock, not by ours."""

    name: str
    length_bytes: int
    mtime_ns: int
    is_folder: bool
    is_regular: bool
    #: changes when the name comes to mean another file; 0 where the storage has no such number
    inode: int = 0
    #: space that is taken for the file; 0 where the storage does not say
    allocated_bytes: int = 0


class Space(NamedTuple):
    """What the file system has. Inode counts are None where it does not count them."""

    free_bytes: int
    total_bytes: int
    free_inodes: int | None
    total_inodes: int | None


class DiskFile(Protocol):
    """An open file. Positioned calls may come from several threads at once."""

    @property
    def length_bytes(self) -> int:
        """The file's length when it was opened, or since changed through this object."""

    def read(self, offset: int, parts: Sequence[memoryview]) -> int:
        """Fill the parts in order from `offset`; return the bytes read, fewer only at the end."""

    def write(self, offset: int, parts: Sequence[memoryview]) -> None:
        """Write all the parts in order at `offset`; whole or an error."""

    def truncate(self, length_bytes: int) -> None:
        """Set the file's length; where it grows, its space is reserved where the storage can."""

    def sync(self) -> None:
        """Wait until the data is durable."""

    def close(self) -> None:
        """Idempotent."""


class DiskLock(Protocol):
    """A held lock with a small text in it that others can read."""

    def beat(self, text: bytes) -> None:
        """Replace the text, so that others see life."""

    def release(self) -> None:
        """Give the lock back and remove its file. Idempotent."""


class Disk(Protocol):
    """One root. Thread-safe."""

    @property
    def place(self) -> str:
        """Where it is, for people."""

    @property
    def is_direct(self) -> bool:
        """Reads and writes with address, length and offset in ALIGNMENTs skip the page cache."""

    def create(self, name: str, reserve_bytes: int) -> DiskFile:
        """Make a new file of that length (its space reserved where the storage can) and open it.

        Raises `PoolDenied` when the name exists; folders on the way are made.
        """

    def open(self, name: str) -> DiskFile | None:
        """Open for reading; None when there is no such regular file."""

    def read_small(self, name: str, limit_bytes: int = 1 << 20) -> bytes | None:
        """The whole content of a small file; None when absent."""

    def publish(self, source: str, target: str) -> bool:
        """Give `source` its final name in one step; False, with `source` left, if the name is taken."""

    def remove(self, name: str) -> bool:
        """Remove a file, or a folder if it is empty; False when it was not there or not empty."""

    def files(self, folder: str) -> list[FileInfo]:
        """Entries of a folder, unordered; empty when there is no such folder."""

    def touch(self, name: str) -> bool:
        """Set a file's mtime to the storage's now; False when absent."""

    def space(self) -> Space:
        """Free and total space and inodes."""

    def lock(self, name: str, text: bytes) -> DiskLock | None:
        """Take the lock file `name` and put `text` in it; None while another live holder has it."""

    def close(self) -> None:
        """Idempotent."""


_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
_DENIED = {
    errno.EACCES,
    errno.EPERM,
    errno.EROFS,
    errno.ENOTDIR,
    errno.EISDIR,
    errno.EEXIST,
    errno.ELOOP,
    errno.ENAMETOOLONG,
}


def translate(error: OSError, operation: str, path: str) -> PoolError:
    """The pool error that an operating system error means; the message keeps the errno's name."""
    code = errno.errorcode.get(error.errno or 0, "unknown errno")
    message = f"{operation} {path}: {code}: {error.strerror or error}"
    if error.errno in _FULL:
        return PoolFull(message, path=path)
    if error.errno in _DENIED:
        return PoolDenied(message, path=path)
    return PoolUnavailable(message, path=path)


@contextmanager
def translated(operation: str, path: str) -> Iterator[None]:
    """Turn operating system errors inside the block into pool errors."""
    try:
        yield
    except OSError as error:
        raise translate(error, operation, path) from error
