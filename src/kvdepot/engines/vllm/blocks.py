"""A request's blocks: vLLM's keys of its chunks, the pool's keys for them, and what is known of each.

vLLM asks for one chunk at a time, from the first on. The answers for the chunks that follow are looked
up together, in growing steps, so that a long prompt costs a few lookups and a miss at its first block
costs a small one.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import islice

from vllm.v1.kv_offload.base import OffloadKey, ReqContext

from kvdepot.keys import BlockKey, adopt_key, root_key

__all__ = ["RequestBlocks"]

_GROUP_BYTES = 4
#: chunks looked up together: the first time, and at most; the largest step takes a quarter of a millisecond
_STEP = 16
_STEP_MAX = 128


class RequestBlocks:
    """Of one request, on the scheduler's thread. vLLM's request context carries it.

    `key`, `in_order`, `end_token` and `parent` may be asked on another thread too: what `learn` has
    taken in stays as it is, and a key that two threads make at once is the same key.

    Args:
        identity_digest: of the engine.
        extras: what changes the KV beyond what vLLM's hash covers; None: the request is not cacheable.
    """

    def __init__(self, identity_digest: bytes, extras: bytes | None) -> None:
        self._identity_digest = identity_digest
        self._extras = extras
        self._keys: dict[OffloadKey, BlockKey] = {}
        #: all keys of the request so far, as vLLM made them: by position within each group
        self._order: list[OffloadKey] = []
        self._places: dict[OffloadKey, int] = {}
        self._verdicts: dict[OffloadKey, bool] = {}
        self._generation = -1
        self._step = _STEP
        #: chunks that were looked up before
        self.counted: set[OffloadKey] = set()
        #: loads of these did not come; the request computes them
        self.lost: set[OffloadKey] = set()
        #: a load was late: what is left of the request is computed
        self.is_given_up = False
        #: chunks that end behind it are not written, and why; by the thread that begins stores
        self.cut_token = math.inf
        self.cut_reason = ""
        self._ends: Mapping[OffloadKey, int] = {}

    @property
    def is_cacheable(self) -> bool:
        """False for what cannot be told from other requests."""
        return self._extras is not None

    @property
    def root(self) -> BlockKey:
        """The parent of a chunk that needs no other."""
        return root_key(self._identity_digest)

    def key(self, offload_key: OffloadKey) -> BlockKey:
        """The pool's key of a chunk."""
        found = self._keys.get(offload_key)
        if found is None:
            assert self._extras is not None
            found = adopt_key(self._identity_digest, offload_key + self._extras)
            self._keys[offload_key] = found
        return found

    def holds(
        self,
        offload_key: OffloadKey,
        context: ReqContext,
        lookup: Callable[[Sequence[BlockKey]], int],
        *,
        generation: int,
        is_chained: bool,
    ) -> bool:
        """Whether the pool has a chunk.

        Args:
            offload_key: the chunk.
            context: the request's.
            lookup: the pool's.
            generation: answers are kept while it stays the same.
            is_chained: the group's chunks are asked for from the first on, without gaps.
        """
        if generation != self._generation:
            self._generation = generation
            self._verdicts.clear()
            self._step = _STEP
        verdict = self._verdicts.get(offload_key)
        if verdict is None:
            ahead = self._ahead(offload_key, context) if is_chained else [offload_key]
            found = lookup([self.key(key) for key in ahead])
            self._verdicts.update(dict.fromkeys(ahead[:found], True))
            self._verdicts.update(dict.fromkeys(ahead[found : found + 1], False))
            verdict = found > 0
        return verdict and offload_key not in self.lost

    def prefix(
        self,
        offload_keys: Sequence[OffloadKey],
        lookup: Callable[[Sequence[BlockKey]], int],
        *,
        is_chained: bool,
    ) -> int:
        """How many chunks of a group, from the first on, the pool has; a few lookups for thousands.

        Args:
            offload_keys: the chunks, in order.
            lookup: the pool's.
            is_chained: each chunk is the next one's parent, so that it is there if the next one is.
        """
        lost = self.lost
        end = len(offload_keys)
        if lost:
            end = next((n for n, key in enumerate(offload_keys) if key in lost), end)
        if not is_chained:
            return lookup([self.key(key) for key in offload_keys[:end]])

        def is_absent(place: int) -> int:
            return 1 - lookup([self.key(offload_keys[place])])

        return bisect_left(range(end), 1, key=is_absent)

    def is_first(self, offload_key: OffloadKey) -> bool:
        """Whether it is the first chunk of the request, as far as is known."""
        return self._places.get(offload_key) == 0

    def learn(self, context: ReqContext) -> None:
        """Take in the keys that vLLM has made since the last time. On the scheduler's thread."""
        made = self._ends = context._offload_key_positions
        if len(made) == len(self._order):
            return
        for key in islice(made, len(self._order), None):
            self._places[key] = len(self._order)
            self._order.append(key)

    def in_order(self, keys: Iterable[OffloadKey]) -> list[OffloadKey]:
        """Keys that were learned, parents before their children; vLLM hands stores over as a set."""
        places, end = self._places, len(self._places)
        return sorted(keys, key=lambda key: places.get(key, end))

    def end_token(self, offload_key: OffloadKey) -> int:
        """Where a chunk that was learned ends in the prompt."""
        return self._ends.get(offload_key, 0)

    def parent(self, offload_key: OffloadKey) -> BlockKey:
        """The key of the chunk before, or the root key where there is none or it is not known."""
        place = self._places.get(offload_key)
        if place is not None:
            group = offload_key[-_GROUP_BYTES:]
            while place > 0:
                place -= 1
                before = self._order[place]
                if before[-_GROUP_BYTES:] == group:
                    return self.key(before)
        return self.root

    # below

    def _ahead(self, offload_key: OffloadKey, context: ReqContext) -> list[OffloadKey]:
        """The chunk and those that follow it in its group, a growing number of them."""
        self.learn(context)
        place = self._places.get(offload_key)
        if place is None:
            return [offload_key]
        group = offload_key[-_GROUP_BYTES:]
        step, self._step = self._step, min(4 * self._step, _STEP_MAX)
        return [key for key in self._order[place : place + step] if key[-_GROUP_BYTES:] == group]
