"""A pool whose I/O runs in a child process of its own: the worker tier.

A busy thread in an engine's process makes every call that lets go of the interpreter lock wait up to
five milliseconds for it. So the reads, writes, checksums and housekeeping of a pool run in a worker
process, which maps the engine's host buffer and moves bytes straight between files and that buffer;
what hangs, grows or crashes there does not reach the engine. Keys, rows and outcomes travel over a
socket as few, large messages.

Lookups stay memory of the engine's process: the worker reports each change of its index, and the
parent keeps an index of its own.

Threads in the engine's process: one that supervises (starts the worker, listens to it, replaces it)
and, per worker, one that sends. The verbs only look at memory and append to a bounded queue.
"""

from __future__ import annotations

import logging
import operator
import sys
import threading
from collections.abc import Sequence
from concurrent.futures import Future
from typing import Self

import msgspec

from kvdepot.clock import Clock, SystemClock
from kvdepot.config import PoolConfig, WorkerConfig
from kvdepot.errors import KvdepotError
from kvdepot.identity import Identity
from kvdepot.io.buffers import ALIGNMENT, HostBuffer
from kvdepot.keys import KEY_BYTES, BlockKey
from kvdepot.metrics import Counters
from kvdepot.pool.worker_jobs import SharedRows, WorkerJob
from kvdepot.pool.worker_link import Link
from kvdepot.pool.worker_wire import Row, StoreRow
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
from kvdepot.urls import distinct_roots

__all__ = ["WorkerTier"]

log = logging.getLogger(__name__)

#: -P: a module in the engine's working folder must not shadow one of ours
_COMMAND = (sys.executable, "-P", "-m", "kvdepot.pool.worker_child")
#: after its time to close, a worker gets this much longer before it is killed
_CLOSE_GRACE_S = 1.0
#: how long a close waits for a killed worker, which may sit in a call that cannot be interrupted
_KILLED_WAIT_S = 2.0
#: killed workers that are not gone yet; with so many, storage hangs, and one more would hang too
_DYING_MAX = 4
_DYING_TICK_S = 0.05


class WorkerTier:
    """`Tier` over a pool, with its I/O in a child process. Open with `WorkerTier.open`; close it.

    Rows of loads and stores must lie in the buffers that the tier was opened with; any other row is a
    mistake of the caller and raises `ConfigError` at once. The buffers may be closed after the tier.

    When the worker ends or hangs, open jobs are FAILED, lookups find nothing, and another worker is
    started in the background. The rows of such jobs are settled when the old process is gone.

    A store that is taken back just as its bytes were written may still be published, with the right
    bytes: the worker hears of it a moment later.
    """

    name = "disk"

    def __init__(
        self,
        config: PoolConfig,
        identity: Identity,
        shared: SharedRows,
        *,
        settings: WorkerConfig,
        clock: Clock,
        counters: Counters,
        command: Sequence[str],
    ) -> None:
        self.counters = counters
        self.identity = identity
        self.limits = TierLimits(
            block_bytes_max=0,
            store_bytes_max=config.write_queue_bytes,
            alignment_bytes=ALIGNMENT,
            is_persistent=True,
            is_shared=True,
        )
        #: what an earlier process has kept for this identity
        self.recalled: bytes | None = None
        self._config = config
        self._shared = shared
        self._settings = settings
        self._clock = clock
        self._command = tuple(command)
        self._link: Link | None = None
        self._dying: list[Link] = []
        self._last_usage = TierUsage(0, 0, 0, 0)
        self._closing = threading.Lock()
        self._is_closed = False
        self._close_s = 0.0
        self._kill_at_s = float("inf")
        self._stop = threading.Event()
        #: no worker serves and none will be started
        self._is_over = threading.Event()
        self._opened: Future[None] = Future()
        # this thread starts the workers and lives as long as they may: they end with it
        self._supervisor = threading.Thread(
            target=self._supervise, name="kvdepot-worker", daemon=True
        )

    @classmethod
    def open(
        cls,
        config: PoolConfig,
        identity: Identity,
        buffers: Sequence[HostBuffer],
        *,
        settings: WorkerConfig | None = None,
        clock: Clock | None = None,
        counters: Counters | None = None,
        command: Sequence[str] | None = None,
    ) -> WorkerTier:
        """Start a worker and have it open a pool for one identity. Blocks until it has.

        Args:
            config: URLs, limits and sizes, as for `PoolTier.open`.
            identity: names the namespace; checked field by field against what is stored.
            buffers: shared host buffers, in which all rows must lie.
            settings: how the worker is watched.
            clock: for tests that own the time.
            counters: shared with the caller; the worker's counts are added to them.
            command: what to run as the worker, for tests that own its storage.

        Raises:
            ConfigError: settings, or a buffer that is not shared.
            PoolUnavailable: the worker did not start, ended, or did not answer in time.
            KvdepotError: whatever `PoolTier.open` raises, raised in the worker.
        """
        identity.digest()  # an undetermined identity fails before anything is started
        # the worker, and each later one, must see the folders that are meant here and now
        urls = tuple(root.url for root in distinct_roots(config.urls))
        tier = cls(
            msgspec.structs.replace(config, urls=urls),
            identity,
            SharedRows(buffers),
            settings=settings or WorkerConfig(),
            clock=clock or SystemClock(),
            counters=counters or Counters(),
            command=command or _COMMAND,
        )
        tier._supervisor.start()
        try:
            tier._opened.result()
        except BaseException:
            tier.close(0.0)
            raise
        return tier

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def worker_pid(self) -> int | None:
        """The process that serves now; None while there is none."""
        link = self._link
        return link.pid if link is not None else None

    # the verbs

    def lookup(self, keys: Sequence[BlockKey]) -> int:
        link = self._link
        return link.index.prefix(keys) if link is not None else 0

    def load(
        self, reads: Sequence[Read], *, deadline_s: float | None = None, turn: Turn | None = None
    ) -> Job:
        job = WorkerJob([read.key for read in reads], deadline_s=deadline_s, clock=self._clock)
        if not reads:
            return job
        check_reads(reads)
        places = self._shared.places([read.into for read in reads])
        rows = [
            Row(key, buffer, offset, into.nbytes)
            for (key, into), (buffer, offset) in zip(reads, places, strict=True)
        ]
        link = self._link
        if link is None:
            self.counters.add("load_missing_blocks_total", len(rows))
            job.resolve_all(Outcome.MISS)
        elif not link.outbox.post_load(job, rows, turn):
            self.counters.add("load_failed_blocks_total", len(rows))
            job.resolve_all(Outcome.FAILED)
        return job

    def store(self, writes: Sequence[Write]) -> Job:
        job = WorkerJob([write.key for write in writes], clock=self._clock)
        if not writes:
            return job
        check_writes(writes)
        link = self._link
        if self._is_closed or self._config.read_only or link is None:
            self._drop(job, range(len(writes)), self._why_dropped(link))
            return job
        wanted: list[int] = []
        present: list[int] = []
        too_large: list[int] = []
        for index, is_present in enumerate(link.index.contains(job.keys)):
            if is_present:
                present.append(index)
            elif not 0 < writes[index].data.nbytes <= self.limits.block_bytes_max:
                too_large.append(index)
            else:
                wanted.append(index)
        places = self._shared.places([writes[index].data for index in wanted])
        rows = [
            StoreRow(key, parent, operator.index(tokens), buffer, offset, data.nbytes)
            for (key, parent, data, tokens), (buffer, offset) in zip(
                (writes[index] for index in wanted), places, strict=True
            )
        ]
        for index in present:
            job.resolve(index, Outcome.DONE)
        self.counters.add("store_present_blocks_total", len(present))
        link.outbox.post_touch([job.keys[index] for index in present])
        self._drop(job, too_large, "dropped_too_large_total")
        if rows:
            self._drop(job, link.outbox.post_store(job, rows, wanted), self._why_dropped(link))
        return job

    def touch(self, keys: Sequence[BlockKey]) -> None:
        if any(len(key) != KEY_BYTES for key in keys):
            raise ValueError(f"block keys have {KEY_BYTES} bytes")
        link = self._link
        if keys and link is not None:
            link.outbox.post_touch(keys)

    def drain(self, timeout_s: float) -> bool:
        """As `Tier.drain`; False also when the worker was lost before all was visible."""
        link = self._link
        return link is None or link.outbox.drain(timeout_s)

    def remember(self, text: bytes) -> None:
        """As `PoolTier.remember`; lost while there is no worker."""
        link = self._link
        if link is not None:
            link.outbox.post_remember(text)

    def usage(self) -> TierUsage:
        link = self._link
        if link is None:
            return self._last_usage._replace(blocks=0, memory_bytes=0)
        return link.usage._replace(
            blocks=len(link.index), memory_bytes=link.index.memory_bytes + link.usage.memory_bytes
        )

    def close(self, timeout_s: float = 10.0) -> None:
        """As `Tier.close`; the worker is killed when it takes a second longer than that. Idempotent."""
        with self._closing:
            if self._is_closed:
                return
            self._kill_at_s = self._clock.monotonic_s() + timeout_s + _CLOSE_GRACE_S
            self._close_s = timeout_s
            self._is_closed = True
        self._stop.set()
        link = self._link
        if link is not None:
            link.outbox.post_close(timeout_s)
        self._is_over.wait(min(timeout_s + _CLOSE_GRACE_S, threading.TIMEOUT_MAX))
        self._supervisor.join(_KILLED_WAIT_S)
        if self._supervisor.is_alive():
            log.warning("a worker process cannot be ended now; its rows stay held until it is gone")

    # below

    def _drop(self, job: Job, positions: Sequence[int], counter: str) -> None:
        for position in positions:
            job.resolve(position, Outcome.DROPPED)
        self.counters.add(counter, len(positions))

    def _why_dropped(self, link: Link | None) -> str:
        if self._is_closed:
            return "dropped_closed_total"
        if self._config.read_only:
            return "dropped_read_only_total"
        is_served = link is not None and link.outbox.is_open
        return "dropped_queue_full_total" if is_served else "dropped_no_worker_total"

    # the supervisor

    def _supervise(self) -> None:
        try:
            link: Link | None = self._start()
        except BaseException as error:  # noqa: BLE001 (raised again by `open`)
            self._opened.set_exception(error)
        else:
            self._link = link
            self._opened.set_result(None)
            backoff_s = self._settings.backoff_s
            while link is not None:
                self._serve(link)
                lived_s = self._clock.monotonic_s() - link.began_s
                if lived_s > self._settings.backoff_s_max:
                    backoff_s = self._settings.backoff_s
                link, backoff_s = self._replace(backoff_s)
        self._is_over.set()
        for dying in self._dying:
            dying.is_gone(wait=True)

    def _start(self) -> Link:
        """A new worker with the pool open.

        Raises:
            KvdepotError: there is none; what was started is killed.
        """
        link = Link(
            self._command,
            self._shared,
            self._settings,
            store_bytes_max=self._config.write_queue_bytes,
            counters=self.counters,
            clock=self._clock,
        )
        try:
            self.limits = link.open(self._config, self.identity, self._stop)
            self.recalled = link.recalled
        except BaseException:
            self._bury(link)
            raise
        return link

    def _serve(self, link: Link) -> None:
        """Listen to a worker until it is lost or closed."""
        tick_s = min(self._settings.heartbeat_s, self._settings.hang_s) / 2
        try:
            while not link.lost and self._clock.monotonic_s() < self._kill_at_s:
                if self._is_closed:
                    link.outbox.post_close(self._close_s)  # one that had just been started
                self._reap()
                link.listen(_DYING_TICK_S if self._dying else tick_s)
        except Exception:
            log.exception("listening to worker process %d failed", link.pid)
        if not self._is_closed:
            log.warning("worker process %d %s; another one is started", link.pid, link.lost)
        self._last_usage = link.usage
        self._link = None
        self._bury(link, grace_s=_CLOSE_GRACE_S if self._is_closed and link.lost else 0.0)

    def _replace(self, backoff_s: float) -> tuple[Link | None, float]:
        """Start workers until one serves; it, or None once the tier is closed, and the next wait."""
        while not self._pause(backoff_s):
            backoff_s = min(2 * backoff_s, self._settings.backoff_s_max)
            try:
                link = self._start()
            except KvdepotError as error:
                log.warning("no worker; the next try is in %.1f s: %s", backoff_s, error)
            except Exception:
                log.exception("no worker; the next try is in %.1f s", backoff_s)
            else:
                self.counters.add("worker_restarts_total")
                self._link = link
                log.info("worker process %d serves", link.pid)
                return link, backoff_s
        return None, backoff_s

    def _pause(self, seconds: float) -> bool:
        """Wait, and until few enough workers are dying; whether the tier was closed meanwhile."""
        until_s = self._clock.monotonic_s() + seconds
        while not self._stop.is_set():
            self._reap()
            left_s = until_s - self._clock.monotonic_s()
            if left_s <= 0 and len(self._dying) < _DYING_MAX:
                return False
            self._stop.wait(_DYING_TICK_S if self._dying else left_s)
        return True

    def _bury(self, link: Link, *, grace_s: float = 0.0) -> None:
        link.fail()
        link.end(grace_s)
        self._dying.append(link)

    def _reap(self) -> None:
        self._dying = [link for link in self._dying if not link.is_gone()]
