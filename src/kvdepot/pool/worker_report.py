"""What a worker tells its parent, and when.

Every message costs the engine's process a turn of its interpreter lock, so reports are few: one when a
job is settled or an answer is due, taking along everything else that has happened; a partial result or
a change of the index alone waits for a moment.

The order is what makes lookups true: a change of the index is noted before the outcome that goes with
it (a block is forgotten, then it is CORRUPT; published, then drained), so a report takes the outcomes
first and the changes second, and the parent takes them in the other way round.

Ownership: any thread may note; one thread sends. `_wake` is held for moments only, and never while a
job's or the index's lock is taken.
"""

from __future__ import annotations

import heapq
import logging
import threading
from collections import deque
from collections.abc import Callable, Iterable, Sequence

from kvdepot.clock import Clock, SystemClock
from kvdepot.io.childprocess import Channel
from kvdepot.keys import BlockKey
from kvdepot.metrics import Counters
from kvdepot.pool.worker_wire import OUTCOMES, Change, Notice, Progress, Report, encode
from kvdepot.tiers import Job, Outcome, TierUsage

__all__ = ["ReportedJob", "Reporter"]

log = logging.getLogger(__name__)

#: how long a partial result or a change of the index waits for company
_LINGER_S = 0.02
#: changes in one report, of up to KEYS_MAX keys each: 2 MiB
_CHANGES_MAX = 64
#: changes that wait; with more, whoever finds new segments waits for the parent
_BACKLOG_MAX = 1024
#: jobs in one report, of up to ROWS_MAX outcomes each: 1 MiB
_JOBS_MAX = 64
_NUMBER_OF = {outcome: number for number, outcome in enumerate(OUTCOMES)}


class ReportedJob(Job):
    """A job of the parent's, as the worker's tier sees it; whatever becomes of it is reported."""

    __slots__ = ("_reporter", "active_at_s", "number")

    def __init__(
        self,
        number: int,
        keys: Sequence[BlockKey],
        reporter: Reporter,
        *,
        deadline_s: float | None = None,
    ) -> None:
        super().__init__(keys, deadline_s=deadline_s)
        self.number = number
        #: when a piece of work last began or ended
        self.active_at_s = self.started_s
        self._reporter = reporter

    @property
    def deadline_at_s(self) -> float | None:
        """Monotonic seconds; None without a deadline."""
        return self._deadline_at

    @property
    def is_in_use(self) -> bool:
        """A piece of work holds the rows."""
        return self._users > 0

    def hold(self) -> bool:
        is_held = super().hold()
        if is_held:
            self.active_at_s = self._clock.monotonic_s()
        return is_held

    def release(self) -> None:
        super().release()
        self.active_at_s = self._clock.monotonic_s()
        self._reporter.job_changed(self)

    def resolve(self, index: int, outcome: Outcome, payload_bytes: int = 0) -> bool:
        is_first = super().resolve(index, outcome, payload_bytes)
        self._reporter.job_changed(self)
        return is_first

    def resolve_run(
        self, first: int, outcomes: Sequence[Outcome], block_bytes: Sequence[int]
    ) -> tuple[int, int]:
        done = super().resolve_run(first, outcomes, block_bytes)
        self._reporter.job_changed(self)
        return done

    def resolve_all(self, outcome: Outcome) -> None:
        super().resolve_all(outcome)
        self._reporter.job_changed(self)

    def cancel(self) -> None:
        super().cancel()
        self._reporter.job_changed(self)


class Reporter:
    """Collects what is to be said, and says it."""

    def __init__(self, channel: Channel, *, clock: Clock | None = None) -> None:
        self.counters = Counters()
        self._channel = channel
        self._clock = clock or SystemClock()
        self._wake = threading.Condition()
        self._jobs: dict[int, ReportedJob] = {}
        self._dirty: dict[int, ReportedJob] = {}
        self._deadlines: list[tuple[float, int]] = []
        self._changes: deque[Change] = deque()
        self._answers: list[Notice] = []
        self._is_urgent = False
        self._linger_until_s: float | None = None
        self._is_closed = False
        self._said_counters = self.counters.snapshot()
        self._usage_of: Callable[[], TierUsage] | None = None
        self._thread = threading.Thread(target=self._run, name="kvdepot-report", daemon=True)

    def start(self) -> None:
        """Begin to send."""
        self._thread.start()

    def watch_usage(self, usage_of: Callable[[], TierUsage]) -> None:
        """Take along what the tier holds."""
        self._usage_of = usage_of

    def close(self) -> None:
        """Say what is left, and stop."""
        with self._wake:
            self._is_closed = True
            self._wake.notify_all()
        self._thread.join()

    # noting

    def watch(self, job: ReportedJob) -> None:
        """From now on report this job, until it is settled."""
        with self._wake:
            self._jobs[job.number] = job
            if job.deadline_at_s is not None:
                heapq.heappush(self._deadlines, (job.deadline_at_s, job.number))
                self._wake.notify_all()

    def cancel(self, number: int) -> None:
        """Take a job back, if it is still there."""
        with self._wake:
            job = self._jobs.get(number)
        if job is not None:
            job.cancel()

    def job_changed(self, job: ReportedJob) -> None:
        """Outcomes of a job, or who uses its rows, have changed."""
        is_settled = job.is_settled
        with self._wake:
            if job.number in self._jobs:
                self._dirty[job.number] = job
                self._note(is_urgent=is_settled)

    def changed(self, changes: Iterable[Change]) -> None:
        """The index has changed. Never blocks."""
        with self._wake:
            self._changes.extend(changes)
            self._note(is_urgent=False)

    def wait_for_room(self) -> None:
        """Block while the parent is far behind with the changes."""
        with self._wake:
            self._wake.wait_for(lambda: len(self._changes) < _BACKLOG_MAX or self._is_closed)

    def say(self, answer: Notice) -> None:
        """Send an answer, after everything that has been noted so far."""
        with self._wake:
            self._answers.append(answer)
            self._note(is_urgent=True)

    def stuck_s(self) -> float:
        """How long the longest piece of work has been holding a job's rows."""
        now_s = self._clock.monotonic_s()
        with self._wake:
            jobs = list(self._jobs.values())
        return max((now_s - job.active_at_s for job in jobs if job.is_in_use), default=0.0)

    # the thread; `_note` and `_wait_s` with the lock held

    def _note(self, *, is_urgent: bool) -> None:
        if is_urgent:
            self._is_urgent = True
            self._wake.notify_all()
        elif self._linger_until_s is None:
            self._linger_until_s = self._clock.monotonic_s() + _LINGER_S
            self._wake.notify_all()

    def _run(self) -> None:
        try:
            while self._wait():
                self._send()
        except OSError as error:
            log.debug("the parent does not listen any more: %s", error)
        with self._wake:
            self._is_closed = True
            self._wake.notify_all()

    def _wait(self) -> bool:
        """Block until something is to be said; False once there never will be."""
        with self._wake:
            while (wait_s := self._wait_s()) != 0:
                if self._is_closed:
                    return False
                self._wake.wait(wait_s and min(wait_s, threading.TIMEOUT_MAX))
            return True

    def _wait_s(self) -> float | None:
        """Seconds until something is due; None if nothing is."""
        is_something_left = bool(self._dirty or self._changes or self._answers)
        if self._is_urgent or (self._is_closed and is_something_left):
            return 0
        due_s = [at_s for at_s, _ in self._deadlines[:1]]
        if self._linger_until_s is not None:
            due_s.append(self._linger_until_s)
        return max(min(due_s) - self._clock.monotonic_s(), 0) if due_s else None

    def _send(self) -> None:
        jobs, answers = self._take()
        progress = [_progress_of(job) for job in jobs]
        with self._wake:
            changes = list(self._changes)
            self._changes.clear()
            for each in progress:
                if each.is_settled:
                    # and not once more: it may have changed again since it was looked at
                    self._jobs.pop(each.number, None)
                    self._dirty.pop(each.number, None)
            self._wake.notify_all()  # there is room again
        for start in range(0, len(changes), _CHANGES_MAX):
            self._channel.send([encode(Report(tuple(changes[start : start + _CHANGES_MAX])))])
        usage = self._usage_of() if self._usage_of and (changes or answers) else None
        counters = self._counted()
        messages: list[Notice] = []
        if progress or counters or usage:
            first, *further = _runs(progress) or [()]
            messages.append(Report((), first, counters, usage))
            messages += [Report((), part) for part in further]
        self._channel.send([encode(message) for message in (*messages, *answers)])

    def _take(self) -> tuple[list[ReportedJob], list[Notice]]:
        """The jobs to look at, those whose deadline has come among them, and the answers."""
        now_s = self._clock.monotonic_s()
        with self._wake:
            dirty, self._dirty = self._dirty, {}
            jobs = {number: job for number, job in dirty.items() if number in self._jobs}
            while self._deadlines and self._deadlines[0][0] <= now_s:
                # looking at a job is what makes it late, and gives back the rows that nobody uses
                job = self._jobs.get(heapq.heappop(self._deadlines)[1])
                if job is not None:
                    jobs[job.number] = job
            answers, self._answers = self._answers, []
            self._is_urgent = False
            self._linger_until_s = None
        return list(jobs.values()), answers

    def _counted(self) -> dict[str, int]:
        """What the counters have grown by since the last time."""
        before, self._said_counters = self._said_counters, self.counters.snapshot()
        return {
            name: value - before[name]
            for name, value in self._said_counters.items()
            if value != before[name]
        }


def _progress_of(job: ReportedJob) -> Progress:
    # in this order: a job that is settled has no outcome that may still change
    is_settled = job.is_settled
    return Progress(job.number, bytes(_NUMBER_OF[outcome] for outcome in job.outcomes), is_settled)


def _runs(progress: Sequence[Progress]) -> list[tuple[Progress, ...]]:
    return [
        tuple(progress[start : start + _JOBS_MAX]) for start in range(0, len(progress), _JOBS_MAX)
    ]
