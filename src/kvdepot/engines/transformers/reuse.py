"""What one request reuses: lookup, the running restore, and the account of tokens."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

from kvdepot.depot import Depot, Restore
from kvdepot.engines.transformers.blocks import PrefixLoad, PrefixTooShort
from kvdepot.engines.transformers.memory import Gate, KvMemory
from kvdepot.errors import IdentityUnknown
from kvdepot.identity import Identity
from kvdepot.keys import BlockKey
from kvdepot.units import ceil_div

__all__ = ["DepotFactory", "OnFailure", "Reuse", "open_depot"]

log = logging.getLogger(__name__)

#: opens the depot for the engine's identity
DepotFactory = Callable[[Identity], Depot]
#: what failed, and how
OnFailure = Callable[[str, Exception], None]

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
        on_failure: told of what failed in an unforeseen way; the prompt is then computed.
    """

    def __init__(
        self,
        depot: Depot | None,
        keys: Sequence[BlockKey],
        memory: KvMemory,
        *,
        prompt_tokens: int,
        deadline_s: float,
        on_failure: OnFailure,
    ) -> None:
        self._on_failure = on_failure
        self._limit = prompt_tokens - 1
        self._restore: Restore | None = None
        self._block_tokens = 1
        self.tokens = 0
        self.gate: Gate | None = None
        if depot is None or not keys:
            return
        try:
            self._begin(depot, keys, memory, deadline_s)
        except Exception as error:  # noqa: BLE001 - whatever it is, the prompt is computed
            on_failure("looking for a prompt's prefix", error)
            self.release()
            self.tokens, self.gate = 0, None

    def _begin(
        self, depot: Depot, keys: Sequence[BlockKey], memory: KvMemory, deadline_s: float
    ) -> None:
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

    def wait_for(self, layer_index: int) -> None:
        """Before a layer runs: have its part of the prefix in memory.

        Raises:
            PrefixTooShort: fewer blocks came than were looked for.
        """
        if self.gate is None:
            return
        try:
            self.gate(layer_index)
        except PrefixTooShort:
            raise
        except Exception as error:
            self._on_failure("restoring a prompt's prefix", error)
            raise PrefixTooShort(0) from error

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


def open_depot(factory: DepotFactory | None, identity: Identity) -> Depot | None:
    """The engine's depot; None, with a loud warning, where sharing would be unsafe.

    Raises:
        KvdepotError: as the depot's opening, but for an unknown identity.
    """
    if factory is None:
        return None
    try:
        identity.digest()
        return factory(identity)
    except IdentityUnknown as error:
        log.warning(
            "sharing is OFF for %s, every prompt is computed: %s", identity.model_name, error
        )
        return None
