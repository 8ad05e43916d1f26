"""What the tests of the local disk share."""

from __future__ import annotations

from kvdepot.io.buffers import ALIGNMENT, aligned_bytes

PAGE = ALIGNMENT


def block(byte, pages=1):
    """Aligned memory filled with one byte."""
    memory = aligned_bytes(pages * PAGE)
    memory[:] = bytes([byte]) * (pages * PAGE)
    return memory


def put(disk, name, *parts):
    file = disk.create(name, sum(part.nbytes for part in parts))
    file.write(0, list(parts))
    file.close()


def content(disk, name):
    return disk.read_small(name)
