"""All policies of one depot in one object: what an engine's adapter, the depot and the simulator ask.

    choose        how a request gets its prefix
    load_began    bytes are asked of a tier; what is ahead of them is known from here on
    load_ended    what became of them: costs are learned, the breaker hears of it
    probe_due     whether to read a little in the background, to find out how the storage does now
    settle        what a decision cost in the end

Pure: no I/O, no threads, no clock; seconds come in. Thread-safe; every call takes microseconds, so a
scheduler's thread may make them. The simulator runs these same objects.
"""

from __future__ import annotations

import logging
import math
import threading
from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

from kvdepot.policy.admission import Admission, AdmissionSettings
from kvdepot.policy.breaker import Breaker, BreakerSettings, Fault, Leave
from kvdepot.policy.cost import CostModel
from kvdepot.policy.decide import Ask, Choice, Mode, Run, decide
from kvdepot.policy.reasons import MissLog, Reason
from kvdepot.policy.write_only import WriteOnlyDetector

__all__ = ["Decision", "LoadTicket", "Policies", "PolicyTotals"]

log = logging.getLogger(__name__)

#: between two background reads while loads are refused by cost: the end of a fault is seen within a few
_PROBE_INTERVAL_S = 1.5
#: ... or this many times as long as the last one took, so that slow storage is not kept busy by them
_PROBE_REST = 10.0
#: after a probe that was much quicker than expected, the next one comes soon
_PROBE_SOON_S = 0.2
_SURPRISE = 2.0
_DECISIONS_MAX = 256


class LoadTicket(NamedTuple):
    """Bytes that are asked of a tier."""

    number: int
    tier: str
    length_bytes: int
    ahead_bytes: int
    began_s: float
    is_probe: bool
    is_prefetch: bool = False


class Decision:
    """One choice, and what came of it. Written by one thread."""

    __slots__ = ("ask", "at_s", "choice", "load_s", "lost_s", "reused_blocks")

    def __init__(self, at_s: float, ask: Ask, choice: Choice) -> None:
        self.at_s = at_s
        self.ask = ask
        self.choice = choice
        self.reused_blocks = 0
        self.load_s = 0.0
        #: seconds that waiting took beyond what its blocks saved; 0 when it was worth it
        self.lost_s = 0.0


class PolicyTotals(NamedTuple):
    """What the decisions came to so far."""

    decisions: int
    loads: int
    meets: int
    computes: int
    #: prefill that was not done, less the waiting for it
    saved_s: float
    #: waiting that was not made good
    lost_s: float
    lost_s_max: float


class Policies:
    """The policies of one depot, for one storage tier behind the host tier.

    Args:
        tier: name of the storage tier.
        admission: what is written.
        breaker: when the tier is left alone.
        write_only: looks for a cache that is only written.
    """

    def __init__(
        self,
        *,
        tier: str = "disk",
        admission: AdmissionSettings = AdmissionSettings(),
        breaker: BreakerSettings = BreakerSettings(),
        write_only: WriteOnlyDetector | None = None,
    ) -> None:
        self.tier = tier
        self.cost = CostModel()
        self.breaker = Breaker(breaker)
        self.admission = Admission(admission)
        self.misses = MissLog()
        self.write_only = write_only or WriteOnlyDetector()
        self._lock = threading.Lock()
        self._next = 0
        self._loading: dict[int, int] = {}
        self._is_refused = False
        self._is_probing = False
        self._probe_at_s = -math.inf
        #: when any bytes of the tier came last
        self._heard_at_s = -math.inf
        self._recent: deque[Decision] = deque(maxlen=_DECISIONS_MAX)
        self._counts = dict.fromkeys(Mode, 0)
        self._saved_s = self._lost_s = self._lost_s_max = 0.0

    # deciding

    def choose(self, ask: Ask, now_s: float) -> Decision:
        """Decide one request; `ask.ahead_bytes` is filled in here."""
        size = sum(run.blocks * run.block_bytes for run in ask.runs)
        ask = ask._replace(ahead_bytes=self.ahead_bytes(size))
        if size and not self.breaker.is_closed:
            ask = ask._replace(runs=_near(ask.runs))
            choice = decide(ask, self.cost)._replace(reason=Reason.BREAKER)
        else:
            choice = decide(ask, self.cost)
        decision = Decision(now_s, ask, choice)
        with self._lock:
            self._counts[choice.mode] += 1
            self._recent.append(decision)
            if size:
                self._is_refused = choice.reason is Reason.REFUSED_COST
        if log.isEnabledFor(logging.DEBUG):
            log.debug("%s for %s, %s", choice, ask, self.cost.describe())
        return decision

    def settle(self, decision: Decision, *, load_s: float, reused_blocks: int) -> None:
        """Say what a decision came to.

        Args:
            decision: of `choose`.
            load_s: seconds that the request waited for blocks with nothing else to do.
            reused_blocks: leading blocks that were not computed in the end.
        """
        decision.load_s, decision.reused_blocks = load_s, reused_blocks
        ask = decision.ask
        saved_s = self.cost.saved_s(reused_blocks * ask.block_tokens, ask.prompt_tokens)
        decision.lost_s = max(load_s - saved_s, 0.0)
        with self._lock:
            self._saved_s += max(saved_s - load_s, 0.0)
            self._lost_s += decision.lost_s
            self._lost_s_max = max(self._lost_s_max, decision.lost_s)

    def recent(self) -> list[Decision]:
        """The last decisions, oldest first."""
        with self._lock:
            return list(self._recent)

    def totals(self) -> PolicyTotals:
        """Sums over all decisions."""
        with self._lock:
            counts = self._counts
            return PolicyTotals(
                sum(counts.values()),
                counts[Mode.LOAD],
                counts[Mode.MEET],
                counts[Mode.COMPUTE],
                self._saved_s,
                self._lost_s,
                self._lost_s_max,
            )

    # loads

    def ahead_bytes(self, length_bytes: int) -> int:
        """What is asked of the tier and goes before a load of this size: shorter ones do."""
        with self._lock:
            return sum(size for size in self._loading.values() if size <= length_bytes)

    @property
    def loading_bytes(self) -> int:
        """What is asked of the tier, prefetches left out: they hold nobody up."""
        with self._lock:
            return sum(self._loading.values())

    def load_began(
        self,
        length_bytes: int,
        now_s: float,
        *,
        is_probe: bool = False,
        is_prefetch: bool = False,
    ) -> LoadTicket:
        """Bytes are asked of the tier."""
        with self._lock:
            ahead = sum(self._loading.values())
            self._next += 1
            if not is_prefetch:
                self._loading[self._next] = length_bytes
            return LoadTicket(
                self._next, self.tier, length_bytes, ahead, now_s, is_probe, is_prefetch
            )

    def load_ended(
        self,
        ticket: LoadTicket,
        now_s: float,
        *,
        done_bytes: int,
        fault: Fault | None = None,
        is_unwanted: bool = False,
    ) -> None:
        """What became of them.

        Args:
            ticket: of `load_began`.
            now_s: when the last byte came, or it was given up.
            done_bytes: came and verified.
            fault: the worst thing that happened.
            is_unwanted: taken back for a reason that is not the storage's; nothing is learned.
        """
        with self._lock:
            self._loading.pop(ticket.number, None)
        if is_unwanted:
            if ticket.is_probe:
                self._probe_ended(now_s, ticket, was_quick=False)
            return
        span_s = now_s - ticket.began_s
        expected_s = self.cost.read_s(
            ticket.tier, ticket.length_bytes, ahead_bytes=ticket.ahead_bytes
        )
        if ticket.is_prefetch:
            pass  # it waited for whoever came, so its time says nothing about the storage's
        elif done_bytes >= ticket.length_bytes:
            self.cost.loaded(ticket.tier, done_bytes, span_s, ahead_bytes=ticket.ahead_bytes)
        elif fault is Fault.LATE:
            self.cost.not_loaded(
                ticket.tier, ticket.length_bytes, span_s, ahead_bytes=ticket.ahead_bytes
            )
        # a load of which some came was slow, and slowness is the cost model's; one of which nothing
        # came while nobody else's came either may never come
        is_silent = not done_bytes and self._heard_at_s <= ticket.began_s
        if done_bytes:
            self._heard_at_s = now_s
        is_failure = fault is not None and (fault is not Fault.LATE or is_silent)
        if is_failure and fault is not None:
            self.breaker.failed(now_s, fault, is_probe=ticket.is_probe)
        elif fault is None or done_bytes:
            self.breaker.succeeded(now_s, is_probe=ticket.is_probe)
        self.write_only.read_back(done_bytes)
        if ticket.is_probe:
            was_quick = not is_failure and span_s * _SURPRISE < expected_s
            self._probe_ended(now_s, ticket, was_quick=was_quick)

    def probe_due(self, now_s: float) -> bool:
        """Whether to read a little now, although no request waits for it; begin it if so.

        True while the breaker is open and lets one through, and now and then while loads are refused
        by cost: otherwise nobody would find out that the storage is well again.
        """
        if not self.breaker.is_closed:
            return self.breaker.may_read(now_s) is Leave.PROBE
        with self._lock:
            if not self._is_refused or self._is_probing or now_s < self._probe_at_s:
                return False
            self._is_probing = True
            return True

    def _probe_ended(self, now_s: float, ticket: LoadTicket, *, was_quick: bool) -> None:
        rest_s = max(_PROBE_INTERVAL_S, min(_PROBE_REST * (now_s - ticket.began_s), 8.0))
        with self._lock:
            self._is_probing = False
            self._probe_at_s = now_s + (_PROBE_SOON_S if was_quick else rest_s)


def _near(runs: Sequence[Run]) -> list[Run]:
    """The leading runs that are in memory."""
    near: list[Run] = []
    for run in runs:
        if run.block_bytes:
            break
        near.append(run)
    return near
