"""What waits to be read, and what may be read now: order, byte budget and breaker of each root.

Loads of one request form a *stream*; streams are served in the order of `kvdepot.policy.ordering`. Within
a stream, loads keep the order in which they were asked for. Nothing behind a stream is read while that
stream is still being planned, or planning would decide the order.

Not thread-safe: the reader holds its lock around every call. Nothing here makes a file call.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from kvdepot.policy.breaker import Breaker, Fault, Leave
from kvdepot.policy.budget import BudgetTuner
from kvdepot.policy.ordering import Lane, ReadOrder
from kvdepot.pool.plan import Unit
from kvdepot.tiers import Job, Read, Turn

__all__ = ["ReadQueue", "Request", "RootHealth", "Task"]

log = logging.getLogger(__name__)


class Request:
    """A load of which some reads are still to be planned."""

    __slots__ = ("job", "next", "reads", "stream")

    def __init__(self, job: Job, reads: Sequence[Read], stream: _Stream) -> None:
        self.job = job
        self.reads = reads
        self.next = 0
        self.stream = stream


class Task(NamedTuple):
    """A unit that is to be read now, or refused."""

    unit: Unit
    #: the root is left alone: answer that it failed, and do not touch it
    is_refused: bool
    #: its outcome decides whether the root is well again
    is_probe: bool


class RootHealth(NamedTuple):
    """How a root does, for people and metrics."""

    place: str
    #: ``closed``, ``open`` or ``half-open``
    breaker: str
    #: why it opened last; empty while it never did
    reason: str
    next_probe_s: float
    openings: int
    budget_bytes: int


class _Stream:
    """The loads of one request."""

    __slots__ = ("is_probe", "key", "number", "to_plan", "units")

    def __init__(self, key: int | None, *, is_probe: bool) -> None:
        self.key = key
        self.is_probe = is_probe
        self.number = -1
        self.to_plan: deque[Request] = deque()
        #: planned, by root
        self.units: dict[int, deque[Unit]] = {}

    @property
    def is_empty(self) -> bool:
        return not self.to_plan and not any(self.units.values())


class _Reading:
    """A unit that a thread is reading."""

    __slots__ = ("began_s", "has_landed", "is_late", "task")

    def __init__(self, task: Task, began_s: float) -> None:
        self.task = task
        self.began_s = began_s
        self.is_late = False
        self.has_landed = False


class _Root:
    """What is being read of one root."""

    def __init__(self, place: str, tuner: BudgetTuner) -> None:
        self.place = place
        self.breaker = Breaker()
        self.tuner = tuner
        self.reading: list[_Reading] = []
        #: whose units are read to find out whether it is well again
        self.trying: _Stream | None = None
        self.in_flight_bytes = 0
        self.waiting = 0
        #: when a read ended well last
        self.heard_s = float("-inf")

    @property
    def is_trying(self) -> bool:
        """A read is under way that may show that it is well again."""
        return any(each.task.is_probe and not each.is_late for each in self.reading)


class ReadQueue:
    """Streams in order, and the state of each root.

    Args:
        threads_per_root: so many units of one root may be read at once: one that hangs must not hold
            all threads.
        unit_bytes: of a unit, and the least of a budget.
        budget_bytes: in flight per root, at first.
        stall_s: a read that takes longer counts as a failure of its root.
    """

    def __init__(
        self, *, threads_per_root: int, unit_bytes: int, budget_bytes: int, stall_s: float
    ) -> None:
        self._threads_per_root = threads_per_root
        self._unit_bytes = unit_bytes
        self._budget_bytes = budget_bytes
        self._stall_s = stall_s
        self._order: ReadOrder[_Stream] = ReadOrder()
        self._streams: dict[int, _Stream] = {}
        self._planning: Request | None = None
        self._roots: dict[int, _Root] = {}

    @property
    def is_busy(self) -> bool:
        """Something waits or is being read."""
        return bool(len(self._order)) or any(root.reading for root in list(self._roots.values()))

    @property
    def wants_storage(self) -> bool:
        """Reads wait for, or use, a root that answers."""
        return any(
            root.breaker.is_closed and (root.reading or root.waiting)
            for root in list(self._roots.values())
        )

    def submit(self, job: Job, reads: Sequence[Read], turn: Turn | None, now_s: float) -> None:
        """A load begins to wait."""
        key = turn.request if turn is not None else None
        stream = self._streams.get(key) if key is not None else None
        if stream is None:
            lane = Lane(turn.lane) if turn is not None else Lane.REQUEST
            stream = _Stream(key, is_probe=lane is Lane.PROBE)
            left = turn.left_bytes if turn is not None else sum(each.into.nbytes for each in reads)
            stream.number = self._order.add(stream, left, now_s, lane)
            if key is not None:
                self._streams[key] = stream
        stream.to_plan.append(Request(job, reads, stream))

    def take(self, now_s: float) -> Request | Task | None:
        """The next piece of work; a request is to be planned and given to `planned`."""
        self._look_for_stalls(now_s)
        for _, stream in self._in_order():
            planning = self._planning
            if planning is None and stream.to_plan:
                self._planning = stream.to_plan.popleft()
                return self._planning
            task = self._task_of(stream, now_s)
            if task is not None:
                return task
            if stream.to_plan or (planning is not None and planning.stream is stream):
                return None  # what is not planned yet goes before all others
        return None

    def planned(self, request: Request, units: Sequence[Unit]) -> None:
        """Some reads of a request have become units; the rest of it is planned next."""
        self._planning = None
        stream = request.stream
        for unit in units:
            root = self._root(unit)
            root.waiting += 1
            stream.units.setdefault(id(unit.segment.root), deque()).append(unit)
        if request.next < len(request.reads):
            stream.to_plan.appendleft(request)
        self._drop_if_empty(stream)

    def landed(self, task: Task, now_s: float) -> None:
        """A unit's bytes have come: they count against the budget no more, while they are verified."""
        root = self._root(task.unit)
        for reading in root.reading:
            if reading.task is task and not reading.has_landed:
                reading.has_landed = True
                root.in_flight_bytes -= task.unit.length_bytes
                root.tuner.read(now_s, task.unit.length_bytes, is_more_waiting=root.waiting > 0)

    def done(self, task: Task, now_s: float, fault: Fault | None, *, is_unread: bool) -> None:
        """A thread is through with a unit.

        Args:
            task: of `take`.
            now_s: now.
            fault: what was wrong with the root, if anything.
            is_unread: the root was not asked at all, so nothing is known of it.
        """
        root = self._root(task.unit)
        for reading in root.reading:
            if reading.task is task:
                root.reading.remove(reading)
                if not reading.has_landed:
                    root.in_flight_bytes -= task.unit.length_bytes
                break
        else:
            return  # it was refused
        if is_unread:
            return
        if fault is not None:
            self._failed(root, now_s, fault, is_probe=task.is_probe)
        elif task.is_probe or not reading.is_late:
            root.heard_s = now_s
            # a probe that came late came all the same: what it hung on is over
            root.breaker.succeeded(now_s, is_probe=task.is_probe)

    def reading_now(self) -> list[Unit]:
        """Units that threads hold."""
        return [each.task.unit for root in self._roots.values() for each in root.reading]

    def clear(self) -> tuple[list[Request], list[Unit]]:
        """Take everything out that is not being read or planned."""
        requests = [each for _, stream in self._in_order() for each in stream.to_plan]
        units = [
            unit
            for _, stream in self._in_order()
            for queue in stream.units.values()
            for unit in queue
        ]
        for number, _ in self._order.in_order():
            self._order.remove(number)
        self._streams.clear()
        for root in self._roots.values():
            root.waiting = 0
        return requests, units

    def health(self, now_s: float) -> list[RootHealth]:
        """Of the roots that something was read from."""
        return [
            RootHealth(
                root.place,
                root.breaker.state.value,
                root.breaker.reason,
                root.breaker.next_probe_s(now_s),
                root.breaker.openings,
                root.tuner.budget_bytes,
            )
            for root in self._roots.values()
        ]

    # below

    def _in_order(self) -> Iterator[tuple[int, _Stream]]:
        first = self._order.first()
        if first is not None and len(self._order) == 1:
            yield first  # the usual case, without sorting
        else:
            yield from self._order.in_order()

    def _task_of(self, stream: _Stream, now_s: float) -> Task | None:
        for queue in stream.units.values():
            if not queue:
                continue
            root = self._root(queue[0])
            has_place = len(root.reading) < self._threads_per_root and (
                not root.in_flight_bytes
                or root.in_flight_bytes + queue[0].length_bytes <= root.tuner.budget_bytes
            )
            if root.breaker.is_closed:
                if has_place:
                    return self._begin(stream, queue, root, now_s, is_probe=False)
                continue
            if self._may_try(stream, root, now_s, has_place=has_place):
                if has_place:
                    return self._begin(stream, queue, root, now_s, is_probe=True)
                if root.is_trying:
                    continue
            unit = queue.popleft()
            root.waiting -= 1
            self._drop_if_empty(stream)
            return Task(unit, is_refused=True, is_probe=False)
        return None

    @staticmethod
    def _may_try(stream: _Stream, root: _Root, now_s: float, *, has_place: bool) -> bool:
        """Whether units of a load may be read although their root is left alone.

        A load tries a root as a whole: one whose other units were refused would fail, and whoever asked
        for it would never hear that the root is well. What was asked for as a probe is one; its sender
        has pauses of its own, and two rows of pauses would add up.
        """
        if stream.is_probe or root.trying is stream:
            return True
        if not has_place or root.breaker.may_read(now_s) is not Leave.PROBE:
            return False
        root.trying = stream
        return True

    def _begin(
        self, stream: _Stream, queue: deque[Unit], root: _Root, now_s: float, *, is_probe: bool
    ) -> Task:
        task = Task(queue.popleft(), is_refused=False, is_probe=is_probe)
        root.waiting -= 1
        root.in_flight_bytes += task.unit.length_bytes
        root.reading.append(_Reading(task, now_s))
        self._order.grow(stream.number, -task.unit.length_bytes)
        self._drop_if_empty(stream)
        return task

    def _drop_if_empty(self, stream: _Stream) -> None:
        planning = self._planning
        if stream.is_empty and (planning is None or planning.stream is not stream):
            self._order.remove(stream.number)
            if stream.key is not None:
                self._streams.pop(stream.key, None)

    def _look_for_stalls(self, now_s: float) -> None:
        for root in self._roots.values():
            for reading in root.reading:
                if reading.is_late or now_s - reading.began_s <= self._stall_s:
                    continue
                reading.is_late = True
                is_only_one = root.heard_s > reading.began_s
                if is_only_one or not root.breaker.is_closed:
                    self._failed(root, now_s, Fault.LATE, is_probe=reading.task.is_probe)
                else:
                    root.breaker.trip(now_s, Fault.LATE)
                    self._say(root, Fault.LATE)

    @staticmethod
    def _failed(root: _Root, now_s: float, fault: Fault, *, is_probe: bool) -> None:
        was_closed = root.breaker.is_closed
        root.trying = None
        root.breaker.failed(now_s, fault, is_probe=is_probe)
        if was_closed and not root.breaker.is_closed:
            ReadQueue._say(root, fault)

    @staticmethod
    def _say(root: _Root, fault: Fault) -> None:
        log.warning("%s is left alone (%s); it is tried again by itself", root.place, fault.value)

    def _root(self, unit: Unit) -> _Root:
        key = id(unit.segment.root)
        root = self._roots.get(key)
        if root is None:
            most = max(self._threads_per_root * self._unit_bytes, self._budget_bytes)
            tuner = BudgetTuner(self._budget_bytes, min_bytes=self._unit_bytes, max_bytes=most)
            root = self._roots[key] = _Root(unit.segment.root.disk.place, tuner)
        return root
