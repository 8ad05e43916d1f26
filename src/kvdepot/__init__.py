"""kvdepot: the KV cache that an LLM engine evicts, kept on disk and read back by any instance.

The names below are the public API. They are imported when first asked for, so that `import kvdepot`
costs nothing and never imports torch.
"""

from __future__ import annotations

import logging
from importlib import import_module
from typing import Any

__version__ = "0.1.0"

# a library is silent until its user sets logging up
logging.getLogger(__name__).addHandler(logging.NullHandler())

_HOMES = {
    "BlockKey": "kvdepot.keys",
    "CacheGroup": "kvdepot.identity",
    "Depot": "kvdepot.depot",
    "Identity": "kvdepot.identity",
    "Image": "kvdepot.keys",
    "Job": "kvdepot.tiers",
    "KvdepotError": "kvdepot.errors",
    "Outcome": "kvdepot.tiers",
    "PoolConfig": "kvdepot.config",
    "PoolTier": "kvdepot.pool.tier",
    "PoolUrl": "kvdepot.urls",
    "Read": "kvdepot.tiers",
    "RequestExtras": "kvdepot.keys",
    "Tier": "kvdepot.tiers",
    "Write": "kvdepot.tiers",
    "aligned_bytes": "kvdepot.io.buffers",
    "block_keys": "kvdepot.keys",
    "root_key": "kvdepot.keys",
}

__all__ = ["__version__", *sorted(_HOMES)]  # noqa: PLE0604 - the values are strings


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(_HOMES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOMES})
