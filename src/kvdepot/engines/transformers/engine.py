"""The embedded engine: a causal language model on torch CPU whose prompts' KV outlives the process."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Generator, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Self

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from kvdepot.clock import Clock, SystemClock
from kvdepot.depot import Depot
from kvdepot.engines.transformers.attention import use_shared_heads
from kvdepot.engines.transformers.blocks import BlockPlan, cutter, plan_blocks
from kvdepot.engines.transformers.decoding import Sampler, TextStream
from kvdepot.engines.transformers.events import Event, FirstToken, Result, TextPiece
from kvdepot.engines.transformers.identify import identity_of, loaded_fingerprint
from kvdepot.engines.transformers.lookahead import LookAhead, Waiting
from kvdepot.engines.transformers.reuse import DepotFactory, Reuse, open_depot
from kvdepot.engines.transformers.runner import Progress, Runner
from kvdepot.engines.transformers.support import dtype_of, end_ids, probe, refuse_config
from kvdepot.errors import ConfigError, Uncacheable
from kvdepot.identity import Identity
from kvdepot.io.models import ModelFiles, model_files
from kvdepot.io.weights import weights_fingerprint
from kvdepot.keys import BlockKey, RequestExtras, block_keys, root_key
from kvdepot.policy.admission import StoreClass

__all__ = ["DepotFactory", "EmbeddedEngine"]

log = logging.getLogger(__name__)

#: fp32, because bf16 has no fast kernel on CPUs without AVX-512: 512 tokens took 13.6 s instead of
#: 2.8 s; weights of either type give the same answers here
_DTYPE = "float32"


class _Request(NamedTuple):
    """One prompt, and how it is to be answered."""

    ids: Sequence[int]
    max_new_tokens: int
    sampler: Sampler
    stop: Sequence[str]
    ignore_end: bool
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
        load_share: float | None = None,
        on_progress: Progress | None = None,
        clock: Clock | None = None,
    ) -> None:
        _ask_for_equal_results()
        self.tokenizer = tokenizer
        self._clock = clock or SystemClock()
        self._store_generated = store_generated
        self._load_share = load_share
        self._on_progress = on_progress
        #: asked now and then, by the engine's thread, for the requests that wait: they are read ahead for
        self.waiting: Callable[[], Sequence[Waiting]] | None = None
        self._ahead: LookAhead | None = None
        refuse_config(model.config)
        model.eval()
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
            weights_fingerprint=loaded_fingerprint(model, weights_fingerprint(files.folder)),
            attention=self.attention,
        )
        text = model.config.get_text_config(decoder=True)
        #: tokens of prompt and answer together that the model takes
        self.context_tokens: int = int(getattr(text, "max_position_embeddings", 0) or 1 << 20)
        self._end_ids = end_ids(model, tokenizer)
        self.token_bytes: int = shape.token_bytes
        #: where the KV memory is, as torch calls it
        self.device: str = model.device.type
        self._runner = Runner(
            model,
            shape,
            context_tokens=self.context_tokens,
            on_progress=self._progressed,
            clock=self._clock,
            on_computed=self._computed,
        )
        self._is_busy = False
        #: requests that could not be keyed and were computed
        self.uncacheable_requests = 0
        #: lookups, restores and stores that failed in an unforeseen way
        self.cache_failures = 0
        self.depot: Depot | None = open_depot(depot, self.identity)
        if self.depot is not None:
            self._ahead = LookAhead(self.depot, self.keys, self._clock)
        self._computed(self._runner.warm_tokens, 0, self._runner.warm_s)

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
                the KV of answers as well; ``load_share``: load whatever is found, and give it up
                after this share of the time that computing its tokens would take (None: the depot's
                policies decide); ``on_progress``: called while a prompt is computed.

        Raises:
            UnsupportedModel: its cache cannot be cut; the message says why.
            ConfigError: a setting, or no such model.
            KvdepotError: as the depot's opening.
        """
        files = model_files(model, name=model_name)
        refuse_config(AutoConfig.from_pretrained(files.folder))
        loaded = AutoModelForCausalLM.from_pretrained(files.folder, dtype=dtype_of(dtype))
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
        ignore_end: bool = False,
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
            ignore_end: go on behind the model's end token, so that all answers have one length.
            extras: tenant salt and the like; part of the block keys.

        Raises:
            ConfigError: an empty or too long prompt, a token that the model does not know, or an
                argument out of range.
        """
        started_s = self._clock.monotonic_s()
        ids = self.tokenize(prompt) if isinstance(prompt, str) else list(prompt)
        self._check(ids, max_new_tokens)
        sampler = Sampler(temperature=temperature, top_p=top_p, seed=seed)
        request = _Request(ids, max_new_tokens, sampler, stop, ignore_end, extras, started_s)
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
        self._runner.memory.reserve(len(request.ids) + request.max_new_tokens)
        reuse = Reuse(
            self.depot,
            keys,
            self._runner.memory,
            prompt_tokens=len(request.ids),
            load_share=self._load_share,
            on_failure=self._cache_failed,
            clock=self._clock,
        )
        if self._ahead is not None:
            self._ahead.begin(reuse.rest_s, request.max_new_tokens)
        try:
            logits = self._runner.compute(request.ids, reuse)
        finally:
            reuse.release()
        self._finish(reuse)
        token = request.sampler.pick(logits)
        ttft_s = self._clock.monotonic_s() - request.started_s
        written = 0
        try:
            yield FirstToken(ttft_s)
        finally:
            written += self._store(request, keys)
        stream = TextStream(self.tokenizer, request.stop)
        tokens: list[int] = []
        while request.ignore_end or token not in self._end_ids:
            tokens.append(token)
            if piece := stream.push(token):
                yield TextPiece(piece)
            if stream.is_stopped or len(tokens) == request.max_new_tokens:
                break
            token = request.sampler.pick(self._decode(token))
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
            load_s=reuse.waited_s,
        )

    def _decode(self, token: int) -> torch.Tensor:
        began_s = self._clock.monotonic_s()
        logits = self._runner.forward([token])
        if self._ahead is not None:
            self._ahead.decoded(self._clock.monotonic_s() - began_s)
            self._look_ahead()
        return logits

    def _progressed(self, done: int, total: int) -> None:
        if self._on_progress is not None:
            self._on_progress(done, total)
        self._look_ahead()

    def _look_ahead(self) -> None:
        if self._ahead is None or self.waiting is None:
            return
        try:
            self._ahead.look(self.waiting)
        except Exception as error:  # noqa: BLE001 - as for a store
            self._cache_failed("reading ahead", error)

    def _finish(self, reuse: Reuse) -> None:
        try:
            reuse.finish()
        except Exception as error:  # noqa: BLE001 - as for a store
            self._cache_failed("taking a request's account", error)

    def _computed(self, tokens: int, position: int, seconds: float) -> None:
        """The cost model learns from what computing takes."""
        if self.depot is not None:
            self.depot.computed(tokens, position, seconds)

    def _cache_failed(self, what: str, error: Exception) -> None:
        """A failure of the cache never fails a request: it is computed."""
        self.cache_failures += 1
        log.warning("%s failed; the request goes on without", what, exc_info=error)

    def _store(
        self,
        request: _Request,
        keys: Sequence[BlockKey],
        kind: StoreClass = StoreClass.PROMPT,
    ) -> int:
        """Hand the KV of these blocks to the depot; payload bytes that are to be written."""
        if self.depot is None or not keys:
            return 0
        cut = cutter(self._runner.memory, self.plan.groups, self.plan.block_tokens)
        handed_over = 0

        def counted(group_index: int, block_index: int, row: memoryview) -> None:
            nonlocal handed_over
            cut(group_index, block_index, row)
            handed_over += row.nbytes

        root = root_key(self.identity.digest(), request.extras)
        try:
            self.depot.store(keys, root, counted, tokens=self.plan.block_tokens, kind=kind)
        except Exception as error:  # noqa: BLE001 - whatever it is, the answer is not lost to it
            self._cache_failed("storing a prompt", error)
        return handed_over if self.depot.pool is not None else 0

    def _store_answer(self, request: _Request, tokens: Sequence[int]) -> int:
        # the last token was sampled and not computed, so it has no KV
        ids = [*request.ids, *tokens[:-1]]
        return self._store(request, self.keys(ids, request.extras), StoreClass.GENERATED)

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
        if min(ids) < 0 or max(ids) >= self._runner.vocabulary:
            raise ConfigError(f"a token id is outside the vocabulary of {self._runner.vocabulary}")


def _ask_for_equal_results() -> None:
    """Have MKL give the same bits in every process, whatever the alignment of memory.

    Processes share what they computed, so they should compute the same. MKL reads the variable at its
    first call; what the user has set stands. On the CPUs measured it costs nothing for long prompts,
    and short ones are a fifth faster in the linear layers.
    """
    os.environ.setdefault("MKL_CBWR", "AUTO")
