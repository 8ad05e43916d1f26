"""Models for vLLM's CPU build: tiny ones with random weights, LoRA adapters for them, and a revision."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import torch
from safetensors.torch import save_file

from tests.tiny_models import save_tiny, tiny_config

LAYERS = 4
HIDDEN = 128
HEADS = 4
KV_HEADS = 2
#: the smallest that the CPU's attention takes
HEAD_DIM = 32
#: 2 KiB a token in 32 bits
TOKEN_BYTES = LAYERS * 2 * KV_HEADS * HEAD_DIM * 4


def tiny_llama(folder: Path, *, seed: int = 0) -> Path:
    """A model of half a megabyte that takes 4,096 tokens."""
    config = tiny_config(
        hidden_size=HIDDEN,
        intermediate_size=192,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        num_key_value_heads=KV_HEADS,
        head_dim=HEAD_DIM,
        max_position_embeddings=4096,
    )
    return save_tiny(folder, config=config, seed=seed)


def another_revision(model: Path, folder: Path) -> Path:
    """The same model with one byte of one weight changed; no size, name or header differs."""
    shutil.copytree(model, folder)
    weights = folder / "model.safetensors"
    content = bytearray(weights.read_bytes())
    content[-3] ^= 0x01
    weights.write_bytes(content)
    return folder


def adapter(folder: Path, *, seed: int) -> Path:
    """A LoRA adapter for the tiny model, in the form that PEFT saves; strong enough to be seen."""
    folder.mkdir(parents=True)
    generator = torch.Generator().manual_seed(seed)
    rank = 8
    outputs = {"q_proj": HEADS * HEAD_DIM, "k_proj": KV_HEADS * HEAD_DIM}
    tensors = {}
    for layer in range(LAYERS):
        for name, size in outputs.items():
            prefix = f"base_model.model.model.layers.{layer}.self_attn.{name}"
            down = torch.randn(rank, HIDDEN, generator=generator)
            up = torch.randn(size, rank, generator=generator)
            tensors[f"{prefix}.lora_A.weight"] = down / HIDDEN**0.5
            tensors[f"{prefix}.lora_B.weight"] = up
    save_file(tensors, str(folder / "adapter_model.safetensors"))
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": "tiny",
        "r": rank,
        "lora_alpha": 2 * rank,
        "target_modules": sorted(outputs),
        "bias": "none",
    }
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder
