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

import msgspec

from kvdepot.clock import Clock
from kvdepot.config import PoolConfig
from kvdepot.errors import (
    ConfigError,
    FormatError,
    PoolDenied,
    PoolError,
    PoolFull,
    UnknownVersion,
)
from kvdepot.identity import FORMAT_VERSION, Identity, compare, decode_manifest, encode_manifest
from kvdepot.io.buffers import ALIGNMENT
from kvdepot.io.disk import Disk, DiskFile
from kvdepot.metrics import Counters
from kvdepot.pool.catalog import NAMESPACE_FOLDER, Catalog, SegmentEntry, segment_path, tmp_path
from kvdepot.pool.cleaner import Cleaner, Limits
from kvdepot.pool.lease import LeaseHolder, new_writer_name
from kvdepot.pool.segment import SegmentName, empty_segment_bytes
from kvdepot.units import format_bytes, round_up

__all__ = ["PoolFile", "Reservation", "Root", "RootListener", "read_pool_file"]

log = logging.getLogger(__name__)

POOL_FILE = "pool.json"
_FORMAT_NAME = "kvdepot pool"
#: a folder with more entries gets a successor, so that no directory grows without bound
_FOLDER_ENTRIES_MAX = 4000
#: everything is looked at again this often, whatever the mtimes say
_FULL_REFRESH_S = 60.0
_TOUCH_INTERVAL_S = 2.0
_ADMIT_ATTEMPTS = 3


class PoolFile(msgspec.Struct, frozen=True, kw_only=True):
    """The content of pool.json; fields that a later release adds are ignored."""

    format: str
    version: int
    pool_id: str
    capacity_bytes: int


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


class Reservation:
    """A place for a segment that is being written; bounded in size from the start."""

    def __init__(self, name: SegmentName, path: str, file: DiskFile, length_bytes: int) -> None:
        self.name = name
        self.path = path
        self.file = file
        self.length_bytes = length_bytes


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
        self._again: deque[SegmentEntry] = deque()
        self._due_s: dict[str, float] = {}
        self.catalog = Catalog(disk, clock)
        self._pool_file = self._open_pool_file()
        self.pool_id = bytes.fromhex(self._pool_file.pool_id)
        self._open_namespace(identity)
        capacity = self._capacity(self._pool_file)
        self._cleaner = Cleaner(
            disk,
            self.catalog,
            Limits.of(disk.space(), capacity, config.free_bytes_min, config.free_inodes_min),
            clock,
            counters,
            lease_s=config.lease_s,
            knowledge=_Knowledge(self, listener),
        )
        self.segment_bytes = self._segment_bytes(identity, capacity)

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
                self._make_room(0)
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
                reservation = self._claim(length_bytes) if self._make_room(length_bytes) else None
            if reservation is not None:
                return reservation
            # two claims met, or another process cleans: one will be first next time
            time.sleep(secrets.randbelow(20) / 1000)
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
        """Give a reservation up; failures are left to the sweep."""
        self._withdraw(reservation.path, reservation.file)

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
        while self._again:
            self._unread.append(self._again.popleft())
        if not self._config.read_only:
            self._restore_pool_file()
            self._cleaner.sweep()
            self._make_room(0)
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
        self._again.append(entry)

    def flush_touches(self) -> None:
        """Write the uses noted so far, prefixes last, so that they count as the more recent."""
        touched, self._touched = self._touched, {}
        if self._config.read_only:
            return
        for path in reversed(touched):
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

    def _open_pool_file(self) -> PoolFile:
        found = read_pool_file(self.disk)
        if found is not None:
            return found
        if self._config.read_only:
            raise ConfigError(
                f"{self.disk.place} holds no pool", hint="open it without read_only to make one"
            )
        space = self.disk.space()
        fresh = PoolFile(
            format=_FORMAT_NAME,
            version=FORMAT_VERSION,
            pool_id=secrets.token_hex(16),
            capacity_bytes=self._config.capacity_bytes or max(space.free_bytes // 2, 1),
        )
        self._publish_small(POOL_FILE, msgspec.json.format(msgspec.json.encode(fresh)))
        # another process may have been first: what is there holds
        made = read_pool_file(self.disk)
        if made is None:
            raise PoolDenied(f"{self.disk.place}: {POOL_FILE} vanished", path=self.disk.place)
        return made

    def _restore_pool_file(self) -> None:
        """Somebody deleted the folder under a running pool: what is written now must be readable."""
        if self.disk.read_small(POOL_FILE) is None:
            log.warning("%s: the pool was deleted while in use; beginning anew", self.disk.place)
            self._publish_small(
                POOL_FILE, msgspec.json.format(msgspec.json.encode(self._pool_file))
            )

    def _open_namespace(self, identity: Identity) -> None:
        path = f"{NAMESPACE_FOLDER}/{self.namespace}/identity.json"
        text = self.disk.read_small(path)
        if text is None:
            if self._config.read_only:
                return
            self._publish_small(path, encode_manifest(identity))
            text = self.disk.read_small(path) or b""
        try:
            theirs = decode_manifest(text)
        except ConfigError as error:
            raise FormatError(
                f"{self.disk.place}/{path} is damaged: {error}",
                hint="remove the namespace folder; its blocks will be computed again",
            ) from error
        compare(identity, theirs)

    def _publish_small(self, path: str, text: bytes) -> None:
        """A small file that is whole or absent, and never overwritten."""
        tmp = f"tmp/{secrets.token_hex(8)}-{0:08x}-{len(text)}.tmp"
        file = self.disk.create(tmp, 0)
        try:
            file.write(0, [memoryview(text)])
            file.close()
            if not self.disk.publish(tmp, path):
                self.disk.remove(tmp)
        except PoolError:
            self._withdraw(tmp, file)
            raise

    def _capacity(self, pool_file: PoolFile) -> int:
        configured = self._config.capacity_bytes
        if configured is None:
            return pool_file.capacity_bytes
        if configured != pool_file.capacity_bytes:
            log.warning(
                "%s: capacity %s is set here, pool.json says %s; this process keeps to its own",
                self.disk.place,
                format_bytes(configured),
                format_bytes(pool_file.capacity_bytes),
            )
        return configured

    def _segment_bytes(self, identity: Identity, capacity: int) -> int:
        """A segment's size here: as configured, but several must fit, and one block must."""
        largest = max(identity.block_bytes)
        least = empty_segment_bytes(1) + round_up(largest, ALIGNMENT)
        if least > capacity:
            raise ConfigError(
                f"{self.disk.place}: a capacity of {format_bytes(capacity)} cannot hold one block of "
                f"{format_bytes(largest)} ({format_bytes(least)} with its frame)"
            )
        wanted = max(min(self._config.segment_bytes, capacity // 8), least)
        return wanted // ALIGNMENT * ALIGNMENT

    def _take_lease(self) -> None:
        name = new_writer_name()
        self._lease = LeaseHolder(self.disk, name, holder=name, pid=os.getpid())

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

    def _make_room(self, wanted_bytes: int) -> bool:
        return self._cleaner.make_room(wanted_bytes)

    def _claim(self, length_bytes: int) -> Reservation | None:
        """Claim by an empty file's name, then look at all claims; None when they are too many."""
        self._sequence += 1
        name = SegmentName(self.writer, self._sequence)
        path = tmp_path(name, length_bytes)
        file = self.disk.create(path, 0)
        try:
            if self._cleaner.excess_bytes(0) == 0:
                file.truncate(length_bytes)
                return Reservation(name, path, file, length_bytes)
        except BaseException:
            self._withdraw(path, file)
            raise
        self._withdraw(path, file)
        return None

    def _withdraw(self, path: str, file: DiskFile) -> None:
        file.close()
        try:
            self.disk.remove(path)
        except PoolError as error:
            log.debug("%s left to the sweep: %s", path, error)

    def _hour(self, now_s: float) -> str:
        """The folder for a new segment: the hour in UTC, with a number once it is crowded."""
        hour = time.strftime("%Y%m%d%H", time.gmtime(now_s))
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
        self._root.discover(is_full=True)

    def evicted(self, entry: SegmentEntry) -> None:
        self._root.gone(entry)

    def bad(self) -> list[SegmentEntry]:
        return self._listener.bad_segments(self._root)

    def parents(self) -> Mapping[SegmentEntry, list[SegmentEntry]]:
        return self._listener.parents_of_segments(self._root)


def read_pool_file(disk: Disk) -> PoolFile | None:
    """The content of pool.json; None when there is no pool.

    Raises:
        UnknownVersion: another format version; names both.
        FormatError: not a pool's file.
    """
    text = disk.read_small(POOL_FILE)
    if text is None:
        return None
    try:
        # the version first: a later release may change every other field
        head = msgspec.json.decode(text, type=dict[str, object])
        if head.get("format") == _FORMAT_NAME and head.get("version") != FORMAT_VERSION:
            raise UnknownVersion(f"pool {disk.place}", head.get("version"), FORMAT_VERSION)
        found = msgspec.json.decode(text, type=PoolFile, strict=True)
        if found.format != _FORMAT_NAME or len(bytes.fromhex(found.pool_id)) != 16:
            raise FormatError(f"{disk.place}: {POOL_FILE} is not a kvdepot pool's")
    except (msgspec.MsgspecError, UnicodeDecodeError, ValueError) as error:
        raise FormatError(
            f"{disk.place}: {POOL_FILE} is damaged: {error}",
            hint="remove the folder, or restore pool.json",
        ) from error
    return found
