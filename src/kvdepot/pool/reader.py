"""Reading: one request's blocks become few long reads, shared by a few threads.

Requests are planned into units (`kvdepot.pool.plan`) piece by piece, so that the first unit is read
while the rest is planned. The units of all requests wait in one queue per root, under a budget of
bytes in flight (`kvdepot.pool.read_queue`). The thread that reads a unit verifies its blocks, while others
read the next ones. Rows that are page-aligned receive the bytes without a copy.

Ownership: `submit` may be called by any thread and only enqueues; locating blocks and all file calls
happen on the reader's threads. A job's rows are touched only between `Job.hold` and `Job.release`.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence
from typing import Protocol

from kvdepot.clock import Clock, TimeLeft
from kvdepot.errors import FormatError, PoolError
from kvdepot.io.buffers import aligned_bytes, merged_rows
from kvdepot.metrics import Counters
from kvdepot.policy.breaker import Fault
from kvdepot.pool.index import BlockIndex
from kvdepot.pool.plan import PlannedBlock, Unit, plan_units
from kvdepot.pool.read_queue import ReadQueue, Request, RootHealth, Task
from kvdepot.pool.segment import block_checksum
from kvdepot.pool.segments import OpenFiles, Segment
from kvdepot.tiers import Job, Outcome, Read, Turn

__all__ = ["Reader", "SegmentSource"]

log = logging.getLogger(__name__)

_FIRST_STEP = 64
_FURTHER_STEP = 1024
#: how often an idle thread looks whether a read hangs
_LOOK_S = 0.5
#: what a thread that is not stuck needs to stop
_STOP_S = 0.1


class SegmentSource(Protocol):
    """Who knows the segments, and must know what reading finds out about them."""

    def segment(self, segment_id: int) -> Segment | None:
        """A segment that is still listed."""

    def segment_is_used(self, segment: Segment) -> None:
        """Blocks of a segment are wanted."""

    def block_is_corrupt(self, segment: Segment, block: PlannedBlock) -> None:
        """A block's bytes did not verify."""

    def segment_is_corrupt(self, segment: Segment, error: FormatError) -> None:
        """A segment's header did not verify."""

    def segment_vanished(self, segment: Segment) -> None:
        """A segment's file is not there."""

    def segment_failed(self, segment: Segment, error: PoolError) -> None:
        """The storage gave an error for a segment."""


class Reader:
    """The read threads of one tier.

    With ``threads=0`` nothing runs by itself and `run_pending` does all work on the caller's thread;
    that is for tests which own the order of events.
    """

    def __init__(
        self,
        index: BlockIndex,
        table: SegmentSource,
        files: OpenFiles,
        counters: Counters,
        identity_digest: bytes,
        *,
        clock: Clock,
        roots: int,
        threads: int,
        unit_bytes: int,
        budget_bytes: int,
        stall_s: float,
    ) -> None:
        self._index = index
        self._table = table
        self._files = files
        self._counters = counters
        self._identity_digest = identity_digest
        self._unit_bytes = unit_bytes
        self._clock = clock
        self._wake = threading.Condition()
        self._queue = ReadQueue(
            threads_per_root=max(threads, 1),
            unit_bytes=unit_bytes,
            budget_bytes=budget_bytes,
            stall_s=stall_s,
        )
        self._is_closed = False
        self._threads = [
            threading.Thread(target=self._run, name=f"kvdepot-read-{n}", daemon=True)
            # one more than may read, so that loads are planned and refused while storage hangs
            for n in range(threads * roots + 1 if threads else 0)
        ]
        for thread in self._threads:
            thread.start()

    def submit(self, job: Job, reads: Sequence[Read], turn: Turn | None = None) -> None:
        """Take a request. Never blocks on I/O."""
        with self._wake:
            if not self._is_closed:
                self._queue.submit(job, reads, turn, self._clock.monotonic_s())
                self._wake.notify()
                return
        job.resolve_all(Outcome.MISS)

    @property
    def wants_storage(self) -> bool:
        """Reads wait for, or use, a root that answers. May be a moment old."""
        return self._queue.wants_storage

    def health(self) -> list[RootHealth]:
        """How the roots do that something was read from."""
        with self._wake:
            return self._queue.health(self._clock.monotonic_s())

    def run_pending(self) -> bool:
        """Do one piece of work if there is one; say whether there was."""
        with self._wake:
            work = self._take()
        if work is None:
            return False
        self._do(work)
        return True

    def close(self, timeout_s: float) -> None:
        """Resolve what is not begun, and wait for the threads as long as allowed.

        What a hung root still holds then is decided, and settled when the root lets go.
        """
        time_left = TimeLeft(timeout_s)
        with self._wake:
            self._is_closed = True
            requests, units = self._queue.clear()
            self._wake.notify_all()
        for request in requests:
            request.job.resolve_all(Outcome.MISS)
        for unit in units:
            _resolve(unit, Outcome.MISS)
        for thread in self._threads:
            thread.join(time_left(at_least_s=_STOP_S))
        with self._wake:
            stuck = self._queue.reading_now()
        for unit in stuck:
            _resolve(unit, Outcome.FAILED)

    # the threads

    def _run(self) -> None:
        while True:
            with self._wake:
                work = self._take()
                while work is None:
                    if self._is_closed:
                        return
                    # a read that hangs is noticed by whoever looks
                    self._wake.wait(_LOOK_S if self._queue.is_busy else None)
                    work = self._take()
            self._do(work)

    def _take(self) -> Task | Request | None:
        return self._queue.take(self._clock.monotonic_s())

    def _do(self, work: Task | Request) -> None:
        if isinstance(work, Request):
            self._plan(work)
            return
        unit = work.unit
        fault: Fault | None = None
        is_unread = False
        try:
            if work.is_refused:
                self._counters.add("load_refused_blocks_total", len(unit.reads))
                _resolve(unit, Outcome.FAILED)
            elif unit.job.hold():
                try:
                    fault = self._read(work)
                finally:
                    unit.job.release()
            else:
                is_unread = True
                self._counters.add("load_given_up_blocks_total", len(unit.reads))
        except Exception:
            # a bug here must not take a thread, or a request, with it
            log.exception("reading %s failed", unit.segment.entry.path)
            self._counters.add("load_failed_blocks_total", len(unit.reads))
            _resolve(unit, Outcome.FAILED)
        finally:
            with self._wake:
                now_s = self._clock.monotonic_s()
                self._queue.done(work, now_s, fault, is_unread=is_unread)
                self._wake.notify_all()

    def _plan(self, request: Request) -> None:
        """Plan the next reads of a request, and put the rest back."""
        first = request.next
        # a short first step, so that the disk has work while the rest is planned
        step = _FIRST_STEP if first == 0 else _FURTHER_STEP
        reads = request.reads[first : first + step]
        request.next += len(reads)
        job = request.job
        try:
            at = self._index.locate([read.key for read in reads])
            units = plan_units(
                job, reads, first, at, self._table.segment, unit_bytes=self._unit_bytes
            )
        except Exception:
            log.exception("planning a load failed")
            request.next = len(request.reads)
            with self._wake:
                self._queue.planned(request, ())
                self._wake.notify_all()
            job.resolve_all(Outcome.FAILED)
            return
        missing = len(reads) - sum(len(unit.reads) for unit in units)
        if missing:
            self._counters.add("load_missing_blocks_total", missing)
        with self._wake:
            if not self._is_closed:
                self._queue.planned(request, units)
                self._wake.notify_all()
                return
        job.resolve_all(Outcome.MISS)

    def _read(self, task: Task) -> Fault | None:
        """Read and verify a unit; what was wrong with the root, if anything."""
        unit = task.unit
        try:
            file = self._files.acquire(unit.segment)
        except FormatError as error:
            self._table.segment_is_corrupt(unit.segment, error)
            self._counters.add("corrupt_blocks_total", len(unit.reads))
            _resolve(unit, Outcome.CORRUPT)
            return Fault.CORRUPT
        except PoolError as error:
            self._fail(unit, error)
            return Fault.ERROR
        if file is None:
            self._table.segment_vanished(unit.segment)
            self._counters.add("load_missing_blocks_total", len(unit.reads))
            _resolve(unit, Outcome.MISS)
            return None
        try:
            self._table.segment_is_used(unit.segment)
            self._counters.add("load_reads_total")
            rows = [read.into for read in unit.reads]
            parts = merged_rows(rows) if not unit.length_bytes - sum(unit.lengths) else None
            if parts is None:
                rows, parts = _staged(unit)
            got = file.read(unit.offset, parts)
            with self._wake:
                # the next unit is read while this one is verified: the device never waits for a sum
                self._queue.landed(task, self._clock.monotonic_s())
                self._wake.notify()
            return None if self._verify(unit, rows, got) else Fault.CORRUPT
        except PoolError as error:
            self._fail(unit, error)
            return Fault.ERROR
        finally:
            self._files.release(unit.segment)

    def _verify(self, unit: Unit, rows: Sequence[memoryview], got: int) -> bool:
        """Check each block, hand the good ones over, report the bad ones; whether all were good."""
        outcomes: list[Outcome] = []
        for index, (read, row) in enumerate(zip(unit.reads, rows, strict=True)):
            is_good = (
                unit.offsets[index] + unit.lengths[index] <= got
                and block_checksum(self._identity_digest, read.key, row) == unit.checksums[index]
            )
            if not is_good:
                self._counters.add("corrupt_blocks_total")
                self._table.block_is_corrupt(unit.segment, unit.block(index))
            elif row is not read.into:
                read.into.cast("B")[:] = row
            outcomes.append(Outcome.DONE if is_good else Outcome.CORRUPT)
        good = outcomes.count(Outcome.DONE)
        loaded, loaded_bytes = unit.job.resolve_run(unit.first, outcomes, unit.lengths)
        self._counters.add("load_blocks_total", loaded)
        self._counters.add("load_late_blocks_total", good - loaded)
        self._counters.add("load_bytes_total", loaded_bytes)
        return good == len(outcomes)

    def _fail(self, unit: Unit, error: PoolError) -> None:
        self._table.segment_failed(unit.segment, error)
        self._counters.add("load_failed_blocks_total", len(unit.reads))
        _resolve(unit, Outcome.FAILED)


def _resolve(unit: Unit, outcome: Outcome) -> None:
    unit.job.resolve_run(unit.first, [outcome] * len(unit.reads), unit.lengths)


def _staged(unit: Unit) -> tuple[list[memoryview], list[memoryview]]:
    """For rows that are not page-aligned, or blocks with padding: memory to read into and copy from."""
    staging = aligned_bytes(unit.length_bytes)
    rows = [
        staging[offset : offset + length]
        for offset, length in zip(unit.offsets, unit.lengths, strict=True)
    ]
    return rows, [staging]
