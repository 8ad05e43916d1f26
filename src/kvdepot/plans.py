"""Plans: how one request gets its prefix, and what came of it.

A plan is made from what the tiers hold (`kvdepot.finding.Hit`) and what the policies decide. In the end
the request says how it went, so that the decision's regret, the reason of a miss and a cache that is only
written become visible.

Used by one engine thread. Nothing here waits.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import NamedTuple, Protocol, runtime_checkable

import msgspec

from kvdepot.clock import Clock
from kvdepot.finding import Hit, runs_of
from kvdepot.host import HostRows
from kvdepot.identity import Identity
from kvdepot.keys import BlockKey
from kvdepot.loads import Loads
from kvdepot.metrics import Counters
from kvdepot.policy.admission import SeenBefore, StoreClass
from kvdepot.policy.cost import CostState
from kvdepot.policy.decide import Ask, Mode
from kvdepot.policy.policies import Decision, Policies
from kvdepot.policy.reasons import Explanation, Reason
from kvdepot.tiers import Job, Outcome, Read, Turn
from kvdepot.units import MIB

__all__ = ["CostKeeper", "Plan", "Planner", "Probe", "Remembers"]

log = logging.getLogger(__name__)

#: what a probe reads: long enough to measure bandwidth, short on slow storage too
_PROBE_BYTES = 4 * MIB
_PROBE_S = 0.25
#: a probe that has not come by then has failed
_PROBE_TIMEOUT_S = 2.0
_STORED_KEYS_MAX = 1 << 18
#: how often the costs are kept with the pool
_REMEMBER_S = 30.0


@runtime_checkable
class Remembers(Protocol):
    """A tier that keeps a small text beside its blocks, so that the next process begins with it."""

    #: what was kept for this identity when the tier was opened
    recalled: bytes | None

    def remember(self, text: bytes) -> None:
        """Have a text kept instead of the last one. Never blocks on I/O; it may be lost."""


class Plan(NamedTuple):
    """How one request gets its prefix."""

    keys: Sequence[BlockKey]
    hit: Hit
    decision: Decision

    @property
    def mode(self) -> Mode:
        """Load, meet or compute."""
        return self.decision.choice.mode

    @property
    def blocks(self) -> int:
        """Blocks to restore, from the first on; with `Mode.COMPUTE` those that are in memory."""
        return self.decision.choice.blocks

    @property
    def near_blocks(self) -> int:
        """Leading blocks that are in memory."""
        return next(
            (place for place, tier in enumerate(self.hit.tiers) if tier != "host"), self.hit.blocks
        )

    @property
    def slack_s(self) -> float:
        """How much longer than computing the request may take."""
        return self.decision.choice.slack_s


class CostKeeper:
    """Keeps what is learned of costs with the pool, so that a restart knows."""

    def __init__(self, policies: Policies, clock: Clock, pool: object = None) -> None:
        self._policies = policies
        self._clock = clock
        self._remembered_s = clock.monotonic_s()
        self.recall(pool)

    def recall(self, pool: object) -> None:
        """Begin with the costs that an earlier process had kept, if the pool keeps any."""
        text = pool.recalled if isinstance(pool, Remembers) else None
        if text is None:
            return
        try:
            self._policies.cost.restore(msgspec.json.decode(text, type=CostState))
        except msgspec.MsgspecError as error:
            log.warning("the costs that were kept cannot be read and are found out anew: %s", error)

    def remember(self, pool: object, *, is_last: bool = False) -> None:
        """Have the costs kept, now and then or for the last time. Memory only."""
        now_s = self._clock.monotonic_s()
        if isinstance(pool, Remembers) and (is_last or now_s - self._remembered_s >= _REMEMBER_S):
            self._remembered_s = now_s
            pool.remember(msgspec.json.encode(self._policies.cost.state()))


class Probe(NamedTuple):
    """A read in the background; its rows go back when it is settled."""

    #: (group, row, key) of each read
    rows: list[tuple[int, int, BlockKey]]
    job: Job


class _Offer(NamedTuple):
    """A prompt whose blocks were offered to the pool."""

    keys: Sequence[BlockKey]
    #: blocks that the pool has or was given
    admitted: int

    def is_of(self, keys: Sequence[BlockKey]) -> bool:
        """Whether these continue that prompt."""
        count = len(self.keys)
        return 0 < count <= len(keys) and keys[count - 1] == self.keys[-1]


class Planner:
    """Makes plans, and hears what became of them."""

    def __init__(
        self,
        identity: Identity,
        policies: Policies,
        loads: Loads,
        hosts: Sequence[HostRows],
        *,
        counters: Counters,
        clock: Clock,
    ) -> None:
        self._block_tokens = identity.block_tokens
        self._block_bytes = sum(identity.block_bytes)
        self._policies = policies
        self._loads = loads
        self._hosts = hosts
        self._counters = counters
        self._clock = clock
        self._stored = SeenBefore(_STORED_KEYS_MAX)
        self._offered = _Offer((), 0)
        self.probe: Probe | None = None

    def plan(
        self,
        keys: Sequence[BlockKey],
        hit: Hit,
        *,
        prompt_tokens: int,
        can_meet: bool,
        is_layered: bool,
    ) -> Plan:
        """Decide how a request gets its prefix. Memory only."""
        self._loads.collect()
        runs = runs_of(hit, self._block_bytes)
        ask = Ask(prompt_tokens, self._block_tokens, runs, can_meet=can_meet, is_layered=is_layered)
        decision = self._policies.choose(ask, self._clock.monotonic_s())
        self._counters.add(f"decided_{decision.choice.mode.value}_total")
        self._policies.write_only.looked_up(is_hit=hit.blocks > 0)
        return Plan(keys, hit, decision)

    def finish(
        self, plan: Plan, *, reused_blocks: int, load_s: float, ended_by: Reason | None
    ) -> Explanation | None:
        """Say how a request went; why its reuse ended where it did, None when it was complete.

        Args:
            plan: of `plan`.
            reused_blocks: not computed in the end.
            load_s: seconds of waiting for bytes with nothing else to do.
            ended_by: why fewer blocks came than were planned.
        """
        self._loads.collect()
        self._policies.settle(plan.decision, load_s=load_s, reused_blocks=reused_blocks)
        found = self._explain(plan, reused_blocks, ended_by)
        self._policies.misses.note(found)
        if found is None:
            self._counters.add("reuse_complete_total")
        else:
            self._counters.add(f"reuse_ended_{found.reason.value}_total")
            log.debug("%s", found.text())
        warning = self._policies.write_only.due_warning(self._policies.misses.requests())
        if warning:
            log.warning("%s", warning)
        return found

    def stored(self, keys: Sequence[BlockKey], length_bytes: int) -> None:
        """Blocks were handed to the pool."""
        for key in keys:
            self._stored.see(key)
        self._policies.write_only.stored(length_bytes)

    def begin_probe(self, group_keys: Sequence[Sequence[BlockKey]]) -> None:
        """Read the first of these blocks in the background, if it is time to; nobody waits for them."""
        now_s = self._clock.monotonic_s()
        if self.probe is not None or not self._policies.probe_due(now_s):
            return
        bandwidth = self._policies.cost.bandwidth(self._policies.tier)
        count = max(int(min(_PROBE_BYTES, bandwidth * _PROBE_S)) // self._block_bytes, 1)
        rows: list[tuple[int, int, BlockKey]] = []
        reads: list[Read] = []
        for group, (host, chain) in enumerate(zip(self._hosts, group_keys, strict=True)):
            held = host.holds(chain)
            missing = [key for key, is_held in zip(chain, held, strict=True) if not is_held][:count]
            for key, row in zip(missing, host.reserve(len(missing)), strict=False):
                rows.append((group, row, key))
                reads.append(Read(key, host.row(row)))
        turn = Turn(self._loads.next_request(), sum(read.into.nbytes for read in reads), lane=2)
        job = self._loads.load(reads, turn, deadline_s=_PROBE_TIMEOUT_S, is_probe=True)
        self.probe = Probe(rows, job)

    def collect_probe(self) -> None:
        """Keep what a probe has read, once its rows are settled."""
        probe = self.probe
        if probe is None or not probe.job.is_settled:
            return
        self.probe = None
        landed = set(probe.job.landed)
        for place, ((group, row, key), outcome) in enumerate(
            zip(probe.rows, probe.job.outcomes, strict=True)
        ):
            if outcome is Outcome.DONE or place in landed:
                self._hosts[group].fill(row, key)
            self._hosts[group].release([row])

    def admit(
        self, keys: Sequence[BlockKey], pooled: int, *, prompt_tokens: int, kind: StoreClass
    ) -> int:
        """How many of the blocks, from the first on, may be in the pool; the first `pooled` are."""
        if self._policies.admission.is_always:
            return len(keys)
        answered = pooled
        if kind is StoreClass.GENERATED and self._offered.is_of(keys):
            # the prompt was offered a moment ago: that is no second sight of it, and what was not
            # admitted then keeps out what follows
            answered = len(self._offered.keys)
            pooled = max(pooled, self._offered.admitted)
        found = self._policies.admission.admit(
            self._clock.monotonic_s(),
            keys[answered:],
            self._block_bytes,
            prompt_tokens=prompt_tokens,
            kind=kind,
        )
        admitted = answered + found.blocks if pooled >= answered else pooled
        if kind is StoreClass.PROMPT:
            self._offered = _Offer(keys, admitted)
        refused = len(keys) - max(admitted, answered)
        self._counters.add("store_not_admitted_blocks_total", refused)
        if found.refusal:
            self._counters.add(f"not_admitted_{found.refusal}_blocks_total", refused)
        return admitted

    def _explain(
        self, plan: Plan, reused_blocks: int, ended_by: Reason | None
    ) -> Explanation | None:
        blocks, choice = len(plan.keys), plan.decision.choice
        if not blocks:
            is_short = plan.decision.ask.prompt_tokens < self._block_tokens
            return Explanation(Reason.TOO_SHORT if is_short else Reason.NOT_KEYED, 0, 0)
        if reused_blocks >= blocks:
            return None
        if reused_blocks < min(choice.blocks, plan.hit.blocks) and ended_by is not None:
            return Explanation(ended_by, reused_blocks, blocks)
        if choice.mode is Mode.MEET and reused_blocks < plan.hit.blocks:
            # the front was computed on purpose
            return Explanation(Reason.REFUSED_COST, plan.near_blocks, blocks, "met in the middle")
        if choice.reason is not None and choice.blocks < plan.hit.blocks:
            return Explanation(choice.reason, choice.blocks, blocks)
        if plan.hit.blocks < blocks:
            was_here = self._stored.knows(plan.keys[plan.hit.blocks])
            reason = Reason.EVICTED if was_here else Reason.NEVER_STORED
            return Explanation(reason, plan.hit.blocks, blocks)
        return Explanation(ended_by or Reason.VANISHED, reused_blocks, blocks)
