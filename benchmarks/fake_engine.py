"""An engine whose prefill is a wait of the right length, over a real depot: what policies cost and save.

It makes the calls that an adapter makes, in the same order, and times them: no call of a scheduler's
thread may take long, whatever the storage does.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeVar

from kvdepot.chunks import ChunkRestore
from kvdepot.clock import SystemClock
from kvdepot.config import PoolConfig
from kvdepot.depot import Depot, Plan
from kvdepot.host import HostRows
from kvdepot.io.localdisk import LocalDisk
from kvdepot.keys import BlockKey, root_key
from kvdepot.metrics import Counters
from kvdepot.policy.deadline import EarnedDeadline
from kvdepot.policy.decide import Mode
from kvdepot.policy.policies import Policies
from kvdepot.policy.reasons import Reason
from kvdepot.pool.tier import PoolTier
from kvdepot.testing.faults import FaultDisk, FaultPlan
from kvdepot.testing.toy import ToyEngine

__all__ = [
    "BLOCK_BYTES",
    "BLOCK_TOKENS",
    "Answer",
    "FakeEngine",
    "Prompt",
    "prefill_s",
    "prefill_terms",
]

_T = TypeVar("_T")

BLOCK_BYTES = 128 * 1024
BLOCK_TOKENS = 16
_FIXED_S = 0.005
_TOKEN_S = 3e-4
_PAIR_S = 1e-7
#: tokens of a pass while the back is read
_PASS_TOKENS = 64
_LOOK_S = 0.02


class Prompt(NamedTuple):
    """A prompt with its keys and bytes, made before anything is timed."""

    tokens: Sequence[int]
    keys: Sequence[BlockKey]
    payload: Sequence[bytes]


class Answer(NamedTuple):
    """What one request came to."""

    ttft_s: float
    mode: str
    reused_blocks: int
    #: the longest call that a scheduler's thread would have made
    call_s: float
    reason: str


def prefill_s(tokens: int, position: int = 0) -> float:
    """Seconds that so many tokens behind others take: a CPU model of a small size."""
    return _FIXED_S + _TOKEN_S * tokens + _PAIR_S * tokens * (tokens + 2 * position)


def prefill_terms() -> tuple[float, float, float]:
    """Of `prefill_s`: seconds a pass, a token and a pair of tokens."""
    return _FIXED_S, _TOKEN_S, _PAIR_S


class FakeEngine:
    """One request at a time, over a pool whose disk a `FaultPlan` disturbs.

    Args:
        folder: of the pool; another one on the same folder continues it.
        host_bytes: of the host tier.
        policies: ``on``; ``off``: everything is loaded, however long it takes; ``none``: no tier.
        can_meet: compute the front while the back is read.
        settings: of the pool.
    """

    def __init__(
        self,
        folder: Path,
        *,
        host_bytes: int,
        policies: Literal["on", "off", "none"] = "on",
        can_meet: bool = False,
        **settings: Any,
    ) -> None:
        self.toy = ToyEngine([BLOCK_BYTES])
        self.faults = FaultPlan()
        self._policies = policies
        self._can_meet = can_meet
        self.depot: Depot | None = None
        self.pool: PoolTier | None = None
        if policies == "none":
            return
        config = PoolConfig.of(str(folder), **settings)
        counters = Counters()
        self.pool = PoolTier.open(
            config,
            self.toy.identity,
            disks=[FaultDisk(LocalDisk(folder), self.faults)],
            counters=counters,
        )
        self.depot = Depot(
            self.toy.identity,
            self.pool,
            [HostRows(BLOCK_BYTES, host_bytes)],
            counters=counters,
            clock=SystemClock(),
            policies=Policies(),
        )

    def close(self) -> None:
        """Publish and stop."""
        self.faults.clear()
        if self.depot is not None:
            self.depot.close()

    def prompt(self, seed: int, blocks: int) -> Prompt:
        """A prompt of so many blocks and a few tokens more."""
        tokens = self.toy.prompt(seed, blocks, extra_tokens=8)
        payload = [self.toy.block(tokens, index) for index in range(blocks)]
        return Prompt(tokens, self.toy.keys(tokens), payload)

    def ask(self, prompt: Prompt) -> Answer:
        """Serve one prompt; wrong bytes raise AssertionError."""
        began_s = time.monotonic()
        if self.depot is None:
            time.sleep(prefill_s(len(prompt.tokens)))
            return Answer(time.monotonic() - began_s, "none", 0, 0.0, "")
        calls: list[float] = []
        plan = _timed(
            calls,
            lambda: self._plan(prompt),
        )
        reused, load_s, ended_by = 0, 0.0, None
        blocks = plan.blocks
        if self._policies == "off":
            blocks = plan.hit.blocks
        if plan.mode is Mode.MEET:
            reused, ended_by = self._meet(prompt, plan, calls)
        else:
            if blocks:
                reused, load_s, ended_by = self._load(prompt, plan, blocks, calls)
            self._compute(len(prompt.tokens), reused)
        ttft_s = time.monotonic() - began_s
        found = _timed(
            calls,
            lambda: self._depot.finished(
                plan, reused_blocks=reused, load_s=load_s, ended_by=ended_by
            ),
        )
        self._store(prompt, calls)
        reason = "" if found is None else found.reason.value
        return Answer(ttft_s, plan.mode.value, reused, max(calls), reason)

    @property
    def _depot(self) -> Depot:
        assert self.depot is not None
        return self.depot

    def _plan(self, prompt: Prompt) -> Plan:
        return self._depot.plan(
            prompt.keys, prompt_tokens=len(prompt.tokens), can_meet=self._can_meet
        )

    def _load(
        self, prompt: Prompt, plan: Plan, blocks: int, calls: list[float]
    ) -> tuple[int, float, Reason | None]:
        depot = self._depot
        began_s = time.monotonic()
        chunks = _timed(calls, lambda: depot.chunks(prompt.keys[:blocks]))
        cost = depot.policies.cost
        deadline = EarnedDeadline(
            began_s,
            plan.slack_s,
            lambda count: cost.saved_s(count * BLOCK_TOKENS, len(prompt.tokens)),
            queue_s=plan.decision.choice.queue_s,
        )
        is_strict = self._policies == "on" and plan.mode is Mode.LOAD
        while not chunks.is_over:
            if _timed(calls, lambda: self._take(chunks, prompt, 0)):
                continue
            now_s = time.monotonic()
            until_s = deadline.until_s(chunks.taken, depot.heard_s) if is_strict else now_s + 1
            if now_s >= until_s:
                chunks.give_up()
                break
            chunks.wait(min(until_s - now_s, _LOOK_S))
        _timed(calls, chunks.release)
        return chunks.taken, time.monotonic() - began_s, chunks.ended_by

    def _meet(self, prompt: Prompt, plan: Plan, calls: list[float]) -> tuple[int, Reason | None]:
        depot, near = self._depot, plan.near_blocks
        found = plan.hit.blocks
        chunks = _timed(calls, lambda: depot.chunks(prompt.keys[near:found], is_from_back=True))
        place = near * BLOCK_TOKENS
        while place < (found - chunks.taken) * BLOCK_TOKENS:
            step = min(_PASS_TOKENS, (found - chunks.taken) * BLOCK_TOKENS - place)
            time.sleep(max(prefill_s(step, place) - _FIXED_S, 0.0))
            place += step
            while _timed(calls, lambda: self._take(chunks, prompt, near)):
                pass
        _timed(calls, chunks.release)
        self._compute(len(prompt.tokens), found)
        return near + chunks.taken, chunks.ended_by

    @staticmethod
    def _take(chunks: ChunkRestore, prompt: Prompt, base: int) -> bool:
        """Take the next chunk if it is there; the restore begins at block `base` of the prompt."""
        chunk = chunks.poll()
        if chunk is None:
            return False
        # one block of each chunk is compared with the oracle; all of them would time the comparing
        if bytes(chunk.rows[0][0]) != prompt.payload[base + chunk.first]:
            raise AssertionError(f"wrong bytes in block {base + chunk.first}")
        return True

    def _compute(self, tokens: int, have_blocks: int) -> None:
        have = min(have_blocks * BLOCK_TOKENS, tokens - 1)
        seconds = prefill_s(tokens - have, have)
        time.sleep(seconds)
        self._depot.computed(tokens - have, have, seconds)

    def _store(self, prompt: Prompt, calls: list[float]) -> None:
        copying_s = 0.0

        def cut(_group: int, index: int, row: memoryview) -> None:
            nonlocal copying_s
            began_s = time.monotonic()
            row[:] = prompt.payload[index]
            copying_s += time.monotonic() - began_s

        began_s = time.monotonic()
        root = root_key(self.toy.digest)
        self._depot.store(prompt.keys, root, cut, tokens=BLOCK_TOKENS)
        # cutting is the engine's own copy of its memory
        calls.append(time.monotonic() - began_s - copying_s)


def _timed(calls: list[float], call: Callable[[], _T]) -> _T:
    began_s = time.monotonic()
    try:
        return call()
    finally:
        calls.append(time.monotonic() - began_s)
