"""One root of a pool: opening it, and everything that is done to it as a whole.

    pool.json                                 format version, pool id, capacity
    ns/<identity digest>/identity.json        the manifest
    ns/<identity digest>/<hour>/<writer>-<sequence>.kvseg
    tmp/<writer>-<sequence>-<bytes>.tmp       being written; the name says how large it may become
    lease/<writer>.lease                      who is alive

Ownership: `lock` is held around the catalog, the cleaner and the leases. It is held over file calls,
so only worker threads may take it.
"""

from __future__ import annotations

import logging
import os
import secrets
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from typing import Protocol

from kvdepot.clock import Clock
from kvdepot.config import PoolConfig
from kvdepot.errors import (
    PoolDenied,
    PoolError,
    PoolFull,
)
from kvdepot.identity import Identity
from kvdepot.io.disk import Disk
from kvdepot.metrics import Counters
from kvdepot.pool.catalog import Catalog, SegmentEntry, hour_name, segment_path, tmp_path
from kvdepot.pool.cleaner import Cleaner
from kvdepot.pool.lease import LeaseHolder, new_writer_name
from kvdepot.pool.poolfile import (
    open_namespace,
    open_pool_file,
    restore_manifest,
    restore_pool_file,
)
from kvdepot.pool.reservation import Reservation
from kvdepot.pool.segment import SegmentName
from kvdepot.pool.sizes import Limits, configured_capacity, segment_bytes_within
from kvdepot.units import format_bytes

__all__ = ["Root", "RootListener"]

log = logging.getLogger(__name__)

#: a folder with more entries gets a successor, so that no directory grows without bound
_FOLDER_ENTRIES_MAX = 4000
#: everything is looked at again this often, whatever the mtimes say
_FULL_REFRESH_S = 60.0
_TOUCH_INTERVAL_S = 2.0
_ADMIT_ATTEMPTS = 8


class RootListener(Protocol):
    """Who wants to know of this root's segments in one namespace."""

    def segment_added(self, root: Root, entry: SegmentEntry) -> None:
        """A segment was found; its footer is still to be read. May make file calls."""

    def segment_removed(self, root: Root, entry: SegmentEntry) -> None:
        """A segment is gone. Called with the root's lock held."""

    def parents_of_segments(self, root: Root) -> Mapping[SegmentEntry, list[SegmentEntry]]:
        """For a segment, those that hold the parents of its blocks, as far as known."""

    def bad_segments(self, root: Root) -> list[SegmentEntry]:
        """Segments whose footer or header does not verify."""


class Root:
    """One root, opened for one identity.

    Raises on construction (all calls block on file calls):
        UnknownVersion: the pool is of another format version; nothing is changed.
        FormatError: pool.json is not a pool's.
        IdentityMismatch: the namespace holds another identity; names the field.
        PoolDenied, PoolFull, PoolUnavailable: as the storage answers.
        ConfigError: the capacity cannot hold one block.
    """

    def __init__(
        self,
        disk: Disk,
        config: PoolConfig,
        identity: Identity,
        *,
        clock: Clock,
        counters: Counters,
        listener: RootListener,
    ) -> None:
        self.disk = disk
        self.lock = threading.RLock()
        self.namespace = identity.digest().hex()
        self._config = config
        self._identity = identity
        self._clock = clock
        self._counters = counters
        self._listener = listener
        self._closed = False
        self._lease: LeaseHolder | None = None
        self._sequence = 0
        self._touched: dict[str, None] = {}
        #: segments found whose footer has not been read yet
        self._unread: deque[SegmentEntry] = deque()
        #: segments whose file gave an error; storage recovers, so they get another chance
        self._again: dict[str, SegmentEntry] = {}
        #: tmp files that could not be removed when their writer gave them up
        self._leftovers: list[str] = []
        self._due_s: dict[str, float] = {}
        self.catalog = Catalog(disk, clock)
        self._pool_file = open_pool_file(disk, config.capacity_bytes, is_read_only=config.read_only)
        self.pool_id = bytes.fromhex(self._pool_file.pool_id)
        open_namespace(disk, identity, is_read_only=config.read_only)
        capacity = configured_capacity(
            disk.place, config.capacity_bytes, self._pool_file.capacity_bytes
        )
        self._cleaner = Cleaner(
            disk,
            self.catalog,
            Limits.of(disk.space(), capacity, config.free_bytes_min, config.free_inodes_min),
            clock,
            counters,
            lease_s=config.lease_s,
            knowledge=_Knowledge(self, listener),
        )
        self.segment_bytes = segment_bytes_within(
            capacity, config.segment_bytes, max(identity.block_bytes), place=disk.place
        )

    def start(self, *, index_s: float) -> None:
        """Take the writer's lease, sweep, trim to the capacity, and read the footers.

        Args:
            index_s: wait so long for the footers; the rest is read on the root's ticks, while the
                tier already serves.
        """
        with self.lock:
            if not self._config.read_only:
                self._take_lease()
                self._cleaner.sweep()
            self.discover(is_full=True)
            self._is_due("full", min(_FULL_REFRESH_S, self._config.lease_s))
            if not self._config.read_only:
                self._cleaner.make_room(0)
        self.read_found(until_s=self._clock.monotonic_s() + index_s)

    @property
    def limits(self) -> Limits:
        """Capacity and floors in force."""
        return self._cleaner.limits

    @property
    def writer(self) -> str:
        """This process's writer name; empty when read-only."""
        return self._lease.name if self._lease else ""

    def used_bytes(self) -> int:
        """Bytes of all known segments. Memory only."""
        return self.catalog.used_bytes

    # writing

    def admit(self, length_bytes: int) -> Reservation:
        """Reserve room for a segment of at most `length_bytes`, evicting if needed.

        The name of the empty file makes the claim; it is checked together with all other claims
        before a byte is written, so writers that race may both step back but never overrun.

        Raises:
            PoolFull: no room can be made now.
            PoolError: the storage refused.
        """
        for _ in range(_ADMIT_ATTEMPTS):
            with self.lock:
                self.discover(is_full=False)
                has_room = self._cleaner.make_room(length_bytes)
                reservation = self._claim(length_bytes) if has_room else None
            if reservation is not None:
                return reservation
            # two claims met, or another process cleans: one will be first next time
            time.sleep(secrets.randbelow(50) / 1000)
        raise PoolFull(
            f"{self.disk.place}: no room for {format_bytes(length_bytes)} within "
            f"{format_bytes(self.limits.capacity_bytes)} and its floors",
            path=self.disk.place,
        )

    def publish(
        self,
        reservation: Reservation,
        length_bytes: int,
        on_published: Callable[[SegmentEntry], None],
    ) -> None:
        """Make a finished segment visible under its final name, and tell.

        Raises:
            PoolError: the storage refused, or the name is taken; the unfinished file is left to
                `withdraw`.
        """
        now_s = self._clock.wall_s()
        with self.lock:
            hour = self._hour(now_s)
            target = segment_path(self.namespace, hour, reservation.name)
            if not self.disk.publish(reservation.path, target):
                raise PoolDenied(f"{target} exists already; nothing is overwritten", path=target)
            entry = SegmentEntry(
                self.namespace, hour, reservation.name, length_bytes, int(now_s * 1e9), 0
            )
            # under the lock, so that discovery cannot find the file in between and take it in twice
            self.catalog.add(entry)
            on_published(entry)

    def withdraw(self, reservation: Reservation) -> None:
        """Give a reservation up; what cannot be removed now is tried again on each tick."""
        reservation.file.close()
        try:
            self.disk.remove(reservation.path)
        except PoolError as error:
            log.debug("%s is removed later: %s", reservation.path, error)
            self._leftovers.append(reservation.path)

    # reading

    def touch(self, entry: SegmentEntry) -> None:
        """Note a use, to be written behind. Memory only."""
        self._touched.setdefault(entry.path)

    def vanished(self, entry: SegmentEntry) -> None:
        """A segment was not there when it was to be read."""
        with self.lock:
            self.gone(entry)
            self.catalog.drop(entry)

    # what the root's own thread does

    def tick(self) -> None:
        """Whatever is due: show life, discover, write touches, look at everything, sweep.

        Raises:
            PoolError: the storage refused; the rest is done on a later tick.
        """
        with self.lock:
            if self._closed:
                return
            if self._is_due("beat", self._config.lease_s / 3) and self._lease is not None:
                self._lease.beat()
            if self._is_due("touch", _TOUCH_INTERVAL_S):
                self.flush_touches()
            # a claim counts against everybody's capacity for as long as its file is there
            while self._leftovers:
                self.disk.remove(self._leftovers[-1])
                self._leftovers.pop()
            if self._is_due("full", min(_FULL_REFRESH_S, self._config.lease_s)):
                self._look_at_everything()
            elif self._is_due("discover", self._config.discover_interval_s):
                self.discover(is_full=False, namespace=self.namespace)
        self.read_found()

    def _is_due(self, what: str, interval_s: float) -> bool:
        now_s = self._clock.monotonic_s()
        if now_s < self._due_s.get(what, now_s):
            return False
        self._due_s[what] = now_s + interval_s
        return True

    def _look_at_everything(self) -> None:
        self.discover(is_full=True)
        again, self._again = self._again, {}
        self._unread.extend(again.values())
        if not self._config.read_only:
            restore_pool_file(self.disk, self._pool_file)
            restore_manifest(self.disk, self._identity)
            self._cleaner.sweep()
            self._cleaner.make_room(0)
            self._cleaner.remove_empty_hours()

    def read_found(self, *, until_s: float | None = None) -> bool:
        """Have the footers of found segments read; False if time (monotonic) ran out before the end.

        Not under the lock: a footer is a file read, and there may be thousands.
        """
        while True:
            try:
                entry = self._unread.popleft()
            except IndexError:
                return True
            self._listener.segment_added(self, entry)
            with self.lock:
                if not self.catalog.knows(entry):
                    self.gone(entry)  # it went while it was read
            if until_s is not None and self._clock.monotonic_s() >= until_s:
                return not self._unread

    def read_again(self, entry: SegmentEntry) -> None:
        """Have a segment's footer read once more on the next look at everything."""
        self._again[entry.path] = entry

    def flush_touches(self) -> None:
        """Write the uses noted so far, prefixes last, so that they count as the more recent."""
        touched, self._touched = self._touched, {}
        if self._config.read_only:
            return
        # a copy: a reader may still be adding to the one that it has just seen
        for path in list(reversed(touched)):
            self.disk.touch(path)

    def close(self) -> None:
        """End the lease. The tmp files must be published or withdrawn before. Idempotent."""
        with self.lock:
            if self._closed:
                return
            self._closed = True
            try:
                self.flush_touches()
            except PoolError as error:
                log.debug("%s: touches not written: %s", self.disk.place, error)
            if self._lease is not None:
                self._lease.release()
            self.disk.close()

    # opening

    def _take_lease(self) -> None:
        name = new_writer_name()
        self._lease = LeaseHolder(self.disk, name, holder=name, pid=os.getpid())
        self._cleaner.own_writer = name

    # callers hold the lock

    def discover(self, *, is_full: bool, namespace: str | None = None) -> None:
        """Take in what others have published and removed; the lock must be held."""
        changes = self.catalog.refresh(is_full=is_full, namespace=namespace)
        for entry in changes.removed:
            self.gone(entry)
        # the newest first: they are the likeliest to be asked for
        fresh = [entry for entry in changes.added if entry.namespace == self.namespace]
        self._unread.extendleft(sorted(fresh, key=lambda entry: entry.mtime_ns))

    def gone(self, entry: SegmentEntry) -> None:
        """Tell the listener that a segment is no more; the lock must be held."""
        if entry.namespace == self.namespace:
            self._listener.segment_removed(self, entry)

    def _claim(self, length_bytes: int) -> Reservation | None:
        """Claim by an empty file's name, then look at all claims; None when they are too many."""
        self._sequence += 1
        name = SegmentName(self.writer, self._sequence)
        path = tmp_path(name, length_bytes)
        reservation = Reservation(name, path, self.disk.create(path, 0), length_bytes)
        try:
            # claims before segments: what another writer publishes in between is seen in one of the
            # two, or in both; the other order would see it in neither and overrun the capacity
            claims = self.catalog.tmp_entries()
            self.discover(is_full=False)
            if self._cleaner.excess_bytes(0, claims) == 0:
                reservation.file.truncate(length_bytes)
                return reservation
        except BaseException:
            self.withdraw(reservation)
            raise
        self.withdraw(reservation)
        return None

    def _hour(self, now_s: float) -> str:
        """The folder for a new segment: the hour in UTC, with a number once it is crowded."""
        hour = hour_name(now_s)
        name, number = hour, 0
        while self.catalog.count(self.namespace, name) >= _FOLDER_ENTRIES_MAX:
            number += 1
            name = f"{hour}-{number}"
        return name


class _Knowledge:
    """The cleaner's view of the root and of what the listener knows; the lock is held."""

    def __init__(self, root: Root, listener: RootListener) -> None:
        self._root = root
        self._listener = listener

    def refresh(self) -> None:
        # what was used in the last seconds must not look older than it is
        self._root.flush_touches()
        self._root.discover(is_full=True)

    def evicted(self, entry: SegmentEntry) -> None:
        self._root.gone(entry)

    def bad(self) -> list[SegmentEntry]:
        return self._listener.bad_segments(self._root)

    def parents(self) -> Mapping[SegmentEntry, list[SegmentEntry]]:
        return self._listener.parents_of_segments(self._root)
