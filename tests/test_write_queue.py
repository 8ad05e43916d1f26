"""`kvdepot.pool.write_queue` and `kvdepot.pool.filling`: bounds, runs, and that everything arrives."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from kvdepot.clock import SystemClock
from kvdepot.keys import BlockKey
from kvdepot.pool.filling import FillingSegment, parts_of
from kvdepot.pool.segment import HEADER_BYTES, empty_segment_bytes
from kvdepot.pool.write_queue import WriteQueue
from kvdepot.testing.simclock import FakeClock
from kvdepot.tiers import Job, Outcome, Write
from tests.tries import in_one_try_of

UNIT = 40_000


def writes_of(lengths: list[int], first: int = 0) -> list[Write]:
    return [
        Write(
            BlockKey((first + i).to_bytes(32, "big")),
            BlockKey(bytes(32)),
            memoryview(bytearray(length)),
            16,
        )
        for i, length in enumerate(lengths)
    ]


def offer(queue: WriteQueue, writes: list[Write]) -> tuple[Job, Any]:
    job = Job([write.key for write in writes])
    return job, queue.offer(job, writes, range(len(writes)))


@given(st.lists(st.integers(1, 30_000), max_size=40), st.integers(1, 400_000))
def test_nothing_is_lost_and_the_bound_holds(lengths: list[int], bytes_max: int) -> None:
    queue = WriteQueue(FakeClock(), unit_bytes=UNIT, bytes_max=bytes_max)
    writes = writes_of(lengths)
    job, offered = offer(queue, writes)
    assert queue.held_bytes <= bytes_max
    assert offered.taken + offered.full == len(writes)
    assert job.outcomes.count(Outcome.DROPPED) == offered.full
    seen = []
    while run := queue.take():
        # a run is one unit, or one block that is larger
        assert len(run) == 1 or sum(item.padded_bytes for item in run) <= UNIT
        seen += [item.position for item in run]
        queue.let_go(run)
        queue.arrive(run)
    assert seen == [i for i, outcome in enumerate(job.outcomes) if outcome is Outcome.PENDING]
    assert queue.held_bytes == 0
    assert queue.drain(0)


def test_a_key_on_its_way_is_not_taken_twice() -> None:
    queue = WriteQueue(FakeClock(), unit_bytes=UNIT, bytes_max=10**6)
    writes = writes_of([100, 100])
    offer(queue, writes)
    job, offered = offer(queue, writes)
    assert offered.present == 2
    assert job.outcomes == (Outcome.DONE, Outcome.DONE)
    run = queue.take()
    queue.let_go(run)
    assert offer(queue, writes)[1].present == 2, "written, and not yet published"
    queue.arrive(run)
    assert offer(queue, writes)[1].taken == 2


def test_short_stores_are_gathered_and_a_lone_one_does_not_wait_for_ever() -> None:
    clock = FakeClock()
    queue = WriteQueue(clock, unit_bytes=UNIT, bytes_max=10**6)
    offer(queue, writes_of([1000]))
    assert queue.wait(lambda: 0)[0] == []
    offer(queue, writes_of([1000], first=1))
    clock.advance(0.01)
    assert len(queue.wait(lambda: 0)[0]) == 2
    offer(queue, writes_of([UNIT], first=2))
    assert len(queue.wait(lambda: 0)[0]) == 1, "a full run goes at once"


@in_one_try_of(3)
def test_drain_flushes_waits_for_the_last_one_and_gives_up_in_time() -> None:
    queue = WriteQueue(SystemClock(), unit_bytes=UNIT, bytes_max=10**6)
    offer(queue, writes_of([1000]))
    assert not queue.drain(0.01)
    flushes = []

    def work() -> None:
        run, _ = queue.wait(lambda: 1.0)
        flushes.append(queue.wait(lambda: 1.0))
        queue.let_go(run)
        queue.arrive(run)

    thread = threading.Thread(target=work)
    threading.Timer(0.05, thread.start).start()
    assert queue.drain(60)
    thread.join()
    assert flushes == [([], True)]


def test_what_no_thread_has_taken_is_handed_back_at_close() -> None:
    queue = WriteQueue(FakeClock(), unit_bytes=UNIT, bytes_max=10**6)
    offer(queue, writes_of([1000, 2000]))
    left = queue.close()
    assert [item.position for item in left] == [0, 1]
    assert queue.held_bytes == 0
    assert not queue.drain(0), "they are still on their way"
    queue.arrive(left)
    assert queue.drain(0)
    job, offered = offer(queue, writes_of([5], first=9))
    assert offered.closed == 1
    assert job.outcomes == (Outcome.DROPPED,)


@given(st.integers(1, 60), st.integers(1, 20_000))
def test_a_segment_never_outgrows_its_reservation(blocks_max: int, length: int) -> None:
    padded = -(-length // 4096) * 4096
    limit = empty_segment_bytes(blocks_max) + blocks_max * padded
    reservation: Any = SimpleNamespace(length_bytes=limit)
    segment = FillingSegment(reservation, 0.0)
    assert segment.cursor == HEADER_BYTES
    while segment.has_room(padded):
        segment.cursor += padded
        segment.placed_count += 1
    assert segment.placed_count >= blocks_max
    end = segment.cursor + empty_segment_bytes(segment.placed_count) - HEADER_BYTES
    assert end <= limit


def test_blocks_with_padding_are_copied_into_whole_pages() -> None:
    writes = writes_of([1000, 5000])
    job = Job([write.key for write in writes])
    queue = WriteQueue(FakeClock(), unit_bytes=UNIT, bytes_max=10**6)
    for number, write in enumerate(writes):
        write.data[:] = bytes([number + 1]) * write.data.nbytes
    queue.offer(job, writes, range(2))
    (part,) = parts_of(queue.take())
    assert part.nbytes == 4096 + 8192
    assert bytes(part[:1000]) == b"\x01" * 1000
    assert bytes(part[1000:4096]) == bytes(3096)
    assert bytes(part[4096:9096]) == b"\x02" * 5000
    assert bytes(part[9096:]) == bytes(8192 - 5000)
