"""Chunks that vLLM stores in part, found in its own description of a store."""

from __future__ import annotations

import pytest

import tests.needs_vllm  # noqa: F401  # isort: skip

from vllm.v1.kv_offload.base import GPULoadStoreSpec, make_offload_key

from kvdepot.engines.vllm.partial import partial_chunks

pytestmark = pytest.mark.vllm


def keys_of(group, count):
    return [make_offload_key(bytes([number]) * 32, group) for number in range(count)]


@pytest.mark.parametrize(
    ("blocks", "first", "per_chunk", "partial"),
    [
        (12, 8, 4, []),
        (10, 10, 4, [0]),  # the window begins inside of the first chunk
        (11, 8, 4, [0, 1, 2]),  # a hole, nobody says where
        (10, 9, 4, [0, 1, 2]),  # a late beginning and a hole
        (3, 8, 1, []),
    ],
)
def test_chunks_with_blocks_missing_are_found(blocks, first, per_chunk, partial):
    full, window = keys_of(0, 2), keys_of(1, 3)
    places = {key: number * 64 for number, key in enumerate(window, 1)}
    source = GPULoadStoreSpec(
        list(range(1, 1 + 2 * per_chunk + blocks)),
        group_sizes=[2 * per_chunk, blocks],
        block_indices=[0, first],
    )
    found = partial_chunks(
        {*reversed(window), *full},
        source,
        groups=[0, 1],
        blocks_per_chunk=per_chunk,
        position=places.get,
    )
    assert found == {window[number] for number in partial}
