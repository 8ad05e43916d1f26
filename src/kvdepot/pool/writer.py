"""Writing behind the engine: blocks become segments, in the background and within bounds.

Stores wait in one queue that is bounded in bytes; what does not fit is dropped, because a lost store
is only a future miss. Write threads take runs of blocks, reserve a place at the end of their root's
open segment, checksum and write straight from the caller's memory, in parallel. A segment is sealed
when it is full or a second old: header, footer, one rename. Runs go to the roots in turn (striping).

Ownership: `submit` may be called by any thread and only enqueues. A store's data is read only between
`Job.hold` and `Job.release`; the footer takes a block in only if its job still wanted it when its
bytes were written, so nothing of a cancelled store is published.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence

from kvdepot.clock import Clock, TimeLeft
from kvdepot.errors import PoolError, PoolFull
from kvdepot.metrics import Counters
from kvdepot.policy.ordering import StoreGate
from kvdepot.pool.catalog import SegmentEntry
from kvdepot.pool.filling import (
    FillingSegment,
    Item,
    Placed,
    parts_of,
    publish_filled,
)
from kvdepot.pool.root import Root
from kvdepot.pool.segment import (
    Records,
    block_checksum,
)
from kvdepot.pool.turns import RootState, Turns
from kvdepot.pool.write_queue import WriteQueue
from kvdepot.tiers import Job, Outcome, Write

__all__ = ["Writer"]

log = logging.getLogger(__name__)

#: a thread that no root has a place for looks again after this, or when another thread is done
_BUSY_WAIT_S = 0.05
#: how often a run that is held back for loads is looked at again
_GATE_LOOK_S = 0.01
#: what a thread that is not stuck needs to stop
_STOP_S = 0.1


class Writer:
    """The write threads of one tier.

    Args:
        roots: where segments go, in turn.
        on_published: called with the root's lock held, once per segment.
        threads: per root; with 0 nothing runs by itself and `run_pending` does the work, for tests.
        writes: write calls at once per root; the other threads checksum and keep the books.
    """

    def __init__(
        self,
        roots: Sequence[Root],
        counters: Counters,
        clock: Clock,
        identity_digest: bytes,
        on_published: Callable[[Root, SegmentEntry, Records], None],
        *,
        threads: int,
        writes: int,
        unit_bytes: int,
        queue_bytes_max: int,
        segment_age_s: float,
        are_loads_waiting: Callable[[], bool] = lambda: False,
    ) -> None:
        self._turns = Turns(roots, clock, threads=max(threads, 1), writes=writes)
        self._counters = counters
        self._clock = clock
        self._identity_digest = identity_digest
        self._on_published = on_published
        self._segment_age_s = segment_age_s
        self._are_loads_waiting = are_loads_waiting
        self._gate = StoreGate()
        self._gate_lock = threading.Lock()
        self._queue = WriteQueue(clock, unit_bytes=unit_bytes, bytes_max=queue_bytes_max)
        #: what each thread is writing, by thread
        self._in_hand: dict[int, list[Item]] = {}
        self._threads = [
            threading.Thread(target=self._run, name=f"kvdepot-write-{n}", daemon=True)
            for n in range(threads * len(roots))
        ]
        for thread in self._threads:
            thread.start()

    @property
    def queued_bytes(self) -> int:
        """Bytes of stores that hold their caller's memory."""
        return self._queue.held_bytes

    def submit(self, job: Job, writes: Sequence[Write], positions: Sequence[int]) -> None:
        """Take the blocks at `positions`; what does not fit into the queue is dropped at once."""
        offered = self._queue.offer(job, writes, positions)
        self._counters.add("store_present_blocks_total", offered.present)
        self._counters.add("dropped_queue_full_total", offered.full)
        self._counters.add("dropped_closed_total", offered.closed)

    def drain(self, timeout_s: float) -> bool:
        """Block until all stores so far are visible or lost; False when time ran out.

        Without threads, `run_pending` must have been called before: nobody else does the work.
        """
        return self._queue.drain(timeout_s if self._threads else 0.0)

    def run_pending(self, *, flush: bool = False) -> bool:
        """Write one run, or seal what is due, on the caller's thread; say whether anything was done."""
        run = self._queue.take()
        if run:
            self._write(run)
            return True
        return self._seal_due(flush=flush)

    def close(self, timeout_s: float) -> None:
        """Publish what was taken as long as time allows, then stop. Idempotent.

        What a hung root still holds then is decided, and settled when the root lets go.
        """
        time_left = TimeLeft(timeout_s)
        self.drain(timeout_s)
        self._lose(self._queue.close(), "dropped_closed_total")
        for thread in self._threads:
            thread.join(time_left(at_least_s=_STOP_S))
        for items in list(self._in_hand.values()):
            stuck = [i for i in items if i.job.resolve(i.position, Outcome.DROPPED)]
            self._lose(stuck, "dropped_closed_total")
        for state in self._turns:
            if not state.lock.acquire(timeout=time_left(at_least_s=_STOP_S)):
                continue  # its file is swept like a dead writer's
            try:
                ready, state.open = self._seal(state.open), None
            finally:
                state.lock.release()
            if ready is not None:
                self._abandon(state, ready)

    # the threads

    def _run(self) -> None:
        while True:
            run, is_flushing = self._queue.wait(self._idle_s)
            try:
                if run:
                    self._let_loads_go_first(is_flushing=is_flushing)
                    if not self._write(run):
                        self._queue.wait_for_others(_BUSY_WAIT_S)
                elif self._queue.is_closed:
                    return
                elif not self._seal_due(flush=is_flushing) and is_flushing:
                    self._queue.wait_for_others(0.01)
            except Exception:
                log.exception("writing failed")

    def _let_loads_go_first(self, *, is_flushing: bool) -> None:
        """Hold a run back for a moment while loads wait; requests wait for those, nobody for this."""
        while not is_flushing and not self._queue.is_closed:
            with self._gate_lock:
                now_s = self._clock.monotonic_s()
                if self._gate.may_store(now_s, are_loads_waiting=self._are_loads_waiting()):
                    return
            time.sleep(_GATE_LOOK_S)

    def _idle_s(self) -> float | None:
        """Until the oldest open segment must be sealed."""
        # one look at each: another thread may seal the segment in between
        segments = [state.open for state in self._turns if self._turns.has_place(state)]
        opened = [segment.opened_at_s for segment in segments if segment is not None]
        if not opened:
            return None
        return max(min(opened) + self._segment_age_s - self._clock.monotonic_s(), 0.001)

    def _write(self, run: list[Item]) -> bool:
        """Write a run; False if some of it was put back, because all roots that take it are busy."""
        me = threading.get_ident()
        held: list[Item] = []
        taken_back: list[Item] = []
        for item in run:
            (held if item.job.hold() else taken_back).append(item)
        self._take_back(taken_back)
        self._in_hand[me] = held
        left: list[Item] = []
        try:
            left = self._write_held(held)
        finally:
            del self._in_hand[me]
            for item in held:
                item.job.release()
            self._queue.let_go(run)
        if left and not self._queue.put_back(left):
            self._lose(left, "dropped_closed_total")
        return not left

    def _write_held(self, items: list[Item]) -> list[Item]:
        """Find places for a run and fill them; a run may be spread over segments and roots.

        Returns:
            What is left, because every root that takes stores has as many threads as it may have.
        """
        left = items
        try:
            while left:
                state, is_any_open = self._turns.enter_next()
                if state is None:
                    if is_any_open:
                        return left
                    self._lose(left, _dropped(is_full=self._turns.is_full))
                    return []
                try:
                    segment, places = self._place(state, left)
                    placed, left = left[: len(places)], left[len(places) :]
                    self._fill(state, segment, placed, places)
                except PoolError as error:
                    self._turns.pause(state, error)
                finally:
                    self._turns.leave(state)
        except Exception:
            # unforeseen: nothing may stay pending, or on its way for ever
            self._lose(left, "dropped_error_total")
            raise
        return []

    def _place(self, state: RootState, items: Sequence[Item]) -> tuple[FillingSegment, list[int]]:
        """Offsets for the first items in the root's open segment, a fresh one if it is full.

        Raises:
            PoolError: no segment can be opened.
        """
        full: FillingSegment | None = None
        try:
            with state.lock:
                segment = state.open
                if segment is None or not segment.has_room(items[0].padded_bytes):
                    full, state.open = self._seal(segment), None
                    reservation = state.root.admit(state.root.segment_bytes)
                    segment = state.open = FillingSegment(reservation, self._clock.monotonic_s())
                places: list[int] = []
                for item in items:
                    if not segment.has_room(item.padded_bytes):
                        break
                    places.append(segment.cursor)
                    segment.cursor += item.padded_bytes
                    segment.placed_count += 1
                segment.writers += 1
                return segment, places
        finally:
            if full is not None:
                self._finish(state, full)

    def _fill(
        self,
        state: RootState,
        segment: FillingSegment,
        items: Sequence[Item],
        places: Sequence[int],
    ) -> None:
        """Checksum and write a run at its place; then the last writer of a sealed segment ends it."""
        placed: list[Placed] = []
        is_written = False
        try:
            placed += [
                Placed(item, offset, self._checksum(item.write))
                for item, offset in zip(items, places, strict=True)
            ]
            parts = parts_of(items)
            with state.write_places:
                segment.reservation.file.write(places[0], parts)
            is_written = True
        except PoolError as error:
            self._turns.pause(state, error)
            self._lose(items, _dropped(is_full=isinstance(error, PoolFull)))
        except BaseException:
            self._lose(items, "dropped_error_total")
            raise
        finally:
            done = self._resolve_written(placed) if is_written else []
            with state.lock:
                segment.written += done
                segment.writers -= 1
                if not is_written and state.open is segment:
                    # what follows in this file would fail as well; publish what it has
                    state.open = None
                    segment.is_sealed = True
                is_mine = segment.is_sealed and segment.writers == 0
            if is_mine:
                self._finish(state, segment)

    def _checksum(self, write: Write) -> int:
        return block_checksum(self._identity_digest, write.key, write.data)

    def _resolve_written(self, placed: Sequence[Placed]) -> list[Placed]:
        """Those that their jobs still wanted when their bytes were written."""
        done: list[Placed] = []
        taken_back: list[Item] = []
        for place in placed:
            item = place.item
            if item.job.resolve(item.position, Outcome.DONE, item.length_bytes):
                done.append(place)
            else:
                taken_back.append(item)
        self._counters.add("store_blocks_total", len(done))
        self._counters.add("store_bytes_total", sum(p.item.length_bytes for p in done))
        self._take_back(taken_back)
        return done

    def _take_back(self, items: Sequence[Item]) -> None:
        """Their jobs were cancelled."""
        self._counters.add("store_cancelled_blocks_total", len(items))
        self._queue.arrive(items)

    def _lose(self, items: Sequence[Item], counter: str) -> None:
        outcome = Outcome.FAILED if counter == "dropped_error_total" else Outcome.DROPPED
        for item in items:
            item.job.resolve(item.position, outcome)
        self._counters.add(counter, len(items))
        self._queue.arrive(items)

    # sealing

    def _seal_due(self, *, flush: bool) -> bool:
        """Seal the segments that are old enough (all, to flush); end those that nobody writes to."""
        now_s = self._clock.monotonic_s()
        is_any = False
        for state in self._turns:
            if not self._turns.enter(state):
                continue  # whoever leaves it looks again
            try:
                with state.lock:
                    segment = state.open
                    if segment is None:
                        continue
                    if not flush and now_s - segment.opened_at_s < self._segment_age_s:
                        continue
                    ready, state.open = self._seal(segment), None
                is_any = True
                if ready is not None:
                    self._finish(state, ready)
            finally:
                self._turns.leave(state)
        return is_any

    @staticmethod
    def _seal(segment: FillingSegment | None) -> FillingSegment | None:
        """Mark as taking no more; return it if its last writer is gone already. State lock held."""
        if segment is None:
            return None
        segment.is_sealed = True
        return segment if segment.writers == 0 else None

    def _finish(self, state: RootState, segment: FillingSegment) -> None:
        """Header, footer, length, name. Exactly one thread gets here for a segment."""
        items = [place.item for place in segment.written]
        try:
            if items:
                publish_filled(
                    state.root,
                    segment,
                    created_ns=int(self._clock.wall_s() * 1e9),
                    on_published=self._on_published,
                )
                self._counters.add("segments_published_total")
            else:
                state.root.withdraw(segment.reservation)
        except PoolError as error:
            log.warning("a segment of %d blocks is lost: %s", len(items), error)
            self._abandon(state, segment)
        except BaseException:
            self._abandon(state, segment)
            raise
        finally:
            self._queue.arrive(items)

    def _abandon(self, state: RootState, segment: FillingSegment) -> None:
        self._counters.add("segments_abandoned_total")
        state.root.withdraw(segment.reservation)


def _dropped(*, is_full: bool) -> str:
    return "dropped_pool_full_total" if is_full else "dropped_error_total"
