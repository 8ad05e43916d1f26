"""What a process knows of the segments in its namespace: their ids, parents and defects.

It stands between the index (which knows segments by number) and the roots (which know files), and
hears from the writer, the roots and the reader what becomes of segments.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Mapping

from kvdepot.errors import FormatError, PoolError
from kvdepot.keys import KEY_BYTES, BlockKey
from kvdepot.metrics import Counters
from kvdepot.pool.catalog import SegmentEntry
from kvdepot.pool.index import BlockIndex
from kvdepot.pool.plan import PlannedBlock
from kvdepot.pool.root import Root
from kvdepot.pool.segment import Records
from kvdepot.pool.segments import OpenFiles, Segment, read_records

__all__ = ["SegmentTable"]

log = logging.getLogger(__name__)


class SegmentTable:
    """Segment ids and what is known of each segment. Thread-safe.

    The root's lock, where it is held, is taken before this table's.
    """

    def __init__(
        self, index: BlockIndex, files: OpenFiles, counters: Counters, identity_digest: bytes
    ) -> None:
        self._index = index
        self._files = files
        self._counters = counters
        self._identity_digest = identity_digest
        self._lock = threading.Lock()
        self._next_id = 0
        self._segments: dict[int, Segment] = {}
        self._ids: dict[tuple[int, str], int] = {}
        #: keys of parents that the segment does not hold itself; located when they are asked for,
        #: because the segment that holds them may be found later
        self._parents: dict[int, tuple[BlockKey, ...]] = {}
        self._bad: dict[tuple[int, str], SegmentEntry] = {}

    def segment(self, segment_id: int) -> Segment | None:
        return self._segments.get(segment_id)

    # from the writer

    def published(self, root: Root, entry: SegmentEntry, records: Records) -> None:
        """This process has made a segment visible."""
        with self._lock:
            segment_id = self._next_id
            self._next_id += 1
            self._segments[segment_id] = Segment(segment_id, root, entry)
            self._ids[id(root), entry.path] = segment_id
        self._index.insert(segment_id, records)
        parents = _outer_parents(records)
        with self._lock:
            is_listed = segment_id in self._segments
            if is_listed:
                self._parents[segment_id] = parents
        if not is_listed:
            self._index.remove_segment(segment_id)  # it went while it was taken in

    # from the roots

    def segment_added(self, root: Root, entry: SegmentEntry) -> None:
        with self._lock:
            if (id(root), entry.path) in self._ids:
                return
        try:
            records = read_records(root.disk, entry, self._identity_digest)
        except FormatError as error:
            self._is_bad(root, entry, error)
            return
        except PoolError as error:
            log.warning("%s cannot be read now: %s", entry.path, error)
            root.read_again(entry)
            return
        if records is not None:
            self.published(root, entry, records)
            self._counters.add("discovered_segments_total")

    def segment_removed(self, root: Root, entry: SegmentEntry) -> None:
        with self._lock:
            self._bad.pop((id(root), entry.path), None)
        self._forget(root, entry)

    def parents_of_segments(self, root: Root) -> Mapping[SegmentEntry, list[SegmentEntry]]:
        with self._lock:
            segments = [each for each in self._segments.values() if each.root is root]
            keys = {segment.id: self._parents.get(segment.id, ()) for segment in segments}
        found: dict[SegmentEntry, list[SegmentEntry]] = {}
        for segment in segments:
            at = self._index.locate(keys[segment.id])
            holders = [self.segment(each) for each in set(at.segment_ids[at.is_present].tolist())]
            found[segment.entry] = [each.entry for each in holders if each and each.root is root]
        return found

    def bad_segments(self, root: Root) -> list[SegmentEntry]:
        with self._lock:
            return [entry for (root_id, _), entry in self._bad.items() if root_id == id(root)]

    # from the reader

    def segment_is_used(self, segment: Segment) -> None:
        segment.root.touch(segment.entry)

    def block_is_corrupt(self, segment: Segment, block: PlannedBlock) -> None:
        log.warning(
            "a block at %d in %s does not verify; it will be computed again",
            block.offset,
            segment.entry.path,
        )
        self._index.forget(block.key, block.segment_id, block.offset)

    def segment_is_corrupt(self, segment: Segment, error: FormatError) -> None:
        self._is_bad(segment.root, segment.entry, error)
        self._forget(segment.root, segment.entry)

    def segment_vanished(self, segment: Segment) -> None:
        self._counters.add("lost_segments_total")
        segment.root.vanished(segment.entry)
        self._forget(segment.root, segment.entry)

    def segment_failed(self, segment: Segment, error: PoolError) -> None:
        log.warning("%s: %s; its blocks count as absent for now", segment.entry.path, error)
        self._forget(segment.root, segment.entry)
        segment.root.read_again(segment.entry)

    # below

    def _is_bad(self, root: Root, entry: SegmentEntry, error: FormatError) -> None:
        with self._lock:
            if (id(root), entry.path) in self._bad:
                return
            self._bad[id(root), entry.path] = entry
        self._counters.add("corrupt_segments_total")
        log.warning("%s is not used: %s", entry.path, error)

    def _forget(self, root: Root, entry: SegmentEntry) -> None:
        with self._lock:
            segment_id = self._ids.pop((id(root), entry.path), None)
            if segment_id is None:
                return
            self._segments.pop(segment_id, None)
            self._parents.pop(segment_id, None)
        self._index.remove_segment(segment_id)
        self._files.drop(segment_id)


def _outer_parents(records: Records) -> tuple[BlockKey, ...]:
    """Keys of the blocks that these continue and that are not among them."""
    joined = records["parent"].tobytes()
    parents = {joined[start : start + KEY_BYTES] for start in range(0, len(joined), KEY_BYTES)}
    joined = records["key"].tobytes()
    own = {joined[start : start + KEY_BYTES] for start in range(0, len(joined), KEY_BYTES)}
    return tuple(BlockKey(key) for key in parents - own)
