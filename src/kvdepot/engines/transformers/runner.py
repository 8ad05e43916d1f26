"""The model at work: forward passes over the KV memory, and how long they take."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

import torch

from kvdepot.clock import Clock
from kvdepot.engines.transformers.backload import BackLoad
from kvdepot.engines.transformers.blocks import PrefixTooShort
from kvdepot.engines.transformers.memory import KvMemory, KvShape, PreallocCache
from kvdepot.engines.transformers.reuse import Reuse
from kvdepot.engines.transformers.support import cache_argument, forward_options

__all__ = ["Computed", "Progress", "Runner"]

log = logging.getLogger(__name__)

#: called while a prompt is computed: (tokens done, tokens to compute)
Progress = Callable[[int, int], None]
#: called after a pass: (tokens, position of the first one, seconds)
Computed = Callable[[int, int, float], None]

#: a long prompt is computed in parts, to bound the memory of its activations; one part is fastest
_PART_TOKENS = 8192
#: KV memory at the start, touched then; longer prompts make it grow
_MEMORY_TOKENS = 8192
_WARM_TOKENS = 64
_WARM_PREFIX_TOKENS = 4096
_WARM_TAIL_TOKENS = 24
#: only long prompts say how fast this machine computes
_RATE_TOKENS_MIN = 256


class Runner:
    """A model with its KV memory. One request at a time, by one thread.

    Args:
        model: loaded, on the CPU.
        shape: of its KV.
        context_tokens: that it takes.
        on_progress: told how far a prompt is.
        clock: for tests that own the time.
        on_computed: told how long prefills took that nothing but computing was part of.
    """

    def __init__(
        self,
        model: Any,
        shape: KvShape,
        *,
        context_tokens: int,
        on_progress: Progress | None,
        clock: Clock,
        on_computed: Computed | None = None,
    ) -> None:
        self._model = model
        self._cache_argument = cache_argument(model)
        self._options = forward_options(model)
        self._on_progress = on_progress or (lambda _done, _total: None)
        self._clock = clock
        self.vocabulary: int = model.get_input_embeddings().num_embeddings
        self.memory = KvMemory(shape, min(context_tokens, _MEMORY_TOKENS))
        self._cache = PreallocCache(self.memory)
        self._on_computed = on_computed or (lambda _tokens, _position, _seconds: None)
        #: tokens of the warm-up's prompt, and what it took
        self.warm_tokens = min(_WARM_TOKENS, context_tokens)
        self.warm_s = self._warm_up(self.warm_tokens)

    def compute(self, ids: Sequence[int], reuse: Reuse) -> torch.Tensor:
        """Compute what of a prompt is not reused; the logits behind its last token.

        When less can be reused than it seemed, `reuse` is shortened and the pass is done again.
        """
        while True:
            started_s = self._clock.monotonic_s()
            try:
                if reuse.back is not None:
                    return self._compute_meeting(ids, reuse, reuse.back)
                logits = self._compute_from(ids, reuse)
            except PrefixTooShort as short:
                before = reuse.tokens
                reuse.shorten(short.good_blocks)
                log.warning("%d of %d tokens to reuse are there", reuse.tokens, before)
                continue
            # with a reused prefix the span has waits for storage in it, and a slow load would earn
            # the next one a longer deadline
            if reuse.is_pure and len(ids) >= _RATE_TOKENS_MIN:
                self._on_computed(len(ids), 0, self._clock.monotonic_s() - started_s)
            return logits

    @torch.inference_mode()
    def forward(self, ids: Sequence[int]) -> torch.Tensor:
        """Compute tokens that follow what is in memory; the logits behind the last one."""
        output = self._model(
            input_ids=torch.tensor([list(ids)]),
            **{self._cache_argument: self._cache},
            **self._options,
        )
        return output.logits[0, -1]

    def _compute_from(self, ids: Sequence[int], reuse: Reuse) -> torch.Tensor:
        total = len(ids) - reuse.tokens
        layers = self.memory.shape.layers
        part_start = reuse.tokens
        part_tokens = 0

        def gate(layer_index: int) -> None:
            reuse.wait_for(layer_index)
            done = part_start - reuse.tokens + part_tokens * layer_index // layers
            self._on_progress(done, total)

        self._cache.begin(reuse.tokens, gate)
        logits = torch.empty(0)
        while part_start < len(ids):
            part = ids[part_start : part_start + _PART_TOKENS]
            part_tokens = len(part)
            logits = self.forward(part)
            part_start += part_tokens
        self._cache.end_gate()
        self._on_progress(total, total)
        return logits

    def _compute_meeting(self, ids: Sequence[int], reuse: Reuse, back: BackLoad) -> torch.Tensor:
        """Compute the front of the prefix while its back is read, then what follows both."""
        total = len(ids) - reuse.tokens
        place = first = reuse.tokens
        computing_s = 0.0
        self._cache.begin(place, reuse.wait_for)
        while True:
            back.await_back(place)
            if place >= min(back.start_token, len(ids) - 1):
                break
            token_s = computing_s / (place - first) if place > first else 0.0
            count = back.pass_tokens(place, token_s)
            part = ids[place : min(place + count, back.start_token, len(ids) - 1)]
            started_s = self._clock.monotonic_s()
            self.forward(part)
            part_s = self._clock.monotonic_s() - started_s
            computing_s += part_s
            if place > first and len(part) >= _RATE_TOKENS_MIN:
                # the first one may have waited for blocks in memory to be pasted
                self._on_computed(len(part), place, part_s)
            place += len(part)
            self._cache.end_gate()
            back.paste(place)
            self._on_progress(place - first, total)
        reuse.met()
        tail = min(back.end_token, len(ids) - 1)
        # without a pass before it, this one pastes what was in memory
        self._cache.begin(tail, None if place > first else reuse.wait_for)
        logits = self.forward(ids[tail:])
        self._cache.end_gate()
        self._on_progress(total, total)
        return logits

    def _warm_up(self, tokens: int) -> float:
        """Run a small prompt, then some tokens over a deep prefix; seconds that the prompt took.

        The first pass of a process pays for threads and memory that later ones find ready, and so does
        the first one over a long prefix. What the prefix holds does not matter here.
        """
        ids = [index % self.vocabulary for index in range(tokens)]
        span_s = 0.0
        for _ in range(2):
            started_s = self._clock.monotonic_s()
            self._cache.begin(0)
            self.forward(ids)
            span_s = self._clock.monotonic_s() - started_s
        self._cache.begin(min(self.memory.capacity_tokens - tokens, _WARM_PREFIX_TOKENS))
        self.forward(ids[:_WARM_TAIL_TOKENS])
        self._cache.begin(0)
        return span_s
