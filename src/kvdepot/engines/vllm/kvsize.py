"""How many bytes of KV cache a token of a model takes, read off the model's config.json.

Close enough to choose sizes by; what an engine really lays out, it says itself. Pure: no file calls.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

__all__ = ["KvSize", "kv_element_bytes", "kv_size", "longest_request"]

_BYTES_OF = {"float32": 4, "float": 4, "float16": 2, "half": 2, "bfloat16": 2}
#: the kinds of layers, as config.json names them, that keep a state of fixed size and no KV
_STATE_KINDS = ("linear_attention", "mamba", "recurrent", "conv")


class KvSize(NamedTuple):
    """What a model's KV takes. Bytes are over all tensor-parallel ranks together."""

    #: layers that keep KV
    layers: int
    #: layers of one KV-cache group, as vLLM groups them: all, unless the model mixes kinds
    group_layers: int
    #: one token's KV in one layer
    layer_token_bytes: int
    #: there are layers with recurrent state besides
    has_state: bool
    #: there are layers whose attention sees the last tokens only
    has_window: bool
    #: multi-head latent attention: one latent for all heads, alike on all ranks
    is_latent: bool

    @property
    def group_token_bytes(self) -> int:
        """One token in one group: what a block holds of it."""
        return self.group_layers * self.layer_token_bytes

    @property
    def token_bytes(self) -> int:
        """One token in all layers; with sliding windows, an upper bound."""
        return self.layers * self.layer_token_bytes


def kv_size(
    config: Mapping[str, Any], *, element_bytes: int, tensor_parallel: int = 1
) -> KvSize | None:
    """The size of a model's KV.

    Args:
        config: the model's config.json.
        element_bytes: of one number in the KV cache, see `kv_element_bytes`.
        tensor_parallel: over how many ranks the heads are split; fewer heads than ranks are repeated.

    Returns:
        None where the config does not tell.
    """
    text = _text_config(config)
    total = _number(text, "num_hidden_layers", "n_layer", "num_layers")
    heads = _number(text, "num_attention_heads", "n_head")
    hidden = _number(text, "hidden_size", "n_embd", "d_model")
    if not total:
        return None
    kinds = _kinds_of(text, total)
    kv_kinds = {kind: count for kind, count in kinds.items() if not _is_state(kind)}
    layers = sum(kv_kinds.values())
    if not layers:
        return None
    latent = _number(text, "kv_lora_rank")
    if latent:
        layer_token_bytes = (latent + _number(text, "qk_rope_head_dim")) * element_bytes
    else:
        head_dim = _number(text, "head_dim") or (hidden // heads if heads else 0)
        kv_heads = max(_kv_heads(text, heads), tensor_parallel)
        value_dim = _number(text, "v_head_dim") or head_dim
        layer_token_bytes = kv_heads * (head_dim + value_dim) * element_bytes
    if not layer_token_bytes:
        return None
    return KvSize(
        layers=layers,
        group_layers=_group_layers(list(kv_kinds.values())),
        layer_token_bytes=layer_token_bytes,
        has_state=len(kv_kinds) < len(kinds),
        has_window=any(_is_window(kind) for kind in kinds) or _has_window_for_all(text),
        is_latent=bool(latent),
    )


def kv_element_bytes(config: Mapping[str, Any], *, dtype: str, kv_cache_dtype: str) -> int:
    """Bytes of one number in the KV cache.

    Args:
        config: the model's config.json.
        dtype: vLLM's ``--dtype``.
        kv_cache_dtype: vLLM's ``--kv-cache-dtype``; the quantised kinds all count as one byte.
    """
    if kv_cache_dtype != "auto":
        return _BYTES_OF.get(kv_cache_dtype, 1)
    scheme = (config.get("quantization_config") or {}).get("kv_cache_scheme")
    if isinstance(scheme, Mapping) and scheme.get("num_bits") == 8:
        return 1
    if dtype != "auto":
        return _BYTES_OF.get(dtype, 2)
    return 2  # vLLM takes a float32 model's weights as 16 bits unless told otherwise


def longest_request(config: Mapping[str, Any]) -> int:
    """The most tokens that the model takes; 0 where the config does not tell."""
    text = _text_config(config)
    tokens = _number(text, "max_position_embeddings", "n_positions", "max_seq_len", "seq_length")
    scaling = text.get("rope_scaling") or text.get("rope_parameters") or {}
    kind = scaling.get("rope_type") or scaling.get("type")
    factor = scaling.get("factor")
    if kind == "yarn" and isinstance(factor, int | float):
        original = scaling.get("original_max_position_embeddings")
        tokens = int((original if isinstance(original, int) else tokens) * factor)
    return tokens


def _text_config(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The language model's part of a config that describes more than that."""
    for name in ("text_config", "llm_config", "language_config"):
        inner = config.get(name)
        if isinstance(inner, Mapping):
            return inner
    return config


def _number(text: Mapping[str, Any], *names: str) -> int:
    """The first of the names that has a number; 0 if none has."""
    for name in names:
        value = text.get(name)
        if isinstance(value, int) and not isinstance(value, bool) and value > 0:
            return value
    return 0


def _kv_heads(text: Mapping[str, Any], heads: int) -> int:
    if text.get("multi_query"):
        return 1
    return _number(text, "num_key_value_heads", "num_kv_heads", "n_head_kv") or heads


def _is_window(kind: str) -> bool:
    return "sliding" in kind or "chunked" in kind or "local" in kind


def _has_window_for_all(text: Mapping[str, Any]) -> bool:
    """A window that no list of layers says the place of, and that is not switched off."""
    is_placed = bool(text.get("layer_types") or text.get("sliding_window_pattern"))
    is_on = text.get("use_sliding_window", True) is not False
    return bool(_number(text, "sliding_window")) and is_on and not is_placed


def _is_state(kind: str) -> bool:
    return any(mark in kind for mark in _STATE_KINDS)


def _kinds_of(text: Mapping[str, Any], total: int) -> dict[str, int]:
    """How many layers there are of each kind of attention."""
    listed = text.get("layer_types") or text.get("layers_block_type")
    if isinstance(listed, list) and listed:
        return {str(kind): listed.count(kind) for kind in dict.fromkeys(listed)}
    every = _number(text, "sliding_window_pattern", "full_attention_interval")
    if 1 < every <= total:
        full = total // every
        other = "sliding_attention" if "sliding_window_pattern" in text else "linear_attention"
        return {"full_attention": full, other: total - full}
    return {"full_attention": total}


def _group_layers(counts: list[int]) -> int:
    """Layers of one group: the rarest kind's, so that all groups' blocks are of one size.

    Where no kind is much rarer than another, vLLM pads the rarer ones instead.
    """
    least, most = min(counts), max(counts)
    return most if most < least * 1.5 else least
