"""Which chunks of vLLM's stores are written: write admission, for chunks that come piece by piece.

vLLM hands a prompt's chunks over in several jobs, as they are computed, and a chunk is of no use
without those before it. So the first chunk that is not wanted cuts its request: of what follows nothing
is written. One group of layers is asked about, and the others follow it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from vllm.v1.kv_offload.base import OffloadKey, get_offload_group_idx

from kvdepot.clock import Clock
from kvdepot.engines.vllm.blocks import RequestBlocks
from kvdepot.keys import BlockKey
from kvdepot.metrics import Counters
from kvdepot.policy.admission import Admission, StoreClass

__all__ = ["StoreAdmission"]


class StoreAdmission:
    """Asked by the thread that begins jobs, in the order in which they are begun.

    Args:
        admission: the policy.
        block_tokens: tokens of a chunk, by group.
        chained: groups in which a chunk is of no use without the one before it; the first of them is
            the one that is asked about.
        row_bytes: of one chunk.
        counters: of the tier.
        clock: for the budget of a day.
    """

    def __init__(
        self,
        admission: Admission,
        block_tokens: Mapping[int, int],
        chained: frozenset[int],
        *,
        row_bytes: int,
        counters: Counters,
        clock: Clock,
    ) -> None:
        self._admission = admission
        self._leader = min(chained or block_tokens, default=0)
        self._chunk_tokens = block_tokens.get(self._leader, 0)
        # the others' chunks come with it; behind a sliding window there are fewer, so this is the most
        self._block_bytes = row_bytes * max(len(block_tokens), 1)
        self._counters = counters
        self._clock = clock

    def in_order(self, keys: Sequence[OffloadKey]) -> Sequence[OffloadKey]:
        """The chunks that are asked about first; otherwise the order stays."""
        if self._admission.is_always:
            return keys
        return sorted(keys, key=lambda key: get_offload_group_idx(key) != self._leader)

    def wanted(
        self,
        keys: Sequence[OffloadKey],
        blocks: RequestBlocks,
        *,
        prompt_tokens: int,
        lookup: Callable[[Sequence[BlockKey]], int],
    ) -> Sequence[OffloadKey]:
        """Those of one request's chunks that are to be written.

        Args:
            keys: in the order of `in_order`.
            blocks: the request's.
            prompt_tokens: length of its prompt; what ends behind it is an answer's.
            lookup: the pool's; what it has costs no write.
        """
        if self._admission.is_always:
            return keys
        leading = [key for key in keys if get_offload_group_idx(key) == self._leader]
        if leading:
            self._decide(leading, blocks, prompt_tokens, lookup)
        found = [key for key in keys if blocks.end_token(key) <= blocks.cut_token]
        refused = len(keys) - len(found)
        if refused:
            self._counters.add("store_not_admitted_blocks_total", refused)
            self._counters.add(f"not_admitted_{blocks.cut_reason}_blocks_total", refused)
        return found

    def _decide(
        self,
        keys: Sequence[OffloadKey],
        blocks: RequestBlocks,
        prompt_tokens: int,
        lookup: Callable[[Sequence[BlockKey]], int],
    ) -> None:
        """Cut the request where its first chunk is that is not wanted, if there is one."""
        held = lookup([blocks.key(key) for key in keys])
        prompt = [key for key in keys[held:] if blocks.end_token(key) <= prompt_tokens]
        runs = ((StoreClass.PROMPT, prompt), (StoreClass.GENERATED, keys[held + len(prompt) :]))
        for kind, run in runs:
            admitted = self._admission.admit(
                self._clock.monotonic_s(),
                [blocks.key(key) for key in run],
                self._block_bytes,
                prompt_tokens=prompt_tokens,
                kind=kind,
                is_reachable=not blocks.cut_reason,
            )
            if admitted.blocks < len(run) and not blocks.cut_reason:
                blocks.cut_token = blocks.end_token(run[admitted.blocks]) - self._chunk_tokens
                blocks.cut_reason = admitted.refusal
