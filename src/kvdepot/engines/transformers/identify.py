"""The identity of what this engine stores: every field resolved, nothing left to a default."""

from __future__ import annotations

import hashlib
from typing import Any

import torch
import transformers

from kvdepot.engines.transformers.blocks import KV_LAYOUT, BlockPlan
from kvdepot.engines.transformers.memory import KvShape
from kvdepot.identity import UNDETERMINED, Identity

__all__ = ["ADAPTER_VERSION", "dtype_name", "identity_of", "loaded_fingerprint"]

#: raised when the cutting or the layout of blocks changes
ADAPTER_VERSION = 1
_WINDOW = 256


def dtype_name(dtype: torch.dtype) -> str:
    """``bfloat16`` for ``torch.bfloat16``."""
    return str(dtype).removeprefix("torch.")


def loaded_fingerprint(model: Any, files_fingerprint: str) -> str:
    """The fingerprint of a model as it is in memory, with that of its files.

    Folders are replaced while they are read, and adapters are merged after loading; so both ends and
    the middle of every parameter that was really loaded take part. Undetermined files stay so.
    """
    if files_fingerprint == UNDETERMINED:
        return UNDETERMINED
    total = hashlib.sha256(b"kvdepot loaded weights v1\n" + files_fingerprint.encode())
    for name, parameter in sorted(model.state_dict().items()):
        flat = parameter.detach().reshape(-1)
        middle = max(flat.numel() // 2 - _WINDOW // 2, 0)
        total.update(f"{name} {parameter.dtype} {tuple(parameter.shape)}\n".encode())
        for start in (0, middle, max(flat.numel() - _WINDOW, 0)):
            window = flat[start : start + _WINDOW].contiguous().view(torch.uint8)
            total.update(window.numpy().tobytes())
    return total.hexdigest()


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
