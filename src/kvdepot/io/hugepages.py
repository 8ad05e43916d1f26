"""Shared memory that somebody else has made, laid out in huge pages.

The kernel's usual settings give files in memory none, and then O_DIRECT into them reads at half the
rate: a device takes few large pieces better than many pages. The kernel can be asked to gather pages
that are there already, through a mapping whose address and file offset agree within a huge page. The
maker of the memory rarely has one, so it is mapped once more, for this alone.
"""

from __future__ import annotations

import ctypes
import logging
import mmap
import os
import threading

__all__ = ["gather_pages", "gather_pages_behind"]

log = logging.getLogger(__name__)

_HUGE_PAGE_BYTES = 2 << 20
# from linux/mman.h; Python has no names for them
_MADV_COLLAPSE = 25
_MAP_FIXED = 0x10
_FAILED = ctypes.c_void_p(-1).value


def gather_pages(fd: int, length_bytes: int) -> bool:
    """Lay the first bytes of a memory file out in huge pages. Copies them; blocks for a second per GiB.

    Content, and who else has it mapped, stay as they are; others may write meanwhile.

    Returns:
        False where the kernel refused, or gathered only some of the pages.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = [
        ctypes.c_void_p,
        ctypes.c_size_t,
        ctypes.c_int,
        ctypes.c_int,
        ctypes.c_int,
        ctypes.c_long,
    ]
    libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
    libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    whole = length_bytes // _HUGE_PAGE_BYTES * _HUGE_PAGE_BYTES
    if not whole:
        return False
    # a stretch of addresses with an aligned one in it, and the file on top of that
    room = whole + _HUGE_PAGE_BYTES
    anonymous = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    start = libc.mmap(None, room, 0, anonymous, -1, 0)
    if start == _FAILED:
        return False
    try:
        aligned = -(-start // _HUGE_PAGE_BYTES) * _HUGE_PAGE_BYTES
        access = mmap.PROT_READ | mmap.PROT_WRITE
        found = libc.mmap(aligned, whole, access, mmap.MAP_SHARED | _MAP_FIXED, fd, 0)
        return bool(found == aligned and libc.madvise(aligned, whole, _MADV_COLLAPSE) == 0)
    finally:
        libc.munmap(start, room)


def gather_pages_behind(fd: int, length_bytes: int) -> threading.Thread:
    """`gather_pages` on a thread, with a descriptor of its own."""
    own = os.dup(fd)

    def gather() -> None:
        try:
            if not gather_pages(own, length_bytes):
                log.info("the host buffer is not in huge pages, so reads into it take longer")
        finally:
            os.close(own)

    thread = threading.Thread(target=gather, name="kvdepot-pages", daemon=True)
    thread.start()
    return thread
