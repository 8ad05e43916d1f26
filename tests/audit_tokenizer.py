"""A small tokenizer for the audit's tests, trained on the spot."""

from __future__ import annotations

import pytest


def byte_level_tokenizer(texts, splitter=None, added=()):
    """A small BPE tokenizer: with GPT-2's way to split text, or with another pattern."""
    tokenizers = pytest.importorskip("tokenizers")
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    kinds = tokenizers.pre_tokenizers
    tokenizer.pre_tokenizer = (
        kinds.ByteLevel(add_prefix_space=False)
        if splitter is None
        else kinds.Sequence(
            [
                kinds.Split(tokenizers.Regex(splitter), "isolated"),
                kinds.ByteLevel(add_prefix_space=False, use_regex=False),
            ]
        )
    )
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=600,
        special_tokens=["<|im_start|>", "<|im_end|>"],
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    blank = (
        "".join(f"x{gap}y" for gap in (" \n", "\n\n", "\n\n\n", "\r\n", "\n    ", "    ", ";\n"))
        * 50
    )
    tokenizer.train_from_iterator([*texts, blank], trainer)
    tokenizer.add_tokens([tokenizers.AddedToken(text, **flags) for text, flags in added])
    return tokenizer.to_str()


def same_ids(one, other):
    return [ids.tolist() for ids in one] == [ids.tolist() for ids in other]
