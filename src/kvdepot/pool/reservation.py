"""A place for a segment that is being written."""

from __future__ import annotations

from kvdepot.io.disk import DiskFile
from kvdepot.pool.segment import SegmentName

__all__ = ["Reservation"]


class Reservation:
    """A place for a segment that is being written; bounded in size from the start."""

    def __init__(self, name: SegmentName, path: str, file: DiskFile, length_bytes: int) -> None:
        self.name = name
        self.path = path
        self.file = file
        self.length_bytes = length_bytes
