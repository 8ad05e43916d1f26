"""Blocks of this engine: their geometry, how they are cut out of the KV memory and pasted back.

A block is the KV of ``block_tokens`` tokens over the layers of one group, laid out as
``[layers, 2, kv_heads, block_tokens, head_dim]``. The layers are split into a few groups so that the
forward pass over the new tokens can begin when the first group is there.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import NamedTuple, Protocol

import torch

from kvdepot.engines.transformers.memory import KvMemory, KvShape
from kvdepot.errors import ConfigError
from kvdepot.identity import CacheGroup
from kvdepot.io.buffers import ALIGNMENT
from kvdepot.units import KIB, format_bytes

__all__ = [
    "KV_LAYOUT",
    "BlockPlan",
    "BlockRuns",
    "PrefixLoad",
    "PrefixTooShort",
    "cutter",
    "plan_blocks",
]

KV_LAYOUT = "layer,kv,head,token,dim"

#: A group's block should have at least this size on average. Neighbouring blocks are read in one call
#: however small they are, so it is index entries that set the bound, at about 1 % of the time to load;
#: each halving of a block saves a quarter of one on what is computed again before every question.
_GROUP_BLOCK_BYTES = 96 * KIB
_BLOCK_TOKENS_MIN = 8
_BLOCK_TOKENS_MAX = 64
#: more groups let the forward pass start earlier; each costs an index entry and a checksum a block
_GROUPS = 3


class BlockPlan(NamedTuple):
    """The geometry that an engine uses, and why."""

    block_tokens: int
    groups: tuple[CacheGroup, ...]
    reason: str


def plan_blocks(
    shape: KvShape, *, block_tokens: int | None = None, group_count: int | None = None
) -> BlockPlan:
    """Choose the tokens of a block and the groups of layers, or take what is given.

    Raises:
        ConfigError: a given number is out of range.
    """
    if block_tokens is not None and block_tokens < 1:
        raise ConfigError(f"block_tokens must be positive, not {block_tokens}")
    count = min(_GROUPS, shape.layers) if group_count is None else group_count
    if not 1 <= count <= shape.layers:
        raise ConfigError(f"group_count must be 1 to {shape.layers} (layers), not {count}")
    chosen = block_tokens or _block_tokens(shape, count)
    bounds = _layer_bounds(shape.layers, count)
    groups = tuple(
        _group(shape, range(start, stop), chosen) for start, stop in itertools.pairwise(bounds)
    )
    return BlockPlan(chosen, groups, _reason(shape, chosen, groups, is_given=bool(block_tokens)))


def _block_tokens(shape: KvShape, group_count: int) -> int:
    """The power of two whose group block is the first that reaches the size aimed at."""
    tokens = _BLOCK_TOKENS_MIN
    while (
        tokens < _BLOCK_TOKENS_MAX and shape.token_bytes * tokens < _GROUP_BLOCK_BYTES * group_count
    ):
        tokens *= 2
    return tokens


def _layer_bounds(layers: int, group_count: int) -> list[int]:
    """Where the groups begin, and where the last one ends.

    The first group is the smallest, because the forward pass waits for it with nothing to do; the
    later ones load while it computes. With three groups they are as 3 : 5 : 7.
    """
    weights = [group_count + 2 * index for index in range(group_count)]
    bounds = [round(layers * sum(weights[:index]) / sum(weights)) for index in range(group_count)]
    # every group has a layer
    inner = [
        min(max(bound, index), layers - (group_count - index)) for index, bound in enumerate(bounds)
    ]
    return [*inner, layers]


def _group(shape: KvShape, layers: range, block_tokens: int) -> CacheGroup:
    return CacheGroup(
        name=f"layers {layers.start}-{layers.stop - 1}",
        kind="full",
        layers=tuple(layers),
        kv_heads=shape.kv_heads,
        key_dim=shape.head_dim,
        value_dim=shape.head_dim,
        block_bytes=shape._replace(layers=len(layers)).token_bytes * block_tokens,
    )


def _reason(
    shape: KvShape, block_tokens: int, groups: tuple[CacheGroup, ...], *, is_given: bool
) -> str:
    sizes = ", ".join(format_bytes(group.block_bytes) for group in groups)
    aligned = all(group.block_bytes % ALIGNMENT == 0 for group in groups)
    return (
        f"{block_tokens} tokens{' (as asked)' if is_given else ''}: "
        f"{format_bytes(shape.token_bytes)} of KV a token makes blocks of {sizes} in the "
        f"{len(groups)} groups of layers, "
        f"{'whole pages, so that reads land where they belong' if aligned else 'padded to pages'}; "
        f"on average {block_tokens // 2} tokens before the question are computed again"
    )


def cutter(
    memory: KvMemory, groups: tuple[CacheGroup, ...], block_tokens: int
) -> Callable[[int, int, memoryview], None]:
    """The callback that `Depot.store` calls to have a block cut out of the memory into a row."""

    def cut(group_index: int, block_index: int, row: memoryview) -> None:
        layers = groups[group_index].layers
        start = block_index * block_tokens
        source = memory.tensor[layers[0] : layers[-1] + 1, :, :, start : start + block_tokens]
        torch.frombuffer(row, dtype=memory.shape.dtype).view(source.shape).copy_(source)

    return cut


class PrefixTooShort(Exception):
    """Fewer blocks came than the forward pass was begun with; it must be done again.

    Internal to the engine: no caller sees it.
    """

    def __init__(self, good_blocks: int) -> None:
        super().__init__(f"{good_blocks} good blocks")
        self.good_blocks = good_blocks


class BlockRuns(Protocol):
    """What is needed of a `kvdepot.depot.Restore`."""

    #: blocks asked for
    blocks: int

    def runs(self, group_index: int) -> Iterator[tuple[int, int, memoryview]]:
        """The good leading blocks of a group: (first block, blocks, their rows), in order."""


class PrefixLoad:
    """Pastes a restore's blocks into the memory, group by group, as the forward pass gets there.

    Used as the gate of a `PreallocCache`. A group is pasted when its first layer is reached, while the
    later groups still load. When a group turns out shorter than expected, the rest is pasted as far as
    it is good, and `PrefixTooShort` says how much of the prefix is in memory for all layers.

    Args:
        restore: not yet read from; released by the caller.
        memory: has room for all blocks.
        groups: of the identity.
        block_tokens: tokens in a block.
    """

    def __init__(
        self,
        restore: BlockRuns,
        memory: KvMemory,
        groups: tuple[CacheGroup, ...],
        block_tokens: int,
    ) -> None:
        self._restore = restore
        self._memory = memory
        self._groups = groups
        self._block_tokens = block_tokens
        self._group_at = {group.layers[0]: index for index, group in enumerate(groups)}
        self._pasted = 0

    def __call__(self, layer_index: int) -> None:
        """Wait for the group that begins with this layer, if one does.

        Raises:
            PrefixTooShort: not all blocks of the prefix can be had.
        """
        index = self._group_at.get(layer_index)
        if index is None or index < self._pasted:
            return
        good = self._paste(index)
        self._pasted = index + 1
        if good < self._restore.blocks:
            raise PrefixTooShort(self._paste_the_rest(good))

    def _paste_the_rest(self, good: int) -> int:
        for index in range(self._pasted, len(self._groups)):
            good = min(good, self._paste(index))
        self._pasted = len(self._groups)
        return good

    def _paste(self, group_index: int) -> int:
        """Copy one group's good leading blocks into the memory; how many there were."""
        group = self._groups[group_index]
        shape = self._memory.shape
        tokens = self._block_tokens
        block = (len(group.layers), 2, shape.kv_heads, tokens, shape.head_dim)
        numbers = group.block_bytes // shape.dtype.itemsize
        target = self._memory.tensor[group.layers[0] : group.layers[-1] + 1]
        good = 0
        for first, count, rows in self._restore.runs(group_index):
            source = (
                torch.frombuffer(rows, dtype=shape.dtype)
                .view(count, -1)[:, :numbers]
                .unflatten(1, block)
            )
            # [blocks, layers, 2, heads, tokens, dim] beside the memory's [layers, 2, heads, ...]
            target[:, :, :, first * tokens : (first + count) * tokens].unflatten(
                3, (count, tokens)
            ).copy_(source.permute(1, 2, 3, 0, 4, 5))
            good = first + count
        return good
