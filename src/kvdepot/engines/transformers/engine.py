"""The embedded engine: a causal language model on torch CPU whose prompts' KV outlives the process."""

from __future__ import annotations

import logging
from collections.abc import Callable, Generator, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Self

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from kvdepot.clock import Clock, SystemClock
from kvdepot.depot import Depot
from kvdepot.engines.transformers.attention import use_shared_heads
from kvdepot.engines.transformers.blocks import BlockPlan, PrefixTooShort, cutter, plan_blocks
from kvdepot.engines.transformers.decoding import Sampler, TextStream
from kvdepot.engines.transformers.events import Event, FirstToken, Result, TextPiece
from kvdepot.engines.transformers.identify import identity_of
from kvdepot.engines.transformers.memory import KvMemory, PreallocCache
from kvdepot.engines.transformers.reuse import Reuse
from kvdepot.engines.transformers.support import (
    cache_argument,
    forward_options,
    probe,
    refuse_config,
)
from kvdepot.errors import ConfigError, IdentityUnknown, Uncacheable
from kvdepot.identity import Identity
from kvdepot.io.models import ModelFiles, model_files
from kvdepot.io.weights import weights_fingerprint
from kvdepot.keys import BlockKey, RequestExtras, block_keys, root_key

__all__ = ["DepotFactory", "EmbeddedEngine", "Progress"]

log = logging.getLogger(__name__)

#: opens the depot for the engine's identity
DepotFactory = Callable[[Identity], Depot]
#: called while a prompt is computed: (tokens done, tokens to compute)
Progress = Callable[[int, int], None]

#: fp32, because bf16 has no fast kernel on CPUs without AVX-512: 512 tokens took 13.6 s instead of
#: 2.8 s; weights of either type give the same answers here
_DTYPE = "float32"
#: a long prompt is computed in parts, to bound the memory of its activations; one part is fastest
_PART_TOKENS = 8192
#: KV memory at the start, touched then; longer prompts make it grow
_MEMORY_TOKENS = 8192
_WARM_TOKENS = 64
#: A load may take this share of the time that computing its tokens would: even when the storage
#: hangs, the request then takes no longer than one and a half times what it takes without.
_LOAD_SHARE = 0.5
#: only long prompts say how fast this machine computes
_RATE_TOKENS_MIN = 256


class _Request(NamedTuple):
    """One prompt, and how it is to be answered."""

    ids: Sequence[int]
    max_new_tokens: int
    sampler: Sampler
    stop: Sequence[str]
    extras: RequestExtras
    started_s: float


class EmbeddedEngine:
    """A loaded model over a depot. Open with `EmbeddedEngine.open`; close it, or use `with`.

    One request at a time, by one thread: `generate` must be read to its end, or closed, before the
    next one. Everything blocks; the depot's threads load and write behind.
    """

    def __init__(
        self,
        model: Any,
        tokenizer: Any,
        files: ModelFiles,
        *,
        depot: DepotFactory | None = None,
        block_tokens: int | None = None,
        group_count: int | None = None,
        store_generated: bool = False,
        load_share: float = _LOAD_SHARE,
        on_progress: Progress | None = None,
        clock: Clock | None = None,
    ) -> None:
        self._model = model.eval()
        self.tokenizer = tokenizer
        self._clock = clock or SystemClock()
        self._store_generated = store_generated
        self._load_share = load_share
        self._on_progress = on_progress
        refuse_config(model.config)
        self.attention = use_shared_heads(model)
        shape = probe(model)
        #: the blocks' geometry, with the reason as a text
        self.plan: BlockPlan = plan_blocks(
            shape, block_tokens=block_tokens, group_count=group_count
        )
        self.identity: Identity = identity_of(
            model,
            shape,
            self.plan,
            model_name=files.name,
            weights_fingerprint=weights_fingerprint(files.folder),
            attention=self.attention,
        )
        self._cache_argument = cache_argument(model)
        self._options = forward_options(model)
        text = model.config.get_text_config(decoder=True)
        #: tokens of prompt and answer together that the model takes
        self.context_tokens: int = int(getattr(text, "max_position_embeddings", 0) or 1 << 20)
        self._vocabulary: int = model.get_input_embeddings().num_embeddings
        self._end_ids = _end_ids(model, tokenizer)
        self.token_bytes: int = shape.token_bytes
        self._memory = KvMemory(shape, min(self.context_tokens, _MEMORY_TOKENS))
        self._cache = PreallocCache(self._memory)
        self._is_busy = False
        #: requests that could not be keyed and were computed
        self.uncacheable_requests = 0
        self._seconds_per_token = self._warm_up()
        self.depot: Depot | None = self._open_depot(depot)

    @classmethod
    def open(
        cls,
        model: str | Path,
        *,
        dtype: str = _DTYPE,
        model_name: str | None = None,
        **settings: Any,
    ) -> EmbeddedEngine:
        """Load a model and open its depot. Takes seconds; weights are read, and one prompt is run.

        Args:
            model: a folder, or the id of a model on the hub.
            dtype: of the weights and the KV: ``float32``, ``bfloat16`` or ``float16``.
            model_name: part of the identity; by default the hub id, or the folder's name.
            **settings: ``depot`` opens the depot for the engine's identity (None: no reuse);
                ``block_tokens``, ``group_count``: geometry of the blocks; ``store_generated``: store
                the KV of answers as well; ``load_share``: give a load up after this share of the time
                that computing its tokens would take; ``on_progress``: called while a prompt is
                computed.

        Raises:
            UnsupportedModel: its cache cannot be cut; the message says why.
            ConfigError: a setting, or no such model.
            KvdepotError: as the depot's opening.
        """
        files = model_files(model, name=model_name)
        refuse_config(AutoConfig.from_pretrained(files.folder))
        loaded = AutoModelForCausalLM.from_pretrained(files.folder, dtype=_dtype(dtype))
        tokenizer = AutoTokenizer.from_pretrained(files.folder)
        return cls(loaded, tokenizer, files, **settings)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Publish what was stored and close the depot. Idempotent."""
        if self.depot is not None:
            self.depot.close()

    def chat_text(self, messages: Sequence[dict[str, str]]) -> str:
        """Messages as the model's chat template writes them, up to where the answer begins."""
        return str(
            self.tokenizer.apply_chat_template(
                list(messages), tokenize=False, add_generation_prompt=True
            )
        )

    def tokenize(self, text: str) -> list[int]:
        """Token ids of a text as it stands; nothing is put before or behind it."""
        return list(self.tokenizer(text, add_special_tokens=False)["input_ids"])

    def keys(self, ids: Sequence[int], extras: RequestExtras = RequestExtras()) -> list[BlockKey]:
        """Keys of the prompt's full blocks; empty when it cannot be keyed, or sharing is off."""
        if self.identity.undetermined:
            return []
        try:
            return block_keys(self.identity.digest(), ids, self.plan.block_tokens, extras)
        except Uncacheable as error:
            self.uncacheable_requests += 1
            log.warning("request computed without reuse: %s", error)
            return []

    def generate(
        self,
        prompt: str | Sequence[int],
        *,
        max_new_tokens: int,
        temperature: float = 0.0,
        top_p: float = 1.0,
        seed: int | None = None,
        stop: Sequence[str] = (),
        extras: RequestExtras = RequestExtras(),
    ) -> Generator[Event, None, None]:
        """Answer one prompt, streamed: `FirstToken`, `TextPiece`s, `Result`.

        The clock of the TTFT starts here, not when the first event is asked for. The prompt's full
        blocks are stored after the first token was given out, also when the stream is closed then.

        Args:
            prompt: token ids, or a text that is tokenised as it stands.
            max_new_tokens: the answer ends there at the latest.
            temperature: 0 is greedy.
            top_p: see `Sampler`.
            seed: see `Sampler`.
            stop: texts that end the answer; they are not part of it.
            extras: tenant salt and the like; part of the block keys.

        Raises:
            ConfigError: an empty or too long prompt, a token that the model does not know, or an
                argument out of range.
        """
        started_s = self._clock.monotonic_s()
        ids = self.tokenize(prompt) if isinstance(prompt, str) else list(prompt)
        self._check(ids, max_new_tokens)
        sampler = Sampler(temperature=temperature, top_p=top_p, seed=seed)
        request = _Request(ids, max_new_tokens, sampler, stop, extras, started_s)
        return self._answer(request)

    # one request

    def _answer(self, request: _Request) -> Generator[Event, None, None]:
        if self._is_busy:
            raise RuntimeError("the engine answers one request at a time; close the other stream")
        self._is_busy = True
        try:
            yield from self._stream(request)
        finally:
            self._is_busy = False

    def _stream(self, request: _Request) -> Iterator[Event]:
        keys = self.keys(request.ids, request.extras) if self.depot is not None else []
        self._memory.reserve(len(request.ids) + request.max_new_tokens)
        reuse = Reuse(
            self.depot,
            keys,
            self._memory,
            prompt_tokens=len(request.ids),
            deadline_s=self._load_share * self._seconds_per_token,
        )
        try:
            logits = self._compute(request.ids, reuse)
        finally:
            reuse.release()
        token = request.sampler.pick(logits)
        ttft_s = self._clock.monotonic_s() - request.started_s
        written = 0
        try:
            yield FirstToken(ttft_s)
        finally:
            written += self._store(request, keys)
        stream = TextStream(self.tokenizer, request.stop)
        tokens: list[int] = []
        while token not in self._end_ids:
            tokens.append(token)
            if piece := stream.push(token):
                yield TextPiece(piece)
            if stream.is_stopped or len(tokens) == request.max_new_tokens:
                break
            token = request.sampler.pick(self._forward([token]))
        if piece := stream.finish():
            yield TextPiece(piece)
        if self._store_generated:
            written += self._store_answer(request, tokens)
        is_ended = stream.is_stopped or len(tokens) < request.max_new_tokens
        yield Result(
            ttft_s=ttft_s,
            total_s=self._clock.monotonic_s() - request.started_s,
            prompt_tokens=len(request.ids),
            computed_tokens=len(request.ids) - reuse.tokens,
            reused_tokens=reuse.by_tier(),
            bytes_read=reuse.bytes_read,
            bytes_written=written,
            token_ids=tuple(tokens),
            text=stream.text,
            finish="stop" if is_ended else "length",
        )

    def _compute(self, ids: Sequence[int], reuse: Reuse) -> torch.Tensor:
        """Compute what is not reused; the logits behind the prompt's last token."""
        while True:
            started_s = self._clock.monotonic_s()
            try:
                logits = self._compute_from(ids, reuse)
            except PrefixTooShort as short:
                log.warning(
                    "%d of %d tokens can be reused, the others are computed",
                    short.good_blocks * self.plan.block_tokens,
                    reuse.tokens,
                )
                reuse.shorten(short.good_blocks)
                continue
            if len(ids) - reuse.tokens >= _RATE_TOKENS_MIN:
                span_s = self._clock.monotonic_s() - started_s
                self._seconds_per_token = span_s / (len(ids) - reuse.tokens)
            return logits

    def _compute_from(self, ids: Sequence[int], reuse: Reuse) -> torch.Tensor:
        total = len(ids) - reuse.tokens
        layers = self._memory.shape.layers
        part_start = reuse.tokens
        part_tokens = 0

        def gate(layer_index: int) -> None:
            if reuse.gate is not None:
                reuse.gate(layer_index)
            if self._on_progress is not None:
                done = part_start - reuse.tokens + part_tokens * layer_index // layers
                self._on_progress(done, total)

        self._cache.begin(reuse.tokens, gate)
        logits = torch.empty(0)
        while part_start < len(ids):
            part = ids[part_start : part_start + _PART_TOKENS]
            part_tokens = len(part)
            logits = self._forward(part)
            part_start += part_tokens
        self._cache.end_gate()
        if self._on_progress is not None:
            self._on_progress(total, total)
        return logits

    @torch.inference_mode()
    def _forward(self, ids: Sequence[int]) -> torch.Tensor:
        """Compute tokens that follow what is in the cache; the logits of the last one."""
        output = self._model(
            input_ids=torch.tensor([list(ids)]),
            **{self._cache_argument: self._cache},
            **self._options,
        )
        return output.logits[0, -1]

    def _store(self, request: _Request, keys: Sequence[BlockKey]) -> int:
        """Hand the KV of these blocks to the depot; payload bytes that are to be written."""
        if self.depot is None or not keys:
            return 0
        cut = cutter(self._memory, self.plan.groups, self.plan.block_tokens)
        handed_over = 0

        def counted(group_index: int, block_index: int, row: memoryview) -> None:
            nonlocal handed_over
            cut(group_index, block_index, row)
            handed_over += row.nbytes

        root = root_key(self.identity.digest(), request.extras)
        self.depot.store(keys, root, counted, tokens=self.plan.block_tokens)
        return handed_over if self.depot.pool is not None else 0

    def _store_answer(self, request: _Request, tokens: Sequence[int]) -> int:
        # the last token was sampled and not computed, so it has no KV
        ids = [*request.ids, *tokens[:-1]]
        return self._store(request, self.keys(ids, request.extras))

    def _check(self, ids: Sequence[int], max_new_tokens: int) -> None:
        if not ids:
            raise ConfigError("the prompt is empty")
        if max_new_tokens < 1:
            raise ConfigError(f"max_new_tokens must be positive, not {max_new_tokens}")
        if len(ids) + max_new_tokens > self.context_tokens:
            raise ConfigError(
                f"the prompt has {len(ids)} tokens and the answer may have {max_new_tokens}, but the "
                f"model's context is {self.context_tokens} tokens",
                hint="shorten the document, or allow fewer new tokens",
            )
        if min(ids) < 0 or max(ids) >= self._vocabulary:
            raise ConfigError(f"a token id is outside the vocabulary of {self._vocabulary}")

    # the start

    def _warm_up(self) -> float:
        """Run a small prompt and one token over it; seconds per prompt token, as a first estimate.

        The first pass of a process pays for threads and memory that later ones find ready.
        """
        ids = [index % self._vocabulary for index in range(min(_WARM_TOKENS, self.context_tokens))]
        span_s = 0.0
        for _ in range(2):
            started_s = self._clock.monotonic_s()
            self._cache.begin(0)
            self._forward(ids)
            span_s = self._clock.monotonic_s() - started_s
        self._cache.begin(len(ids) // 2)
        self._forward(ids[len(ids) // 2 :])
        self._cache.begin(0)
        return span_s / len(ids)

    def _open_depot(self, factory: DepotFactory | None) -> Depot | None:
        if factory is None:
            return None
        if self.identity.undetermined:
            log.warning(
                "sharing is OFF: %s of %s cannot be determined; every prompt is computed",
                ", ".join(self.identity.undetermined),
                self.identity.model_name,
            )
            return None
        try:
            return factory(self.identity)
        except IdentityUnknown as error:
            log.warning("sharing is OFF: %s", error)
            return None


def _dtype(name: str) -> torch.dtype:
    known = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
    if name not in known:
        raise ConfigError(f"unknown dtype {name!r}; known are {', '.join(known)}")
    return known[name]


def _end_ids(model: Any, tokenizer: Any) -> frozenset[int]:
    """Tokens that end an answer."""
    configured = getattr(model.generation_config, "eos_token_id", None)
    ids = configured if isinstance(configured, list) else [configured]
    return frozenset(
        int(each) for each in [*ids, getattr(tokenizer, "eos_token_id", None)] if each is not None
    )
