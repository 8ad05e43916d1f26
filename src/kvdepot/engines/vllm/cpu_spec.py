"""The tiering spec for vLLM's CPU build: the same scheduler, manager and tiers, another copy worker.

Named by ``spec_name`` and ``spec_module_path`` in ``kv_connector_extra_config``.
"""

from __future__ import annotations

from vllm.v1.kv_offload.base import CanonicalKVCaches, OffloadingManager
from vllm.v1.kv_offload.config import OffloadingConfig
from vllm.v1.kv_offload.cpu.shared_offload_region import SharedOffloadRegion
from vllm.v1.kv_offload.tiering.spec import TieringOffloadingSpec

from kvdepot.engines.vllm.cpu_worker import CpuCopyWorker
from kvdepot.errors import ConfigError
from kvdepot.io.host import unlink_shared_memory
from kvdepot.io.hugepages import gather_pages_behind

__all__ = ["CpuTieringSpec"]


class CpuTieringSpec(TieringOffloadingSpec):
    """vLLM's tiering spec with copies in memory instead of copies to and from a GPU.

    Raises:
        ConfigError: the canonical layout is asked for, which vLLM's CPU build does not need.
    """

    def __init__(self, config: OffloadingConfig) -> None:
        if config.canonical_layout:
            raise ConfigError(
                "canonical_layout is not supported on vLLM's CPU build",
                hint="remove canonical_layout from kv_connector_extra_config",
            )
        super().__init__(config)
        self._copier: CpuCopyWorker | None = None

    def get_manager(self) -> OffloadingManager:
        """The manager of this engine's tiers, in the scheduler's process."""
        is_new = self._manager is None
        manager = super().get_manager()
        region = self._scheduler_mmap
        if is_new and region is not None and region.fd is not None:
            # on a GPU the region is pinned, and stays as it is
            gather_pages_behind(region.fd, region.total_size_bytes)
            # vLLM makes the scheduler after its workers, so all who share the region have mapped it:
            # without a name it goes with the last of them, however they end
            unlink_shared_memory(region.mmap_path)
        return manager

    def get_worker(self, kv_caches: CanonicalKVCaches) -> CpuCopyWorker:
        """The copy worker of this rank."""
        if self._copier is None:
            self._copier = self.create_worker(kv_caches)
        return self._copier

    def create_worker(self, kv_caches: CanonicalKVCaches) -> CpuCopyWorker:
        """Map the host region with this rank's place in each chunk, and copy there."""
        region = SharedOffloadRegion(
            engine_id=self._engine_id,
            num_chunks=self.num_chunks,
            rank=0 if self.replicated_layout else self.config.parallel.rank,
            kv_bytes_per_chunk=self.kv_bytes_per_chunk,
            cpu_page_size=self.cpu_page_size_per_worker,
        )
        # whoever comes last removes the name, see `get_manager`
        region._creator = False
        try:
            return CpuCopyWorker(kv_caches, self.blocks_per_chunk, region)
        except Exception:
            region.cleanup()
            raise
