"""One open file of a local root: positioned, vectored reads and writes, with or without O_DIRECT."""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from kvdepot.io.buffers import ALIGNMENT, address_of
from kvdepot.io.disk import translated

__all__ = ["O_DIRECT", "LocalFile", "reserve"]

#: 0 where the system has no such flag
O_DIRECT = getattr(os, "O_DIRECT", 0)
_IOV_MAX = os.sysconf("SC_IOV_MAX") if "SC_IOV_MAX" in os.sysconf_names else 1024


class _Owner(Protocol):
    """The root that a file is of, as far as a file needs it."""

    is_direct: bool

    def give_up_direct(self, reason: str) -> None:
        """Use buffered I/O on this root from now on."""


class LocalFile:
    """`DiskFile` over one path, with a direct descriptor beside the buffered one.

    Args:
        owner: decides whether O_DIRECT is used.
        path: for messages.
        fd: an open descriptor, which becomes this file's.
        length_bytes: the file's length.
    """

    def __init__(self, owner: _Owner, path: Path, fd: int, length_bytes: int) -> None:
        self._owner = owner
        self._path = path
        self._fd = fd
        self._direct_fd: int | None = None
        self._lock = threading.Lock()
        self.length_bytes = length_bytes

    def read(self, offset: int, parts: Sequence[memoryview]) -> int:
        total = 0
        for group in _groups(parts):
            wanted = sum(part.nbytes for part in group)
            got = self._read_group(offset + total, group, wanted)
            total += got
            if got < wanted:
                break
        return total

    def write(self, offset: int, parts: Sequence[memoryview]) -> None:
        with translated("write", str(self._path)):
            for group in _groups(parts):
                offset += self._write_group(offset, group)

    def truncate(self, length_bytes: int) -> None:
        with translated("truncate", str(self._path)):
            if length_bytes > self.length_bytes:
                reserve(self._fd, length_bytes)
            else:
                os.ftruncate(self._fd, length_bytes)
        self.length_bytes = length_bytes

    def sync(self) -> None:
        with translated("sync", str(self._path)):
            os.fdatasync(self._fd)

    def close(self) -> None:
        with self._lock:
            fds = [fd for fd in (self._fd, self._direct_fd) if fd is not None and fd >= 0]
            self._fd, self._direct_fd = -1, None
        for fd in fds:
            os.close(fd)

    # one vectored call, repeated while it is short

    def _read_group(self, offset: int, group: list[memoryview], wanted: int) -> int:
        is_direct = self._owner.is_direct and _is_aligned(offset, group)
        done = 0
        with translated("read", str(self._path)):
            while done < wanted:
                rest = _after(group, done)
                got = self._read_once(offset + done, rest, is_direct)
                if got == 0:
                    break
                done += got
                if is_direct and done % ALIGNMENT:
                    break  # an unaligned short direct read is the end of the file
        return done

    def _read_once(self, offset: int, parts: list[memoryview], is_direct: bool) -> int:
        if is_direct and self._owner.is_direct:
            try:
                return os.preadv(self._direct(), parts, offset)
            except OSError as error:
                if error.errno != errno.EINVAL:
                    raise
                self._owner.give_up_direct("an aligned read with O_DIRECT gave EINVAL")
        return os.preadv(self._fd, parts, offset)

    def _write_group(self, offset: int, group: list[memoryview]) -> int:
        wanted = sum(part.nbytes for part in group)
        done = 0
        while done < wanted:
            rest = _after(group, done)
            # a short write may leave an unaligned rest, which then goes through the page cache
            is_direct = self._owner.is_direct and _is_aligned(offset + done, rest)
            done += self._write_once(offset + done, rest, is_direct)
        return done

    def _write_once(self, offset: int, parts: list[memoryview], is_direct: bool) -> int:
        written: int | None = None
        if is_direct:
            try:
                written = os.pwritev(self._direct(), parts, offset)
            except OSError as error:
                if error.errno != errno.EINVAL:
                    raise
                self._owner.give_up_direct("an aligned write with O_DIRECT gave EINVAL")
        if written is None:
            written = os.pwritev(self._fd, parts, offset)
        if written == 0:
            raise OSError(errno.EIO, "a write made no progress")
        return written

    def _direct(self) -> int:
        with self._lock:
            if self._direct_fd is None:
                mode = os.O_RDWR if self._is_writable() else os.O_RDONLY
                # through /proc so that the descriptor is of this very file, whatever its name now means
                source = f"/proc/self/fd/{self._fd}"
                self._direct_fd = os.open(source, mode | O_DIRECT | os.O_CLOEXEC)
            return self._direct_fd

    def _is_writable(self) -> bool:
        return fcntl.fcntl(self._fd, fcntl.F_GETFL) & os.O_ACCMODE == os.O_RDWR


def _groups(parts: Sequence[memoryview]) -> list[list[memoryview]]:
    """The parts in runs that one vectored call may take."""
    kept = [part for part in parts if part.nbytes]
    return [kept[start : start + _IOV_MAX] for start in range(0, len(kept), _IOV_MAX)]


def _after(group: list[memoryview], done: int) -> list[memoryview]:
    """The parts that are left when `done` bytes have moved."""
    if done == 0:
        return group
    for index, part in enumerate(group):
        if done < part.nbytes:
            return [part.cast("B")[done:], *group[index + 1 :]]
        done -= part.nbytes
    return []


def _is_aligned(offset: int, parts: Sequence[memoryview]) -> bool:
    return offset % ALIGNMENT == 0 and all(
        part.nbytes % ALIGNMENT == 0 and address_of(part) % ALIGNMENT == 0 for part in parts
    )


_libc = ctypes.CDLL(None, use_errno=True)


def reserve(fd: int, length_bytes: int) -> None:
    """Reserve space so that a full disk shows now and not in mid-segment.

    The system call and not `os.posix_fallocate`, whose emulation writes into every block where the
    file system cannot reserve.
    """
    fallocate = getattr(_libc, "fallocate", None)
    if fallocate is not None:
        fallocate.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64)
        if fallocate(fd, 0, 0, length_bytes) == 0:
            return
        code = ctypes.get_errno()
        if code not in (errno.EOPNOTSUPP, errno.ENOTSUP, errno.ENOSYS, errno.EINVAL):
            raise OSError(code, os.strerror(code))
    os.ftruncate(fd, length_bytes)
