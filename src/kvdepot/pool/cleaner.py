"""Keeping a root within its capacity and its floors, and sweeping what dead writers left.

The simple policy: whole segments, by last use. A segment counts as used as late as the segments whose
blocks continue its own, and of equally late ones the youngest goes first, so along a chain the suffix
goes before its prefix. Segments whose footer does not verify go first of all.

One cleaner at a time: the ``cleaner`` lease. All calls block on file calls; the root's lock is held.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable, Mapping
from typing import Protocol

from kvdepot.clock import Clock
from kvdepot.errors import PoolError, WriterNameTaken
from kvdepot.io.disk import Disk, Space
from kvdepot.metrics import Counters
from kvdepot.pool.catalog import Catalog, SegmentEntry, TmpEntry
from kvdepot.pool.lease import LeaseHolder, LeaseWatch
from kvdepot.pool.sizes import Limits
from kvdepot.units import format_bytes

__all__ = ["CLEANER_LEASE", "Cleaner", "SegmentKnowledge", "eviction_order"]

log = logging.getLogger(__name__)

CLEANER_LEASE = "cleaner"


class SegmentKnowledge(Protocol):
    """What the cleaner asks of, and tells, whoever knows the segments' blocks."""

    def refresh(self) -> None:
        """List every folder of the root, so that others' touches and publications count."""

    def evicted(self, entry: SegmentEntry) -> None:
        """A segment is gone."""

    def bad(self) -> list[SegmentEntry]:
        """Segments that do not verify."""

    def parents(self) -> Mapping[SegmentEntry, Iterable[SegmentEntry]]:
        """For a segment, those that hold the parents of its blocks, as far as known."""


class Cleaner:
    """Makes room in one root."""

    def __init__(
        self,
        disk: Disk,
        catalog: Catalog,
        limits: Limits,
        clock: Clock,
        counters: Counters,
        *,
        lease_s: float,
        knowledge: SegmentKnowledge,
    ) -> None:
        self._disk = disk
        self._catalog = catalog
        self.limits = limits
        self._counters = counters
        self._knowledge = knowledge
        self._watch = LeaseWatch(disk, clock, lease_s=lease_s)

    def used_bytes(self, claims: Iterable[TmpEntry] | None = None) -> int:
        """Bytes of all known segments, and what all writers may yet put into theirs (`claims`)."""
        if claims is None:
            claims = self._catalog.tmp_entries()
        return self._catalog.used_bytes + sum(entry.reserved_bytes for entry in claims)

    def excess_bytes(self, wanted_bytes: int, claims: Iterable[TmpEntry] | None = None) -> int:
        """How much must go before `wanted_bytes` more may be written; 0 when they may."""
        space = self._disk.space()
        excess = self.used_bytes(claims) + wanted_bytes - self.limits.capacity_bytes
        excess = max(excess, self.limits.free_bytes_min + wanted_bytes - space.free_bytes, 0)
        if self._lacks_inodes(space):
            excess = max(excess, 1)  # any one segment gives an inode back
        return excess

    def make_room(self, wanted_bytes: int) -> bool:
        """Evict until `wanted_bytes` more may be written; False when that cannot be reached now.

        False too while another process cleans: it makes the room, and the caller comes again.
        """
        if self.excess_bytes(wanted_bytes) == 0:
            return True
        try:
            lease = LeaseHolder(self._disk, CLEANER_LEASE, holder=CLEANER_LEASE, pid=os.getpid())
        except WriterNameTaken:
            return False
        try:
            self.sweep()
            self._knowledge.refresh()
            order = eviction_order(
                self._catalog.entries(),
                bad=self._knowledge.bad(),
                parents=self._knowledge.parents(),
            )
            for entry in order:
                if self.excess_bytes(wanted_bytes) == 0:
                    return True
                self._evict(entry)
            return self.excess_bytes(wanted_bytes) == 0
        finally:
            lease.release()

    def sweep(self) -> int:
        """Remove the unfinished segments and leases of dead writers; return how many files went."""
        swept = 0
        tmp_entries = self._catalog.tmp_entries()
        writers = {entry.writer for entry in tmp_entries} | self._watch.names()
        for writer in sorted(writers - {CLEANER_LEASE}):
            if not self._watch.is_dead(writer):
                continue
            for entry in tmp_entries:
                if entry.writer == writer:
                    swept += self._disk.remove(entry.path)
            self._watch.bury(writer)
        if swept:
            log.info("%s: removed %d files of dead writers", self._disk.place, swept)
            self._counters.add("leftovers_swept_total", swept)
        return swept

    def remove_empty_hours(self) -> None:
        """Remove hour folders that eviction has emptied; a store that loses the race makes it anew."""
        for namespace, hour in self._catalog.empty_hours():
            self._disk.remove(f"ns/{namespace}/{hour}")

    def _evict(self, entry: SegmentEntry) -> None:
        try:
            removed = self._disk.remove(entry.path)
        except PoolError as error:
            # another user's file in a shared pool: say so, and let the next one go
            log.warning("cannot evict %s: %s", entry.path, error)
            return
        self._catalog.drop(entry)
        self._knowledge.evicted(entry)
        if removed:
            self._counters.add("segments_evicted_total")
            self._counters.add("segment_bytes_evicted_total", entry.length_bytes)
            log.debug("evicted %s (%s)", entry.path, format_bytes(entry.length_bytes))

    def _lacks_inodes(self, space: Space) -> bool:
        return space.free_inodes is not None and space.free_inodes <= self.limits.free_inodes_min


def eviction_order(
    entries: Iterable[SegmentEntry],
    *,
    bad: Iterable[SegmentEntry] = (),
    parents: Mapping[SegmentEntry, Iterable[SegmentEntry]],
) -> list[SegmentEntry]:
    """The order in which segments go.

    Args:
        entries: all segments.
        bad: segments that do not verify; they go first.
        parents: for a segment, those that hold the parents of its blocks, as far as known.
    """
    known = list(entries)
    used_ns = {entry.path: entry.mtime_ns for entry in known}
    edges = {child.path: [p.path for p in of] for child, of in parents.items()}
    # a prefix is worth as much as what continues it: hand the time of use up the chains, youngest
    # first, so that each edge is walked at most once per improvement
    pending = sorted(used_ns, key=lambda path: used_ns[path])
    while pending:
        child = pending.pop()
        for parent in edges.get(child, ()):
            if parent in used_ns and used_ns[parent] < used_ns[child]:
                used_ns[parent] = used_ns[child]
                pending.append(parent)
    bad_paths = {entry.path for entry in bad}
    return sorted(
        known,
        key=lambda e: (e.path not in bad_paths, used_ns[e.path], -e.mtime_ns, -e.name.sequence),
    )
