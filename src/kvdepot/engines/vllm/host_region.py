"""vLLM's host region as the pool sees it: rows, and the memory that a child process can map too."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable
from typing import Any

from kvdepot.engines.vllm.settings import TierSettings
from kvdepot.errors import ConfigError
from kvdepot.identity import Identity
from kvdepot.io.buffers import HostBuffer
from kvdepot.metrics import Counters
from kvdepot.pool.tier import PoolTier
from kvdepot.pool.worker import WorkerTier
from kvdepot.tiers import Tier
from kvdepot.units import format_bytes

__all__ = ["HostRegion"]

log = logging.getLogger(__name__)


class HostRegion:
    """The rows that vLLM's tiers move bytes to and from.

    Where the region has a file descriptor it is mapped once more, so that rows stay valid for a read
    that a hung mount holds, whatever vLLM does at its end.

    Args:
        spec: vLLM's, which holds the region.
        view: the region as vLLM gives it: (chunk, byte).
    """

    def __init__(self, spec: Any, view: memoryview) -> None:
        assert view.strides is not None
        self.row_bytes: int = view.strides[0]
        self.length_bytes = view.nbytes
        self._buffer: HostBuffer | None = None
        region = getattr(spec, "_scheduler_mmap", None)
        descriptor = getattr(region, "fd", None)
        if descriptor is not None and self.length_bytes:
            self._buffer = HostBuffer.of_fd(os.dup(descriptor), self.length_bytes)
            self._memory = self._buffer.memory
        else:
            self._memory = view.cast("B")

    @property
    def is_shared(self) -> bool:
        """A child process can map it."""
        return self._buffer is not None

    def rows(self, chunk_ids: Iterable[int]) -> list[memoryview]:
        """The rows of chunks; each is page-aligned and holds a chunk of all ranks."""
        memory, length = self._memory, self.row_bytes
        return [memory[n * length : (n + 1) * length] for n in map(int, chunk_ids)]

    def open_pool(self, settings: TierSettings, identity: Identity, counters: Counters) -> Tier:
        """Open the pool with its I/O where the settings want it. Blocks on file calls.

        Raises:
            ConfigError: a process is wanted, and the region cannot be shared with one.
            KvdepotError: as `PoolTier.open` and `WorkerTier.open`.
        """
        is_threaded = settings.io == "threads" or (settings.io == "auto" and self._buffer is None)
        pool: Tier
        if is_threaded:
            pool = PoolTier.open(settings.pool, identity, counters=counters)
        elif self._buffer is None:
            raise ConfigError(
                "io is process, but vLLM's host region cannot be shared with one",
                hint="set io to threads",
            )
        else:
            pool = WorkerTier.open(settings.pool, identity, [self._buffer], counters=counters)
        log.info(
            "pool open: %s; capacity %s; rows of %s (%d tokens); %s; namespace %s",
            ", ".join(settings.pool.urls),
            format_bytes(pool.usage().capacity_bytes),
            format_bytes(self.row_bytes),
            identity.block_tokens,
            "I/O in threads" if is_threaded else "I/O in a process of its own",
            identity.digest().hex()[:16],
        )
        if self.row_bytes > pool.limits.block_bytes_max:
            log.warning(
                "rows of %s do not fit into segments, which take %s at most: nothing will be stored "
                "(hint: raise segment_bytes, or make the chunks smaller)",
                format_bytes(self.row_bytes),
                format_bytes(pool.limits.block_bytes_max),
            )
        return pool

    def close(self, *, is_in_use: bool) -> None:
        """Unmap it. What a read still holds goes with the process."""
        if self._buffer is not None and not is_in_use:
            self._buffer.close()
