"""The kernel's FUSE protocol, as far as a pass-through needs it: requests in, answers out.

Everything is little-endian, as on the machines that run this; the layouts are those of
``linux/fuse.h``, version 7.31, which every later kernel speaks as well.
"""

from __future__ import annotations

import os
import struct
from enum import IntEnum
from typing import NamedTuple

__all__ = [
    "REQUEST_BYTES_MAX",
    "Op",
    "Request",
    "SetAttr",
    "answer",
    "attr",
    "directory",
    "entry",
    "init",
    "opened",
    "request_of",
    "space",
]

#: one read or write; the kernel's own limit
IO_BYTES_MAX = 1 << 20
REQUEST_BYTES_MAX = IO_BYTES_MAX + 8192

_IN = struct.Struct("<IIQQIIIHH")
_OUT = struct.Struct("<IiQ")
_ATTR = struct.Struct("<QQQQQQIIIIIIIIII")
_ENTRY = struct.Struct("<QQQQII")
_ATTR_OUT = struct.Struct("<QII")
_OPEN_OUT = struct.Struct("<QII")
_INIT_OUT = struct.Struct("<IIIIHHIIHHII24x")
_STATFS_OUT = struct.Struct("<QQQQQIIII24x")
_DIRENT = struct.Struct("<QQII")
_SETATTR_IN = struct.Struct("<IIQQQQQQIIIIIIII")

_MAJOR, _MINOR = 7, 31
_ASYNC_READ, _BIG_WRITES, _ASYNC_DIO, _PARALLEL_DIROPS = 1, 1 << 5, 1 << 15, 1 << 18
_MAX_PAGES = 1 << 22
#: reads and writes go past the kernel's page cache, so that each one is seen here
_DIRECT_IO = 1


class Op(IntEnum):
    """What is asked."""

    LOOKUP = 1
    FORGET = 2
    GETATTR = 3
    SETATTR = 4
    MKDIR = 9
    UNLINK = 10
    RMDIR = 11
    RENAME = 12
    LINK = 13
    OPEN = 14
    READ = 15
    WRITE = 16
    STATFS = 17
    RELEASE = 18
    FSYNC = 20
    FLUSH = 25
    INIT = 26
    OPENDIR = 27
    READDIR = 28
    RELEASEDIR = 29
    FSYNCDIR = 30
    CREATE = 35
    INTERRUPT = 36
    DESTROY = 38
    BATCH_FORGET = 42
    FALLOCATE = 43
    RENAME2 = 45


class Request(NamedTuple):
    """One request; `body` is valid until the buffer it lies in is used again."""

    op: int
    unique: int
    node: int
    body: memoryview

    def numbers(self, layout: str) -> tuple[int, ...]:
        """The leading numbers of the body."""
        return struct.unpack_from(f"<{layout}", self.body)

    def names(self, offset: int) -> list[str]:
        """The names that end the body."""
        return [os.fsdecode(name) for name in bytes(self.body[offset:]).split(b"\0")[:-1]]


class SetAttr(NamedTuple):
    """What is to be changed; None leaves it."""

    #: of an open file; None where the node's path is meant
    handle: int | None
    size: int | None
    mode: int | None
    #: nanoseconds, both; 0 is now
    times: tuple[int, int] | None

    @classmethod
    def of(cls, request: Request) -> SetAttr:
        """From the body of a request."""
        valid, _, handle, size, _, atime, mtime, _, atime_ns, mtime_ns, _, mode, *_ = (
            _SETATTR_IN.unpack_from(request.body)
        )
        times = None
        if valid & (16 | 32 | 128 | 256):
            times = (
                0 if valid & 128 else atime * 10**9 + atime_ns,
                0 if valid & 256 else mtime * 10**9 + mtime_ns,
            )
        return cls(
            handle if valid & 64 else None,
            size if valid & 8 else None,
            mode if valid & 1 else None,
            times,
        )


def request_of(buffer: memoryview) -> Request:
    """A request as it was read from the device."""
    _, op, unique, node, *_ = _IN.unpack_from(buffer)
    return Request(op, unique, node, buffer[_IN.size :])


def answer(unique: int, error: int, length_bytes: int) -> bytes:
    """The head of an answer whose body has so many bytes; `error` is an errno or 0."""
    return _OUT.pack(_OUT.size + length_bytes, -error, unique)


def init(request: Request) -> bytes:
    """The answer to the first request."""
    _, _, readahead, flags = request.numbers("IIII")
    wanted = _ASYNC_READ | _BIG_WRITES | _ASYNC_DIO | _PARALLEL_DIROPS | _MAX_PAGES
    pages = IO_BYTES_MAX // 4096
    return _INIT_OUT.pack(
        _MAJOR, _MINOR, readahead, wanted & flags, 64, 48, IO_BYTES_MAX, 1, pages, 0, 0, 0
    )


def attr(status: os.stat_result) -> bytes:
    """An answer with attributes; the kernel must not keep them."""
    return _ATTR_OUT.pack(0, 0, 0) + _attr(status)


def entry(node: int, status: os.stat_result) -> bytes:
    """An answer with a node and its attributes; the kernel must not keep them."""
    return _ENTRY.pack(node, 0, 0, 0, 0, 0) + _attr(status)


def opened(handle: int) -> bytes:
    """An answer with a handle."""
    return _OPEN_OUT.pack(handle, _DIRECT_IO, 0)


def space(found: os.statvfs_result) -> bytes:
    """An answer about the file system's space."""
    return _STATFS_OUT.pack(
        found.f_blocks,
        found.f_bfree,
        found.f_bavail,
        found.f_files,
        found.f_ffree,
        found.f_bsize,
        found.f_namemax,
        found.f_frsize,
        0,
    )


def directory(entries: list[tuple[str, int, int]], offset: int, size: int) -> bytes:
    """Entries (name, inode, mode) from the `offset`-th on, as many as `size` bytes hold."""
    found = b""
    for number, (name, inode, mode) in enumerate(entries[offset:], offset + 1):
        raw = os.fsencode(name)
        one = _DIRENT.pack(inode, number, len(raw), mode >> 12) + raw
        one += b"\0" * (-len(one) % 8)
        if len(found) + len(one) > size:
            break
        found += one
    return found


def _attr(status: os.stat_result) -> bytes:
    return _ATTR.pack(
        status.st_ino,
        status.st_size,
        status.st_blocks,
        status.st_atime_ns // 10**9,
        status.st_mtime_ns // 10**9,
        status.st_ctime_ns // 10**9,
        status.st_atime_ns % 10**9,
        status.st_mtime_ns % 10**9,
        status.st_ctime_ns % 10**9,
        status.st_mode,
        status.st_nlink,
        status.st_uid,
        status.st_gid,
        0,
        4096,
        0,
    )
