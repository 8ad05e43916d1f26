"""Keeping a root within its capacity and its floors, and sweeping what dead writers left.

The simple policy: whole segments, by last use. A segment counts as used as late as the segments whose
blocks continue its own, and of equally late ones the youngest goes first, so along a chain the suffix
goes before its prefix. Segments whose footer does not verify go first of all.

One cleaner at a time: the ``cleaner`` lease. All calls block on file calls; the root's lock is held.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple, Protocol

from kvdepot.clock import Clock
from kvdepot.errors import PoolError, WriterNameTaken
from kvdepot.io.disk import Disk, Space
from kvdepot.metrics import Counters
from kvdepot.pool.catalog import Catalog, SegmentEntry, TmpEntry
from kvdepot.pool.lease import LEASE_FOLDER, LEASE_SUFFIX, LeaseHolder, LeaseWatch
from kvdepot.pool.sizes import Limits
from kvdepot.units import format_bytes

__all__ = ["CLEANER_LEASE", "Cleaner", "SegmentKnowledge", "eviction_order"]

log = logging.getLogger(__name__)

CLEANER_LEASE = "cleaner"
#: a last use so much later than the storage's now is a clock's error and says nothing
_FUTURE_NS = 3600 * 10**9
#: removed files give their space back so late, while other processes still have them open
_RELEASE_S = 5.0


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
        #: the writer of this process; alive, whatever became of its lease file
        self.own_writer = ""
        self._clock = clock
        self._counters = counters
        self._knowledge = knowledge
        self._promise = _Promise(0, 0, float("-inf"))
        self._watch = LeaseWatch(disk, clock, lease_s=lease_s)

    def used_bytes(self, claims: Iterable[TmpEntry] | None = None) -> int:
        """Bytes of all known segments, and what all writers may yet put into theirs (`claims`)."""
        if claims is None:
            claims = self._catalog.tmp_entries()
        return self._catalog.used_bytes + sum(entry.reserved_bytes for entry in claims)

    def excess_bytes(self, wanted_bytes: int, claims: Iterable[TmpEntry] | None = None) -> int:
        """How much must go before `wanted_bytes` more may be written; 0 when they may."""
        if claims is None:
            claims = self._catalog.tmp_entries()
        return self._excess_bytes(wanted_bytes, list(claims), self._disk.space())

    def _excess_bytes(self, wanted_bytes: int, claims: Sequence[TmpEntry], space: Space) -> int:
        claimed = sum(entry.reserved_bytes for entry in claims)
        excess = self._catalog.used_bytes + claimed + wanted_bytes - self.limits.capacity_bytes
        # what is claimed and not yet reserved will still go, for all that the free space says
        pending = sum(entry.pending_bytes for entry in claims)
        floor = self.limits.free_bytes_min + pending + wanted_bytes
        excess = max(excess, floor - space.free_bytes, 0)
        # a segment needs an inode as well; after the claim, with nothing more wanted, it has it
        if self._lacks_inodes(space, wanted=1 if wanted_bytes else 0):
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
            self._evict_for(wanted_bytes)
            return self.excess_bytes(wanted_bytes) == 0
        finally:
            lease.release()

    def _evict_for(self, wanted_bytes: int) -> None:
        """Evict what must go, and not more because its space comes back late."""
        claims = self._catalog.tmp_entries()
        claimed = sum(entry.reserved_bytes for entry in claims)
        if claimed + wanted_bytes > self.limits.capacity_bytes:
            return  # with everything gone there would be no room either
        order = eviction_order(
            self._catalog.entries(),
            bad=self._knowledge.bad(),
            parents=self._knowledge.parents(),
            now_ns=self._storage_now_ns(),
        )
        now_s = self._clock.monotonic_s()
        space = self._disk.space()
        expected = space if now_s >= self._promise.until_s else self._promise.applied_to(space)
        for entry in order:
            if self._excess_bytes(wanted_bytes, claims, expected) == 0:
                break
            if self._evict(entry):
                expected = _more(expected, entry.length_bytes)
        late = expected.free_bytes - self._disk.space().free_bytes
        until_s = now_s + _RELEASE_S if late > 0 else float("-inf")
        self._promise = _Promise(expected.free_bytes, expected.free_inodes or 0, until_s)

    def sweep(self) -> int:
        """Remove the unfinished segments and leases of dead writers; return how many files went."""
        swept = 0
        tmp_entries = self._catalog.tmp_entries()
        writers = {entry.writer for entry in tmp_entries} | self._watch.names()
        for writer in sorted(writers - {CLEANER_LEASE, self.own_writer}):
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

    def _evict(self, entry: SegmentEntry) -> bool:
        try:
            removed = self._disk.remove(entry.path)
        except PoolError as error:
            # another user's file in a shared pool: say so, and let the next one go
            log.warning("cannot evict %s: %s", entry.path, error)
            return False
        self._catalog.drop(entry)
        self._knowledge.evicted(entry)
        if removed:
            self._counters.add("segments_evicted_total")
            self._counters.add("segment_bytes_evicted_total", entry.length_bytes)
            log.debug("evicted %s (%s)", entry.path, format_bytes(entry.length_bytes))
        return removed

    def _storage_now_ns(self) -> int | None:
        """The storage's clock, by the lease that has just been taken."""
        for info in self._disk.files(LEASE_FOLDER):
            if info.name == f"{CLEANER_LEASE}{LEASE_SUFFIX}":
                return info.mtime_ns
        return None

    def _lacks_inodes(self, space: Space, *, wanted: int) -> bool:
        if space.free_inodes is None:
            return False
        return space.free_inodes - wanted <= self.limits.free_inodes_min


class _Promise(NamedTuple):
    """What the file system will have when the files that were removed have been let go of."""

    free_bytes: int
    free_inodes: int
    until_s: float

    def applied_to(self, space: Space) -> Space:
        inodes = space.free_inodes
        return space._replace(
            free_bytes=max(space.free_bytes, self.free_bytes),
            free_inodes=None if inodes is None else max(inodes, self.free_inodes),
        )


def _more(space: Space, length_bytes: int) -> Space:
    """The space when one file of that length has gone."""
    inodes = space.free_inodes
    return space._replace(
        free_bytes=space.free_bytes + length_bytes,
        free_inodes=None if inodes is None else inodes + 1,
    )


def eviction_order(
    entries: Iterable[SegmentEntry],
    *,
    bad: Iterable[SegmentEntry] = (),
    parents: Mapping[SegmentEntry, Iterable[SegmentEntry]],
    now_ns: int | None = None,
) -> list[SegmentEntry]:
    """The order in which segments go.

    Args:
        entries: all segments.
        bad: segments that do not verify; they go first.
        parents: for a segment, those that hold the parents of its blocks, as far as known.
        now_ns: by the storage's clock. Last uses well after it, left by a clock that has been set back
            since, count as older than all others; else they would outlast everything.
    """
    known = list(entries)
    used_ns = {entry.path: entry.mtime_ns for entry in known}
    if now_ns is not None:
        latest = max(used_ns.values(), default=0)
        for path, mtime_ns in used_ns.items():
            if mtime_ns > now_ns + _FUTURE_NS:
                used_ns[path] = mtime_ns - latest - _FUTURE_NS  # in their own order
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
