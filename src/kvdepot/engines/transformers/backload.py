"""The back of a prefix, read while the front is computed.

Chunks come from the end of the prefix towards its beginning and are pasted between two passes. How many
tokens the next pass takes is chosen so that it ends about where the two meet: each pass more costs time,
and a pass that goes too far computes what would have been there.
"""

from __future__ import annotations

import torch

from kvdepot.chunks import Chunk, ChunkRestore
from kvdepot.clock import Clock
from kvdepot.engines.transformers.memory import KvMemory
from kvdepot.identity import CacheGroup
from kvdepot.policy.reasons import Reason

__all__ = ["BackLoad"]

#: shorter passes do not use the machine well
_PASS_TOKENS_MIN = 256
#: of a prefix of which nothing is known, this much is computed before the first look
_FIRST_PASS_TOKENS = 512
#: of the patience, what storage of unknown speed gets until its first bytes
_LOOK_SHARE = 0.5


class BackLoad:
    """Pastes chunks from the back, and says how far the front should be computed next.

    Args:
        chunks: not yet read from; released here.
        memory: has room for the whole prompt.
        groups: of the identity.
        block_tokens: tokens in a block.
        first_block: of the prompt, at which the chunks begin.
        meet_block: where the two are expected to meet; `first_block` or less when unknown.
        patience_s: so long, all in all, `await_back` may stand still for bytes.
        is_unknown: nothing is known of the storage's speed, so it is worth a look before the first pass.
        clock: measures the patience.
    """

    def __init__(
        self,
        chunks: ChunkRestore,
        memory: KvMemory,
        groups: tuple[CacheGroup, ...],
        block_tokens: int,
        *,
        first_block: int,
        meet_block: int,
        patience_s: float,
        is_unknown: bool,
        clock: Clock,
    ) -> None:
        self._chunks = chunks
        self._memory = memory
        self._groups = groups
        self._block_tokens = block_tokens
        self._first_block = first_block
        #: token at which the whole prefix ends, and the pasted part begins
        self.end_token = (first_block + chunks.blocks) * block_tokens
        self.start_token = self.end_token
        self._first_pass = max((meet_block - first_block) * block_tokens, 0) or _FIRST_PASS_TOKENS
        self._has_passed = False
        self._patience_s = patience_s
        self._look_s = _LOOK_SHARE * patience_s if is_unknown else 0.0
        self._clock = clock
        self._began_s = clock.monotonic_s()
        #: seconds that were waited for bytes with nothing else to do
        self.waited_s = 0.0
        self.disk_tokens = 0

    @property
    def tokens(self) -> int:
        """Tokens that are in memory."""
        return self.end_token - self.start_token

    @property
    def bytes_read(self) -> int:
        """Payload bytes read from the pool; right once it is released."""
        return self._chunks.bytes_read

    @property
    def ended_by(self) -> Reason | None:
        """Why no more chunks came, if something was wrong."""
        return self._chunks.ended_by

    def paste(self, computed_token: int) -> None:
        """Take what is there; blocks before `computed_token` are computed and left as they are."""
        while self.start_token > computed_token:
            chunk = self._chunks.poll()
            if chunk is None:
                return
            self._paste(chunk)
            start = (self._first_block + chunk.first) * self._block_tokens
            self.start_token = max(start, computed_token)
            for index, is_from_disk in enumerate(chunk.is_from_disk):
                end = start + (index + 1) * self._block_tokens
                if is_from_disk:
                    # of the block in which the two meet, the rest
                    self.disk_tokens += min(max(end - computed_token, 0), self._block_tokens)

    def await_back(self, computed_token: int) -> None:
        """Paste what comes, for as long as all of it is expected to come within the patience.

        A pass takes longer than reading a whole prefix from a quick disk, so one that is begun just
        before the bytes come is what costs most. Storage of which nothing is known gets a moment to
        show its rate. Blocks; all calls together by no more than `patience_s`.
        """
        while self.start_token > computed_token and not self._chunks.is_over:
            left_s = self._look_s if not self.tokens else self._patience_s
            if left_s <= 0 or self._rest_s(computed_token) > left_s:
                return
            started_s = self._clock.monotonic_s()
            self._chunks.wait(left_s)
            spent_s = self._clock.monotonic_s() - started_s
            self._look_s -= spent_s
            self._patience_s -= spent_s
            self.waited_s += spent_s
            self.paste(computed_token)

    def _rest_s(self, computed_token: int) -> float:
        """Until everything behind `computed_token` is there, at the rate seen so far; 0 if none was."""
        if not self.tokens:
            return 0.0
        span_s = self._clock.monotonic_s() - self._began_s
        return span_s * (self.start_token - computed_token) / self.tokens

    def pass_tokens(self, computed_token: int, computing_s: float) -> int:
        """How many tokens to compute next, at least one.

        Args:
            computed_token: up to where the front is there.
            computing_s: seconds that a token took to compute so far; 0 before the first pass.
        """
        gap = self.start_token - computed_token
        if not self._has_passed:
            self._has_passed = True
            return max(min(gap, max(self._first_pass, _PASS_TOKENS_MIN)), 1)
        loaded, loading_s = self.tokens, self._clock.monotonic_s() - self._began_s
        if not loaded or computing_s <= 0 or loading_s <= 0 or self._chunks.is_over:
            return gap  # nothing comes: one pass is quickest
        loading_rate = loaded / loading_s
        front = gap / (1.0 + loading_rate * computing_s)
        return max(min(gap, max(int(front), _PASS_TOKENS_MIN)), 1)

    def release(self) -> None:
        """Give the rows back. Idempotent."""
        self._chunks.release()

    def _paste(self, chunk: Chunk) -> None:
        shape, tokens = self._memory.shape, self._block_tokens
        first = (self._first_block + chunk.first) * tokens
        for group, rows in zip(self._groups, chunk.rows, strict=True):
            layers = group.layers
            block = (len(layers), 2, shape.kv_heads, tokens, shape.head_dim)
            for index, row in enumerate(rows):
                start = first + index * tokens
                target = self._memory.tensor[
                    layers[0] : layers[-1] + 1, :, :, start : start + tokens
                ]
                target.copy_(torch.frombuffer(row, dtype=shape.dtype).view(block))
