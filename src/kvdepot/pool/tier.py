"""The pool as a tier: segments under one or several roots, shared by all processes that open them.

Threads of a tier: readers and writers per root, and one that keeps house (shows life, discovers other
writers' segments, notes uses, makes room). The verbs only look at memory and enqueue.
"""

from __future__ import annotations

import logging
import os
import threading
from collections import deque
from collections.abc import Sequence
from typing import Self

from kvdepot.clock import Clock, SystemClock, TimeLeft
from kvdepot.config import PoolConfig
from kvdepot.errors import ConfigError, KvdepotError, PoolError
from kvdepot.identity import Identity
from kvdepot.io.buffers import ALIGNMENT
from kvdepot.io.disk import Disk
from kvdepot.io.localdisk import LocalDisk
from kvdepot.keys import KEY_BYTES, BlockKey
from kvdepot.metrics import Counters
from kvdepot.pool.index import BlockIndex
from kvdepot.pool.notebook import Notebook
from kvdepot.pool.read_queue import RootHealth
from kvdepot.pool.reader import Reader
from kvdepot.pool.root import Root
from kvdepot.pool.segment_table import SegmentTable
from kvdepot.pool.segments import OpenFiles
from kvdepot.pool.sizes import block_bytes_max
from kvdepot.pool.writer import Writer
from kvdepot.tiers import (
    Job,
    Outcome,
    Read,
    TierLimits,
    TierUsage,
    Turn,
    Write,
    check_reads,
    check_writes,
)
from kvdepot.units import format_bytes
from kvdepot.urls import distinct_roots

__all__ = ["PoolTier"]

log = logging.getLogger(__name__)

#: how long opening waits for the index; what is left is read while serving
_INDEX_WAIT_S = 5.0
_OPEN_FILES_MAX = 256
#: touches wait for the housekeeping thread; the oldest are forgotten beyond this
_TOUCHES_MAX = 1024
#: what closing needs of a thread, and of a root, that does not hang
_STOP_S = 0.1
_CLOSE_S = 1.0


class PoolTier:
    """`Tier` over a pool. Open with `PoolTier.open`; close it, or use it as a context manager.

    A copy in a forked child serves nothing and closes nothing; a child opens the pool itself.
    """

    name = "disk"

    def __init__(
        self,
        config: PoolConfig,
        identity: Identity,
        disks: Sequence[Disk],
        *,
        clock: Clock,
        counters: Counters,
        has_threads: bool,
        index: BlockIndex | None = None,
    ) -> None:
        self.counters = counters
        self.identity = identity
        self._config = config
        self._clock = clock
        self._digest = identity.digest()
        self._index = BlockIndex() if index is None else index
        self._files = OpenFiles(self._digest, _OPEN_FILES_MAX)
        self._table = SegmentTable(self._index, self._files, counters, self._digest)
        self._touches: deque[Sequence[BlockKey]] = deque(maxlen=_TOUCHES_MAX)
        self._is_closed = False
        self._pid = os.getpid()
        self._closing = threading.Lock()
        self._stop = threading.Event()
        self.roots: list[Root] = []
        self._start_roots(disks)
        self._notebook = Notebook(disks[0], self._digest.hex())
        #: what an earlier process has kept for this identity
        self.recalled = self._notebook.read()
        self._reader = Reader(
            self._index,
            self._table,
            self._files,
            counters,
            self._digest,
            clock=clock,
            roots=len(self.roots),
            threads=config.read_threads if has_threads else 0,
            unit_bytes=config.read_unit_bytes,
            budget_bytes=config.read_budget_bytes,
            stall_s=config.read_stall_s,
        )
        self._writer = Writer(
            self.roots,
            counters,
            clock,
            self._digest,
            self._table.published,
            threads=config.write_threads if has_threads and not config.read_only else 0,
            writes=config.writes_in_flight,
            unit_bytes=config.write_unit_bytes,
            queue_bytes_max=config.write_queue_bytes,
            segment_age_s=config.segment_age_s,
            are_loads_waiting=lambda: self._reader.wants_storage,
        )
        self.limits = TierLimits(
            block_bytes_max=min(block_bytes_max(root.segment_bytes) for root in self.roots),
            store_bytes_max=config.write_queue_bytes,
            alignment_bytes=ALIGNMENT,
            is_persistent=True,
            is_shared=True,
        )
        self._housekeepers = self._start_housekeepers() if has_threads else []

    @classmethod
    def open(
        cls,
        config: PoolConfig,
        identity: Identity,
        *,
        clock: Clock | None = None,
        counters: Counters | None = None,
        disks: Sequence[Disk] | None = None,
        has_threads: bool = True,
        index: BlockIndex | None = None,
    ) -> PoolTier:
        """Open a pool for one identity, making it where it does not exist. Blocks on file calls.

        Args:
            config: URLs, limits and sizes.
            identity: names the namespace; checked field by field against what is stored.
            clock: for tests that own the time.
            counters: shared with the caller; fresh ones otherwise.
            disks: one per URL, for tests that own the storage.
            has_threads: without, `run_pending` and `tick` do all work on the caller's thread.
            index: an empty one to fill, for who wants to hear of its changes.

        Raises:
            PoolUrlError, ConfigError: settings.
            IdentityUnknown, IdentityMismatch: sharing would be unsafe.
            UnknownVersion, FormatError: the folder holds another format, or is damaged.
            PoolDenied, PoolFull, PoolUnavailable: as the storage answers.
        """
        identity.digest()  # an undetermined identity fails before anything is made
        urls = distinct_roots(config.urls)
        if disks is None:
            disks = [
                LocalDisk(url.path, direct=config.direct, is_read_only=config.read_only)
                for url in urls
            ]
        tier = cls(
            config,
            identity,
            disks,
            clock=clock or SystemClock(),
            counters=counters or Counters(),
            has_threads=has_threads,
            index=index,
        )
        for root in tier.roots:
            log.info(
                "pool root %s: %s of %s used, %d blocks of this model, %s I/O",
                root.disk.place,
                format_bytes(root.used_bytes()),
                format_bytes(root.limits.capacity_bytes),
                len(tier._index),
                "direct" if root.disk.is_direct else "buffered",
            )
        return tier

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # the verbs

    def lookup(self, keys: Sequence[BlockKey]) -> int:
        return self._index.prefix(keys)

    def load(
        self, reads: Sequence[Read], *, deadline_s: float | None = None, turn: Turn | None = None
    ) -> Job:
        job = Job([read.key for read in reads], deadline_s=deadline_s, clock=self._clock)
        self.begin_load(job, reads, turn)
        return job

    def begin_load(self, job: Job, reads: Sequence[Read], turn: Turn | None = None) -> None:
        """`load` with a job of the caller's making, whose blocks are the reads' in order."""
        check_reads(reads)
        if self._is_forked:
            job.resolve_all(Outcome.MISS)
        elif reads:
            self._reader.submit(job, reads, turn)

    def store(self, writes: Sequence[Write]) -> Job:
        job = Job([write.key for write in writes], clock=self._clock)
        self.begin_store(job, writes)
        return job

    def begin_store(self, job: Job, writes: Sequence[Write]) -> None:
        """`store` with a job of the caller's making, whose blocks are the writes' in order."""
        if not writes:
            return
        check_writes(writes)
        reason = (
            "dropped_closed_total"
            if self._is_closed or self._is_forked
            else "dropped_read_only_total"
            if self._config.read_only
            else ""
        )
        if reason:
            job.resolve_all(Outcome.DROPPED)
            self.counters.add(reason, len(writes))
            return
        wanted: list[int] = []
        present: list[BlockKey] = []
        for index, is_present in enumerate(self._index.contains(job.keys)):
            if is_present:
                job.resolve(index, Outcome.DONE)
                present.append(job.keys[index])
            elif not 0 < writes[index].data.nbytes <= self.limits.block_bytes_max:
                job.resolve(index, Outcome.DROPPED)
                self.counters.add("dropped_too_large_total")
            else:
                wanted.append(index)
        self.counters.add("store_present_blocks_total", len(present))
        # before the room for the suffix is made, so that its own prefix is not what has to go
        self._note_uses(present)
        self._writer.submit(job, writes, wanted)

    def touch(self, keys: Sequence[BlockKey]) -> None:
        if any(len(key) != KEY_BYTES for key in keys):
            raise ValueError(f"block keys have {KEY_BYTES} bytes")
        if keys:
            # a copy: the caller may go on with its list
            self._touches.append(tuple(keys))

    def drain(self, timeout_s: float) -> bool:
        return self._writer.drain(timeout_s)

    def remember(self, text: bytes) -> None:
        """Keep a small text for the next process, in place of the last one. Memory only, no I/O."""
        if not self._config.read_only and not self._is_forked:
            self._notebook.keep(text)

    def usage(self) -> TierUsage:
        return TierUsage(
            blocks=len(self._index),
            used_bytes=sum(root.used_bytes() for root in self.roots),
            capacity_bytes=sum(root.limits.capacity_bytes for root in self.roots),
            memory_bytes=self._index.memory_bytes + self._writer.queued_bytes,
        )

    def health(self) -> list[RootHealth]:
        """How the roots do, as far as something was read from them. Memory only, no I/O."""
        return self._reader.health()

    def close(self, timeout_s: float = 10.0) -> None:
        if self._is_forked:
            return
        with self._closing:
            if self._is_closed:
                return
            self._is_closed = True
            time_left = TimeLeft(timeout_s)
            self._writer.close(timeout_s)
            self._stop.set()
            self._reader.close(time_left())
            for housekeeper in self._housekeepers:
                housekeeper.join(time_left(at_least_s=_STOP_S))
            self._note_touches()
            self._files.close()
            # closing makes file calls, and a hung root must not keep the caller
            close = self._close_root
            closers = [threading.Thread(target=close, args=(r,), daemon=True) for r in self.roots]
            for closer in closers:
                closer.start()
            for root, closer in zip(self.roots, closers, strict=True):
                closer.join(time_left(at_least_s=_CLOSE_S))
                if closer.is_alive():
                    log.warning("%s hangs; its lease ends with this process", root.disk.place)

    @property
    def _is_forked(self) -> bool:
        """This is a copy in a child process: it has no threads, and the leases are the parent's."""
        return os.getpid() != self._pid

    # for tests that own the order of events

    def run_pending(self, *, flush: bool = False) -> None:
        """Do all reading and writing that is due, on the caller's thread; `flush` seals segments."""
        while self._reader.run_pending():
            pass
        while self._writer.run_pending(flush=flush):
            pass

    def tick(self) -> None:
        """What the housekeeping thread does each time. A refusing root does not stop the others."""
        for root in self.roots:
            self._tick(root)

    def _tick(self, root: Root) -> None:
        self._note_touches()
        try:
            root.tick()
            if root is self.roots[0]:
                self._notebook.write()
        except KvdepotError as error:
            log.warning("%s: housekeeping failed: %s", root.disk.place, error)

    def _note_touches(self) -> None:
        while True:
            try:
                keys = self._touches.popleft()
            except IndexError:
                return
            self._note_uses(keys)

    def _note_uses(self, keys: Sequence[BlockKey]) -> None:
        at = self._index.locate(keys)
        for segment_id in dict.fromkeys(at.segment_ids[at.is_present].tolist()):
            segment = self._table.segment(segment_id)
            if segment is not None:
                segment.root.touch(segment.entry)

    def _start_roots(self, disks: Sequence[Disk]) -> None:
        config, clock, counters = self._config, self._clock, self.counters
        try:
            for disk in disks:
                root = Root(disk, config, self.identity, clock=clock, counters=counters,
                            listener=self._table)  # fmt: skip
                self.roots.append(root)
                _refuse_twins(self.roots)
                root.start(index_s=_INDEX_WAIT_S)
        except BaseException:
            for root in self.roots:
                root.close()
            raise

    def _close_root(self, root: Root) -> None:
        try:
            if root is self.roots[0]:
                self._notebook.write()
            root.close()
        except PoolError as error:
            log.warning("%s: not closed cleanly: %s", root.disk.place, error)

    def _start_housekeepers(self) -> list[threading.Thread]:
        # one for each root: a root that hangs must not keep the others from showing life
        keepers = [
            threading.Thread(target=self._keep_house, args=(r,), name="kvdepot-house", daemon=True)
            for r in self.roots
        ]
        for keeper in keepers:
            keeper.start()
        return keepers

    def _keep_house(self, root: Root) -> None:
        # often enough for both: a writer that shows no life is taken for dead
        interval_s = min(self._config.discover_interval_s, self._config.lease_s / 3)
        while not self._stop.wait(interval_s):
            try:
                self._tick(root)
            except Exception:
                log.exception("housekeeping failed")


def _refuse_twins(roots: Sequence[Root]) -> None:
    """Two paths to one folder, by a link or a second mount: every byte would count twice."""
    *others, last = roots
    for other in others:
        if other.pool_id == last.pool_id:
            raise ConfigError(
                f"{other.disk.place} and {last.disk.place} are the same pool",
                hint="give each root once; a copied pool needs a pool.json of its own",
            )
