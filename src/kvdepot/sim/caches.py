"""Caches of the simulated world: blocks by id, least recently used out first, suffix before prefix."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

__all__ = ["LruBlocks", "SeenIds"]

#: ids up to here are marked in an array, a byte each; larger ones in a set
_DENSE_MAX = 1 << 28


class LruBlocks:
    """At most so many blocks; 0 holds nothing."""

    def __init__(self, capacity: int) -> None:
        self.capacity = max(capacity, 0)
        self.evicted = 0
        self._blocks: OrderedDict[int, None] = OrderedDict()

    def __contains__(self, block_id: int) -> bool:
        return block_id in self._blocks

    def __len__(self) -> int:
        return len(self._blocks)

    @property
    def ids(self) -> OrderedDict[int, None]:
        """For quick membership tests; not to be changed."""
        return self._blocks

    def use(self, block_ids: Sequence[int]) -> int:
        """Put blocks of one prompt in, or mark them as used; how many were new."""
        blocks = self._blocks
        before = len(blocks)
        # the last block first, so that a prefix is always younger than what continues it
        for block_id in reversed(block_ids):
            blocks[block_id] = None
            blocks.move_to_end(block_id)
        added = len(blocks) - before
        while len(blocks) > self.capacity:
            blocks.popitem(last=False)
            self.evicted += 1
        return added

    def mark(self, block_ids: Sequence[int]) -> None:
        """Mark those that are there as used; put none in."""
        blocks = self._blocks
        for block_id in reversed(block_ids):
            if block_id in blocks:
                blocks.move_to_end(block_id)


class SeenIds:
    """What an endless cache would hold."""

    def __init__(self) -> None:
        self._dense = bytearray(1 << 16)
        self._sparse: set[int] = set()

    def leading(self, block_ids: Sequence[int]) -> int:
        """How many, from the first on, were seen."""
        dense, size = self._dense, len(self._dense)
        for index, block_id in enumerate(block_ids):
            is_seen = dense[block_id] if block_id < size else block_id in self._sparse
            if not is_seen:
                return index
        return len(block_ids)

    def add(self, block_ids: Sequence[int]) -> None:
        """They have been seen."""
        if not block_ids:
            return
        largest = max(block_ids)
        if largest >= _DENSE_MAX:
            self._sparse.update(each for each in block_ids if each >= len(self._dense))
        elif largest >= len(self._dense):
            self._dense.extend(bytes(largest * 5 // 4 - len(self._dense) + 1))
        dense, size = self._dense, len(self._dense)
        for block_id in block_ids:
            if block_id < size:
                dense[block_id] = 1
