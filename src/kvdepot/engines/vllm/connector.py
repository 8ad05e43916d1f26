"""vLLM's offloading connector, with what a tier must know besides, and a say in what a request loads.

Named by ``kv_connector`` and ``kv_connector_module_path``. A tier of vLLM's learns keys and rows; it is
told neither which model they belong to nor which adapter a request uses, and its only answers are yes
and no. This connector hands the engine's settings and its workers' facts to our tiers, and decides per
request whether to go on now, to wait its turn for room in the host tier, or to load a part. Everything
else is vLLM's own connector.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

import torch
from vllm.config import VllmConfig
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorRole,
)
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.common import (
    OffloadingConnectorMetadata,
)
from vllm.distributed.kv_transfer.kv_connector.v1.offloading_connector import OffloadingConnector
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.kv_cache_interface import KVCacheConfig
from vllm.v1.kv_offload.base import LookupResult
from vllm.v1.outputs import KVConnectorOutput
from vllm.v1.request import Request

from kvdepot.clock import SystemClock
from kvdepot.engines.vllm.extras import (
    AdapterCheck,
    AdapterDigests,
    has_known_images,
    has_steady_keys,
)
from kvdepot.engines.vllm.facts import Engine, WorkerFacts, engine_is, gather_facts
from kvdepot.engines.vllm.missing import GroupChunks, missing_ends
from kvdepot.engines.vllm.partial import partial_chunks
from kvdepot.engines.vllm.room import HostRoom, Turn
from kvdepot.engines.vllm.tier import KvdepotTier

__all__ = ["KvdepotConnector"]

log = logging.getLogger(__name__)

_RESET_WAIT_S = 10.0


class KvdepotConnector(OffloadingConnector):
    """`OffloadingConnector` for tiers that are kvdepot's. Made by vLLM, once per process.

    Raises:
        ConfigError: a tier's setting is wrong.
    """

    def __init__(
        self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig
    ) -> None:
        _use_logging_of_vllm()
        self._engine = Engine(vllm_config, kv_cache_config)
        self._facts: WorkerFacts | None = None
        with engine_is(self._engine):
            super().__init__(vllm_config, role, kv_cache_config)
        self.tiers: list[KvdepotTier] = []
        self._clock = SystemClock()
        self._adapters = AdapterDigests(self._clock)
        self._checks: dict[str, AdapterCheck] = {}
        self._room: HostRoom | None = None
        if self.connector_scheduler is not None:
            tiers = getattr(self.connector_scheduler.manager, "secondary_tiers", [])
            self.tiers = [tier for tier in tiers if isinstance(tier, KvdepotTier)]
            if not self.tiers:
                log.warning("KvdepotConnector without a KvdepotTier among its secondary_tiers")
            else:
                self._room = self._host_room(self.tiers[0])

    # a worker's side

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        """As vLLM's, and a look at how they lie."""
        super().register_kv_caches(kv_caches)
        try:
            self._facts = gather_facts(self._engine, kv_caches)
        except Exception:
            log.exception("this worker's KV cache cannot be described; the pool will stay off")

    def get_handshake_metadata(self) -> KVConnectorHandshakeMetadata | None:
        """What this worker's scheduler must know."""
        return self._facts

    # the scheduler's side

    def set_xfer_handshake_metadata_pp_aware(
        self, metadata: Mapping[tuple[int, int], KVConnectorHandshakeMetadata]
    ) -> None:
        """All workers are there: open the pool."""
        in_order = [found for _, found in sorted(metadata.items(), key=lambda item: item[0])]
        facts = [found for found in in_order if isinstance(found, WorkerFacts)]
        for tier in self.tiers:
            tier.open(facts)

    def on_new_request(self, request: Request) -> None:
        """As vLLM's, after a look at what the request's hashes do not tell."""
        extras: bytes | None = None
        try:
            if has_known_images(request) and has_steady_keys(request):
                extras = b""
            if request.lora_request is not None and extras is not None:
                # until its content is known, nothing of it is looked up or kept
                extras = None
                self._checks[request.request_id] = self._adapters.check(request.lora_request)
        except Exception:
            log.exception("looking at a new request failed; it is not cached")
        for tier in self.tiers:
            tier.request_extras[request.request_id] = extras
            tier.prompt_tokens[request.request_id] = request.num_prompt_tokens
            if extras is None and request.request_id not in self._checks:
                tier.stats.counts["uncacheable_requests_total"] += 1
        super().on_new_request(request)

    def get_num_new_matched_tokens(
        self, request: Request, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        """As vLLM's, as far as the request may load; None to be asked again in the next step."""
        for tier in self.tiers:
            tier.resume()  # asked for by a scheduler that runs: not while weights are exchanged
        limits = [self._max_loadable_tokens(request, num_computed_tokens)]
        if self._is_adapter_pending(request):
            return None, False
        # what vLLM itself does first below is not counted as ours
        self.scheduler._req_status[request.request_id].update_offload_keys()
        began_s = self._clock.monotonic_s()
        try:
            turn, end_token = self._turn(request, num_computed_tokens)
        except Exception:
            log.exception("finding room for a request failed; it goes on without")
            turn, end_token = Turn.NOW, None
        self._note_turn(self._clock.monotonic_s() - began_s)
        if turn is Turn.WAIT:
            return None, False
        if end_token is not None:
            limits.append(max(end_token - num_computed_tokens, 0))
        found, is_async = self.scheduler.get_num_new_matched_tokens(
            request,
            num_computed_tokens,
            max_num_new_tokens=min((n for n in limits if n is not None), default=None),
        )
        if found == 0:
            self._give_room_back(request.request_id)
        return found, is_async

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> KVConnectorMetadata:
        """As vLLM's, and a look at which chunks are stored in part only."""
        meta = super().build_connector_meta(scheduler_output)
        if self.tiers and isinstance(meta, OffloadingConnectorMetadata):
            try:
                self._note_partial(meta)
            except Exception:
                log.exception("looking at stores failed; nothing is kept from now on")
                for tier in self.tiers:
                    tier.resets.note(for_good=True)
        return meta

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        """As vLLM's; what is on the device needs no room in the host tier any more."""
        super().update_connector_output(connector_output)
        for request_id in connector_output.finished_recving or ():
            self._give_room_back(request_id)

    def request_finished(
        self, request: Request, block_ids: list[int]
    ) -> tuple[bool, dict[str, Any] | None]:
        """As vLLM's."""
        self._forget(request.request_id)
        return super().request_finished(request, block_ids)

    def request_finished_all_groups(
        self, request: Request, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        """As vLLM's."""
        self._forget(request.request_id)
        return super().request_finished_all_groups(request, block_ids)

    def reset_cache(self) -> bool | None:
        """As vLLM's; False, and nothing changed, while storage holds rows of the host region."""
        if not all(tier.jobs.quiesce(_RESET_WAIT_S) for tier in self.tiers):
            log.warning("storage hangs: the host tier cannot be reset now")
            return False
        for tier in self.tiers:
            tier.resets.note()
        return super().reset_cache()

    def shutdown(self) -> None:
        """As vLLM's, and a word on the host tier's size if it was too small."""
        advice = self._room.advice() if self._room is not None else ""
        if advice:
            log.warning("%s", advice)
        super().shutdown()

    # below

    def _host_room(self, tier: KvdepotTier) -> HostRoom:
        region = tier.region
        return HostRoom(
            region.length_bytes // region.row_bytes,
            region.row_bytes,
            rows_pinned=lambda: sum(tier.jobs.rows_storing for tier in self.tiers),
            costs=tier.patience,
            clock=self._clock,
        )

    def _is_adapter_pending(self, request: Request) -> bool:
        """Whether to wait for a look at the request's adapter; notes its content once it is known."""
        check = self._checks.get(request.request_id)
        if check is None:
            return False
        if check.is_pending(self._clock.monotonic_s()):
            return True
        del self._checks[request.request_id]
        for tier in self.tiers:
            if check.is_over and check.digest is not None:
                tier.request_extras[request.request_id] = b"lora" + check.digest
            else:
                tier.stats.counts["uncacheable_requests_total"] += 1
        return False

    def _turn(self, request: Request, start_token: int) -> tuple[Turn, int | None]:
        """Whether a request may load now, and up to which token."""
        if self._room is None or request.skip_reading_prefix_cache:
            return Turn.NOW, None
        status = self.scheduler._req_status[request.request_id]
        late = self._first_late(status)
        turn, end_token = self._room.ask(
            request.request_id,
            start_token,
            request.num_tokens,
            lambda: self._missing(status, start_token),
        )
        ends = [end for end in (late, end_token) if end is not None]
        return turn, min(ends, default=None)

    def _note_turn(self, took_s: float) -> None:
        for tier in self.tiers[:1]:
            tier.times.note("turn", took_s)
            if self._room is not None:
                told = tier.stats.counts["host_short_requests_total"]
                short = self._room.short_requests - told
                tier.counters.add("reuse_ended_host_full_total", short)
                tier.stats.counts |= {
                    "host_waits_total": self._room.waits,
                    "host_short_requests_total": self._room.short_requests,
                    "host_short_tokens_total": self._room.short_tokens,
                }

    def _first_late(self, status: Any) -> int | None:
        """Where the first chunk begins that a late load still holds; the rest is computed."""
        late = set().union(*(tier.jobs.late_keys for tier in self.tiers))
        if not late:
            return None
        firsts = [
            next((n * tokens for n, key in enumerate(keys) if key in late), None)
            for tokens, keys in _groups(status)
        ]
        return min((first for first in firsts if first is not None), default=None)

    def _missing(self, status: Any, start_token: int) -> list[int]:
        """Where the chunks end that the request would bring in from a pool."""
        context = status.req_context
        primary = self.scheduler.manager.primary_tier

        def is_absent(key: Any) -> bool:
            return primary.lookup(key, context) is LookupResult.MISS

        def held(keys: Any) -> int:
            return max(tier.held(keys, context) for tier in self.tiers)

        return missing_ends(_groups(status), start_token, is_absent, held)

    def _note_partial(self, meta: OffloadingConnectorMetadata) -> None:
        """Tell the tiers of chunks that vLLM copies in part, as their other blocks are gone already."""
        scheduler = self.scheduler
        for number, transfer in meta.store_jobs.items():
            status = scheduler._req_status[transfer.req_id]
            found = partial_chunks(
                scheduler._jobs[number].keys,
                transfer.src_spec,
                groups=[config.group_idx for config in scheduler.config.kv_group_configs],
                blocks_per_chunk=scheduler.config.blocks_per_chunk,
                position=status.req_context.get_offload_key_position,
            )
            for tier in self.tiers if found else ():
                tier.partial_keys.setdefault(transfer.req_id, set()).update(found)

    def _forget(self, request_id: str) -> None:
        self._checks.pop(request_id, None)
        self._give_room_back(request_id)

    def _give_room_back(self, request_id: str) -> None:
        if self._room is not None:
            self._room.give_back(request_id)


def _groups(status: Any) -> list[GroupChunks]:
    """A request's chunks, as far as they are full."""
    pairs = zip(status.config.kv_group_configs, status.group_states, strict=True)
    return [GroupChunks(config.tokens_per_chunk, state.offload_keys) for config, state in pairs]


def _use_logging_of_vllm() -> None:
    """Have our messages where vLLM's are, unless somebody has arranged for them already."""
    ours = logging.getLogger("kvdepot")
    handlers = [*ours.handlers, *logging.getLogger().handlers]
    if all(isinstance(handler, logging.NullHandler) for handler in handlers):
        for handler in logging.getLogger("vllm").handlers:
            ours.addHandler(handler)
        ours.setLevel(logging.INFO)
        ours.propagate = False
