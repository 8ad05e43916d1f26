"""A segment while it is being filled: the blocks' places, and what its footer will say."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from kvdepot.io.buffers import ALIGNMENT, aligned_bytes, merged_rows
from kvdepot.pool.catalog import SegmentEntry
from kvdepot.pool.reservation import Reservation
from kvdepot.pool.root import Root
from kvdepot.pool.segment import (
    HEADER_BYTES,
    RECORD,
    RECORDS_MAX,
    Records,
    SegmentStamp,
    empty_segment_bytes,
    encode_header,
    encode_tail,
    key_table,
)
from kvdepot.tiers import Job, Write
from kvdepot.units import round_up

__all__ = ["FillingSegment", "Item", "Placed", "parts_of", "publish_filled"]


class Item(NamedTuple):
    """One block on its way."""

    job: Job
    position: int
    write: Write
    #: of the data; a number of our own, because a caller may have released the view
    length_bytes: int

    @property
    def padded_bytes(self) -> int:
        """What the block takes in a segment."""
        return round_up(self.length_bytes, ALIGNMENT)


class Placed(NamedTuple):
    """A block whose place is fixed."""

    item: Item
    offset: int
    checksum: int


class FillingSegment:
    """A segment that is being filled. Guarded by its root's state lock, except the file's writes."""

    def __init__(self, reservation: Reservation, opened_at_s: float) -> None:
        self.reservation = reservation
        self.opened_at_s = opened_at_s
        self.cursor = HEADER_BYTES
        self.placed_count = 0
        self.written: list[Placed] = []
        self.writers = 0
        self.is_sealed = False

    def has_room(self, padded_bytes: int) -> bool:
        """Whether one more block fits, with the footer that it lengthens."""
        tail = empty_segment_bytes(self.placed_count + 1) - HEADER_BYTES
        is_within = self.cursor + padded_bytes + tail <= self.reservation.length_bytes
        return is_within and self.placed_count < RECORDS_MAX


def _records_of(placed: Sequence[Placed]) -> Records:
    items = [place.item for place in placed]
    writes = [item.write for item in items]
    records = np.zeros(len(placed), dtype=RECORD)
    records["key"] = key_table([write.key for write in writes])
    records["parent"] = key_table([write.parent for write in writes])
    records["offset"] = [place.offset for place in placed]
    records["length"] = [item.length_bytes for item in items]
    records["tokens"] = [write.tokens for write in writes]
    records["checksum"] = np.array([place.checksum for place in placed], dtype=np.uint64)
    return records


def parts_of(items: Sequence[Item]) -> list[memoryview]:
    """What to write: the caller's memory where it is aligned, else a padded copy."""
    data = [item.write.data.cast("B") for item in items]
    # neighbours as one part: the kernel pins their pages in longer runs
    parts = merged_rows(data)
    if parts is not None:
        return parts
    staging = aligned_bytes(sum(item.padded_bytes for item in items))
    start = 0
    for item, view in zip(items, data, strict=True):
        staging[start : start + view.nbytes] = view
        start += item.padded_bytes
    return [staging]


def publish_filled(
    root: Root,
    segment: FillingSegment,
    *,
    created_ns: int,
    on_published: Callable[[Root, SegmentEntry, Records], None],
) -> None:
    """Write header and footer of a segment that nobody fills any more, and make it visible.

    Raises:
        PoolError: the storage refused; the reservation is still to be withdrawn.
    """
    segment.written.sort(key=lambda place: place.offset)
    records = _records_of(segment.written)
    reservation = segment.reservation
    stamp = SegmentStamp(bytes.fromhex(root.namespace), root.pool_id, reservation.name)
    tail = encode_tail(stamp, records, segment.cursor)
    length_bytes = segment.cursor + tail.nbytes
    file = reservation.file
    file.write(0, [encode_header(stamp, created_ns)])
    file.write(segment.cursor, [tail])
    file.truncate(length_bytes)
    file.close()
    root.publish(reservation, length_bytes, lambda entry: on_published(root, entry, records))
