"""The identity of what this engine stores: every field resolved, nothing left to a default."""

from __future__ import annotations

from typing import Any

import torch
import transformers

from kvdepot.engines.transformers.blocks import KV_LAYOUT, BlockPlan
from kvdepot.engines.transformers.memory import KvShape
from kvdepot.identity import Identity

__all__ = ["ADAPTER_VERSION", "dtype_name", "identity_of"]

#: raised when the cutting or the layout of blocks changes
ADAPTER_VERSION = 1


def dtype_name(dtype: torch.dtype) -> str:
    """``bfloat16`` for ``torch.bfloat16``."""
    return str(dtype).removeprefix("torch.")


def identity_of(
    model: Any,
    shape: KvShape,
    plan: BlockPlan,
    *,
    model_name: str,
    weights_fingerprint: str,
    attention: str,
) -> Identity:
    """The identity of a loaded model.

    Args:
        model: loaded, on the CPU.
        shape: as its cache really is.
        plan: of the blocks.
        model_name: what its users call it.
        weights_fingerprint: of its files.
        attention: the implementation it runs with.
    """
    return Identity(
        model_name=model_name,
        weights_fingerprint=weights_fingerprint,
        model_dtype=dtype_name(model.dtype),
        kv_dtype=dtype_name(shape.dtype),
        kv_layout=KV_LAYOUT,
        groups=plan.groups,
        block_tokens=plan.block_tokens,
        attention=attention,
        engine="transformers",
        # kernels are torch's, so its version is part of what computed the bytes
        engine_version=f"transformers {transformers.__version__}, torch {torch.__version__}",
        adapter_version=ADAPTER_VERSION,
    )
