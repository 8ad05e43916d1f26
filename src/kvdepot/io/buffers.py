"""Page-aligned memory, so that O_DIRECT can land in it and no copy is needed.

A buffer is anonymous memory of this process, or memory that a child process can map as well. It is
zero-filled, aligned to the page, and freed when the last view of it is gone.
"""

from __future__ import annotations

import ctypes
import mmap
import os
from collections.abc import Sequence

import numpy as np

from kvdepot.errors import ConfigError
from kvdepot.units import round_up

__all__ = ["ALIGNMENT", "HostBuffer", "address_of", "aligned_bytes", "merged_rows"]

#: Alignment of everything that moves: the page, and a multiple of every disk's logical block.
ALIGNMENT = 4096
_HUGE_PAGE_BYTES = 2 << 20
# from linux/mman.h; Python has no names for them
_MADV_POPULATE_WRITE = 23
_MADV_COLLAPSE = 25
#: each try meets the address that the one before was given, unless another thread maps memory
_MAP_TRIES = 4


class HostBuffer:
    """A run of page-aligned bytes.

    Args:
        length_bytes: at least this many; rounded up to the page.
        is_shared: memory behind a file descriptor (`fd`) that can be handed to a child process.
        is_prefaulted: touch every page now, so that no later load pays for the page faults.
    """

    def __init__(
        self, length_bytes: int, *, is_shared: bool = False, is_prefaulted: bool = False
    ) -> None:
        if length_bytes < 1:
            raise ConfigError(f"a buffer needs at least one byte, not {length_bytes}")
        self.length_bytes = round_up(length_bytes, ALIGNMENT)
        self.is_prefaulted = is_prefaulted
        self.fd: int | None = None
        #: where in the file behind `fd` the buffer begins
        self.fd_offset = 0
        if is_shared:
            self.fd = os.memfd_create("kvdepot-host")
            self._map, self.fd_offset = _map_shared(self.fd, self.length_bytes)
            if is_prefaulted:
                _collapse(self._map)
        else:
            flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
            self._map = mmap.mmap(-1, self.length_bytes, flags=flags)
            if hasattr(mmap, "MADV_HUGEPAGE") and self.length_bytes >= _HUGE_PAGE_BYTES:
                # fewer faults and fewer pinned pages per O_DIRECT call; a refusal costs only that
                try:
                    self._map.madvise(mmap.MADV_HUGEPAGE)
                except OSError:
                    pass
        if is_prefaulted:
            _populate(self._map)
        self.memory = memoryview(self._map)

    @classmethod
    def of_fd(
        cls, fd: int, length_bytes: int, *, fd_offset: int = 0, is_prefaulted: bool = False
    ) -> HostBuffer:
        """Map shared memory that another process made; the descriptor becomes this buffer's."""
        buffer = cls.__new__(cls)
        buffer.length_bytes = length_bytes
        buffer.is_prefaulted = is_prefaulted
        buffer.fd = fd
        buffer.fd_offset = fd_offset
        buffer._map = mmap.mmap(fd, length_bytes, flags=mmap.MAP_SHARED, offset=fd_offset)
        if is_prefaulted:
            # the pages are there, but a process that maps them has its own faults to take
            _populate(buffer._map)
        buffer.memory = memoryview(buffer._map)
        return buffer

    def close(self) -> None:
        """Give the memory back if no view of it is left; otherwise it goes with the last view."""
        try:
            self.memory.release()
            self._map.close()
        except BufferError:
            pass
        if self.fd is not None:
            os.close(self.fd)
            self.fd = None


def aligned_bytes(length_bytes: int) -> memoryview:
    """Fresh page-aligned memory of exactly `length_bytes`, freed with its last view."""
    return HostBuffer(max(length_bytes, 1)).memory[:length_bytes]


def address_of(view: memoryview) -> int:
    """The address of a view's first byte; 0 for an empty view."""
    if view.nbytes == 0:
        return 0
    if view.readonly:
        return int(np.frombuffer(view, dtype=np.uint8).ctypes.data)
    # several times faster, and asked for every row
    return ctypes.addressof(ctypes.c_char.from_buffer(view))


def merged_rows(rows: Sequence[memoryview]) -> list[memoryview] | None:
    """Rows as few parts as possible for one vectored call; None if any is not page-aligned.

    Rows that follow each other in one memory map become one part.
    """
    parts: list[memoryview] = []
    end = -1
    for row in rows:
        address = address_of(row)
        if address % ALIGNMENT or row.nbytes % ALIGNMENT:
            return None
        whole = row.obj
        if address == end and isinstance(whole, mmap.mmap) and parts[-1].obj is whole:
            base = memoryview(whole)
            start = address - address_of(base) - parts[-1].nbytes
            parts[-1] = base[start : start + parts[-1].nbytes + row.nbytes]
        else:
            parts.append(row.cast("B"))
        end = address + row.nbytes
    return parts


def _map_shared(fd: int, length_bytes: int) -> tuple[mmap.mmap, int]:
    """Map a fresh memory file so that its pages can become huge ones; the map and its file offset.

    They can where address and offset agree within a huge page. The address is the kernel's to choose,
    so the offset follows it.
    """
    offset = 0
    for _ in range(_MAP_TRIES):
        os.ftruncate(fd, offset + length_bytes)
        found = mmap.mmap(fd, length_bytes, flags=mmap.MAP_SHARED, offset=offset)
        wanted = address_of(memoryview(found)) % _HUGE_PAGE_BYTES
        if wanted == offset or length_bytes < _HUGE_PAGE_BYTES:
            return found, offset
        found.close()
        offset = wanted
    os.ftruncate(fd, offset + length_bytes)
    return mmap.mmap(fd, length_bytes, flags=mmap.MAP_SHARED, offset=offset), offset


def _collapse(memory: mmap.mmap) -> None:
    """Have the kernel back shared memory by huge pages, which its settings rarely do by themselves.

    Reads with O_DIRECT into it are twice as fast: a device takes few large pieces better than many
    pages. A refusal costs only that.
    """
    for offset in range(0, len(memory), _HUGE_PAGE_BYTES):
        memory[offset] = 0  # the kernel collapses only what has a page already
    try:
        memory.madvise(_MADV_COLLAPSE)
    except OSError:
        pass


def _populate(memory: mmap.mmap) -> None:
    """Touch every page."""
    try:
        memory.madvise(_MADV_POPULATE_WRITE)
    except OSError:  # a kernel before 5.14
        for offset in range(0, len(memory), ALIGNMENT):
            memory[offset] = memory[offset]
