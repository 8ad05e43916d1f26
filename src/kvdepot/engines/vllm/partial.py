"""Which chunks vLLM copies to the host tier in part only.

Behind a sliding window vLLM frees blocks before the chunk that they belong to is stored, and copies what
is left of it. The rest of such a chunk's row is what was there before. vLLM may know which part of it is
good; a pool that outlives the engine does not, so such chunks are not kept.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

from vllm.v1.kv_offload.base import GPULoadStoreSpec, OffloadKey, get_offload_group_idx

__all__ = ["partial_chunks"]


def partial_chunks(
    keys: Collection[OffloadKey],
    source: GPULoadStoreSpec,
    *,
    groups: Sequence[int],
    blocks_per_chunk: int,
    position: Callable[[OffloadKey], int | None],
) -> set[OffloadKey]:
    """The chunks of one store that are not copied whole.

    Args:
        keys: of the store's chunks.
        source: the blocks to copy: how many of each group, and the number of the first.
        groups: the groups that `source` counts, in its order.
        blocks_per_chunk: blocks of a whole chunk.
        position: by its key, where a chunk ends in the prompt.
    """
    found: set[OffloadKey] = set()
    if blocks_per_chunk == 1:
        return found
    counted = zip(groups, source.group_sizes, source.block_indices, strict=True)
    for group, blocks, first in counted:
        of_group = [key for key in keys if get_offload_group_idx(key) == group]
        missing = len(of_group) * blocks_per_chunk - blocks
        if not missing:
            continue
        if missing == first % blocks_per_chunk:
            # the first chunk begins late; the others are whole
            found.add(min(of_group, key=lambda key: position(key) or 0))
        else:
            found.update(of_group)
    return found
