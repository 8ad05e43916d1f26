"""What one request reuses: lookup, the running restore, and the account of tokens."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence

from kvdepot.clock import Clock
from kvdepot.depot import Depot, Plan, Restore
from kvdepot.engines.transformers.backload import BackLoad
from kvdepot.engines.transformers.blocks import PrefixLoad, PrefixTooShort
from kvdepot.engines.transformers.memory import Gate, KvMemory
from kvdepot.errors import IdentityUnknown
from kvdepot.identity import Identity
from kvdepot.keys import BlockKey
from kvdepot.policy.decide import Mode
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
        load_share: None: the depot's policies decide. A number: everything that is found is loaded, and
            given up after this share of the time that computing it would take.
        on_failure: told of what failed in an unforeseen way; the prompt is then computed.
        clock: measures what is waited.
    """

    def __init__(
        self,
        depot: Depot | None,
        keys: Sequence[BlockKey],
        memory: KvMemory,
        *,
        prompt_tokens: int,
        load_share: float | None,
        on_failure: OnFailure,
        clock: Clock,
    ) -> None:
        self._depot = depot
        self._on_failure = on_failure
        self._prompt_tokens = prompt_tokens
        self._limit = prompt_tokens - 1
        self._clock = clock
        self._restore: Restore | None = None
        self._plan: Plan | None = None
        self._block_tokens = 1
        self._waited_s = 0.0
        self.tokens = 0
        self.gate: Gate | None = None
        #: the back of the prefix, which is read while the front is computed
        self.back: BackLoad | None = None
        if depot is None:
            return
        try:
            self._begin(depot, keys, memory, load_share)
        except Exception as error:  # noqa: BLE001 - whatever it is, the prompt is computed
            on_failure("looking for a prompt's prefix", error)
            self.release()
            self.tokens, self.gate, self.back, self._plan = 0, None, None, None

    def _begin(
        self,
        depot: Depot,
        keys: Sequence[BlockKey],
        memory: KvMemory,
        load_share: float | None,
    ) -> None:
        identity = depot.identity
        self._block_tokens = identity.block_tokens
        depot.prefetcher.claim(keys)
        if load_share is None:
            plan = self._plan = depot.plan(
                keys, prompt_tokens=self._prompt_tokens, can_meet=True, is_layered=True
            )
            deadline_s, blocks = plan.slack_s, plan.blocks
            if plan.mode is Mode.MEET:
                blocks = plan.near_blocks
                chunks = depot.chunks(keys[blocks : plan.hit.blocks], is_from_back=True)
                choice = plan.decision.choice
                self.back = BackLoad(
                    chunks,
                    memory,
                    identity.groups,
                    self._block_tokens,
                    first_block=blocks,
                    meet_block=choice.meet_block,
                    patience_s=choice.slack_s,
                    is_unknown=math.isinf(choice.load_s),
                    clock=self._clock,
                )
        else:
            blocks = depot.lookup(keys).blocks
            computing_s = depot.policies.cost.prefill_s(blocks * self._block_tokens)
            deadline_s = load_share * computing_s if blocks else 0.0
        if blocks == 0:
            return
        self._restore = depot.restore(keys[:blocks], deadline_s=deadline_s)
        self._set_blocks(blocks)
        self.gate = PrefixLoad(self._restore, memory, identity.groups, self._block_tokens)

    @property
    def rest_s(self) -> float:
        """About how long the rest of the prompt takes to compute; infinite when unknown."""
        if self._depot is None:
            return math.inf
        return self._depot.policies.cost.prefill_s(self._prompt_tokens - self.tokens, self.tokens)

    @property
    def is_pure(self) -> bool:
        """Nothing is restored, so that the pass shows what computing takes."""
        return self.tokens == 0 and self.back is None

    def wait_for(self, layer_index: int) -> None:
        """Before a layer runs: have its part of the prefix in memory.

        Raises:
            PrefixTooShort: fewer blocks came than were looked for.
        """
        if self.gate is None:
            return
        started_s = self._clock.monotonic_s()
        try:
            self.gate(layer_index)
        except PrefixTooShort:
            raise
        except Exception as error:
            self._on_failure("restoring a prompt's prefix", error)
            raise PrefixTooShort(0) from error
        finally:
            self._waited_s += self._clock.monotonic_s() - started_s

    def shorten(self, good_blocks: int) -> None:
        """Reuse fewer blocks, all of which are in memory already, and nothing of the back."""
        self._set_blocks(good_blocks)
        self.gate = None
        if self.back is not None:
            self.back.release()
            self.back = None

    def met(self) -> None:
        """The front has met the back: what of the back is in memory is reused as well."""
        if self.back is not None:
            self.back.release()
            self.tokens = min(self.tokens + self.back.tokens, self._limit)

    def _set_blocks(self, blocks: int) -> None:
        # of a prompt that is covered whole, one token less is reused and not one block
        self.tokens = min(blocks * self._block_tokens, self._limit)

    def by_tier(self) -> dict[str, int]:
        """Reused tokens by the tier that they came from; right once the prefix has been used."""
        counts = dict.fromkeys(_TIERS, 0)
        if self.back is not None:
            counts["disk"] = min(self.back.disk_tokens, self.tokens)
            counts["host"] = self.tokens - counts["disk"]
        elif self._restore is not None:
            blocks = ceil_div(self.tokens, self._block_tokens)
            for index, tier in enumerate(self._restore.tiers[:blocks]):
                start = index * self._block_tokens
                counts[tier] += min(self.tokens - start, self._block_tokens)
        return counts

    @property
    def waited_s(self) -> float:
        """Seconds of waiting for the prefix: the load that no computing hid."""
        return self._waited_s + (0.0 if self.back is None else self.back.waited_s)

    @property
    def bytes_read(self) -> int:
        """Payload bytes read from the pool for it; right once it is released."""
        back = 0 if self.back is None else self.back.bytes_read
        return back + (0 if self._restore is None else self._restore.bytes_read)

    def release(self) -> None:
        """Give the rows back. Idempotent."""
        if self.back is not None:
            self.back.release()
        if self._restore is not None:
            self._restore.release()

    def finish(self) -> None:
        """Tell the depot how it went. After `release`, once."""
        plan, self._plan = self._plan, None
        if plan is None or self._depot is None:
            return
        ended_by = self._restore.ended_by if self._restore is not None else None
        if self.back is not None:
            ended_by = self.back.ended_by or ended_by
        self._depot.finished(
            plan,
            reused_blocks=ceil_div(self.tokens, self._block_tokens),
            load_s=self.waited_s,
            ended_by=ended_by,
        )


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
