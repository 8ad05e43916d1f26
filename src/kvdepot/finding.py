"""What the tiers have of a prompt. Memory only; used by one engine thread."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

from kvdepot.host import HostRows
from kvdepot.keys import BlockKey, group_key
from kvdepot.policy.decide import Run
from kvdepot.tiers import Tier

__all__ = ["Finder", "Hit", "runs_of"]

_GROUP_KEYS_MAX = 1 << 15


class Hit(NamedTuple):
    """The answer to a lookup."""

    #: longest prefix that is present in every group
    blocks: int
    #: per block the farthest tier that must serve it
    tiers: tuple[str, ...]


class Finder:
    """Looks prompts up.

    Args:
        hosts: rows of the groups.
        pool: behind them; None without one.
    """

    def __init__(self, hosts: Sequence[HostRows], pool: Tier | None) -> None:
        self._hosts = hosts
        self._pool = pool
        # a request's keys come by three times: at lookup, restore and store
        self._group_key = lru_cache(maxsize=_GROUP_KEYS_MAX)(group_key)

    def group_keys(self, keys: Sequence[BlockKey]) -> list[list[BlockKey]]:
        """The keys of a prompt's blocks in each group."""
        return [[self._group_key(key, g) for key in keys] for g in range(len(self._hosts))]

    def find(self, keys: Sequence[BlockKey]) -> Hit:
        """How many blocks from the first on are present in all groups, and where."""
        blocks = len(keys)
        group_keys = self.group_keys(keys)
        for group, host in enumerate(self._hosts):
            blocks = min(blocks, self._prefix(host, group_keys[group][:blocks]))
        held = [host.holds(group_keys[g][:blocks]) for g, host in enumerate(self._hosts)]
        tiers = tuple("host" if all(in_host) else "disk" for in_host in zip(*held, strict=True))
        return Hit(blocks, tiers)

    def _prefix(self, host: HostRows, keys: Sequence[BlockKey]) -> int:
        """Longest prefix over both tiers together."""
        found = 0
        while found < len(keys):
            step = host.prefix(keys[found:])
            if self._pool is not None:
                step += self._pool.lookup(keys[found + step :])
            if step == 0:
                break
            found += step
        return found


def runs_of(hit: Hit, block_bytes: int) -> list[Run]:
    """What was found, as runs of neighbouring blocks of one tier."""
    return [
        Run(tier, len(list(group)), 0 if tier == "host" else block_bytes)
        for tier, group in itertools.groupby(hit.tiers[: hit.blocks])
    ]
