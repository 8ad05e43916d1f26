"""How large a block is: how many of the engine's own blocks one block of the pool covers.

vLLM calls a block of the pool a chunk, and takes its size as a number of its own blocks. Pure.
"""

from __future__ import annotations

from typing import NamedTuple

from kvdepot.engines.vllm.kvsize import KvSize
from kvdepot.errors import ConfigError
from kvdepot.units import MIB, ceil_div, format_bytes, round_up

__all__ = ["BLOCK_BYTES_AIM", "BLOCK_TOKENS_MAX", "BlockChoice", "choose_block"]

#: from here on larger reads are hardly faster, on local disks and even less on network file systems
BLOCK_BYTES_AIM = MIB
#: reuse ends at the last whole block of a prompt, so that a block costs half of its tokens on average
BLOCK_TOKENS_MAX = 256


class BlockChoice(NamedTuple):
    """The size of a block, and why it is so."""

    tokens: int
    #: vLLM's ``blocks_per_chunk``
    engine_blocks: int
    #: of one block, over all ranks; 0 where the model's size is not known
    block_bytes: int
    reason: str

    def describe(self) -> str:
        """One line for people."""
        size = f" = {format_bytes(self.block_bytes)}" if self.block_bytes else ""
        return f"blocks of {self.tokens} tokens{size}: {self.reason}"


def choose_block(
    size: KvSize | None, engine_block_tokens: int, *, explicit_tokens: int | None = None
) -> BlockChoice:
    """Choose the size of a block.

    Args:
        size: of the model's KV; None where it is not known.
        engine_block_tokens: of vLLM's own block, of which a block is a multiple.
        explicit_tokens: what the user wants; it wins.

    Raises:
        ConfigError: the explicit number is no multiple of the engine's block.
    """
    token_bytes = size.group_token_bytes if size else 0
    if explicit_tokens is not None:
        _check(explicit_tokens, engine_block_tokens)
        tokens, reason = explicit_tokens, "as asked for"
    elif size is None:
        tokens = round_up(BLOCK_TOKENS_MAX, engine_block_tokens)
        reason = "the size of the model's KV is not known, and so many do for all but the smallest"
    elif size.has_state:
        tokens = engine_block_tokens
        reason = "one block of vLLM's, which makes them large enough for the layers with state"
    elif size.has_window:
        tokens = engine_block_tokens
        reason = (
            "one block of vLLM's, because vLLM stores larger ones in part behind a sliding window"
        )
    else:
        tokens, reason = _by_bytes(token_bytes, engine_block_tokens)
    return BlockChoice(
        tokens=tokens,
        engine_blocks=tokens // engine_block_tokens,
        block_bytes=tokens * token_bytes,
        reason=reason,
    )


def _by_bytes(token_bytes: int, engine_block_tokens: int) -> tuple[int, str]:
    aim = round_up(ceil_div(BLOCK_BYTES_AIM, token_bytes), engine_block_tokens)
    most = max(BLOCK_TOKENS_MAX // engine_block_tokens, 1) * engine_block_tokens
    what = f"{format_bytes(token_bytes)} a token, and vLLM's blocks have {engine_block_tokens}"
    if aim > most:
        return most, f"{what}; more than {most} would leave too little of short prompts to reuse"
    if aim == engine_block_tokens:
        return aim, f"{what}: one of them reaches {format_bytes(BLOCK_BYTES_AIM)}"
    return aim, f"{what}: the least multiple that reaches {format_bytes(BLOCK_BYTES_AIM)}"


def _check(tokens: int, engine_block_tokens: int) -> None:
    if tokens <= 0 or tokens % engine_block_tokens:
        nearest = max(round_up(max(tokens, 1), engine_block_tokens), engine_block_tokens)
        raise ConfigError(
            f"a block of {tokens} tokens is no multiple of vLLM's own block of"
            f" {engine_block_tokens} tokens",
            hint=f"take {nearest}, or change vLLM's with -- --block-size",
        )
