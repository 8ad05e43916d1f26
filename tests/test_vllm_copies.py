"""The CPU build's copies: every block lands at its place, whatever the sizes and the order."""

from __future__ import annotations

import pytest

import tests.needs_vllm  # noqa: F401  # isort: skip

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st
from vllm.v1.kv_offload.base import (
    CanonicalKVCacheRef,
    CanonicalKVCaches,
    CanonicalKVCacheTensor,
    GPULoadStoreSpec,
)
from vllm.v1.kv_offload.cpu.common import CPULoadStoreSpec

from kvdepot.engines.vllm.cpu_worker import CpuCopyWorker, copy_runs

pytestmark = pytest.mark.vllm

BLOCKS = 24
CHUNKS = 10


@given(st.data())
def test_runs_cover_each_block_once_and_never_leave_their_chunk(data):
    per_chunk = data.draw(st.integers(1, 4))
    skipped = data.draw(st.integers(0, per_chunk - 1))
    count = data.draw(st.integers(1, 12))
    blocks = data.draw(st.permutations(range(BLOCKS)))[:count]
    if data.draw(st.booleans()):
        blocks.sort()
    chunks = data.draw(st.permutations(range(CHUNKS + 3)))[: -(-(skipped + count) // per_chunk)]
    found = []
    for first, chunk, place, length in copy_runs(
        blocks, chunks, blocks_per_chunk=per_chunk, skipped=skipped
    ):
        for step in range(length):
            at = (chunk, place + step) if per_chunk > 1 else (chunk + step, 0)
            assert at[1] < per_chunk
            found.append((first + step, *at))
    places = [divmod(skipped + index, per_chunk) for index in range(count)]
    wanted = [(block, chunks[c], p) for block, (c, p) in zip(blocks, places, strict=True)]
    assert found == wanted


class Region:
    """As much of vLLM's region as the worker uses, with a rank's place in the middle of each row."""

    def __init__(self, row_bytes):
        self.rows = torch.zeros((CHUNKS, row_bytes + 64), dtype=torch.int8)
        self.next = 32
        self.is_open = True

    def create_next_worker_view(self, length):
        self.next += length
        return self.rows[:, self.next - length : self.next]

    def cleanup(self):
        self.is_open = False


@given(st.integers(1, 3), st.integers(1, 2), st.randoms(use_true_random=False))
def test_what_is_stored_is_loaded_into_other_blocks(per_chunk, groups, random):
    pages = [48, 80, 64]
    tensors = [
        torch.from_numpy(
            np.random.default_rng(i).integers(-128, 128, (BLOCKS, page)).astype(np.int8)
        )
        for i, page in enumerate(pages)
    ]
    refs = [[CanonicalKVCacheRef(0, 48), CanonicalKVCacheRef(1, 72)], [CanonicalKVCacheRef(2, 64)]]
    region = Region(sum(pages) * per_chunk)
    worker = CpuCopyWorker(
        CanonicalKVCaches(
            [CanonicalKVCacheTensor(t, p) for t, p in zip(tensors, pages, strict=True)],
            refs[:groups],
        ),
        per_chunk,
        region,
    )
    sizes = [random.randint(1, 5) for _ in range(groups)]
    starts = [random.randint(0, 5) for _ in range(groups)]
    chunks_of = [
        -(-(start % per_chunk + size) // per_chunk)
        for start, size in zip(starts, sizes, strict=True)
    ]
    ids = random.sample(range(BLOCKS), 2 * sum(sizes))
    chunks = random.sample(range(CHUNKS), sum(chunks_of))
    source, target = ids[: sum(sizes)], ids[sum(sizes) :]
    before = [tensor.clone() for tensor in tensors]
    worker.submit_store(1, GPULoadStoreSpec(source, sizes, starts), CPULoadStoreSpec(chunks))
    assert all(torch.equal(*pair) for pair in zip(tensors, before, strict=True))
    worker.submit_load(2, CPULoadStoreSpec(chunks), GPULoadStoreSpec(target, sizes, starts))
    first = 0
    for group, size in enumerate(sizes):
        for ref in refs[group]:
            tensor, length = tensors[ref.tensor_idx], ref.page_size_bytes
            for index in range(first, first + size):
                old, new = source[index], target[index]
                assert torch.equal(tensor[new, :length], before[ref.tensor_idx][old, :length])
                # padding is nobody's: it is not copied
                assert torch.equal(tensor[new, length:], before[ref.tensor_idx][new, length:])
        first += size
    done = worker.get_finished()
    assert [(result.job_id, result.success) for result in done] == [(1, True), (2, True)]
    assert done[0].transfer_size == done[1].transfer_size
    assert worker.get_finished() == []
    worker.wait({1, 2})
    assert torch.equal(region.rows[:, :32], torch.zeros((CHUNKS, 32), dtype=torch.int8))
    worker.shutdown()
    worker.shutdown()
    assert not region.is_open
