"""A world of engines over one shared storage, driven by a trace through the real policies.

What is simulated: which blocks are where, whose bytes are read when, how long prompts wait for bytes,
for room and for the engine. What is not: batching (prompts are computed one after the other), decoding,
and the competition of writes with reads. Caches evict block by block, least recently used first; a pool
evicts whole segments.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Iterable
from typing import Any

from kvdepot.policy.breaker import Fault
from kvdepot.policy.deadline import EarnedDeadline
from kvdepot.policy.decide import Ask, Mode, near_blocks
from kvdepot.policy.host_buffer import RoomMode
from kvdepot.policy.reasons import Reason
from kvdepot.sim.caches import LruBlocks, SeenIds
from kvdepot.sim.ending import explain, keep, note
from kvdepot.sim.instance import Instance, Prompt, find_runs
from kvdepot.sim.result import SimResult, Tally, result_of
from kvdepot.sim.settings import SimSettings
from kvdepot.sim.storage import Loading, Storage
from kvdepot.sim.trace import TraceRequest

__all__ = ["World", "simulate"]

_PROBE_BYTES = 4 << 20
_PROBE_TIMEOUT_S = 2.0
_NEVER = float("inf")


def simulate(requests: Iterable[TraceRequest], settings: SimSettings) -> SimResult:
    """Run a trace to its end.

    Raises:
        ConfigError: the settings describe no world.
    """
    settings.check()
    world = World(settings)
    world.run(requests)
    return result_of(world)


class World:
    """Events in the order of their time. Used once, by one thread."""

    def __init__(self, settings: SimSettings) -> None:
        self.settings = settings
        self.instances = [Instance(settings) for _ in range(settings.instances)]
        self.disk = LruBlocks(
            0 if settings.policies == "off" else settings.disk_bytes // settings.block_bytes
        )
        self.storage = Storage(
            settings.read_bytes_per_s,
            factors=settings.factors,
            is_ordered=settings.policies == "on",
            ageing=settings.ageing_bytes_per_s,
        )
        self.seen = SeenIds()
        self.tally = Tally()
        self._events: list[tuple[float, int, Callable[[Any], None], Any]] = []
        self._next_event = self._arrivals = 0
        self._storage_version = 0
        self.now_s = 0.0
        self.began_s = 0.0

    def run(self, requests: Iterable[TraceRequest]) -> None:
        """All requests, until each has its first token."""
        arrivals = iter(requests)
        request = next(arrivals, None)
        self.began_s = request.at_s if request is not None else 0.0
        while request is not None or self._events:
            if request is not None and (not self._events or request.at_s <= self._events[0][0]):
                self.now_s = request.at_s
                self._arrive(request)
                request = next(arrivals, None)
                continue
            self.now_s, _, action, argument = heapq.heappop(self._events)
            action(argument)

    # a request comes

    def _arrive(self, request: TraceRequest) -> None:
        settings, now_s = self.settings, self.now_s
        instance = min(self.instances, key=lambda each: each.idle_s(now_s))
        ids = list(request.block_ids)
        seen = self.seen.leading(ids)
        self.seen.add(ids)
        self.tally.prompt_tokens += request.input_tokens
        self.tally.new_tokens += max(request.input_tokens - seen * settings.block_tokens, 1)
        self._arrivals += 1
        is_follow_up = bool(seen) and 2 * seen >= len(ids)
        prompt = Prompt(request, instance, number=self._arrivals, is_follow_up=is_follow_up)
        prompt.runs = find_runs(ids, instance, self.disk, settings.block_bytes)
        prompt.found = sum(run.blocks for run in prompt.runs)
        prompt.near = prompt.have = near_blocks(prompt.runs)
        instance.policies.write_only.looked_up(is_hit=prompt.found > 0)
        mode = self._choose(prompt)
        if mode is Mode.COMPUTE:
            self._is_ready(prompt)
        elif mode is Mode.MEET:
            self._begin_load(prompt, prompt.found)
            self._is_ready(prompt)
        else:
            self._ask_for_room(prompt)

    def _choose(self, prompt: Prompt) -> Mode:
        settings, instance = self.settings, prompt.instance
        if settings.policies != "on":
            prompt.wanted = prompt.found
            return Mode.LOAD if prompt.found > prompt.near else Mode.COMPUTE
        ask = Ask(
            prompt.request.input_tokens,
            settings.block_tokens,
            prompt.runs,
            can_meet=settings.can_meet,
            idle_s=instance.idle_s(self.now_s),
        )
        prompt.decision = instance.policies.choose(ask, self.now_s)
        choice = prompt.decision.choice
        prompt.wanted = choice.blocks
        if choice.mode is Mode.COMPUTE and prompt.found > prompt.near:
            self._probe(instance, (prompt.found - prompt.near) * settings.block_bytes)
        return choice.mode

    # room and loads

    def _ask_for_room(self, prompt: Prompt) -> None:
        """Begin the load if it fits; else wait, load a part, or compute."""
        instance, bytes_each = prompt.instance, self.settings.block_bytes
        blocks = prompt.wanted - prompt.near
        if prompt.decision is None:  # without policies there is no admission either
            self._begin_load(prompt, prompt.wanted)
            return
        choice = prompt.decision.choice
        until_s = self.now_s + (choice.load_s if math.isfinite(choice.load_s) else 1.0)
        prompt.room = instance.room.take(blocks * bytes_each, until_s)
        if prompt.room is not None:
            self._begin_load(prompt, prompt.wanted)
            return
        room = instance.room.choose(
            self.now_s,
            blocks,
            bytes_each,
            lambda k: self._expected_s(prompt, k),
            slack_s=choice.slack_s,
        )
        if room.mode is RoomMode.WAIT and not prompt.has_waited:
            instance.for_room.append(prompt)
            prompt.has_waited = True
            self._at(self.now_s + room.patience_s, self._lose_patience, prompt)
            return
        lost = blocks - room.blocks
        instance.room.fell_short(blocks * bytes_each, lost * self.settings.block_tokens)
        note(prompt, Reason.HOST_FULL, prompt.near + room.blocks)
        prompt.wanted = prompt.near + room.blocks
        if room.mode is RoomMode.NOW and room.blocks:
            prompt.room = instance.room.take(room.blocks * bytes_each, until_s)
            self._begin_load(prompt, prompt.wanted)
        else:
            self._is_ready(prompt)

    def _expected_s(self, prompt: Prompt, blocks: int) -> float:
        cost, settings = prompt.instance.policies.cost, self.settings
        have = min((prompt.near + blocks) * settings.block_tokens, prompt.request.input_tokens - 1)
        rest_s = cost.prefill_s(prompt.request.input_tokens - have, have)
        return rest_s + cost.read_s("disk", blocks * settings.block_bytes)

    def _lose_patience(self, prompt: Prompt) -> None:
        waiting = prompt.instance.for_room
        if prompt in waiting:
            waiting.remove(prompt)
            self._ask_for_room(prompt)

    def _begin_load(self, prompt: Prompt, stop: int) -> None:
        """Ask the storage for what is not in memory of the first `stop` blocks."""
        start, size = 0, 0
        for run in prompt.runs:
            size += max(min(start + run.blocks, stop) - start, 0) * run.block_bytes
            start += run.blocks
        prompt.loading = Loading(prompt, size, self.now_s)
        prompt.idle_s = prompt.instance.idle_s(self.now_s)
        policies = prompt.instance.policies
        prompt.ticket = policies.load_began(size, self.now_s)
        self.storage.begin(prompt.loading, self.now_s)
        self._storage_changed()
        decision = prompt.decision
        if decision is not None and decision.choice.mode is Mode.LOAD:
            settings, request = self.settings, prompt.request
            slack_s = decision.choice.slack_s + prompt.idle_s
            prompt.deadline = EarnedDeadline(
                self.now_s,
                slack_s,
                lambda blocks: policies.cost.saved_s(
                    blocks * settings.block_tokens, request.input_tokens
                ),
                queue_s=decision.choice.queue_s,
            )
            self._at(prompt.deadline.until_s(0), self._look_at_deadline, prompt)

    def _leading(self, prompt: Prompt) -> int:
        """Blocks from the first on that are there, counting those in memory."""
        loading = prompt.loading
        if loading is None:
            return prompt.near
        read = int((loading.done_bytes + 0.5) // self.settings.block_bytes)
        return min(prompt.near + read, prompt.wanted)

    def _look_at_deadline(self, prompt: Prompt) -> None:
        if prompt.loading is None or prompt.deadline is None:
            return
        self.storage.advance(self.now_s)
        leading = self._leading(prompt)
        until_s = prompt.deadline.until_s(leading - prompt.near, self.storage.heard_s)
        if self.now_s < until_s:
            self._at(max(until_s, self.now_s + 1e-6), self._look_at_deadline, prompt)
        elif leading < prompt.wanted:
            prompt.have = leading
            note(prompt, Reason.DEADLINE, leading)
            self._end_load(prompt, Fault.LATE)
            self._is_ready(prompt)
        self._storage_changed()

    def _end_load(self, prompt: Prompt, fault: Fault | None, *, is_met: bool = False) -> None:
        loading, ticket = prompt.loading, prompt.ticket
        if loading is None or ticket is None:
            return
        self.storage.stop(loading, self.now_s)
        done = loading.total_bytes if fault is None and not is_met else int(loading.done_bytes)
        if is_met:
            ticket = ticket._replace(length_bytes=done)
        prompt.instance.policies.load_ended(ticket, self.now_s, done_bytes=done, fault=fault)
        if not is_met:
            # what the engine was busy with others for anyway was not lost
            prompt.load_wait_s = max(self.now_s - loading.began_s - prompt.idle_s, 0.0)
        prompt.loading = None
        prompt.version += 1
        self._room_is_back(prompt)

    def _room_is_back(self, prompt: Prompt) -> None:
        if prompt.room is None:
            return
        instance, ticket = prompt.instance, prompt.room
        prompt.room = None
        instance.room.give_back(ticket)
        for waiting in [instance.for_room.popleft() for _ in range(len(instance.for_room))]:
            self._ask_for_room(waiting)

    def _probe(self, instance: Instance, most_bytes: int) -> None:
        if not instance.policies.probe_due(self.now_s):
            return
        loading = Loading(None, min(most_bytes, _PROBE_BYTES), self.now_s)
        ticket = instance.policies.load_began(loading.total_bytes, self.now_s, is_probe=True)
        loading.owner = (instance, ticket)
        self.storage.begin(loading, self.now_s)
        self._storage_changed()
        self._at(self.now_s + _PROBE_TIMEOUT_S, self._probe_is_late, loading)

    def _probe_is_late(self, loading: Loading) -> None:
        if loading.owner is not None:
            self.storage.stop(loading, self.now_s)
            self._probe_ended(loading, Fault.LATE)
            self._storage_changed()

    def _probe_ended(self, loading: Loading, fault: Fault | None) -> None:
        instance, ticket = loading.owner
        loading.owner = None
        done = loading.total_bytes if fault is None else int(loading.done_bytes)
        instance.policies.load_ended(ticket, self.now_s, done_bytes=done, fault=fault)

    # the storage

    def _storage_changed(self) -> None:
        """Somebody came, went or was done: tell those who are done, and look again at the next change."""
        for loading in self.storage.take_done():
            self._at(self.now_s + self.settings.read_latency_s, self._arrived, loading)
        self._storage_version += 1
        at_s = self.storage.next_event_s()
        if at_s < _NEVER:
            self._at(at_s, self._storage_event, self._storage_version)
        for instance in self.instances:
            if instance.current is not None and instance.current.loading is not None:
                self._plan_meeting(instance.current)

    def _storage_event(self, version: int) -> None:
        if version == self._storage_version:
            self.storage.advance(self.now_s)
            self._storage_changed()

    def _arrived(self, loading: Loading) -> None:
        """The last byte of a load is there."""
        owner = loading.owner
        if isinstance(owner, tuple):
            self._probe_ended(loading, None)
        elif isinstance(owner, Prompt) and owner.loading is loading:
            if owner.decision is not None and owner.decision.choice.mode is Mode.MEET:
                if owner.instance.current is not owner:
                    owner.have = owner.found
                    self._end_load(owner, None)
                return  # otherwise the meeting is planned already
            owner.have = owner.wanted
            self._end_load(owner, None)
            self._is_ready(owner)

    # computing

    def _is_ready(self, prompt: Prompt) -> None:
        rest = prompt.request.input_tokens - prompt.have * self.settings.block_tokens
        prompt.instance.backlog_s += self.settings.prefill.seconds(max(rest, 1))
        heapq.heappush(prompt.instance.ready, (prompt.arrived_s, prompt.number, prompt))
        self._begin_next(prompt.instance)

    def _begin_next(self, instance: Instance) -> None:
        if instance.current is not None or not instance.ready:
            return
        prompt = instance.current = heapq.heappop(instance.ready)[2]
        if not instance.ready:
            instance.backlog_s = 0.0
        else:
            rest = prompt.request.input_tokens - prompt.have * self.settings.block_tokens
            instance.backlog_s -= self.settings.prefill.seconds(max(rest, 1))
        if prompt.loading is not None:
            self.storage.advance(self.now_s)
            prompt.front_s = self.now_s
            self._plan_meeting(prompt)
            return
        self._compute_rest(prompt, prompt.have, began_s=self.now_s)

    def _compute_rest(self, prompt: Prompt, have_blocks: int, *, began_s: float) -> None:
        settings = self.settings
        have = min(have_blocks * settings.block_tokens, prompt.request.input_tokens - 1)
        rest = prompt.request.input_tokens - have
        seconds = settings.prefill.seconds(rest, have)
        prompt.instance.policies.cost.computed(rest, have, seconds)
        prompt.instance.busy_until_s = self.now_s + seconds
        prompt.instance.busy_s += self.now_s - began_s + seconds
        self._at(self.now_s + seconds, self._is_done, prompt)

    def _plan_meeting(self, prompt: Prompt) -> None:
        """When the front, as it is computed, meets the back, as it is read, if nothing changes."""
        loading = prompt.loading
        if loading is None:
            return
        prompt.version += 1
        rate = self.storage.rate_of(loading)
        low, high = self.now_s, prompt.front_s + self._front_s(prompt, loading.total_bytes)
        high = max(low, high)
        for _ in range(40):
            middle = (low + high) / 2
            done = loading.done_bytes + rate * (middle - self.now_s)
            if prompt.front_s + self._front_s(prompt, loading.total_bytes - done) <= middle:
                high = middle
            else:
                low = middle
        prompt.instance.busy_until_s = high
        self._at(high, self._meet, (prompt, prompt.version))

    def _front_s(self, prompt: Prompt, length_bytes: float) -> float:
        """Seconds to compute the blocks from the near ones on that so many bytes stand for."""
        tokens = max(length_bytes, 0.0) / self.settings.token_bytes
        return self.settings.prefill.seconds(tokens, prompt.near * self.settings.block_tokens)

    def _meet(self, argument: tuple[Prompt, int]) -> None:
        prompt, version = argument
        if version != prompt.version or prompt.loading is None:
            return
        self.storage.advance(self.now_s)
        prompt.read = int(prompt.loading.done_bytes // self.settings.block_bytes)
        self._end_load(prompt, None, is_met=True)
        self._storage_changed()
        prompt.have = prompt.near + prompt.read
        self._compute_rest(prompt, prompt.found, began_s=prompt.front_s)

    def _is_done(self, prompt: Prompt) -> None:
        instance, request, settings = prompt.instance, prompt.request, self.settings
        self.tally.answered(self.now_s - prompt.arrived_s, is_follow_up=prompt.is_follow_up)
        reused = min(prompt.have * settings.block_tokens, request.input_tokens - 1)
        self.tally.computed_tokens += request.input_tokens - reused
        left = reused
        for run in prompt.runs:
            tokens = min(run.blocks * settings.block_tokens, left)
            self.tally.reused[run.tier] += tokens
            left -= tokens
        if prompt.decision is not None:
            instance.policies.settle(
                prompt.decision, load_s=prompt.load_wait_s, reused_blocks=prompt.have
            )
            explain(prompt)
        self.tally.written_bytes += keep(prompt, self.disk, self.settings, self.now_s)
        instance.current = None
        self._begin_next(instance)

    def _at(self, at_s: float, action: Callable[[Any], None], argument: Any) -> None:
        if at_s < _NEVER:
            self._next_event += 1
            heapq.heappush(self._events, (at_s, self._next_event, action, argument))
