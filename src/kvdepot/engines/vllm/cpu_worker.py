"""Copies between vLLM's paged cache and the host region, where both are plain memory.

vLLM's own copy worker is made for GPUs: streams, events and DMA descriptors. On its CPU build the same
job is a memory copy. The copies run on the caller's thread: a forward pass keeps all cores busy, so a
thread beside it would win nothing, and what is copied cannot change meanwhile.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from vllm.v1.kv_offload.base import (
    BlockIDsLoadStoreSpec,
    CanonicalKVCaches,
    GPULoadStoreSpec,
    LoadStoreSpec,
    OffloadingWorker,
    TransferResult,
)
from vllm.v1.kv_offload.cpu.shared_offload_region import SharedOffloadRegion

from kvdepot.clock import Clock, SystemClock

__all__ = ["CopyRun", "CpuCopyWorker", "copy_runs"]

log = logging.getLogger(__name__)

_Bytes = npt.NDArray[np.uint8]


class CopyRun(NamedTuple):
    """Neighbouring blocks of the paged cache and neighbouring places of them in the host region."""

    first_block: int
    chunk: int
    #: place of the first block inside its chunk
    place: int
    blocks: int


def copy_runs(
    block_ids: Sequence[int], chunk_ids: Sequence[int], *, blocks_per_chunk: int, skipped: int
) -> Iterator[CopyRun]:
    """Pair the blocks of one group with their places in its chunks, in runs as long as possible.

    Args:
        block_ids: blocks of the paged cache, in the order of the prompt.
        chunk_ids: chunks of the host region that hold them.
        blocks_per_chunk: places in a chunk; a run does not leave its chunk, except where chunks have
            one place each.
        skipped: places of the first chunk that come before the first block.
    """
    start = 0
    while start < len(block_ids):
        chunk_index, place = divmod(skipped + start, blocks_per_chunk)
        most = len(block_ids) - start
        if blocks_per_chunk > 1:
            most = min(most, blocks_per_chunk - place)
        blocks = 1
        while (
            blocks < most
            and block_ids[start + blocks] == block_ids[start] + blocks
            and (
                blocks_per_chunk > 1
                or chunk_ids[chunk_index + blocks] == chunk_ids[chunk_index] + blocks
            )
        ):
            blocks += 1
        yield CopyRun(block_ids[start], chunk_ids[chunk_index], place, blocks)
        start += blocks


class CpuCopyWorker(OffloadingWorker):
    """vLLM's `OffloadingWorker` by memory copies. One for each worker process of an engine.

    Args:
        kv_caches: the paged cache, as vLLM hands it over.
        blocks_per_chunk: blocks of the paged cache in one chunk of the host region.
        region: the host region with this rank's place in each chunk; released by `shutdown`.
    """

    def __init__(
        self,
        kv_caches: CanonicalKVCaches,
        blocks_per_chunk: int,
        region: SharedOffloadRegion,
        *,
        clock: Clock | None = None,
    ) -> None:
        self._clock = clock or SystemClock()
        self._region: SharedOffloadRegion | None = region
        self._blocks_per_chunk = blocks_per_chunk
        self._finished: list[TransferResult] = []
        #: per tensor: (block, byte), and (chunk, place, byte)
        self._paged: list[_Bytes] = []
        self._hosted: list[_Bytes] = []
        for cache in kv_caches.tensors:
            page_bytes = cache.page_size_bytes
            paged = cache.tensor.view(torch.int8).view((-1, page_bytes))
            hosted = region.create_next_worker_view(page_bytes * blocks_per_chunk)
            self._paged.append(paged.numpy().view(np.uint8))
            places = hosted.view((-1, blocks_per_chunk, page_bytes))
            self._hosted.append(places.numpy().view(np.uint8))
        #: per group: (tensor, bytes of a block without padding)
        self._groups = [
            [(ref.tensor_idx, ref.page_size_bytes) for ref in refs]
            for refs in kv_caches.group_data_refs
        ]

    def submit_store(
        self, job_id: int, src_spec: GPULoadStoreSpec, dst_spec: LoadStoreSpec
    ) -> bool:
        """Copy from the paged cache into the host region, now."""
        self._copy(job_id, src_spec, dst_spec, is_store=True)
        return True

    def submit_load(self, job_id: int, src_spec: LoadStoreSpec, dst_spec: GPULoadStoreSpec) -> bool:
        """Copy from the host region into the paged cache, now."""
        self._copy(job_id, dst_spec, src_spec, is_store=False)
        return True

    def get_finished(self) -> list[TransferResult]:
        """What was copied since the last call."""
        finished, self._finished = self._finished, []
        return finished

    def wait(self, job_ids: set[int]) -> None:
        """Nothing to wait for: a job is done when it has been submitted."""

    def shutdown(self) -> None:
        """Let go of the memory. Idempotent."""
        self._paged.clear()
        self._hosted.clear()
        region, self._region = self._region, None
        if region is not None:
            region.cleanup()

    # below

    def _copy(
        self, job_id: int, paged: GPULoadStoreSpec, hosted: LoadStoreSpec, *, is_store: bool
    ) -> None:
        assert isinstance(hosted, BlockIDsLoadStoreSpec)
        began_s = self._clock.monotonic_s()
        block_ids: list[int] = paged.block_ids.tolist()
        chunk_ids: list[int] = hosted.block_ids.tolist()
        moved = first_block = first_chunk = 0
        places = zip(paged.group_sizes, paged.block_indices, self._groups, strict=True)
        for count, first_index, tensors in places:
            if not count:
                continue
            skipped = first_index % self._blocks_per_chunk
            chunks = -(-(skipped + count) // self._blocks_per_chunk)
            runs = list(
                copy_runs(
                    block_ids[first_block : first_block + count],
                    chunk_ids[first_chunk : first_chunk + chunks],
                    blocks_per_chunk=self._blocks_per_chunk,
                    skipped=skipped,
                )
            )
            for tensor, length in tensors:
                self._copy_tensor(tensor, length, runs, is_store=is_store)
                moved += count * length
            first_block += count
            first_chunk += chunks
        assert first_block == len(block_ids)
        assert first_chunk == len(chunk_ids)
        took_s = self._clock.monotonic_s() - began_s
        self._finished.append(
            TransferResult(job_id, success=True, transfer_size=moved, transfer_time=took_s)
        )

    def _copy_tensor(
        self, tensor: int, length: int, runs: Sequence[CopyRun], *, is_store: bool
    ) -> None:
        paged = self._paged[tensor]
        hosted = self._hosted[tensor]
        for first_block, chunk, place, blocks in runs:
            in_pages = paged[first_block : first_block + blocks, :length]
            in_host: Any = (
                hosted[chunk, place : place + blocks, :length]
                if self._blocks_per_chunk > 1
                else hosted[chunk : chunk + blocks, 0, :length]
            )
            if is_store:
                in_host[...] = in_pages
            else:
                in_pages[...] = in_host
