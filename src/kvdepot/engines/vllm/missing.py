"""Which chunks a request would bring in from a pool: those that are there and not in the host tier.

Asked on the scheduler's thread before room is taken, for prompts of thousands of chunks; so the pool is
asked a few times for a whole group, and not for each chunk. The answer is an estimate: what is brought
in is decided by vLLM's own lookups, one by one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from vllm.v1.kv_offload.base import OffloadKey

__all__ = ["GroupChunks", "missing_ends"]


class GroupChunks(NamedTuple):
    """A request's full chunks of one group, from its first token on."""

    chunk_tokens: int
    keys: Sequence[OffloadKey]


def missing_ends(
    groups: Iterable[GroupChunks],
    start_token: int,
    is_absent: Callable[[OffloadKey], bool],
    held: Callable[[Sequence[OffloadKey]], int],
) -> list[int]:
    """Where the chunks end that a request would bring in, group by group.

    Args:
        groups: its chunks.
        start_token: what is computed or cached on the device already.
        is_absent: whether a chunk is not in the host tier.
        held: how many of some chunks of a group, from the first on, are in a pool.
    """
    ends: list[int] = []
    for tokens, keys in groups:
        first = start_token // tokens
        absent = [number for number in range(first, len(keys)) if is_absent(keys[number])]
        if absent:
            count = held([keys[number] for number in absent])
            ends += [(number + 1) * tokens for number in absent[:count]]
    return ends
