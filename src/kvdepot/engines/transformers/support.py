"""Which models this engine can cut, decided twice: from the config, and from what a model really does.

Reuse of a prefix is right only where a token's KV depends on the tokens up to it and on nothing else,
and where all of it is in the cache, for every token. Sliding windows drop old tokens, state-space
layers keep a state that no token run can give back, and some rotary embeddings change with the length
of the whole prompt. Such models are refused with the reason: wrong reuse would be silent.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
from transformers.cache_utils import DynamicCache, DynamicLayer

from kvdepot.engines.transformers.memory import KvMemory, KvShape, PreallocCache
from kvdepot.errors import ConfigError, UnsupportedModel

__all__ = [
    "cache_argument",
    "dtype_of",
    "end_ids",
    "forward_options",
    "probe",
    "refuse_config",
]

_FULL = "full_attention"

#: rotary embeddings whose angles depend on the length of the whole prompt
_LENGTH_DEPENDENT_ROPES = {"dynamic", "longrope"}

#: for configs that say nothing of their layers; the probe finds these as well, after loading
_RECURRENT_MODELS = {
    "falcon_mamba",
    "mamba",
    "mamba2",
    "recurrent_gemma",
    "rwkv",
    "xlstm",
}

_PROBE_TOKENS = 12


def refuse_config(config: Any) -> None:
    """Refuse a model whose config already says that its cache cannot be cut.

    Raises:
        UnsupportedModel: with the reason.
    """
    reason = _reason_in(config)
    if reason:
        raise UnsupportedModel(
            f"cannot reuse the KV of {config.model_type}: {reason}",
            hint="models with full attention in every layer work: Llama, Qwen, SmolLM and relatives",
        )


def _reason_in(config: Any) -> str:
    if getattr(config, "is_encoder_decoder", False):
        return "it is an encoder-decoder; the decoder's KV depends on the encoder's input"
    text = config.get_text_config(decoder=True)
    if text.model_type in _RECURRENT_MODELS:
        return "it keeps a recurrent state, which no run of tokens can give back"
    if getattr(text, "use_cache", None) is None:
        return "its config has no use_cache: it keeps no KV cache"
    if not getattr(text, "is_causal", True) or getattr(text, "use_bidirectional_attention", False):
        return "its attention is not causal, so a token's KV depends on later tokens"
    return _reason_in_layers(text) or _reason_in_rope(text)


def _reason_in_layers(text: Any) -> str:
    kinds = getattr(text, "layer_types", None) or getattr(text, "layers_block_type", None)
    if kinds:
        other = sorted(set(kinds) - {_FULL, "attention"})
        if other:
            return f"it has layers of kind {', '.join(other)}; only {_FULL} can be cut"
        return ""
    window = getattr(text, "sliding_window", None)
    if window and getattr(text, "use_sliding_window", True):
        return f"it has a sliding window of {window} tokens and drops what is older"
    chunk = getattr(text, "attention_chunk_size", None)
    if chunk:
        return f"it attends in chunks of {chunk} tokens"
    return ""


def _reason_in_rope(text: Any) -> str:
    parameters = getattr(text, "rope_parameters", None) or {}
    # one dict, or one per kind of layer
    each = [parameters, *(value for value in parameters.values() if isinstance(value, dict))]
    for entry in each:
        kind = entry.get("rope_type")
        if kind in _LENGTH_DEPENDENT_ROPES:
            return f"its rotary embedding ({kind}) depends on the length of the whole prompt"
    return ""


def cache_argument(model: Any) -> str:
    """The name under which the model's forward pass takes its cache; transformers has renamed it."""
    parameters = inspect.signature(model.forward).parameters
    for name in ("cache", "past_key_values"):
        if name in parameters:
            return name
    raise UnsupportedModel(f"{type(model).__name__} takes no KV cache in its forward pass")


def forward_options(model: Any) -> dict[str, Any]:
    """Arguments of every forward pass: keep the KV, and give the logits of the last token alone."""
    is_known = "logits_to_keep" in inspect.signature(model.forward).parameters
    return {"use_cache": True, **({"logits_to_keep": 1} if is_known else {})}


@torch.inference_mode()
def probe(model: Any) -> KvShape:
    """Run a few tokens through a loaded model and look at the cache that comes out.

    Then run them again in two parts over our own cache: the KV must be the same, or this model does
    something with its cache that cutting would break.

    Raises:
        UnsupportedModel: with the reason.
    """
    name = cache_argument(model)
    vocabulary = model.get_input_embeddings().num_embeddings
    ids = torch.arange(_PROBE_TOKENS).remainder(vocabulary).unsqueeze(0)
    stock = DynamicCache(config=model.config)
    model(input_ids=ids, use_cache=True, **{name: stock})
    shape = _shape_of(model, stock)
    memory = KvMemory(shape, _PROBE_TOKENS)
    ours = PreallocCache(memory)
    half = _PROBE_TOKENS // 2
    model(input_ids=ids[:, :half], use_cache=True, **{name: ours})
    model(input_ids=ids[:, half:], use_cache=True, **{name: ours})
    for index, layer in enumerate(stock.layers):
        both = torch.stack([layer.keys[0], layer.values[0]]).float()
        if not torch.allclose(both, memory.tensor[index].float(), rtol=1e-2, atol=1e-2):
            raise UnsupportedModel(
                f"cannot reuse the KV of {model.config.model_type}: layer {index} computes other KV "
                "when a prompt is computed in two parts"
            )
    return shape


def _shape_of(model: Any, cache: DynamicCache) -> KvShape:
    expected = model.config.get_text_config(decoder=True).num_hidden_layers
    reason = ""
    if len(cache.layers) != expected:
        reason = f"its cache has {len(cache.layers)} layers for {expected} of the model"
    shapes = set()
    for index, layer in enumerate(cache.layers):
        if type(layer) is not DynamicLayer:
            reason = reason or f"layer {index} of its cache is a {type(layer).__name__}"
        elif not layer.is_initialized or layer.keys is None or layer.keys.ndim != 4:
            reason = reason or f"layer {index} puts no keys into the cache"
        elif layer.keys.shape != layer.values.shape:
            reason = reason or (
                f"its keys {tuple(layer.keys.shape)} and values {tuple(layer.values.shape)} differ "
                f"in shape in layer {index}, as with multi-head latent attention"
            )
        elif layer.keys.shape[2] != _PROBE_TOKENS:
            reason = (
                reason or f"layer {index} keeps {layer.keys.shape[2]} of {_PROBE_TOKENS} tokens"
            )
        else:
            shapes.add((layer.keys.shape[1], layer.keys.shape[3], layer.keys.dtype))
    if not reason and len(shapes) != 1:
        reason = f"its layers keep KV of different shapes: {sorted(map(str, shapes))}"
    if reason:
        raise UnsupportedModel(f"cannot reuse the KV of {model.config.model_type}: {reason}")
    kv_heads, head_dim, dtype = shapes.pop()
    return KvShape(expected, kv_heads, head_dim, dtype)


def dtype_of(name: str) -> torch.dtype:
    """The type of a name. Raises ConfigError for others than the three that are served."""
    known = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
    if name not in known:
        raise ConfigError(f"unknown dtype {name!r}; known are {', '.join(known)}")
    return known[name]


def end_ids(model: Any, tokenizer: Any) -> frozenset[int]:
    """Tokens that end an answer."""
    configured = getattr(model.generation_config, "eos_token_id", None)
    ids = configured if isinstance(configured, list) else [configured]
    return frozenset(
        int(each) for each in [*ids, getattr(tokenizer, "eos_token_id", None)] if each is not None
    )
