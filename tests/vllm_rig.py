"""vLLM's own managers with our tier, without an engine: a test plays the scheduler and the GPU."""

from __future__ import annotations

import hashlib
import time
import uuid
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.kv_offload.base import (
    LookupResult,
    OffloadingKVEventsConfig,
    OffloadKey,
    ReqContext,
    ScheduleEndContext,
    make_offload_key,
)
from vllm.v1.kv_offload.config import (
    OffloadingCacheConfig,
    OffloadingConfig,
    OffloadingGroupConfig,
    OffloadingModelConfig,
    OffloadingParallelConfig,
)
from vllm.v1.kv_offload.cpu.shared_offload_region import SharedOffloadRegion
from vllm.v1.kv_offload.tiering.manager import (
    CPUPrimaryTierOffloadingManager,
    TieringOffloadingManager,
)

from kvdepot.engines.vllm.facts import Engine, engine_is
from kvdepot.engines.vllm.tier import KvdepotTier
from kvdepot.identity import Identity
from kvdepot.io.localdisk import LocalDisk
from kvdepot.pool.tier import PoolTier
from kvdepot.testing.faults import FaultDisk, FaultPlan
from tests.identities import GROUP, IDENTITY, replaced

ROW_BYTES = 8192
CHUNK_TOKENS = 32
SETTINGS: dict[str, Any] = {
    "capacity_bytes": 64 << 20,
    "free_bytes_min": 0,
    "free_inodes_min": 0,
    "segment_bytes": 1 << 20,
    "segment_age_s": 0.1,
    "discover_interval_s": 0.1,
    "lease_s": 1.0,
    "read_threads": 2,
    "write_threads": 1,
    "io": "threads",
    "load_deadline_s": 60.0,
    "close_s": 5.0,
}


def offloading_config(**changes: Any) -> OffloadingConfig:
    parallel = OffloadingParallelConfig(
        rank=0,
        world_size=1,
        tp_size=1,
        pp_size=1,
        pcp_size=1,
        dcp_size=1,
        data_parallel_index=0,
        data_parallel_size=1,
        data_parallel_rank_local=None,
        is_parallelism_agnostic=False,
    )
    fields: dict[str, Any] = {
        "groups": (OffloadingGroupConfig(16, ("model.layers.0", "model.layers.1"), 0),),
        "worker_kv_bytes_per_block": ROW_BYTES // 2,
        "enable_kv_cache_events": False,
        "extra_config": {},
        "engine_id": "rig",
        "model": OffloadingModelConfig("toy", "float32"),
        "cache": OffloadingCacheConfig(tokens_per_hash=16, blocks_per_chunk=2),
        "parallel": parallel,
        "kv_cache_layout": "LBHNC",
    }
    return OffloadingConfig(**{**fields, **changes})


def cache_config() -> KVCacheConfig:
    spec = FullAttentionSpec(block_size=16, num_kv_heads=2, head_size=16, dtype=torch.float32)
    return KVCacheConfig(10, [], [KVCacheGroupSpec(["model.layers.0", "model.layers.1"], spec)])


def row_identity(**changes: Any) -> Identity:
    identity = replaced(IDENTITY, "groups", (replaced(GROUP, "block_bytes", ROW_BYTES),))
    for name, value in changes.items():
        identity = replaced(identity, name, value)
    return identity


class RigTier(KvdepotTier):
    """Its identity is given, and its pool is on disks that a test may break."""

    rig: TierRig

    def _find_identity(self, facts):
        del facts
        return self.rig.identity

    def _open_pool(self, identity):
        if self.rig.plan is None:
            return super()._open_pool(identity)
        disk = FaultDisk(LocalDisk(self.rig.folder), self.rig.plan)
        self._digest = identity.digest()
        return PoolTier.open(self.settings.pool, identity, disks=[disk], counters=self.counters)


class Ask:
    """One request: its keys, and the bytes that belong into its chunks."""

    def __init__(self, prompt: str, chunks: int, *, request: str | None = None) -> None:
        self.context = ReqContext(req_id=request or uuid.uuid4().hex)
        self.keys: list[OffloadKey] = []
        parent = hashlib.sha256(prompt.encode()).digest()
        for number in range(chunks):
            parent = hashlib.sha256(parent + number.to_bytes(4, "little")).digest()
            key = make_offload_key(parent, 0)
            self.keys.append(key)
            self.context.set_offload_key_position(key, (number + 1) * CHUNK_TOKENS)


def payload(key: OffloadKey) -> bytes:
    return hashlib.shake_128(b"row" + key).digest(ROW_BYTES)


class TierRig:
    """A host region, vLLM's two managers, and the tier under test."""

    def __init__(
        self,
        folder: Path,
        *,
        rows: int = 32,
        identity: Identity | None = None,
        plan: FaultPlan | None = None,
        has_engine: bool = True,
        events: bool = False,
        **settings: Any,
    ) -> None:
        self.folder = folder
        self.plan = plan
        self.identity = identity or row_identity()
        self.region = SharedOffloadRegion(
            engine_id=f"kvdepot-test-{uuid.uuid4().hex}",
            num_chunks=rows,
            rank=None,
            kv_bytes_per_chunk=ROW_BYTES,
            cpu_page_size=ROW_BYTES,
        )
        primary = CPUPrimaryTierOffloadingManager(num_chunks=rows, mmap_region=self.region)
        spec: Any = SimpleNamespace(
            config=offloading_config(),
            blocks_per_chunk=2,
            kv_events_config=OffloadingKVEventsConfig(events, False),
            _scheduler_mmap=self.region,
        )
        engine = Engine(SimpleNamespace(), cache_config()) if has_engine else None
        with engine_is(engine):  # type: ignore[arg-type]
            self.tier = RigTier(
                spec,
                primary.get_kv_memoryview(),
                "KvdepotTier",
                **{"urls": [f"file://{folder}"], **SETTINGS, **settings},
            )
        self.tier.rig = self
        self.tier.open([])
        self.primary = primary
        self.manager = TieringOffloadingManager(primary, [self.tier])

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.manager.shutdown()

    # the scheduler

    def step(self) -> None:
        self.manager.on_schedule_end(ScheduleEndContext((), ()))

    def begin(self, ask: Ask) -> None:
        self.manager.on_new_request(ask.context)

    def end(self, ask: Ask) -> None:
        self.manager.on_request_finished(ask.context)

    def hits(self, ask: Ask) -> int | None:
        """As vLLM's scheduler asks: hits from the first on, or None while some are on their way."""
        count = 0
        is_waiting = False
        for key in ask.keys:
            result = self.manager.lookup(key, ask.context)
            assert result is not LookupResult.RETRY
            if result is LookupResult.MISS:
                break
            is_waiting |= result is LookupResult.HIT_PENDING
            count += 1
        self.step()
        return None if is_waiting else count

    def wait_hits(self, ask: Ask, timeout_s: float = 60.0) -> int:
        give_up_s = time.monotonic() + timeout_s
        while (count := self.hits(ask)) is None:
            assert time.monotonic() < give_up_s, "the lookup never ended"
            time.sleep(0.005)
        return count

    def wait_idle(self, timeout_s: float = 60.0) -> None:
        give_up_s = time.monotonic() + timeout_s
        while self.manager._jobs:
            assert time.monotonic() < give_up_s, "a job never ended"
            self.step()
            time.sleep(0.005)

    # the GPU

    def store(self, ask: Ask, *, keys: list[OffloadKey] | None = None) -> list[OffloadKey]:
        """What a forward pass and the copies behind it do; the keys that were stored."""
        output = self.manager.prepare_store(keys or ask.keys, ask.context)
        assert output is not None
        view = self.primary.get_kv_memoryview()
        flat = view.cast("B")
        for key, chunk in zip(output.keys_to_store, output.store_spec.chunk_ids, strict=True):
            flat[chunk * ROW_BYTES : (chunk + 1) * ROW_BYTES] = payload(key)
        if output.keys_to_store:
            self.manager.complete_store(set(output.keys_to_store), ask.context)
        return output.keys_to_store

    def put(self, ask: Ask) -> None:
        """Store a whole request and wait until it is visible."""
        self.begin(ask)
        self.store(ask)
        self.end(ask)
        self.wait_idle()
        assert self.tier.pool is None or self.tier.pool.drain(60)

    def take(self, ask: Ask) -> int:
        """Ask for a request; its hits, each of which has the right bytes."""
        self.begin(ask)
        count = self.wait_hits(ask)
        self.check(ask, count)
        self.end(ask)
        return count

    def check(self, ask: Ask, count: int) -> None:
        flat = self.primary.get_kv_memoryview().cast("B")
        keys = ask.keys[:count]
        spec = self.manager.prepare_load(keys, ask.context)
        for key, chunk in zip(keys, spec.chunk_ids, strict=True):
            row = bytes(flat[chunk * ROW_BYTES : (chunk + 1) * ROW_BYTES])
            assert row == payload(key), "a row holds other bytes than were stored"
        self.manager.complete_load(keys, ask.context)

    def forget_host(self) -> None:
        """An empty host tier, as after a restart."""
        self.manager.reset_cache()
