"""vLLM's offloading connector, with what a tier must know besides: the engine's settings and its workers.

Named by ``kv_connector`` and ``kv_connector_module_path``. Everything else is vLLM's own connector.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping

import torch
from vllm.config import VllmConfig
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorHandshakeMetadata,
    KVConnectorRole,
)
from vllm.distributed.kv_transfer.kv_connector.v1.offloading_connector import OffloadingConnector
from vllm.v1.kv_cache_interface import KVCacheConfig

from kvdepot.engines.vllm.facts import Engine, WorkerFacts, engine_is, gather_facts
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
        if self.connector_scheduler is not None:
            tiers = getattr(self.connector_scheduler.manager, "secondary_tiers", [])
            self.tiers = [tier for tier in tiers if isinstance(tier, KvdepotTier)]
            if not self.tiers:
                log.warning("KvdepotConnector without a KvdepotTier among its secondary_tiers")

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
        facts = [found for found in metadata.values() if isinstance(found, WorkerFacts)]
        for tier in self.tiers:
            tier.open(facts)

    def reset_cache(self) -> bool | None:
        """As vLLM's; False, and nothing changed, while storage holds rows of the host region."""
        if not all(tier.jobs.quiesce(_RESET_WAIT_S) for tier in self.tiers):
            log.warning("storage hangs: the host tier cannot be reset now")
            return False
        return super().reset_cache()


def _use_logging_of_vllm() -> None:
    """Have our messages where vLLM's are, unless somebody has arranged for them already."""
    ours = logging.getLogger("kvdepot")
    handlers = [*ours.handlers, *logging.getLogger().handlers]
    if all(isinstance(handler, logging.NullHandler) for handler in handlers):
        for handler in logging.getLogger("vllm").handlers:
            ours.addHandler(handler)
        ours.setLevel(logging.INFO)
        ours.propagate = False
