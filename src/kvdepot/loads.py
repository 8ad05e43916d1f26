"""Loads from the pool, and what the policies learn from them.

Every load of a depot goes through here: it gets its request's turn, its bytes count as being ahead of
later ones, and when it is decided, the policies hear how long it took and what was wrong.

Used by one engine thread. Nothing here waits.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from kvdepot.clock import Clock
from kvdepot.policy.breaker import Fault
from kvdepot.policy.ordering import Lane
from kvdepot.policy.policies import LoadTicket, Policies
from kvdepot.policy.reasons import Reason
from kvdepot.tiers import Job, Outcome, Read, Tier, Turn

__all__ = ["FAULTS", "Loads", "reason_of", "worst_of"]

#: what an outcome says of the storage; the worst first
FAULTS = {
    Outcome.CORRUPT: Fault.CORRUPT,
    Outcome.FAILED: Fault.ERROR,
    Outcome.LATE: Fault.LATE,
}
_REASONS = {
    Outcome.CORRUPT: Reason.CORRUPT,
    Outcome.FAILED: Reason.FAILED,
    Outcome.LATE: Reason.DEADLINE,
    Outcome.CANCELLED: Reason.DEADLINE,
    Outcome.MISS: Reason.VANISHED,
}


class _Load:
    """A load that the policies have not heard the end of."""

    __slots__ = ("is_unwanted", "job", "ticket")

    def __init__(self, job: Job, ticket: LoadTicket) -> None:
        self.job = job
        self.ticket = ticket
        self.is_unwanted = False


class Loads:
    """The loads of one depot.

    Args:
        pool: where they go; None answers every load with a miss.
        policies: who learns from them.
        clock: for tests that own the time.
    """

    def __init__(self, pool: Tier | None, policies: Policies, clock: Clock) -> None:
        self._pool = pool
        self._policies = policies
        self._clock = clock
        self._open: list[_Load] = []
        self._next_request = 0
        #: when any bytes came last, as far as anybody looked
        self.heard_s = float("-inf")
        self._done_bytes = 0

    def next_request(self) -> int:
        """A number for the loads of one request."""
        self._next_request += 1
        return self._next_request

    def load(
        self,
        reads: Sequence[Read],
        turn: Turn,
        *,
        deadline_s: float | None = None,
        is_probe: bool = False,
    ) -> Job:
        """Begin a load."""
        keys = [read.key for read in reads]
        if self._pool is None:
            job = Job(keys, clock=self._clock)
            job.resolve_all(Outcome.MISS)
            return job
        size = sum(read.into.nbytes for read in reads)
        ticket = self._policies.load_began(
            size,
            self._clock.monotonic_s(),
            is_probe=is_probe,
            is_prefetch=turn.lane == Lane.PREFETCH,
        )
        job = self._pool.load(reads, deadline_s=deadline_s, turn=turn)
        self._open.append(_Load(job, ticket))
        return job

    def take_back(self, job: Job) -> None:
        """Cancel a load for a reason that is not the storage's; nothing is learned from it."""
        for load in self._open:
            if load.job is job and not job.is_decided:
                load.is_unwanted = True
        job.cancel()

    def give_up(self, job: Job) -> None:
        """Cancel a load because it is too slow."""
        job.cancel()

    def collect(self) -> None:
        """Tell the policies of the loads that are decided."""
        done_bytes = sum(load.job.bytes_done for load in self._open)
        if done_bytes != self._done_bytes:
            self.heard_s = self._clock.monotonic_s()
        left: list[_Load] = []
        for load in self._open:
            if load.job.is_decided:
                self._tell(load)
            else:
                left.append(load)
        self._open = left
        self._done_bytes = sum(load.job.bytes_done for load in left)

    def _tell(self, load: _Load) -> None:
        job = load.job
        outcomes = set(job.outcomes)
        worst = worst_of(outcomes)
        fault = FAULTS[worst] if worst is not None else None
        if fault is None and Outcome.CANCELLED in outcomes:
            fault = Fault.LATE
        ended_s = job.finished_s if job.finished_s is not None else self._clock.monotonic_s()
        # blocks that vanished say nothing about the storage's speed
        is_unwanted = load.is_unwanted or (fault is None and Outcome.MISS in outcomes)
        self._policies.load_ended(
            load.ticket,
            ended_s,
            done_bytes=job.bytes_done,
            fault=fault,
            is_unwanted=is_unwanted,
        )


def worst_of(outcomes: Collection[Outcome]) -> Outcome | None:
    """The outcome that says the worst of the storage; None when none speaks against it."""
    return next((outcome for outcome in FAULTS if outcome in outcomes), None)


def reason_of(outcome: Outcome) -> Reason | None:
    """Why a block with this outcome is computed; None when it is not."""
    return _REASONS.get(outcome)
