"""What is lost though the prompts are right: donors still in prefill, evicted blocks, coarse blocks."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from kvdepot.audit.blocklog import BlockLog
from kvdepot.audit.prefix import blocks_of
from kvdepot.audit.records import Record
from kvdepot.audit.tokenlog import Ints, TokenLog

__all__ = ["GRANULARITIES", "CacheCheck", "GrainRow", "cache_check", "grains", "too_early_tokens"]

#: vLLM's default block, common larger ones, and LMCache's chunk
GRANULARITIES = (16, 64, 128, 256)


class GrainRow(NamedTuple):
    """Reuse at one granularity."""

    block_tokens: int
    reused_tokens: int
    #: equal to the token, but not in a full block
    lost_tokens: int


def grains(log: TokenLog, exact: Ints, block_tokens: int) -> list[GrainRow]:
    """Reuse at usual granularities and at the engine's."""
    total = int(exact.sum())
    rows = []
    for size in sorted({*GRANULARITIES, block_tokens}):
        reused = int(blocks_of(log, size).hit_tokens().sum())
        rows.append(GrainRow(size, reused, max(0, total - reused)))
    return rows


def too_early_tokens(log: BlockLog, prefill_tokens_per_s: float) -> int:
    """Tokens that count as reused, but whose first request is still computing them.

    A block is ready when its first request has computed up to its end.
    """
    if not len(log.blocks):
        return 0
    ends = np.cumsum(log.tokens) - np.repeat(
        np.cumsum(log.tokens)[log.starts[:-1].clip(max=len(log.tokens) - 1)]
        - log.tokens[log.starts[:-1].clip(max=len(log.tokens) - 1)],
        np.diff(log.starts),
    )
    first = log.first_touch[log.blocks]
    ready_s = log.times_s[log.requests_of[first]] + ends[first] / prefill_tokens_per_s
    is_early = log.is_hit() & (log.times_s[log.requests_of] < ready_s)
    return int(log.tokens[is_early].sum())


class CacheCheck(NamedTuple):
    """What the server says it had cached, against what a cache that keeps everything has."""

    requests: int
    input_tokens: int
    predicted_tokens: int
    logged_tokens: int

    @property
    def lost_tokens(self) -> int:
        """Predicted, and not had."""
        return max(0, self.predicted_tokens - self.logged_tokens)


def cache_check(records: list[Record], lengths: Ints, hit_tokens: Ints) -> CacheCheck | None:
    """Compare with ``cached_tokens``; None where no request logs it."""
    numbers = [number for number, each in enumerate(records) if each.usage_cached is not None]
    if not numbers:
        return None
    return CacheCheck(
        len(numbers),
        int(lengths[numbers].sum()),
        int(hit_tokens[numbers].sum()),
        sum(records[number].usage_cached or 0 for number in numbers),
    )
