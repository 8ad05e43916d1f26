"""What an engine's process and its worker say to each other, and in which order."""

from __future__ import annotations

import inspect
import socket
import struct
import threading
import time
from contextlib import contextmanager
from types import SimpleNamespace

import msgspec
import numpy as np
import pytest

from kvdepot import errors
from kvdepot.clock import SystemClock
from kvdepot.config import WorkerConfig
from kvdepot.errors import IdentityMismatch, KvdepotError, PoolUnavailable, UnknownVersion
from kvdepot.io.buffers import HostBuffer
from kvdepot.io.childprocess import Channel
from kvdepot.keys import BlockKey
from kvdepot.pool import worker_report
from kvdepot.pool.index import BlockIndex
from kvdepot.pool.segment import RECORD
from kvdepot.pool.worker_child import ReportedIndex
from kvdepot.pool.worker_jobs import SharedRows, Ticket, WorkerJob
from kvdepot.pool.worker_link import Link
from kvdepot.pool.worker_outbox import Outbox
from kvdepot.pool.worker_report import ReportedJob, Reporter
from kvdepot.pool.worker_wire import (
    KEYS_MAX,
    MESSAGE_BYTES_MAX,
    OUTCOMES,
    ROWS_MAX,
    Added,
    Command,
    Drained,
    Forgot,
    Load,
    Notice,
    Ping,
    Pong,
    Progress,
    Refused,
    Removed,
    Report,
    Row,
    Store,
    StoreRow,
    Touch,
    decode_command,
    decode_notice,
    encode,
    error_of,
    refusal_of,
)
from kvdepot.tiers import Outcome, TierUsage
from tests.tries import in_some_try

KEY = BlockKey(bytes(range(32)))
NUMBER_OF = {outcome: number for number, outcome in enumerate(OUTCOMES)}


@pytest.fixture
def ends():
    ours, theirs = socket.socketpair()
    with ours, theirs:
        yield Channel(ours, 1000), Channel(theirs, 1000)


def received(channel, count):
    messages: list[bytes] = []
    while len(messages) < count:
        messages += channel.receive(5)
    return messages


# --- the channel


def test_messages_arrive_whole_and_in_order_however_the_bytes_come(ends):
    ours, theirs = ends
    ours.send([b"", b"a" * 999])
    ours.send([b"last"])
    assert received(theirs, 3) == [b"", b"a" * 999, b"last"]
    framed = struct.pack("<I", 3) + b"abc"
    for index in range(len(framed) - 1):
        ours._socket.send(framed[index : index + 1])
        assert theirs.receive(5) == []
    ours._socket.send(framed[-1:])
    assert theirs.receive(5) == [b"abc"]


def test_waiting_for_messages_ends_in_time_and_at_the_end(ends):
    ours, theirs = ends
    start_s = time.monotonic()
    assert theirs.receive(0.05) == []
    assert 0.04 < time.monotonic() - start_s < 30
    ours.send([b"x"])
    ours.shut()
    assert theirs.receive(5) == [b"x"]
    with pytest.raises(EOFError):
        theirs.receive(None)
    with pytest.raises(OSError, match=r".+"):
        theirs.send([b"y"])
    ours.shut()


def test_a_long_message_is_neither_sent_nor_believed(ends):
    ours, theirs = ends
    with pytest.raises(ValueError, match="above the limit"):
        ours.send([b"x" * 1001])
    ours._socket.send(struct.pack("<I", 0xFFFFFFFF))
    with pytest.raises(ValueError, match="announced"):
        theirs.receive(5)


def test_a_sender_that_waits_comes_back_when_the_channel_is_shut(ends):
    ours, _ = ends
    failed = threading.Event()

    def send():
        try:
            while True:
                ours.send([b"x" * 1000])
        except OSError:
            failed.set()

    thread = threading.Thread(target=send, daemon=True)
    thread.start()
    assert not failed.wait(0.1)
    ours.shut()
    assert failed.wait(60)
    thread.join()


# --- the messages

COMMANDS: list[Command] = [
    Load(1, (Row(KEY, 0, 4096, 368_640),), 0.5),
    Store(2, (StoreRow(KEY, KEY, 16, 1, 0, 4096),)),
    Touch(KEY * 3),
    Ping(4),
]
NOTICES: list[Notice] = [
    Report((Added(1, KEY * 2), Removed(2), Forgot(1, KEY)), (Progress(3, b"\x01\x02", True),)),
    Report(counters={"load_bytes_total": 5}, usage=TierUsage(1, 2, 3, 4)),
    Drained(5, True),
    Pong(6, 0.25),
]


def test_messages_mean_the_same_on_the_other_side():
    assert [decode_command(encode(each)) for each in COMMANDS] == COMMANDS
    assert [decode_notice(encode(each)) for each in NOTICES] == NOTICES


def test_each_side_understands_only_what_is_said_to_it():
    for command in COMMANDS:
        with pytest.raises(msgspec.MsgspecError):
            decode_notice(encode(command))
    for notice in NOTICES:
        with pytest.raises(msgspec.MsgspecError):
            decode_command(encode(notice))
    for data in (b"", b"\xc1", b"\x93", msgspec.msgpack.encode(["Load", 1])):
        with pytest.raises(msgspec.MsgspecError):
            decode_command(data)


@pytest.mark.parametrize(
    "command",
    [
        Load(1, (Row(b"short", 0, 0, 1),), None),
        Load(1, (Row(KEY, 0, -1, 1),), None),
        Load(1, (Row(KEY, 0, 0, 1),) * (ROWS_MAX + 1), None),
        Touch(bytes(32 * KEYS_MAX + 1)),
    ],
    ids=["key", "offset", "rows", "keys"],
)
def test_what_is_out_of_bounds_is_refused(command):
    with pytest.raises(msgspec.ValidationError):
        decode_command(encode(command))


def test_the_largest_messages_fit():
    row = StoreRow(KEY, KEY, 1 << 31, 100, 1 << 50, 1 << 40)
    added = Added(1 << 40, bytes(32 * KEYS_MAX))
    progress = Progress(1 << 40, bytes(ROWS_MAX), False)
    for message in (
        Store(1 << 40, (row,) * ROWS_MAX),
        Report((added,) * 64, ()),
        Report((), (progress,) * 64),
    ):
        assert len(encode(message)) < MESSAGE_BYTES_MAX


def test_outcomes_have_a_number_each_and_pending_is_the_first():
    assert OUTCOMES[0] is Outcome.PENDING
    assert set(OUTCOMES) == set(Outcome)


# --- errors


def every_error():
    for name in errors.__all__:
        kind = getattr(errors, name)
        arguments = {
            parameter.name: f"a {parameter.name}"
            for parameter in inspect.signature(kind).parameters.values()
        }
        positional = [
            arguments.pop(parameter.name)
            for parameter in inspect.signature(kind).parameters.values()
            if parameter.kind is parameter.POSITIONAL_OR_KEYWORD
        ]
        yield kind(*positional, **arguments)


def sent(error):
    refused = decode_notice(encode(refusal_of(error)))
    assert isinstance(refused, Refused)
    return error_of(refused)


@pytest.mark.parametrize("error", list(every_error()), ids=lambda error: type(error).__name__)
def test_an_error_is_the_same_on_the_other_side(error):
    there = sent(error)
    assert type(there) is type(error)
    assert str(there) == str(error)
    assert vars(there) == vars(error)
    assert there.retryable is error.retryable


def test_what_an_error_carries_is_made_plain():
    error = sent(IdentityMismatch("groups", (1, 2), object))
    assert isinstance(error, IdentityMismatch)
    assert error.ours == [1, 2]
    assert "object" in str(error.theirs)
    assert isinstance(refusal_of(UnknownVersion("pool", None, 1)).fields["supported"], int)


def test_a_bug_in_the_worker_is_an_unavailable_pool():
    error = error_of(refusal_of(ZeroDivisionError("by zero")))
    assert type(error) is PoolUnavailable
    assert "ZeroDivisionError: by zero" in str(error)
    assert error.hint


def test_a_class_that_is_no_error_of_ours_is_not_made():
    refused = msgspec.structs.replace(refusal_of(KvdepotError("x")), kind="annotations")
    assert type(error_of(refused)) is KvdepotError


# --- the order of a report


@contextmanager
def reported():
    """A reporter, and a function that closes it and gives everything that it said."""
    ours, theirs = socket.socketpair()
    reporter = Reporter(Channel(ours, MESSAGE_BYTES_MAX))
    said: list[Notice] = []

    def listen():
        channel = Channel(theirs, MESSAGE_BYTES_MAX)
        try:
            while True:
                said.extend(map(decode_notice, channel.receive(None)))
        except (EOFError, OSError):
            pass

    thread = threading.Thread(target=listen, daemon=True)
    thread.start()

    def finish():
        reporter.close()
        ours.close()
        thread.join(60)
        return said

    with ours, theirs:
        reporter.start()
        yield reporter, finish


@pytest.fixture
def reporting():
    with reported() as found:
        yield found


def records_of(*keys):
    records = np.zeros(len(keys), dtype=RECORD)
    records["key"] = np.frombuffer(b"".join(keys), dtype="<u8").reshape(-1, 4)
    return records


def test_a_job_is_said_to_be_settled_once(reporting, monkeypatch):
    """It may change again between the look at it and the end of its time with us: the parent, which
    knows it no more, would take a second word for nonsense and give the whole worker up."""
    reporter, finish = reporting
    look = worker_report._progress_of

    def look_and_change(job):
        found = look(job)
        reporter.job_changed(job)
        return found

    monkeypatch.setattr(worker_report, "_progress_of", look_and_change)
    for number in range(50):
        job = ReportedJob(number, [BlockKey(bytes(32))], reporter)
        reporter.watch(job)
        job.resolve(0, Outcome.DONE, 1)
    settled = [
        each.number
        for notice in finish()
        if isinstance(notice, Report)
        for each in notice.progress
        if each.is_settled
    ]
    assert sorted(settled) == list(range(50))


def test_a_change_is_said_before_the_outcome_that_goes_with_it(reporting):
    reporter, finish = reporting
    index = ReportedIndex(reporter)
    keys = [BlockKey(bytes([number]) * 32) for number in range(200)]
    index.insert(1, records_of(*keys))
    for number, key in enumerate(keys):
        job = ReportedJob(number, [key], reporter)
        reporter.watch(job)
        assert job.hold()
        index.forget(key, 1, 0)
        job.resolve(0, Outcome.CORRUPT)
        job.release()
    said = finish()
    forgotten, settled = set(), set()
    for report in said:
        forgotten |= {change.key for change in report.changes if isinstance(change, Forgot)}
        for progress in report.progress:
            if progress.is_settled:
                assert keys[progress.number] in forgotten
                assert progress.outcomes == bytes([NUMBER_OF[Outcome.CORRUPT]])
                assert progress.number not in settled, "said twice"
                settled.add(progress.number)
    assert settled == set(range(200))
    assert len(said) < 200, "each outcome was a message of its own"


def test_an_index_that_is_told_of_every_change_is_the_same_index(reporting):
    reporter, finish = reporting
    index = ReportedIndex(reporter)
    key = [BlockKey(number.to_bytes(2, "little") * 16) for number in range(3000)]
    index.insert(1, records_of(*key[:2500]))
    index.insert(2, records_of(*key[2000:]))  # many of them are spare
    index.remove_segment(1)
    index.insert(3, records_of(*key[:10], *key[:10]))  # twice in one segment
    index.forget(key[2600], 2, 0)
    index.forget(key[2600], 2, 0)
    index.remove_segment(99)
    index.insert(4, records_of(key[2600]))
    index.remove_segment(2)
    told = BlockIndex()
    link = Link.__new__(Link)
    link.index = told
    for report in finish():
        for change in report.changes:
            link._take_change(change)
    assert told.contains(key) == index.contains(key)
    assert len(told) == len(index) == 11


def test_a_late_job_gives_its_rows_back_without_anybody_looking():
    late = bytes([NUMBER_OF[Outcome.LATE]])

    def attempt():
        with reported() as (reporter, finish):
            reporter.watch(ReportedJob(7, [KEY], reporter, deadline_s=float("inf")))
            jobs = [ReportedJob(number, [KEY], reporter, deadline_s=0.05) for number in range(2)]
            for job in jobs:
                reporter.watch(job)
            assert jobs[1].hold()
            time.sleep(0.2)
            jobs[1].release()
            progress = [each for report in finish() for each in report.progress]
        assert progress == [
            Progress(0, late, True),
            Progress(1, late, False),
            Progress(1, late, True),
        ]

    in_some_try(attempt)


def test_time_in_one_piece_of_work_is_seen():
    def attempt():
        with reported() as (reporter, finish):
            job = ReportedJob(1, [KEY, KEY], reporter)
            reporter.watch(job)
            assert reporter.stuck_s() == 0.0
            job.hold()
            time.sleep(0.1)
            assert reporter.stuck_s() >= 0.1
            job.hold()
            assert reporter.stuck_s() < 0.1
            job.resolve_all(Outcome.FAILED)
            job.release()
            job.release()
            assert reporter.stuck_s() == 0.0
            finish()

    in_some_try(attempt)


def test_whoever_finds_segments_waits_for_a_parent_that_is_far_behind():
    ours, theirs = socket.socketpair()
    with ours, theirs:
        reporter = Reporter(Channel(ours, MESSAGE_BYTES_MAX))
        reporter.start()
        filler = [Added(1, bytes(32 * KEYS_MAX)) for _ in range(600)]
        is_through = threading.Event()

        def find():
            for _ in range(8):
                reporter.wait_for_room()
                reporter.changed(filler)
            is_through.set()

        thread = threading.Thread(target=find, daemon=True)
        thread.start()
        assert not is_through.wait(0.3)
        channel = Channel(theirs, MESSAGE_BYTES_MAX)
        while not is_through.is_set():
            channel.receive(0.1)
        thread.join(60)
        theirs.close()
        reporter.close()


# --- silence


class FakeClock:
    now_s = 0.0

    def monotonic_s(self):
        return self.now_s


def test_silence_is_counted_while_we_listen_and_not_while_we_stand_still():
    clock = FakeClock()
    took_s = 0.0
    messages: list[bytes] = []

    class Quiet:
        end_status = None

        def receive(self, timeout_s):
            clock.now_s += took_s
            return messages

    link = Link.__new__(Link)
    vars(link).update(
        lost="",
        outbox=SimpleNamespace(is_open=True),
        _clock=clock,
        _channel=Quiet(),
        _process=Quiet(),
        _settings=WorkerConfig(hang_s=5.0),
        _silence_s=0.0,
    )
    took_s = 1000.0  # stopped, or the machine slept
    for _ in range(2):
        link.listen(1.0)
    assert not link.lost
    took_s = 1.0
    messages = [encode(Pong(1, 0.0))]
    link.listen(1.0)
    messages = []
    for _ in range(5):
        link.listen(1.0)
        assert not link.lost
    link.listen(1.0)
    assert vars(link)["lost"] == "has not answered for 6.0 s"


# --- places and tickets


def test_places_are_found_at_the_borders_of_buffers():
    buffers = [HostBuffer(8192, is_shared=True) for _ in range(4)]
    shared = SharedRows(buffers)
    for number, buffer in enumerate(buffers):
        memory = buffer.memory
        rows = [memory, memory[4096:], memory[8191:], memory[:1].toreadonly()]
        found = shared.places(rows)
        assert found == [(number, 0), (number, 4096), (number, 8191), (number, 0)]
        del memory, rows
    ends = [buffer.memory[-1:] for buffer in buffers]
    found = shared.places(ends * 2)
    assert found == [(number, 8191) for number in range(4)] * 2
    del ends
    for buffer in buffers:
        buffer.close()


def test_a_ticket_takes_in_each_outcome_once():
    job = WorkerJob([KEY] * 6, clock=SystemClock())
    rows = tuple(Row(KEY, 0, 0, 10 * place) for place in range(1, 5))
    ticket = Ticket(job, Load(1, rows, None), [0, 1, 3, 5])
    done, miss = (bytes([NUMBER_OF[each]]) for each in (Outcome.DONE, Outcome.MISS))
    assert ticket.advance(b"\0\0\0\0") == 0
    assert ticket.advance(done + done + done + b"\0") == 60
    assert ticket.open_bytes == 40
    assert ticket.advance(done + done + done + miss) == 40
    assert ticket.advance(done + done + done + miss) == 0
    assert job.outcomes == (
        Outcome.DONE,
        Outcome.DONE,
        Outcome.PENDING,
        Outcome.DONE,
        Outcome.PENDING,
        Outcome.MISS,
    )
    assert job.bytes_done == 60
    for bad in (b"\1", b"\xff\1\1\1"):
        with pytest.raises(ValueError, match="outcomes of"):
            ticket.advance(bad)


def test_a_report_of_an_unknown_job_is_an_error():
    ours, theirs = socket.socketpair()
    with ours, theirs:
        outbox = Outbox(Channel(ours, 1000), WorkerConfig(), store_bytes_max=1, clock=SystemClock())
        with pytest.raises(ValueError, match="no open job 7"):
            outbox.take_progress(Progress(7, b"\1", True))
        outbox.take_drained(Drained(7, True))
