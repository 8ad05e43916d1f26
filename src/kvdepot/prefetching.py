"""Reads ahead for requests that wait in the engine's queue: what `kvdepot.policy.prefetch` chose.

The engine says now and then who waits. A request's prefix is read in the lane behind those that are
being served, into rows that stay its own until its turn comes; then they are cached blocks like others.

Used by one engine thread; the pool's threads fill the rows. Nothing here waits.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

from kvdepot.chunks import ChunkRestore
from kvdepot.finding import Hit, runs_of
from kvdepot.host import HostRows
from kvdepot.identity import Identity
from kvdepot.keys import BlockKey
from kvdepot.metrics import Counters
from kvdepot.policy.decide import Ask, Mode, decide
from kvdepot.policy.policies import Policies
from kvdepot.policy.prefetch import Waiting, plan_prefetch

__all__ = ["Prefetcher", "Wanted"]

#: this part of the rows is left to the request that runs, and to what it stores
_SHARE_LEFT = 2


class Wanted(NamedTuple):
    """A request that waits."""

    #: by which the engine's queue knows it
    number: int
    #: of its full blocks
    keys: Sequence[BlockKey]
    prompt_tokens: int


class _Ahead(NamedTuple):
    """What is read, or was, for one of them."""

    keys: Sequence[BlockKey]
    read_bytes: int
    chunks: ChunkRestore


class _Prospect(NamedTuple):
    """A request and how much of its prefix is worth having in memory."""

    number: int
    keys: Sequence[BlockKey]
    read_bytes: int


class Prefetcher:
    """The reading ahead of one depot.

    Args:
        identity: of the blocks.
        policies: whether a load is worth making, and whether the storage is well.
        hosts: rows of the groups.
        find: what the tiers have of a prompt; memory only.
        begin: begins to read blocks into rows, in the lane of prefetches.
        collect: hears of loads that have ended, and takes their rows back.
        counters: of the process.
    """

    def __init__(
        self,
        identity: Identity,
        policies: Policies,
        hosts: Sequence[HostRows],
        *,
        find: Callable[[Sequence[BlockKey]], Hit],
        begin: Callable[[Sequence[BlockKey]], ChunkRestore],
        collect: Callable[[], None],
        counters: Counters,
    ) -> None:
        self._block_tokens = identity.block_tokens
        self._block_bytes = sum(identity.block_bytes)
        self._policies = policies
        self._hosts = hosts
        self._find = find
        self._begin = begin
        self._collect = collect
        self._counters = counters
        self._ahead: dict[int, _Ahead] = {}
        self._running: frozenset[BlockKey] = frozenset()

    def look_ahead(self, wanted: Sequence[Wanted], *, busy_s: float) -> None:
        """Read ahead for those who wait, as far as there is room; end it for those who do not any more.

        Args:
            wanted: in the order in which the engine will serve them.
            busy_s: about how long the running request goes on.
        """
        self._collect()
        waits = {each.number for each in wanted}
        for number in [number for number in self._ahead if number not in waits]:
            self._end(number)
        if not wanted or not self._policies.breaker.is_closed:
            return
        loading_bytes = self._policies.loading_bytes + sum(
            ahead.read_bytes for ahead in self._ahead.values() if not ahead.chunks.is_decided
        )
        chosen = plan_prefetch(
            self._prospects(wanted, busy_s),
            free_bytes=self._free_bytes(),
            bytes_per_s=self._policies.cost.bandwidth(self._policies.tier),
            loading_bytes=loading_bytes,
        )
        for each in chosen:
            self._counters.add("prefetch_requests_total")
            self._ahead[each.number] = _Ahead(each.keys, each.read_bytes, self._begin(each.keys))

    def claim(self, keys: Sequence[BlockKey]) -> None:
        """A request's turn has come: what was read ahead for it is cached, the rest is taken back."""
        self._running = frozenset(keys)
        for number, ahead in list(self._ahead.items()):
            blocks = len(ahead.keys)
            if blocks <= len(keys) and keys[blocks - 1] == ahead.keys[-1]:
                self._end(number)

    def close(self) -> None:
        """End all of it."""
        for number in list(self._ahead):
            self._end(number)

    # below

    def _prospects(self, wanted: Sequence[Wanted], busy_s: float) -> list[Waiting[_Prospect]]:
        # what the running request reads or computes, and what is read ahead for another one, will be
        # in memory without being read again
        coming = self._running.union(*(ahead.keys for ahead in self._ahead.values()))
        waiting: list[Waiting[_Prospect]] = []
        starts_in_s = busy_s
        for number, keys, prompt_tokens in wanted:
            hit = self._find(keys)
            tiers = tuple(
                "host" if key in coming else tier
                for key, tier in zip(keys, hit.tiers, strict=False)
            )
            runs = runs_of(Hit(hit.blocks, tiers), self._block_bytes)
            choice = decide(
                Ask(prompt_tokens, self._block_tokens, runs, idle_s=starts_in_s),
                self._policies.cost,
            )
            from_storage = sum(tier != "host" for tier in tiers[: choice.blocks])
            size = from_storage * self._block_bytes
            prospect = _Prospect(number, keys[: choice.blocks], size)
            is_worth_it = choice.mode is not Mode.COMPUTE and number not in self._ahead
            waiting.append(Waiting(prospect, size, starts_in_s, is_worth_it))
            coming = coming.union(prospect.keys)
            takes_s = min(choice.expected_s, choice.compute_s)
            starts_in_s += takes_s if takes_s < math.inf else 0.0
        return waiting

    def _free_bytes(self) -> int:
        rows = []
        for host in self._hosts:
            free, clean, _ = host.counts()
            rows.append(free + clean - host.row_count // _SHARE_LEFT)
        return max(min(rows), 0) * self._block_bytes

    def _end(self, number: int) -> None:
        ahead = self._ahead.pop(number)
        ahead.chunks.release()
        self._counters.add("prefetch_bytes_total", ahead.chunks.bytes_read)
