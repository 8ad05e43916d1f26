"""Tiny models with random weights, made on the spot: a forward pass takes a millisecond.

Random weights are enough wherever bytes, counts and equality are checked; what a model says is checked
with the real small model in the tests marked slow.
"""

from __future__ import annotations

from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    PreTrainedTokenizerFast,
)

# the work is too small for two threads, and OpenMP's threads spin against whatever else runs
torch.set_num_threads(1)

VOCABULARY = 300
CHAT = (
    "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
#: attributes that every tiny config shares
SMALL = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 512,
}


def tiny_config(**changes):
    return LlamaConfig(**{**SMALL, **changes})


def tiny_tokenizer():
    """One token per byte."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {character: index for index, character in enumerate(alphabet)}
    vocabulary["<end>"] = len(alphabet)
    inner = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="<end>")
    tokenizer.chat_template = CHAT
    return tokenizer


def tiny_model(config=None, *, seed=0):
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config or tiny_config())
    # greedy runs of random weights repeat one token soon; larger weights keep them lively
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 2:
                parameter.mul_(4)
    model.generation_config.eos_token_id = None
    return model.eval()


def save_tiny(folder: Path, *, config=None, seed=0) -> Path:
    """A folder as `from_pretrained` reads it."""
    tiny_model(config, seed=seed).save_pretrained(folder)
    tokenizer = tiny_tokenizer()
    tokenizer.eos_token = None
    tokenizer.save_pretrained(folder)
    return folder


def prompt_of(length, *, seed=1):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (length,), generator=generator).tolist()
