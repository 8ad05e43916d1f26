"""Reading: one request's blocks become few long reads, shared by a few threads.

Neighbouring blocks of a request that are neighbours in a segment form an *extent*; extents are cut at
block borders into *units* of a few MiB, so that one request is read by several threads at once. The
units of all requests wait in one queue per root, under a budget of bytes in flight. The thread that
reads a unit verifies its blocks. Rows that are page-aligned receive the bytes without a copy.

Ownership: `submit` may be called by any thread and only enqueues; locating blocks and all file calls
happen on the reader's threads. A job's rows are touched only between `Job.hold` and `Job.release`.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

from kvdepot.errors import FormatError, PoolError
from kvdepot.io.buffers import ALIGNMENT, address_of, aligned_bytes
from kvdepot.io.disk import DiskFile
from kvdepot.metrics import Counters
from kvdepot.pool.index import BlockIndex, Location
from kvdepot.pool.segment import block_checksum
from kvdepot.pool.segments import OpenFiles, Segment
from kvdepot.tiers import Job, Outcome, Read
from kvdepot.units import round_up

__all__ = ["PlannedBlock", "Reader", "SegmentSource", "Unit", "plan_units"]

log = logging.getLogger(__name__)


class PlannedBlock(NamedTuple):
    """One block of a unit: which read it answers and where its bytes are."""

    position: int
    read: Read
    location: Location

    @property
    def padded_bytes(self) -> int:
        return round_up(self.location.length, ALIGNMENT)


class Unit(NamedTuple):
    """Blocks that lie next to each other in one segment; one read call."""

    job: Job
    segment: Segment
    blocks: tuple[PlannedBlock, ...]

    @property
    def offset(self) -> int:
        """Where the first block begins."""
        return self.blocks[0].location.offset

    @property
    def length_bytes(self) -> int:
        """Bytes from the first block's beginning to the last one's padded end."""
        return sum(block.padded_bytes for block in self.blocks)


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


def plan_units(
    job: Job,
    reads: Sequence[Read],
    locations: Sequence[Location | None],
    segment_of: Callable[[int], Segment | None],
    *,
    unit_bytes: int,
) -> list[Unit]:
    """Cut a request into units, in the order of its reads; what cannot be read is resolved here."""
    units: list[Unit] = []
    run: list[PlannedBlock] = []
    run_segment: Segment | None = None
    run_bytes = 0

    def end_run() -> None:
        nonlocal run, run_bytes
        if run and run_segment is not None:
            units.append(Unit(job, run_segment, tuple(run)))
        run, run_bytes = [], 0

    for index, (read, location) in enumerate(zip(reads, locations, strict=True)):
        segment = segment_of(location.segment_id) if location else None
        if location is None or segment is None or read.into.nbytes != location.length:
            # another length under the same key cannot be this block, whatever it is
            job.resolve(index, Outcome.MISS)
            continue
        block = PlannedBlock(index, read, location)
        follows = (
            run
            and segment is run_segment
            and location.offset == run[-1].location.offset + run[-1].padded_bytes
            and run_bytes + block.padded_bytes <= unit_bytes
        )
        if not follows:
            end_run()
            run_segment = segment
        run.append(block)
        run_bytes += block.padded_bytes
    end_run()
    return units


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
        roots: int,
        threads: int,
        unit_bytes: int,
        budget_bytes: int,
    ) -> None:
        self._index = index
        self._table = table
        self._files = files
        self._counters = counters
        self._identity_digest = identity_digest
        self._unit_bytes = unit_bytes
        self._budget_bytes = budget_bytes
        self._wake = threading.Condition()
        self._requests: deque[tuple[Job, Sequence[Read]]] = deque()
        self._queues: dict[int, deque[Unit]] = {}
        self._in_flight: dict[int, int] = {}
        self._is_closed = False
        self._threads = [
            threading.Thread(target=self._run, name=f"kvdepot-read-{n}", daemon=True)
            for n in range(threads * roots)
        ]
        for thread in self._threads:
            thread.start()

    def submit(self, job: Job, reads: Sequence[Read]) -> None:
        """Take a request. Never blocks on I/O."""
        with self._wake:
            if not self._is_closed:
                self._requests.append((job, reads))
                self._wake.notify()
                return
        job.resolve_all(Outcome.MISS)

    def run_pending(self) -> bool:
        """Do one piece of work if there is one; say whether there was."""
        with self._wake:
            work = self._take()
        if work is None:
            return False
        self._do(work)
        return True

    def close(self, timeout_s: float) -> None:
        """Resolve what is not begun, and wait for the threads as long as allowed."""
        with self._wake:
            self._is_closed = True
            requests, self._requests = list(self._requests), deque()
            units = [unit for queue in self._queues.values() for unit in queue]
            self._queues.clear()
            self._wake.notify_all()
        for job, _ in requests:
            job.resolve_all(Outcome.MISS)
        for unit in units:
            for block in unit.blocks:
                unit.job.resolve(block.position, Outcome.MISS)
        for thread in self._threads:
            thread.join(timeout_s / max(len(self._threads), 1))

    # the threads

    def _run(self) -> None:
        while True:
            with self._wake:
                work = self._take()
                while work is None:
                    if self._is_closed:
                        return
                    self._wake.wait()
                    work = self._take()
            self._do(work)

    def _take(self) -> Unit | tuple[Job, Sequence[Read]] | None:
        """The next piece of work: planning first, then the units that the budgets allow."""
        if self._requests:
            return self._requests.popleft()
        for root_id, queue in self._queues.items():
            if not queue:
                continue
            in_flight = self._in_flight.get(root_id, 0)
            if in_flight and in_flight + queue[0].length_bytes > self._budget_bytes:
                continue
            unit = queue.popleft()
            self._in_flight[root_id] = in_flight + unit.length_bytes
            return unit
        return None

    def _do(self, work: Unit | tuple[Job, Sequence[Read]]) -> None:
        if not isinstance(work, Unit):
            self._plan(*work)
            return
        try:
            if work.job.hold():
                try:
                    self._read(work)
                finally:
                    work.job.release()
            else:
                self._counters.add("load_late_blocks_total", len(work.blocks))
        except Exception:
            # a bug here must not take a thread, or a request, with it
            log.exception("reading %s failed", work.segment.entry.path)
            self._resolve(work, Outcome.FAILED)
        finally:
            with self._wake:
                self._in_flight[id(work.segment.root)] -= work.length_bytes
                self._wake.notify_all()

    def _plan(self, job: Job, reads: Sequence[Read]) -> None:
        try:
            locations = self._index.locate([read.key for read in reads])
            units = plan_units(
                job, reads, locations, self._table.segment, unit_bytes=self._unit_bytes
            )
        except Exception:
            log.exception("planning a load failed")
            job.resolve_all(Outcome.FAILED)
            return
        missing = locations.count(None)
        if missing:
            self._counters.add("load_missing_blocks_total", missing)
        with self._wake:
            if not self._is_closed:
                for unit in units:
                    self._queues.setdefault(id(unit.segment.root), deque()).append(unit)
                self._wake.notify_all()
                return
        job.resolve_all(Outcome.MISS)

    def _read(self, unit: Unit) -> None:
        try:
            file = self._files.acquire(unit.segment)
        except FormatError as error:
            self._table.segment_is_corrupt(unit.segment, error)
            self._resolve(unit, Outcome.CORRUPT)
            return
        except PoolError as error:
            self._fail(unit, error)
            return
        if file is None:
            self._table.segment_vanished(unit.segment)
            self._counters.add("load_missing_blocks_total", len(unit.blocks))
            self._resolve(unit, Outcome.MISS)
            return
        try:
            self._table.segment_is_used(unit.segment)
            self._counters.add("load_reads_total")
            if _is_direct_possible(unit):
                got = file.read(unit.offset, _merged([block.read.into for block in unit.blocks]))
                self._verify(unit, [block.read.into for block in unit.blocks], got)
            else:
                self._read_through_copy(unit, file)
        except PoolError as error:
            self._fail(unit, error)
        finally:
            self._files.release(unit.segment)

    def _read_through_copy(self, unit: Unit, file: DiskFile) -> None:
        """For rows that are not page-aligned, or blocks with padding."""
        staging = aligned_bytes(unit.length_bytes)
        got = file.read(unit.offset, [staging])
        rows, start = [], 0
        for block in unit.blocks:
            rows.append(staging[start : start + block.location.length])
            start += block.padded_bytes
        self._verify(unit, rows, got)

    def _verify(self, unit: Unit, rows: Sequence[memoryview], got: int) -> None:
        """Check each block, hand the good ones over, report the bad ones."""
        loaded = loaded_bytes = end = 0
        for block, row in zip(unit.blocks, rows, strict=True):
            end += block.padded_bytes
            is_whole = end - block.padded_bytes + block.location.length <= got
            checksum = block_checksum(self._identity_digest, block.read.key, row)
            if not is_whole or checksum != block.location.checksum:
                self._counters.add("corrupt_blocks_total")
                self._table.block_is_corrupt(unit.segment, block)
                unit.job.resolve(block.position, Outcome.CORRUPT)
                continue
            if row is not block.read.into:
                block.read.into.cast("B")[:] = row
            if unit.job.resolve(block.position, Outcome.DONE, row.nbytes):
                loaded += 1
                loaded_bytes += row.nbytes
            else:
                self._counters.add("load_late_blocks_total")
        self._counters.add("load_blocks_total", loaded)
        self._counters.add("load_bytes_total", loaded_bytes)

    def _fail(self, unit: Unit, error: PoolError) -> None:
        self._table.segment_failed(unit.segment, error)
        self._counters.add("load_failed_blocks_total", len(unit.blocks))
        self._resolve(unit, Outcome.FAILED)

    def _resolve(self, unit: Unit, outcome: Outcome) -> None:
        for block in unit.blocks:
            unit.job.resolve(block.position, outcome)


def _is_direct_possible(unit: Unit) -> bool:
    return all(
        block.location.length % ALIGNMENT == 0 and address_of(block.read.into) % ALIGNMENT == 0
        for block in unit.blocks
    )


def _merged(rows: Sequence[memoryview]) -> list[memoryview]:
    """The rows as the system call's parts."""
    return [row.cast("B") if row.format != "B" or row.ndim != 1 else row for row in rows]
