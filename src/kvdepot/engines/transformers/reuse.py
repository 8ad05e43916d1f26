"""What one request reuses: lookup, the running restore, and the account of tokens."""

from __future__ import annotations

from collections.abc import Sequence

from kvdepot.depot import Depot, Restore
from kvdepot.engines.transformers.blocks import PrefixLoad
from kvdepot.engines.transformers.memory import Gate, KvMemory
from kvdepot.keys import BlockKey
from kvdepot.units import ceil_div

__all__ = ["Reuse"]

#: tiers of the account, nearest first; this engine keeps no KV of other requests in its own memory
_TIERS = ("device", "host", "disk")


class Reuse:
    """The reused prefix of one request. Used by the engine's thread; release it in the end.

    Args:
        depot: where blocks may be; None reuses nothing.
        keys: of the prompt's full blocks; empty reuses nothing.
        memory: where the blocks go; made large enough by the caller.
        prompt_tokens: the last one is always computed, for its logits.
        deadline_s: per prompt token; the whole load is given up after as many seconds.
    """

    def __init__(
        self,
        depot: Depot | None,
        keys: Sequence[BlockKey],
        memory: KvMemory,
        *,
        prompt_tokens: int,
        deadline_s: float,
    ) -> None:
        self._limit = prompt_tokens - 1
        self._restore: Restore | None = None
        self._block_tokens = 1
        self.tokens = 0
        self.gate: Gate | None = None
        if depot is None or not keys:
            return
        blocks = depot.lookup(keys).blocks
        if blocks == 0:
            return
        identity = depot.identity
        self._block_tokens = identity.block_tokens
        self._restore = depot.restore(
            keys[:blocks], deadline_s=deadline_s * blocks * self._block_tokens
        )
        self._set_blocks(blocks)
        self.gate = PrefixLoad(self._restore, memory, identity.groups, self._block_tokens)

    def shorten(self, good_blocks: int) -> None:
        """Reuse fewer blocks, all of which are in memory already."""
        self._set_blocks(good_blocks)
        self.gate = None

    def _set_blocks(self, blocks: int) -> None:
        # of a prompt that is covered whole, one token less is reused and not one block
        self.tokens = min(blocks * self._block_tokens, self._limit)

    def by_tier(self) -> dict[str, int]:
        """Reused tokens by the tier that they came from; right once the prefix has been used."""
        counts = dict.fromkeys(_TIERS, 0)
        if self._restore is not None:
            blocks = ceil_div(self.tokens, self._block_tokens)
            for index, tier in enumerate(self._restore.tiers[:blocks]):
                start = index * self._block_tokens
                counts[tier] += min(self.tokens - start, self._block_tokens)
        return counts

    @property
    def bytes_read(self) -> int:
        """Payload bytes read from the pool for it; right once it is released."""
        return 0 if self._restore is None else self._restore.bytes_read

    def release(self) -> None:
        """Give the rows back. Idempotent."""
        if self._restore is not None:
            self._restore.release()
