"""What the audit takes from a model's folder: tokenizer, chat template, bytes of KV per token."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

from kvdepot.audit.render import ChatMl, Renderer
from kvdepot.audit.template import ModelTemplate
from kvdepot.audit.tokens import Encoder, FallbackEncoder, ModelEncoder
from kvdepot.errors import ConfigError
from kvdepot.io.lines import read_text
from kvdepot.io.models import model_files

__all__ = ["ModelParts", "kv_bytes_per_token", "load_model"]

_DTYPE_BYTES = 2


class ModelParts(NamedTuple):
    """How to turn bodies into token ids, and what a token's KV weighs."""

    encoder: Encoder
    renderer: Renderer
    #: None where the folder does not say
    kv_bytes_per_token: int | None


def load_model(name: str | None) -> ModelParts:
    """The parts of a model folder or hub id; without one, the documented fallback.

    Raises:
        ConfigError: the folder lacks a tokenizer, or a library is missing.
    """
    if name is None:
        return ModelParts(FallbackEncoder(), ChatMl(), None)
    files = model_files(name)
    folder = files.folder
    tokenizer = _text(folder, "tokenizer.json")
    if tokenizer is None:
        raise ConfigError(
            f"{name} has no tokenizer.json",
            hint="give the folder of the model that serves, or leave out --model for an estimate",
        )
    encoder = ModelEncoder(tokenizer, files.name)
    settings = _json(folder, "tokenizer_config.json")
    source = _text(folder, "chat_template.jinja") or _template(settings)
    renderer: Renderer = ChatMl()
    if source is not None:
        names = {
            key: str(value.get("content") if isinstance(value, dict) else value)
            for key in ("bos_token", "eos_token", "pad_token", "unk_token")
            if (value := settings.get(key)) is not None
        }
        renderer = ModelTemplate(source, names)
    return ModelParts(encoder, renderer, kv_bytes_per_token(_json(folder, "config.json")))


def _text(folder: Path, name: str) -> str | None:
    try:
        return read_text(folder / name)
    except ConfigError:
        return None


def _json(folder: Path, name: str) -> dict[str, Any]:
    text = _text(folder, name)
    try:
        found = json.loads(text) if text is not None else {}
    except ValueError as error:
        raise ConfigError(f"{folder / name} is not JSON: {error}") from error
    return found if isinstance(found, dict) else {}


def _template(settings: dict[str, Any]) -> str | None:
    found = settings.get("chat_template")
    if isinstance(found, list):
        named = {each.get("name"): each.get("template") for each in found if isinstance(each, dict)}
        found = named.get("default")
    return found if isinstance(found, str) else None


def kv_bytes_per_token(config: dict[str, Any]) -> int | None:
    """Bytes of KV per token from a model's config: full attention or MLA; None where it does not say.

    Layers with a window or with recurrent state have no bytes per token beyond their window and are
    left out.
    """
    inner = config.get("text_config")
    config = inner if isinstance(inner, dict) else config
    layers = config.get("num_hidden_layers")
    if not isinstance(layers, int):
        return None
    kinds = config.get("layer_types")
    if isinstance(kinds, list):
        layers = sum(kind == "full_attention" for kind in kinds)
    rank, rope = config.get("kv_lora_rank"), config.get("qk_rope_head_dim")
    if isinstance(rank, int) and isinstance(rope, int):
        return layers * (rank + rope) * _DTYPE_BYTES
    heads = config.get("num_attention_heads")
    kv_heads = config.get("num_key_value_heads", heads)
    width = config.get("head_dim")
    if width is None and isinstance(heads, int) and isinstance(config.get("hidden_size"), int):
        width = config["hidden_size"] // heads
    if not isinstance(kv_heads, int) or not isinstance(width, int):
        return None
    return 2 * layers * kv_heads * width * _DTYPE_BYTES
