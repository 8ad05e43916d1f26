"""How fast a folder's files can be read past the page cache, by one thread: the ceiling of a cold read."""

from __future__ import annotations

import os
from pathlib import Path

from kvdepot.clock import Clock
from kvdepot.io.buffers import ALIGNMENT, HostBuffer
from kvdepot.io.localfile import O_DIRECT

__all__ = ["read_rate"]


def read_rate(
    folder: str | Path, clock: Clock, *, read_bytes: int = 2 << 20, bytes_max: int = 1 << 29
) -> float | None:
    """Bytes a second over the folder's files, largest first; None without files worth the name.

    Args:
        folder: searched with its sub-folders; nothing is written.
        clock: of the span.
        read_bytes: of one call; a multiple of 4 KiB.
        bytes_max: in all.
    """
    files = sorted(
        (path for path in Path(folder).rglob("*") if path.is_file() and not path.is_symlink()),
        key=lambda path: path.stat().st_size,
        reverse=True,
    )
    buffer = HostBuffer(read_bytes, is_prefaulted=True)
    done = 0
    began_s = clock.monotonic_s()
    try:
        for path in files:
            if done >= bytes_max or path.stat().st_size < ALIGNMENT:
                break
            done += _read(path, buffer.memory, bytes_max - done)
    finally:
        buffer.close()
    span_s = clock.monotonic_s() - began_s
    return done / span_s if done >= read_bytes and span_s > 0 else None


def _read(path: Path, memory: memoryview, bytes_max: int) -> int:
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | O_DIRECT)
    except OSError:
        # a file system without O_DIRECT: what was dropped from the page cache is read cold too
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    done = 0
    try:
        while done < bytes_max:
            got = os.preadv(fd, [memory], done)
            done += got
            if got < memory.nbytes:
                break
    finally:
        os.close(fd)
    return done
