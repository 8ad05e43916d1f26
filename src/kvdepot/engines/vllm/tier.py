"""The pool as a secondary tier of vLLM's offloading: memory is asked, bytes move behind the scheduler.

Named by ``type`` and ``module_path`` in ``secondary_tiers``. vLLM calls all methods on its scheduler's
thread; none of them makes a file call or waits, except `drain_jobs` and `shutdown`, which must.

Whatever goes wrong here becomes a miss or a failed job and a counter, never an exception in vLLM.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable, Sequence
from typing import Any, ClassVar

import vllm
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.metrics import (
    OffloadingConnectorStats,
)
from vllm.v1.kv_offload.base import (
    Locality,
    LookupResult,
    Medium,
    OffloadingEvent,
    OffloadingMetricMetadata,
    OffloadingSpec,
    OffloadKey,
    ReqContext,
    RequestOffloadingContext,
    ScheduleEndContext,
    get_offload_group_idx,
)
from vllm.v1.kv_offload.tiering.base import JobResult, SecondaryTierManager, TransferJob

from kvdepot.clock import SystemClock, TimeLeft
from kvdepot.engines.vllm.admit import StoreAdmission
from kvdepot.engines.vllm.blocks import RequestBlocks
from kvdepot.engines.vllm.calls import CallTimes, fenced, timed
from kvdepot.engines.vllm.events import StoredEvents
from kvdepot.engines.vllm.facts import WorkerFacts, current_engine
from kvdepot.engines.vllm.host_region import HostRegion
from kvdepot.engines.vllm.identify import check_supported, files_of, group_kinds, identity_of
from kvdepot.engines.vllm.jobs import Ended, TierJobs
from kvdepot.engines.vllm.moving import Moving
from kvdepot.engines.vllm.opening import PoolOpening
from kvdepot.engines.vllm.patience import Patience, Wait
from kvdepot.engines.vllm.resets import Resets
from kvdepot.engines.vllm.settings import parse_settings
from kvdepot.engines.vllm.stats import TierStats, metric_definitions
from kvdepot.engines.vllm.versions import check_interface
from kvdepot.errors import IdentityUnknown
from kvdepot.identity import Identity
from kvdepot.metrics import Counters
from kvdepot.tiers import Tier

__all__ = ["KvdepotTier"]

log = logging.getLogger(__name__)

_DRAIN_LOG_S = 10.0
#: what closing a pool with nothing on its way needs
_CLOSE_S = 0.1


class KvdepotTier(SecondaryTierManager):
    """vLLM's secondary tier over a pool. Made by vLLM.

    Args:
        offloading_spec: vLLM's.
        primary_kv_view: the host region, a row for each chunk.
        tier_type: what vLLM calls it.
        backpressure_detector: vLLM's own back-pressure, if it is configured.
        **settings: see `kvdepot.engines.vllm.settings`.

    Raises:
        ConfigError: a setting is wrong.
    """

    medium: ClassVar[Medium | None] = Medium.STORAGE

    def __init__(
        self,
        offloading_spec: OffloadingSpec,
        primary_kv_view: memoryview,
        tier_type: str,
        backpressure_detector: Any = None,
        **settings: Any,
    ) -> None:
        super().__init__(offloading_spec, primary_kv_view, tier_type, backpressure_detector)
        self._clock = SystemClock()
        self.times = CallTimes(self._clock)
        self.counters = Counters()
        self.region = HostRegion(offloading_spec, primary_kv_view)
        self.settings = parse_settings(
            settings, region_bytes=self.region.length_bytes, row_bytes=self.region.row_bytes
        )
        self.locality = Locality(self.settings.locality) if self.settings.locality else None
        self.engine = current_engine()
        self.stats = TierStats(self.counters, self.times, self._clock, tier_type)
        self._generation = 0
        self._events = StoredEvents(
            offloading_spec.kv_events_config,
            is_wanted=self.settings.enable_kv_events,
            locality=self.locality,
            owner=tier_type,
        )
        #: what a request's connector knows of it, by its id: extras of its keys, or None
        self.request_extras: dict[str, bytes | None] = {}
        #: how long its prompt is
        self.prompt_tokens: dict[str, int] = {}
        #: chunks of its that vLLM copied in part: what else is in their rows is somebody else's
        self.partial_keys: dict[str, set[OffloadKey]] = {}
        # with adapters, a request that nobody has looked at may use any of them
        adapters = self.engine and getattr(self.engine.vllm_config, "lora_config", None)
        self._extras_unknown = None if adapters is not None else b""
        self._digest = b""
        config = offloading_spec.config
        tokens = {
            group.group_id: group.tokens_per_block * config.cache.blocks_per_chunk
            for group in config.groups
        }
        self._kinds = group_kinds(self.engine, config) if self.engine is not None else {}
        #: groups whose chunks are asked for from the first on; of a window, the last ones are
        self._chained = frozenset(n for n, kind in self._kinds.items() if kind == "full")
        self.patience = Patience(
            self.deadline_s,
            admission=self.settings.admission,
            counters=self.counters,
            clock=self._clock,
        )
        admission = StoreAdmission(
            self.patience.policies.admission,
            tokens,
            self._chained,
            row_bytes=self.region.row_bytes,
            counters=self.counters,
            clock=self._clock,
        )
        self.jobs = TierJobs(self.region, tokens, self._chained, admission, self._clock)
        self._opening: PoolOpening | None = None
        self._files: object = None
        self.resets = Resets(self._is_same, self._refuse)
        if self.engine is None:
            log.error(
                "the pool is not used: vLLM's own OffloadingConnector does not say which model it "
                "serves (hint: set kv_connector to KvdepotConnector and kv_connector_module_path to "
                "kvdepot.engines.vllm.connector)"
            )

    # making it ready

    def open(self, facts: Sequence[WorkerFacts]) -> None:
        """Find the identity and open the pool, in the background after `open_wait_s`.

        Raises:
            ConfigError: a setting is wrong.
        """
        if self.engine is None or self._opening is not None:
            return
        refusal = check_interface(vllm.__version__)
        if refusal:
            log.error("the pool is not used: %s", refusal)
            return
        self._opening = PoolOpening(lambda: self._find_identity(facts), self._open_pool)
        self._opening.start(self.settings.open_wait_s)

    @property
    def pool(self) -> Tier | None:
        """The open pool."""
        if self._opening is None or self.resets.is_open:
            return None
        return self._opening.pool

    def _find_identity(self, facts: Sequence[WorkerFacts]) -> Identity:
        engine = self.engine
        assert engine is not None
        config = self._offloading_spec.config
        check_supported(engine, self._kinds)
        self._files = files_of(engine.vllm_config)
        identity = identity_of(engine, config, row_bytes=self.region.row_bytes, facts=facts)
        if identity.undetermined:
            raise IdentityUnknown(
                f"identity unknown, sharing off: {', '.join(identity.undetermined)} not determined"
            )
        return identity

    def _open_pool(self, identity: Identity) -> Tier:
        pool = self.region.open_pool(self.settings, identity, self.counters)
        self._digest = identity.digest()
        return pool

    def resume(self) -> None:
        """vLLM takes requests on, so weights are in place: after a reset, look at the model's files."""
        if self._opening is not None and self._opening.pool is not None:
            self.resets.look()

    def _is_same(self) -> bool:
        return self.engine is not None and files_of(self.engine.vllm_config) == self._files

    def _refuse(self, reason: str) -> None:
        assert self._opening is not None
        self._opening.refuse(reason, self.settings.close_s)

    # what vLLM calls

    @timed
    @fenced(RequestOffloadingContext)
    def on_new_request(self, req_context: ReqContext) -> RequestOffloadingContext:  # noqa: ARG002
        """Chunks are stored as they are computed."""
        return RequestOffloadingContext()

    @timed
    @fenced(lambda: LookupResult.MISS)
    def lookup(self, key: OffloadKey, req_context: ReqContext) -> LookupResult:
        """HIT or MISS, from memory."""
        pool = self.pool
        if pool is None:
            return LookupResult.MISS
        blocks = self._blocks(req_context)
        if not blocks.is_cacheable or blocks.is_given_up:
            return LookupResult.MISS
        is_held = blocks.holds(
            key,
            req_context,
            pool.lookup,
            generation=self._generation,
            is_chained=get_offload_group_idx(key) in self._chained,
        )
        if key not in blocks.counted:  # vLLM asks again in each step that a request waits
            blocks.counted.add(key)
            self.counters.add("lookup_blocks_total")
            if is_held:
                self.counters.add("lookup_hit_blocks_total")
            if blocks.is_first(key):
                self.patience.looked_up(req_context.req_id, is_hit=is_held)
        # asked last: only whoever has something to load can find out that storage is well again
        may_load = is_held and self.patience.may_load(req_context.req_id)
        return LookupResult.HIT if may_load else LookupResult.MISS

    @fenced(lambda: 0)
    def held(self, keys: Sequence[OffloadKey], req_context: ReqContext) -> int:
        """About how many chunks of one group, from the first on, `lookup` would find."""
        pool, blocks = self.pool, self._blocks(req_context)
        if pool is None or not blocks.is_cacheable or blocks.is_given_up:
            return 0
        if not keys:
            return 0
        is_chained = get_offload_group_idx(keys[0]) in self._chained
        found = blocks.prefix(keys, pool.lookup, is_chained=is_chained)
        return found if found and self.patience.may_load(req_context.req_id) else 0

    @timed
    def submit_load(self, job_metadata: TransferJob) -> None:
        """Begin to read chunks into their rows: the first ones at once, the others in a moment."""
        blocks, pool = self._blocks(job_metadata.req_context), self.pool
        try:
            if pool is not None and blocks.is_cacheable and self._load(pool, job_metadata, blocks):
                return
        except Exception:
            log.exception("a load of %d chunks failed", len(job_metadata.keys))
            self.times.failed("submit_load")
        self.jobs.refuse(job_metadata, blocks)

    @timed
    def submit_store(self, job_metadata: TransferJob) -> None:
        """Have chunks written from their rows, behind the engine."""
        blocks, pool = self._blocks(job_metadata.req_context), self.pool
        try:
            if not blocks.is_cacheable:
                self.jobs.refuse(job_metadata, is_failure=False)
                return
            if pool is not None:
                request = job_metadata.req_context.req_id
                self.patience.computed(request, self.jobs.tokens(job_metadata.keys))
                self.jobs.store(
                    pool,
                    job_metadata,
                    blocks,
                    prompt_tokens=self.prompt_tokens.get(request, 0),
                    partial=self.partial_keys.get(request, ()),
                )
                return
        except Exception:
            log.exception("a store of %d chunks failed", len(job_metadata.keys))
            self.times.failed("submit_store")
        self.jobs.refuse(job_metadata)

    @timed
    def get_finished_jobs(self) -> Iterable[JobResult]:
        """Jobs whose rows are free again."""
        ended = self.jobs.ended()
        self._learn(ended)
        for job in ended:
            self._events.stored(job.stored)
            if job.broken:
                self.times.failed(job.broken)
        return [job.result for job in ended]

    @timed
    @fenced(lambda: None)
    def touch(self, keys: Collection[OffloadKey], req_context: ReqContext) -> None:
        """Chunks were used, for the order of eviction."""
        pool = self.pool
        blocks = self._blocks(req_context)
        if pool is not None and blocks.is_cacheable:
            self.jobs.touch(pool, keys, blocks)

    @timed
    @fenced(lambda: None)
    def on_request_finished(self, req_context: ReqContext) -> None:
        """What was noted of a request goes with it."""
        self.request_extras.pop(req_context.req_id, None)
        self.partial_keys.pop(req_context.req_id, None)
        self.prompt_tokens.pop(req_context.req_id, None)
        self.patience.finished(req_context.req_id)

    @timed
    @fenced(lambda: None)
    def on_schedule_end(self, context: ScheduleEndContext) -> None:
        """Answers are kept for one step."""
        self._generation += 1
        self.patience.scheduled(context.new_req_ids)

    def take_events(self) -> Iterable[OffloadingEvent]:
        """Chunks stored since the last call, if events are wanted."""
        return self._events.take()

    def drain_jobs(self) -> None:
        """Wait until no byte of the host region is in use by a job; each job's result is there then.

        What was not begun is given up. Waits for as long as the storage holds a row: to return sooner
        would give that row to others.
        """
        self.jobs.cancel()
        while not self.jobs.quiesce(_DRAIN_LOG_S):
            log.warning("storage does not let go of %d jobs; still waiting", len(self.jobs))

    def shutdown(self) -> None:
        """Publish what was stored and let go of the host region, within `close_s` and a little."""
        time_left = TimeLeft(self.settings.close_s)
        self.jobs.close(time_left())
        if self._opening is not None:
            self._opening.close(time_left(at_least_s=_CLOSE_S))
        self.region.close(is_in_use=not self.jobs.quiesce(0.0))

    @classmethod
    def build_metric_definitions(
        cls,
        extra_config: dict[str, Any],  # noqa: ARG003
    ) -> dict[str, OffloadingMetricMetadata]:
        """The metrics of `kvdepot.engines.vllm.stats`."""
        return metric_definitions()

    @timed
    @fenced(lambda: None)
    def get_stats(self) -> OffloadingConnectorStats | None:
        """What has changed in them."""
        if not self.stats.is_due:
            return None
        self.stats.counts |= self.resets.counts
        self.stats.is_write_only = self.patience.is_write_only()
        return self.stats.take(self.pool, len(self.jobs), len(self.jobs.late_keys))

    # below

    def _blocks(self, context: ReqContext) -> RequestBlocks:
        blocks = context.get_state(RequestBlocks)
        if blocks is None:
            extras = self.request_extras.get(context.req_id, self._extras_unknown)
            blocks = RequestBlocks(self._digest, extras)
            if self.pool is not None:  # before, there is no digest to make keys with
                context.set_state(blocks)
        return blocks

    def deadline_s(self, length_bytes: int) -> float:
        """How long so many bytes may take to load before the request computes instead."""
        moved_s = length_bytes / self.settings.load_bytes_per_s_min
        return self.settings.load_deadline_s + moved_s

    @fenced(lambda: None)
    def _learn(self, ended: Sequence[Ended]) -> None:
        self.patience.collect(self.pool)
        self.patience.stored(sum(job.stored_bytes for job in ended))

    def _load(self, pool: Tier, transfer: TransferJob, blocks: RequestBlocks) -> bool:
        """Begin a load if it is worth it; False when the request is to compute."""
        chunks = len(transfer.keys)
        size = chunks * self.region.row_bytes
        tokens = self.jobs.tokens(transfer.keys)
        wait = self.patience.wait_for(transfer.req_context.req_id, chunks, tokens, size)
        if wait.deadline_s is None:
            return False
        job = self.jobs.load(pool, transfer, blocks, wait.deadline_s, patience_s=wait.patience_s)
        self._began(job, size, wait)
        return True

    @fenced(lambda: None)
    def _began(self, job: Moving, size: int, wait: Wait) -> None:
        # a failure here must not refuse a load that has begun: it would end twice
        self.patience.began(job, size, wait)
