"""The segments that a process reads: their ids, their footers, their open files.

An index knows a segment by a small number; this table turns numbers into files. Ids are never used
again, so a late reader cannot meet another segment under an old id.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Sequence
from typing import NamedTuple

from kvdepot.errors import CorruptSegment
from kvdepot.io.buffers import ALIGNMENT, aligned_bytes
from kvdepot.io.disk import Disk, DiskFile
from kvdepot.pool.catalog import SegmentEntry
from kvdepot.pool.root import Root
from kvdepot.pool.segment import (
    HEADER_BYTES,
    RECORD,
    TRAILER_BYTES,
    Records,
    decode_footer,
    decode_header,
    decode_trailer,
)

__all__ = ["OpenFiles", "Segment", "read_records"]

#: most segments' footers fit into the first read of the tail
_TAIL_BYTES = 64 * 1024


class Segment(NamedTuple):
    """A published segment of this process's namespace."""

    id: int
    root: Root
    entry: SegmentEntry


def read_records(disk: Disk, entry: SegmentEntry, identity_digest: bytes) -> Records | None:
    """A segment's verified records; None when the file is not there. Blocks on file calls.

    Raises:
        CorruptSegment: trailer or footer do not verify, or are another segment's.
        UnknownVersion: another format version.
        PoolError: the storage refused.
    """
    file = disk.open(entry.path)
    if file is None:
        return None
    try:
        length = file.length_bytes
        if length < HEADER_BYTES + ALIGNMENT or length % ALIGNMENT:
            raise CorruptSegment(f"{length} bytes are no segment", kind="length")
        tail_bytes = min(_TAIL_BYTES, length)
        tail = aligned_bytes(tail_bytes)
        if file.read(length - tail_bytes, [tail]) != tail_bytes:
            raise CorruptSegment("the segment ended early", kind="length")
        trailer = decode_trailer(tail[tail_bytes - TRAILER_BYTES :], length)
        stamp = trailer.stamp
        if stamp.identity_digest != identity_digest or stamp.name != entry.name:
            raise CorruptSegment("the trailer is another segment's", kind="swapped")
        table_bytes = trailer.records * RECORD.itemsize
        if length - trailer.footer_offset > tail_bytes:
            tail = aligned_bytes(length - trailer.footer_offset)
            if file.read(trailer.footer_offset, [tail]) != tail.nbytes:
                raise CorruptSegment("the segment ended early", kind="length")
        start = tail.nbytes - (length - trailer.footer_offset)
        return decode_footer(trailer, tail[start : start + table_bytes])
    finally:
        file.close()


class OpenFiles:
    """Open segment files, a bounded number, least recently used closed first. Thread-safe.

    A file in use is closed only after its last user; a file that is open stays readable although its
    name is gone (on POSIX systems), so an eviction does not disturb a read.
    """

    def __init__(self, identity_digest: bytes, files_max: int) -> None:
        self._identity_digest = identity_digest
        self._files_max = files_max
        self._lock = threading.Lock()
        self._files: OrderedDict[int, _Used] = OrderedDict()

    def acquire(self, segment: Segment) -> DiskFile | None:
        """The open file of a segment, with its header checked; None when it is not there.

        Every acquired file must be given back with `release`.

        Raises:
            CorruptSegment: the header is damaged or another segment's, or the length has changed.
            UnknownVersion, PoolError: as for `read_records`.
        """
        with self._lock:
            used = self._files.get(segment.id)
            if used is not None:
                used.users += 1
                self._files.move_to_end(segment.id)
                return used.file
        file = segment.root.disk.open(segment.entry.path)
        if file is None:
            return None
        try:
            self._check(file, segment)
        except BaseException:
            file.close()
            raise
        with self._lock:
            used = self._files.get(segment.id)
            surplus = [] if used is None or used.file is file else [file]  # another was first
            if used is None:
                used = self._files[segment.id] = _Used(file)
            used.users += 1
            surplus += self._take_surplus()
        _close(surplus)
        return used.file

    def release(self, segment: Segment) -> None:
        """End of one use."""
        with self._lock:
            used = self._files[segment.id]
            used.users -= 1
            surplus = self._take_surplus()
            if used.is_dropped and used.users == 0:
                surplus.append(self._files.pop(segment.id).file)
        _close(surplus)

    def drop(self, segment_id: int) -> None:
        """Close a segment's file, now or after its last user."""
        with self._lock:
            used = self._files.get(segment_id)
            if used is None:
                return
            used.is_dropped = True
            if used.users:
                return
            del self._files[segment_id]
        _close([used.file])

    def close(self) -> None:
        """Close all files that are not in use."""
        with self._lock:
            for used in self._files.values():
                used.is_dropped = True
            idle = [number for number, used in self._files.items() if used.users == 0]
            files = [self._files.pop(number).file for number in idle]
        _close(files)

    def _check(self, file: DiskFile, segment: Segment) -> None:
        if file.length_bytes != segment.entry.length_bytes:
            raise CorruptSegment("the segment's length has changed", kind="length")
        page = aligned_bytes(HEADER_BYTES)
        if file.read(0, [page]) != HEADER_BYTES:
            raise CorruptSegment("the segment has no header", kind="header")
        stamp = decode_header(page)
        if stamp.identity_digest != self._identity_digest or stamp.name != segment.entry.name:
            raise CorruptSegment("the header is another segment's", kind="swapped")

    def _take_surplus(self) -> list[DiskFile]:
        """The least recently used files that are too many and not in use; the lock is held."""
        surplus = len(self._files) - self._files_max
        idle = [number for number, used in self._files.items() if surplus > 0 and used.users == 0]
        return [self._files.pop(number).file for number in idle[: max(surplus, 0)]]


def _close(files: Sequence[DiskFile]) -> None:
    """Not under the lock: where closing waits for a server, the other roots' readers must go on."""
    for file in files:
        file.close()


class _Used:
    """An open file and how many use it."""

    __slots__ = ("file", "is_dropped", "users")

    def __init__(self, file: DiskFile) -> None:
        self.file = file
        self.users = 0
        self.is_dropped = False
