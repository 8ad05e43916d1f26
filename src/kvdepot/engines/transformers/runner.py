"""The model at work: forward passes over the KV memory, and how long they take."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

import torch

from kvdepot.clock import Clock
from kvdepot.engines.transformers.blocks import PrefixTooShort
from kvdepot.engines.transformers.memory import KvMemory, KvShape, PreallocCache
from kvdepot.engines.transformers.reuse import Reuse
from kvdepot.engines.transformers.support import cache_argument, forward_options

__all__ = ["Progress", "Runner"]

log = logging.getLogger(__name__)

#: called while a prompt is computed: (tokens done, tokens to compute)
Progress = Callable[[int, int], None]

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
    """

    def __init__(
        self,
        model: Any,
        shape: KvShape,
        *,
        context_tokens: int,
        on_progress: Progress | None,
        clock: Clock,
    ) -> None:
        self._model = model
        self._cache_argument = cache_argument(model)
        self._options = forward_options(model)
        self._on_progress = on_progress or (lambda _done, _total: None)
        self._clock = clock
        self.vocabulary: int = model.get_input_embeddings().num_embeddings
        self.memory = KvMemory(shape, min(context_tokens, _MEMORY_TOKENS))
        self._cache = PreallocCache(self.memory)
        #: of a prompt, as last measured; at first from the warm-up
        self.seconds_per_token = self._warm_up(min(_WARM_TOKENS, context_tokens))

    def compute(self, ids: Sequence[int], reuse: Reuse) -> torch.Tensor:
        """Compute what of a prompt is not reused; the logits behind its last token.

        When less can be reused than it seemed, `reuse` is shortened and the pass is done again.
        """
        while True:
            started_s = self._clock.monotonic_s()
            try:
                logits = self._compute_from(ids, reuse)
            except PrefixTooShort as short:
                before = reuse.tokens
                reuse.shorten(short.good_blocks)
                log.warning("%d of %d tokens to reuse are there", reuse.tokens, before)
                continue
            # with a reused prefix the span has waits for storage in it, and a slow load would earn
            # the next one a longer deadline
            if reuse.tokens == 0 and len(ids) >= _RATE_TOKENS_MIN:
                self.seconds_per_token = (self._clock.monotonic_s() - started_s) / len(ids)
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

    def _warm_up(self, tokens: int) -> float:
        """Run a small prompt, then some tokens over a deep prefix; seconds per prompt token.

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
        return span_s / tokens
