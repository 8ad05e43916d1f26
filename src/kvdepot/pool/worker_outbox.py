"""What is under way through one worker process: what waits to be sent, and what is not settled yet.

The engine's threads post, which only appends to a bounded queue; one sender thread turns the queue into
messages, and may block in that; one receiver, the tier's own thread, brings the answers. `_wake` guards
everything and is held for moments only.

A job's rows are held from the moment its message is made; so what is taken back, or late, while it
waits here is settled at once and the child never hears of it.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Sequence

from kvdepot.clock import Clock
from kvdepot.config import WorkerConfig
from kvdepot.io.childprocess import Channel
from kvdepot.keys import BlockKey
from kvdepot.metrics import Counters
from kvdepot.pool.worker_jobs import Ticket, WorkerJob
from kvdepot.pool.worker_wire import (
    KEYS_MAX,
    ROWS_MAX,
    Cancel,
    Close,
    Command,
    Drain,
    Drained,
    Load,
    Ping,
    Progress,
    Remember,
    Row,
    Store,
    StoreRow,
    Touch,
    encode,
)
from kvdepot.tiers import Outcome, Turn

__all__ = ["Outbox"]

log = logging.getLogger(__name__)

#: rows in one sending, so that what waits can still be taken back when the child does not read
_SEND_ROWS_MAX = 2 * ROWS_MAX
#: touches wait behind so many entries at most; a lost touch makes a segment look older than it is
_TOUCH_QUEUE_MAX = 256


class _Drain:
    """A caller that waits for `Drained`."""

    def __init__(self, stores: int) -> None:
        #: how many stores had been posted before
        self.stores = stores
        self.is_over = threading.Event()
        self.is_drained = False


class Outbox:
    """The way to one worker process.

    Args:
        channel: to the child; only sent to.
        settings: limits and the heartbeat.
        store_bytes_max: bytes of stores in flight beyond which stores are dropped.
    """

    def __init__(
        self,
        channel: Channel,
        settings: WorkerConfig,
        *,
        store_bytes_max: int,
        clock: Clock,
    ) -> None:
        self._channel = channel
        self._settings = settings
        self._store_bytes_max = store_bytes_max
        self._clock = clock
        self._wake = threading.Condition()
        self._is_open = False
        self._queue: deque[Ticket | Command] = deque()
        self._queued_rows = 0
        self._cancelled: list[int] = []
        self._tickets: dict[int, Ticket] = {}
        self._drains: dict[int, _Drain] = {}
        self._store_bytes = 0
        self._stores_posted = 0
        self._stores_visible = 0
        self._last_number = 0
        self._ping_due_s = 0.0
        self._sender = threading.Thread(target=self._send, name="kvdepot-send", daemon=True)

    @property
    def is_open(self) -> bool:
        """Whether anything may be posted."""
        return self._is_open

    def start(self) -> None:
        """The child is ready: take posts, and begin to send."""
        self._is_open = True
        self._ping_due_s = self._clock.monotonic_s() + self._settings.heartbeat_s
        self._sender.start()

    # the engine's threads

    def post_load(self, job: WorkerJob, rows: Sequence[Row], turn: Turn | None = None) -> bool:
        """Begin to load a job's blocks; False, and nothing done, if there is no room or no child."""
        with self._wake:
            if not self._has_room(len(rows)):
                return False
            for start in range(0, len(rows), ROWS_MAX):
                part = tuple(rows[start : start + ROWS_MAX])
                command = Load(self._number(), part, None, turn)
                self._enqueue(job, command, range(start, start + len(part)))
        return True

    def post_store(
        self, job: WorkerJob, rows: Sequence[StoreRow], positions: Sequence[int]
    ) -> list[int]:
        """Begin to store blocks of a job; the positions of those that are dropped for lack of room."""
        taken: list[int] = []
        dropped: list[int] = []
        with self._wake:
            if not self._has_room(len(rows)):
                return list(positions)
            for place, row in enumerate(rows):
                if self._store_bytes + row.length > self._store_bytes_max:
                    dropped.append(positions[place])
                else:
                    self._store_bytes += row.length
                    taken.append(place)
            for start in range(0, len(taken), ROWS_MAX):
                places = taken[start : start + ROWS_MAX]
                command = Store(self._number(), tuple(rows[place] for place in places))
                self._enqueue(job, command, [positions[place] for place in places])
            self._stores_posted += bool(taken)
        return dropped

    def post_touch(self, keys: Sequence[BlockKey]) -> None:
        """Pass uses on, if there is room."""
        starts = range(0, len(keys), KEYS_MAX)
        pieces = [Touch(b"".join(keys[start : start + KEYS_MAX])) for start in starts]
        with self._wake:
            is_room = len(self._queue) + len(pieces) <= _TOUCH_QUEUE_MAX
            if pieces and self._is_open and is_room:
                self._queue.extend(pieces)
                self._wake.notify()

    def post_remember(self, text: bytes) -> None:
        """Have a note kept, if there is room."""
        with self._wake:
            if self._is_open and len(self._queue) < _TOUCH_QUEUE_MAX:
                self._queue.append(Remember(text))
                self._wake.notify()

    def drain(self, timeout_s: float) -> bool:
        """Block until all stores so far are visible; False when time ran out or the child was lost."""
        with self._wake:
            if self._stores_visible == self._stores_posted:
                return True
            if not self._is_open:
                return False
            number = self._number()
            drain = self._drains[number] = _Drain(self._stores_posted)
            self._queue.append(Drain(number, float(timeout_s)))
            self._wake.notify()
        drain.is_over.wait(min(timeout_s, threading.TIMEOUT_MAX))
        with self._wake:
            self._drains.pop(number, None)
        return drain.is_drained

    def post_close(self, timeout_s: float) -> None:
        """Have the child publish, give back its leases and end; nothing may be posted any more."""
        with self._wake:
            if self._is_open:
                self._is_open = False
                self._queue.append(Close(float(timeout_s)))
                self._wake.notify()

    # the receiver

    def take_progress(self, progress: Progress) -> None:
        """The child says where a job stands.

        Raises:
            ValueError: there is no such job, or not with so many rows.
        """
        with self._wake:
            ticket = self._tickets.get(progress.number)
        if ticket is None:
            raise ValueError(f"there is no open job {progress.number}")
        decided_bytes = ticket.advance(progress.outcomes)
        with self._wake:
            if ticket.is_store:
                self._store_bytes -= decided_bytes
            if progress.is_settled:
                del self._tickets[ticket.number]
        if progress.is_settled:
            ticket.job.release()

    def take_drained(self, drained: Drained) -> None:
        """The child says that all stores before a drain are visible, or that time ran out."""
        with self._wake:
            drain = self._drains.get(drained.number)
            if drain is None:
                return  # its caller has given up
            if drained.is_drained:
                drain.is_drained = True
                self._stores_visible = max(self._stores_visible, drain.stores)
        drain.is_over.set()

    def fail(self, counters: Counters) -> None:
        """The child serves no more: decide everything. What it was sent holds its rows until `release`."""
        with self._wake:
            self._is_open = False
            self._queue.clear()
            self._wake.notify_all()
        self._channel.shut()
        if self._sender.ident is not None:
            self._sender.join()
        with self._wake:
            tickets = list(self._tickets.values())
            self._tickets = {ticket.number: ticket for ticket in tickets if ticket.is_sent}
            for drain in self._drains.values():
                drain.is_over.set()
        for ticket in tickets:
            pending = ticket.job.outcomes.count(Outcome.PENDING)
            name = "dropped_error_total" if ticket.is_store else "load_failed_blocks_total"
            counters.add(name, pending)
            ticket.job.resolve_all(Outcome.FAILED)

    def release(self) -> None:
        """The child is gone, with all its threads: give back the rows that it could write to."""
        with self._wake:
            tickets, self._tickets = self._tickets, {}
        for ticket in tickets.values():
            ticket.job.release()

    # with the lock held

    def _has_room(self, rows: int) -> bool:
        # a call that is larger than the queue is taken when there is nothing else
        is_within = not self._queued_rows or self._queued_rows + rows <= self._settings.queue_rows
        return self._is_open and is_within

    def _number(self) -> int:
        self._last_number += 1
        return self._last_number

    def _enqueue(self, job: WorkerJob, command: Load | Store, positions: Sequence[int]) -> None:
        ticket = Ticket(job, command, positions)
        self._tickets[ticket.number] = ticket
        self._queue.append(ticket)
        self._queued_rows += ticket.rows
        job.numbers.append(ticket.number)
        job.when_cancelled(self._cancel)
        self._wake.notify()

    def _take_ticket(self, ticket: Ticket) -> list[Command]:
        self._queued_rows -= ticket.rows
        if ticket.job.hold():
            ticket.is_sent = True
            return [ticket.message()]
        del self._tickets[ticket.number]
        if ticket.is_store:
            self._store_bytes -= ticket.open_bytes
        return []

    def _take_queued(self) -> list[Command]:
        messages: list[Command] = []
        rows = 0
        while self._queue and rows < _SEND_ROWS_MAX:
            entry = self._queue.popleft()
            if isinstance(entry, Ticket):
                rows += entry.rows
                messages += self._take_ticket(entry)
            else:
                messages.append(entry)
        cancelled, self._cancelled = self._cancelled, []
        return messages + [Cancel(number) for number in cancelled]

    # without it

    def _cancel(self, job: WorkerJob) -> None:
        """A job was taken back; tell of the parts that the child has."""
        with self._wake:
            for number in job.numbers:
                ticket = self._tickets.get(number)
                if ticket is not None and ticket.is_sent:
                    self._cancelled.append(number)
            self._wake.notify()

    def _send(self) -> None:
        try:
            while messages := self._take_messages():
                self._channel.send([encode(message) for message in messages])
        except OSError as error:
            log.debug("nothing can be sent to the worker: %s", error)
        except Exception:
            log.exception("sending to the worker failed")
            self._channel.shut()

    def _take_messages(self) -> list[Command]:
        """Block until something is to be sent; nothing once the link is closed."""
        with self._wake:
            while True:
                messages = self._take_queued()
                now_s = self._clock.monotonic_s()
                if self._is_open and now_s >= self._ping_due_s:
                    self._ping_due_s = now_s + self._settings.heartbeat_s
                    messages.append(Ping(self._number()))
                if messages or not self._is_open:
                    return messages
                self._wake.wait(self._ping_due_s - now_s)
