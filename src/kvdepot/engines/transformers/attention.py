"""Attention for grouped queries that reads each key and value head where it lies.

The stock ``sdpa`` function of transformers copies every key and value head once per query head as
soon as a mask is needed, which is always so when a few new tokens follow a long cached prefix. For 24
tokens over 4,096 that is 75 MB of copies a layer. Here the KV heads become the batch axis and the
query heads of a group share their KV head by a stride of zero: the same kernel on the same numbers,
so the results are equal bit for bit, without the copies. The mask is made additive once per forward
pass and not once per layer.

Whatever is not plain causal attention of one sequence goes to the stock function.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

__all__ = ["ATTENTION_NAME", "additive_mask", "attend", "use_shared_heads"]

#: the name under which transformers knows it, and which goes into the identity
ATTENTION_NAME = "kvdepot_sdpa"

#: arguments by which models ask for more than plain attention
_SPECIAL = ("softcap", "position_bias", "output_attentions", "s_aux")


def attend(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """The attention function of one layer.

    Args:
        module: the model's attention module.
        query: ``[1, heads, query_tokens, head_dim]``.
        key: ``[1, kv_heads, tokens, head_dim]``; any strides with a dense last axis.
        value: as `key`.
        attention_mask: ``[1, 1, query_tokens, tokens]``, or None for plain causal attention.
        dropout: probability; anything but 0 goes to the stock function.
        scaling: factor of the scores; None for ``head_dim ** -0.5``.
        is_causal: overrides what the module says.
        **kwargs: what else the model passes on.

    Returns:
        ``[1, query_tokens, heads, head_dim]``, and None for the weights.
    """
    batch, heads, tokens, _ = query.shape
    kv_heads = key.shape[1]
    is_plain = batch == 1 and not dropout
    is_plain = is_plain and all(_is_off(kwargs.get(name)) for name in _SPECIAL)
    # one query token is served well by the stock function, and so are models without groups
    if not is_plain or tokens == 1 or heads == kv_heads:
        return sdpa_attention_forward(
            module,
            query,
            key,
            value,
            attention_mask,
            dropout=dropout,
            scaling=scaling,
            is_causal=is_causal,
            **kwargs,
        )
    group = heads // kv_heads
    module_is_causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    out = torch.nn.functional.scaled_dot_product_attention(
        query[0].unflatten(0, (kv_heads, group)),
        key[0].unsqueeze(1).expand(-1, group, -1, -1),
        value[0].unsqueeze(1).expand(-1, group, -1, -1),
        attn_mask=attention_mask,
        is_causal=attention_mask is None and module_is_causal,
        scale=scaling,
    )
    return out.flatten(0, 1).unsqueeze(0).transpose(1, 2).contiguous(), None


def _is_off(value: Any) -> bool:
    # by identity: a tensor has no truth value
    return value is None or value is False


def additive_mask(
    *args: Any,
    batch_size: int,
    attention_mask: torch.Tensor | None = None,
    dtype: torch.dtype = torch.float32,
    **kwargs: Any,
) -> torch.Tensor | None:
    """The mask of one forward pass, made by transformers, as numbers to add to the scores.

    With padding a row may be masked altogether, which only the boolean form can say.
    """
    mask = sdpa_mask(*args, batch_size=batch_size, attention_mask=attention_mask, **kwargs)
    if mask is None or mask.dtype != torch.bool or batch_size != 1 or attention_mask is not None:
        return mask
    return torch.zeros(mask.shape, dtype=dtype).masked_fill_(~mask, float("-inf"))


def use_shared_heads(model: Any) -> str:
    """Let a model use `attend` where it can; return the name of the attention that it then uses."""
    can_set = getattr(model, "_can_set_attn_implementation", lambda: False)
    if model.config._attn_implementation == "sdpa" and can_set():
        AttentionInterface.register(ATTENTION_NAME, attend)
        AttentionMaskInterface.register(ATTENTION_NAME, additive_mask)
        model.set_attn_implementation(ATTENTION_NAME)
    return str(model.config._attn_implementation)
