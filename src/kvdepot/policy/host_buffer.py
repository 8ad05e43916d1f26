"""Admission over the host buffer: the restores in flight fit, and what does not fit is decided by cost.

Where an engine needs a whole prefix in host memory before it copies the first byte, two restores that
each hold half of what they need wait for each other for ever, and a buffer one request too small turns
every hit into a computation. So room is taken for a whole restore or not at all. A request that does
not fit now may wait for those before it, restore the part that fits, or compute, whichever is quickest.

It also counts what a larger buffer would have saved, and how large that is.

Pure; time comes from outside. Thread-safe.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Sequence
from enum import Enum
from typing import NamedTuple

__all__ = ["Claim", "HostAdmission", "HostAdvice", "RoomChoice", "RoomMode"]

#: shortfalls that are remembered for the advice; the oldest are forgotten
_SHORTFALLS_MAX = 4096


class RoomMode(Enum):
    """What to do with a restore, as to room."""

    #: it fits, or a part of it does and that is the quickest
    NOW = "now"
    #: wait for others to give room back
    WAIT = "wait"
    #: do without
    COMPUTE = "compute"


class RoomChoice(NamedTuple):
    """The answer to a request for room."""

    mode: RoomMode
    #: blocks to restore now (NOW), or after waiting (WAIT)
    blocks: int
    #: seconds that the wait is expected to take, and after which it is no longer worth it
    wait_s: float
    patience_s: float


class Claim(NamedTuple):
    """Room that no restore in flight holds, and that is spoken for all the same."""

    length_bytes: int
    #: when it is expected to be free
    until_s: float


class HostAdvice(NamedTuple):
    """What a larger host buffer would have done for what was seen so far."""

    #: 0 when nothing was lost for want of room
    host_bytes: int
    #: tokens that were computed for want of room and would not have been
    tokens: int
    requests: int

    def text(self) -> str:
        """One line for people; empty when there is nothing to say."""
        if not self.tokens:
            return ""
        return (
            f"host buffer of {self.host_bytes / 2**30:.3g} GiB would have avoided"
            f" {self.tokens} recomputed tokens in {self.requests} requests"
        )


class HostAdmission:
    """Who holds how much of the buffer, and when it comes back.

    Args:
        capacity_bytes: of the buffer.
        reserve_bytes: never given to restores, so that stores and copies go on.
    """

    def __init__(self, capacity_bytes: int, *, reserve_bytes: int = 0) -> None:
        self._capacity = max(capacity_bytes - reserve_bytes, 0)
        self._reserve = reserve_bytes
        self._lock = threading.Lock()
        self._next = 0
        #: restores in flight: bytes, and when they are expected to be over
        self._held: dict[int, tuple[int, float]] = {}
        self._in_use = 0
        self._shortfalls: list[tuple[int, int]] = []

    @property
    def in_use_bytes(self) -> int:
        """What the restores in flight hold."""
        return self._in_use

    def take(self, length_bytes: int, until_s: float) -> int | None:
        """Room for a whole restore; a ticket for `give_back`, or None when it does not fit now.

        Args:
            length_bytes: what it holds.
            until_s: when it is expected to give it back.
        """
        with self._lock:
            if self._in_use + length_bytes > self._capacity:
                return None
            self._in_use += length_bytes
            self._next += 1
            self._held[self._next] = (length_bytes, until_s)
            return self._next

    def give_back(self, ticket: int) -> None:
        """A restore is over. Idempotent."""
        with self._lock:
            length_bytes, _ = self._held.pop(ticket, (0, 0.0))
            self._in_use -= length_bytes

    def choose(
        self,
        now_s: float,
        blocks: int,
        block_bytes: int,
        total_s: Callable[[int], float],
        *,
        slack_s: float,
        claims: Sequence[Claim] = (),
        may_wait: bool = True,
    ) -> RoomChoice:
        """What to do with a restore of so many blocks.

        Args:
            now_s: now.
            blocks: to restore.
            block_bytes: room for one.
            total_s: seconds to the end of the prompt when so many leading blocks are restored and the
                rest is computed; ``total_s(0)`` computes everything.
            slack_s: how much longer than computing a request may take.
            claims: what goes before this restore: room that others wait for since longer, or that
                something else than a restore holds.
            may_wait: False for one that has waited for as long as it was worth.
        """
        with self._lock:
            free = self._free(claims)
            fits = min(max(free, 0) // max(block_bytes, 1), blocks)
            if fits == blocks:
                return RoomChoice(RoomMode.NOW, blocks, 0.0, 0.0)
            compute_s = total_s(0)
            wait_s = math.inf
            if may_wait:
                wait_s = self._wait_s(now_s, blocks * block_bytes, claims)
            part_s = total_s(fits) if fits else compute_s
            whole_s = wait_s + total_s(blocks)
            if whole_s < min(part_s, compute_s):
                # as with a load: it may be behind by the slack, and no more
                patience_s = max(min(part_s, compute_s) - total_s(blocks), 0.0)
                return RoomChoice(
                    RoomMode.WAIT, blocks, wait_s, min(patience_s, 2 * wait_s + slack_s)
                )
            if fits and part_s < compute_s:
                return RoomChoice(RoomMode.NOW, fits, 0.0, 0.0)
            return RoomChoice(RoomMode.COMPUTE, 0, 0.0, 0.0)

    def fell_short(self, length_bytes: int, tokens: int) -> None:
        """A request computed `tokens` that this much more room would have served."""
        with self._lock:
            needed = self._in_use + self._reserve + length_bytes
            self._shortfalls.append((needed, tokens))
            del self._shortfalls[:-_SHORTFALLS_MAX]

    def advice(self, *, share: float = 0.95) -> HostAdvice:
        """The size that would have served this share of the tokens computed for want of room."""
        with self._lock:
            shortfalls = sorted(self._shortfalls)
        total = sum(tokens for _, tokens in shortfalls)
        served = requests = needed = 0
        for needed, tokens in shortfalls:  # noqa: B007 - the last one that is needed is the answer
            served += tokens
            requests += 1
            if served >= share * total:
                break
        return HostAdvice(needed if total else 0, served, requests)

    def _free(self, claims: Sequence[Claim]) -> int:
        return self._capacity - self._in_use - sum(claim.length_bytes for claim in claims)

    def _wait_s(self, now_s: float, length_bytes: int, claims: Sequence[Claim]) -> float:
        """Until so much is free, if those who have room give it back when they are expected to."""
        free = self._free(claims)
        for held, until_s in sorted((*self._held.values(), *claims), key=lambda each: each[1]):
            free += held
            if free >= length_bytes:
                return max(until_s - now_s, 0.0)
        return math.inf
