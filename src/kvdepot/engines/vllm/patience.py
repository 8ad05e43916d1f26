"""The policies, with what vLLM lets a tier know: whether the pool is asked, and how long a load may take.

vLLM tells a tier which requests were scheduled and when their chunks are computed, so prefill is measured as
a request experiences it, batching included. A load is one job: while any row of it is in use, none of its
chunks is to be had, so that blocks that come earn nothing before the end. Its request waits for what
reading is expected to take, twice over, or the slack, and never longer than its tokens take to compute.

That is a bet. After a load that lost it, those that follow are only waited for as long as the slack
allows, which may be less than any load takes: they go on without their requests, and what becomes of
them says when loads are to be trusted again. So do probes.

Used by the scheduler's thread alone; every call takes microseconds.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Collection, Iterable
from typing import NamedTuple, Protocol

from kvdepot.clock import Clock
from kvdepot.loads import FAULTS, reason_of, worst_of
from kvdepot.metrics import Counters
from kvdepot.plans import CostKeeper
from kvdepot.policy.admission import AdmissionSettings
from kvdepot.policy.breaker import Fault
from kvdepot.policy.deadline import slack_of
from kvdepot.policy.decide import Ask, Mode, Run
from kvdepot.policy.policies import LoadTicket, Policies
from kvdepot.policy.reasons import Reason
from kvdepot.tiers import Outcome, Tier

__all__ = ["Decided", "Patience", "Wait"]

log = logging.getLogger(__name__)

#: requests whose scheduling is remembered; one that never stores anything is forgotten by and by
_REQUESTS_MAX = 4096
#: a load may take so many times as long as is expected at the slower end
_DOUBT = 2.0
#: a load that was waited for in vain is made good by so many that come in time, at most
_DISTRUST_MAX = 8
#: so many that were waited for and came in time halve what the next such load is made good by
_TRUSTED = 16


class Wait(NamedTuple):
    """The answer to a load that vLLM wants."""

    #: seconds after which what has not come is given up; None: no load is made, and the request computes
    deadline_s: float | None
    is_probe: bool
    #: seconds that the request waits; then it computes, and the load goes on without it
    patience_s: float = math.inf


class Decided(Protocol):
    """What is learned of a load."""

    @property
    def is_decided(self) -> bool:
        """It is known what became of it."""

    @property
    def outcomes(self) -> Collection[Outcome]:
        """What became of its chunks."""

    @property
    def bytes_done(self) -> int:
        """Payload bytes that came."""

    @property
    def finished_s(self) -> float | None:
        """When it was decided, by the clock."""


class Patience:
    """One tier's policies.

    Args:
        deadline_s: by the bytes of a load, how long it may take at most; also while it is not known
            what computing takes.
        admission: what is written.
        counters: of the tier.
        clock: for tests that own the time.
    """

    def __init__(
        self,
        deadline_s: Callable[[int], float],
        *,
        admission: AdmissionSettings = AdmissionSettings(),
        counters: Counters,
        clock: Clock,
    ) -> None:
        self.policies = Policies(admission=admission)
        self._deadline_s = deadline_s
        self._counters = counters
        self._clock = clock
        #: requests of which not even the first chunk was found: what they store, they have computed
        self._new: dict[str, None] = {}
        #: of those, when they were first scheduled; gone once they have stored
        self._scheduled_s: dict[str, float] = {}
        self._probing: str | None = None
        #: requests that compute what they could load, until they end
        self._refused: set[str] = set()
        self._costs = CostKeeper(self.policies, clock)
        self._has_recalled = False
        #: loads on their way, and how long their requests wait
        self._open: list[tuple[LoadTicket, Decided, float]] = []
        #: so many loads must come in time before one is waited for beyond the slack
        self._distrust = 0
        #: what that was when a load had been waited for in vain last
        self._last_distrust = 0
        #: loads that were waited for and came in time, since one did not
        self._trusted = 0

    def may_load(self, request: str) -> bool:
        """Whether a request may load what it has in the pool: not while the storage is left alone."""
        if self.policies.breaker.is_closed or request == self._probing:
            return True
        if self.policies.probe_due(self._clock.monotonic_s()):
            self._probing = request
            return True
        if request not in self._refused:  # asked about each chunk, and in each step
            self._refused.add(request)
            self._counters.add(f"reuse_ended_{Reason.BREAKER.value}_total")
        return False

    def looked_up(self, request: str, *, is_hit: bool) -> None:
        """The first chunk of a request is in the pool, or it is not, and all of it will be computed."""
        self.policies.write_only.looked_up(is_hit=is_hit)
        if is_hit:
            return
        self._new[request] = None
        if len(self._new) > _REQUESTS_MAX:
            self.finished(next(iter(self._new)))

    def scheduled(self, requests: Iterable[str]) -> None:
        """Requests begin to be computed in this step."""
        now_s = self._clock.monotonic_s()
        for request in requests:
            if request in self._new:
                self._scheduled_s[request] = now_s

    def computed(self, request: str, tokens: int) -> None:
        """Chunks of a request were computed; its first ones say how long that took."""
        self._new.pop(request, None)
        began_s = self._scheduled_s.pop(request, None)
        if began_s is not None:
            self.policies.cost.computed(tokens, 0, self._clock.monotonic_s() - began_s)

    def wait_for(self, request: str, chunks: int, tokens: int, length_bytes: int) -> Wait:
        """Whether to make a load, and for how long to wait for it."""
        now_s = self._clock.monotonic_s()
        self._new.pop(request, None)  # its prefill is no measure of computing
        self._scheduled_s.pop(request, None)
        is_probe = request == self._probing and not self.policies.breaker.is_closed
        cost = self.policies.cost
        run = Run(self.policies.tier, chunks, length_bytes // max(chunks, 1))
        ask = Ask(tokens + 1, max(tokens // max(chunks, 1), 1), [run])
        choice = self.policies.choose(ask, now_s).choice
        self._counters.add(f"decided_{choice.mode.value}_total")
        if choice.mode is Mode.COMPUTE and not is_probe:
            # now and then one is made all the same, or nobody would find out that storage is well again
            is_probe = self.policies.probe_due(now_s)
            if not is_probe:
                reason = choice.reason or Reason.REFUSED_COST
                self._counters.add(f"reuse_ended_{reason.value}_total")
                return Wait(None, is_probe=False)
        unknown_s = self._deadline_s(length_bytes)
        computing_s = cost.prefill_s(tokens)
        if not math.isfinite(computing_s):
            return Wait(unknown_s, is_probe)
        slack_s = slack_of(computing_s)
        if is_probe or self._distrust:
            # more than computing takes would not be of use to the next request either
            return Wait(min(computing_s, unknown_s), is_probe, slack_s)
        expected_s = cost.read_s(self.policies.tier, length_bytes, is_doubtful=True)
        wait_s = max(slack_s, min(_DOUBT * expected_s, computing_s))
        return Wait(min(wait_s, unknown_s), is_probe)

    # what room in the host tier is compared by; see `kvdepot.engines.vllm.room.RoomCosts`

    def load_s(self, length_bytes: int) -> float:
        """Seconds that a load is expected to take, behind those that are served first."""
        cost, tier = self.policies.cost, self.policies.tier
        if not cost.knows_reads(tier):
            # as slow as storage may be before it hardly beats computing
            return self._deadline_s(length_bytes) - self._deadline_s(0)
        ahead_bytes = self.policies.ahead_bytes(length_bytes)
        return cost.read_s(tier, length_bytes, ahead_bytes=ahead_bytes, is_doubtful=True)

    def compute_s(self, tokens: int, position: int, length_bytes: int) -> float:
        """Seconds to compute tokens; what their load may take at most while that is not known."""
        seconds = self.policies.cost.prefill_s(tokens, position)
        return seconds if math.isfinite(seconds) else self._deadline_s(length_bytes)

    def began(self, job: Decided, length_bytes: int, wait: Wait) -> None:
        """A load was made."""
        now_s = self._clock.monotonic_s()
        ticket = self.policies.load_began(length_bytes, now_s, is_probe=wait.is_probe)
        self._open.append((ticket, job, wait.patience_s))

    def collect(self, pool: Tier | None) -> None:
        """Learn from the loads that are decided; what is known is kept with the pool, once it is open."""
        if pool is not None and not self._has_recalled:
            self._has_recalled = True
            self._costs.recall(pool)
        self._costs.remember(pool)
        for entry in [entry for entry in self._open if entry[1].is_decided]:
            self._open.remove(entry)
            ticket, job, patience_s = entry
            outcomes = set(job.outcomes)
            worst = worst_of(outcomes)
            fault = FAULTS[worst] if worst is not None else None
            ended_s = self._clock.monotonic_s() if job.finished_s is None else job.finished_s
            self.policies.load_ended(
                ticket,
                ended_s,
                done_bytes=job.bytes_done,
                fault=fault,
                is_unwanted=fault is None and outcomes != {Outcome.DONE},
            )
            was_left = ended_s - ticket.began_s > patience_s
            self._trust(fault, is_whole=outcomes == {Outcome.DONE}, was_left=was_left)
            reason = reason_of(worst) if worst is not None else None
            if was_left:
                reason = Reason.DEADLINE
            if reason is not None:
                self._counters.add(f"reuse_ended_{reason.value}_total")
            if ticket.is_probe:
                self._probing = None

    def stored(self, length_bytes: int) -> None:
        """Bytes were written."""
        if length_bytes:
            self.policies.write_only.stored(length_bytes)

    def is_write_only(self) -> bool:
        """Whether next to nothing of what was stored ever comes back; the log says so when it is due."""
        counts = self._counters.snapshot()
        found = {reason: counts[f"reuse_ended_{reason.value}_total"] for reason in Reason}
        misses = {reason: count for reason, count in found.items() if count}
        warning = self.policies.write_only.due_warning(misses)
        if warning:
            log.warning("%s", warning)
        return bool(self.policies.write_only.verdict(misses).warning)

    def finished(self, request: str) -> None:
        """A request has ended."""
        self._refused.discard(request)
        self._new.pop(request, None)
        self._scheduled_s.pop(request, None)
        if request == self._probing:
            self._probing = None

    # below

    def _trust(self, fault: Fault | None, *, is_whole: bool, was_left: bool) -> None:
        """Learn whether loads are to be waited for."""
        if fault is not None:
            if not was_left:
                # a request may have lost more than the slack; where that comes and goes, more is asked for
                self._last_distrust = min(max(2 * self._last_distrust, 1), _DISTRUST_MAX)
                self._trusted = 0
            self._distrust = self._last_distrust
        elif is_whole and self._distrust:
            self._distrust -= 1
        elif is_whole:
            self._trusted += 1
            if self._trusted >= _TRUSTED:
                self._trusted = 0
                self._last_distrust //= 2
