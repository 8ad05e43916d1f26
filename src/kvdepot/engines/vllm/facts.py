"""What only a worker process knows of its KV cache: the kernels that fill it and how it really lies.

The connector's worker side gathers it and vLLM carries it to the scheduler's process, once, at start.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorHandshakeMetadata

__all__ = ["Engine", "WorkerFacts", "current_engine", "engine_is", "gather_facts"]


class Engine(NamedTuple):
    """vLLM's settings and its cache's, as its connector gets them."""

    vllm_config: Any
    kv_cache_config: Any


_engine: ContextVar[Engine | None] = ContextVar("kvdepot_vllm_engine", default=None)


@contextlib.contextmanager
def engine_is(engine: Engine) -> Iterator[None]:
    """Tiers that vLLM makes inside of this learn whose they are."""
    token = _engine.set(engine)
    try:
        yield
    finally:
        _engine.reset(token)


def current_engine() -> Engine | None:
    """The engine whose tiers are being made; None under another connector than ours."""
    return _engine.get()


@dataclass(frozen=True)
class WorkerFacts(KVConnectorHandshakeMetadata):
    """One worker's; sent as vLLM sends its own."""

    #: attention backends of the layers
    attention: tuple[str, ...]
    #: how the layers' caches lie in memory, without their number of blocks
    layout: tuple[str, ...]
    #: kind of device, such as ``cpu`` or ``cuda``
    device: str
    #: names of its layers; pipeline stages have different ones
    layers: tuple[str, ...]


def gather_facts(engine: Engine, kv_caches: Mapping[str, Any]) -> WorkerFacts:
    """Look at the caches that vLLM registers. In a worker process."""
    layers = engine.vllm_config.compilation_config.static_forward_context
    blocks = engine.kv_cache_config.num_blocks
    attention = {layers[name].get_attn_backend().get_name() for name in kv_caches}
    layout = {
        _lies(tensor, blocks)
        for cache in kv_caches.values()
        for tensor in (cache if isinstance(cache, list | tuple) else [cache])
    }
    tensor = next(iter(kv_caches.values()))
    tensor = tensor[0] if isinstance(tensor, list | tuple) else tensor
    return WorkerFacts(
        attention=tuple(sorted(attention)),
        layout=tuple(sorted(layout)),
        device=tensor.device.type,
        layers=tuple(sorted(kv_caches)),
    )


def _lies(tensor: torch.Tensor, blocks: int) -> str:
    """A tensor's type, the lengths of its axes but the first, and the axes from the outermost in."""
    lengths = [tensor.shape[0] // blocks if blocks else 0, *tensor.shape[1:]]
    order = sorted(range(tensor.ndim), key=lambda axis: (-tensor.stride(axis), axis))
    kind = str(tensor.dtype).removeprefix("torch.")
    return f"{kind} {'x'.join(map(str, lengths))} by {''.join(map(str, order))}"
