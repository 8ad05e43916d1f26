"""The KV of one request: one run of memory over all layers, and the cache that transformers sees.

`KvMemory` is ``[layers, 2, kv_heads, capacity_tokens, head_dim]``. A block, which is a run of tokens
over a run of layers, is one strided view of it, so that cutting and pasting are one copy each.
`PreallocCache` is a `DynamicCache` whose layers append in place, where the stock layers build a new
tensor of the whole sequence for every token.

Used by one engine thread. Nothing here knows about tiers; a *gate* is called before a layer's KV is
first read, and that is where restored KV arrives.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from transformers.cache_utils import DynamicCache, DynamicLayer

from kvdepot.io.buffers import HostBuffer

__all__ = ["Gate", "KvMemory", "KvShape", "PreallocCache", "PreallocLayer"]

#: called with a layer's index before the layer's KV is used in a forward pass; may raise to end it
Gate = Callable[[int], None]


class KvShape(NamedTuple):
    """What one token's KV looks like; the same for all layers."""

    layers: int
    kv_heads: int
    head_dim: int
    dtype: torch.dtype

    @property
    def token_bytes(self) -> int:
        """Bytes of K and V of one token over all layers."""
        return self.layers * 2 * self.kv_heads * self.head_dim * self.dtype.itemsize


class KvMemory:
    """K and V of all layers, in one tensor that lasts over requests.

    Huge pages are asked for and every page is touched when it is made: attention reads all of it for
    every token, and a request must not pay for page faults.

    Args:
        shape: of one token's KV.
        capacity_tokens: room at the start; `reserve` makes more.
    """

    def __init__(self, shape: KvShape, capacity_tokens: int) -> None:
        self.shape = shape
        self.tensor = self._allocate(capacity_tokens)

    @property
    def capacity_tokens(self) -> int:
        """Tokens that fit without new memory."""
        return int(self.tensor.shape[3])

    def reserve(self, tokens: int, *, keep_tokens: int = 0) -> None:
        """Make room for `tokens`; the first `keep_tokens` of every layer stay.

        Grows to at least twice the size, so that appending token by token copies little.
        """
        if tokens <= self.capacity_tokens:
            return
        larger = self._allocate(max(tokens, 2 * self.capacity_tokens))
        larger[:, :, :, :keep_tokens] = self.tensor[:, :, :, :keep_tokens]
        self.tensor = larger

    def _allocate(self, capacity_tokens: int) -> torch.Tensor:
        shape = self.shape
        count = max(capacity_tokens, 1)
        buffer = HostBuffer(count * shape.token_bytes)
        flat = torch.frombuffer(
            buffer.memory,
            dtype=shape.dtype,
            count=count * shape.token_bytes // shape.dtype.itemsize,
        )
        return flat.zero_().view(shape.layers, 2, shape.kv_heads, count, shape.head_dim)


class PreallocLayer(DynamicLayer):
    """One layer's window on a `KvMemory`, for a batch of one sequence."""

    def __init__(self, cache: PreallocCache, index: int) -> None:
        super().__init__()
        self._cache = cache
        self._index = index
        self._length = 0
        self.dtype = cache.memory.shape.dtype
        self.device = torch.device("cpu")
        self.is_initialized = True
        self.set_length(0)

    def set_length(self, tokens: int) -> None:
        """Say how many leading tokens of the memory are this layer's KV."""
        self._length = tokens
        layer = self._cache.memory.tensor[self._index]
        self.keys = layer[0, :, :tokens].unsqueeze(0)
        self.values = layer[1, :, :tokens].unsqueeze(0)

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *_args: Any, **_kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Append new tokens in place and return all keys and values, as views."""
        self._cache.pass_gate(self._index)
        memory = self._cache.memory
        start = self._length
        stop = start + key_states.shape[-2]
        memory.reserve(stop, keep_tokens=start)
        layer = memory.tensor[self._index]
        layer[0, :, start:stop] = key_states[0]
        layer[1, :, start:stop] = value_states[0]
        self.set_length(stop)
        return self.keys, self.values

    def get_seq_length(self) -> int:
        """Tokens in the layer, those still on their way from a tier included."""
        return self._length

    def reset(self) -> None:
        """Forget all tokens; the memory stays."""
        self.set_length(0)

    def crop(self, tokens_to_remove: int) -> None:
        """Forget the last tokens; the count is given as a negative number, as transformers does."""
        self.set_length(self._length - abs(tokens_to_remove))

    def _refuse(self, *_args: Any, **_kwargs: Any) -> None:
        raise NotImplementedError("this cache holds one sequence; there is no batch to rearrange")

    reorder_cache = batch_repeat_interleave = batch_select_indices = _refuse


class PreallocCache(DynamicCache):
    """The cache object that a model's forward pass is given.

    Args:
        memory: where the KV lies; must not be used by another cache at the same time.
    """

    def __init__(self, memory: KvMemory) -> None:
        super().__init__()
        self.memory = memory
        self._gate: Gate | None = None
        self.layers = [PreallocLayer(self, index) for index in range(memory.shape.layers)]

    def begin(self, prefix_tokens: int, gate: Gate | None = None) -> None:
        """Start a request whose first `prefix_tokens` are, or will be behind the gate, in memory."""
        self._gate = gate
        for layer in self.layers:
            layer.set_length(prefix_tokens)

    def end_gate(self) -> None:
        """All layers are past the gate; what follows is appended to KV that is in memory."""
        self._gate = None

    def pass_gate(self, layer_index: int) -> None:
        """Called by a layer before its KV is used."""
        if self._gate is not None:
            self._gate(layer_index)
