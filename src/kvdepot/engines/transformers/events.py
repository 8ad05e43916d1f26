"""What an answer consists of, in the order in which it streams: `FirstToken`, `TextPiece`s, `Result`."""

from __future__ import annotations

from typing import Literal, NamedTuple

__all__ = ["Event", "FirstToken", "Result", "TextPiece"]


class FirstToken(NamedTuple):
    """The first token is there."""

    #: seconds from the call of `generate` to the first token sampled
    ttft_s: float


class TextPiece(NamedTuple):
    """Text that the last token completed; pieces are never empty and join to the whole text."""

    text: str


class Result(NamedTuple):
    """The end of an answer, and what it cost.

    ``computed_tokens`` and the sum over ``reused_tokens`` make ``prompt_tokens``, exactly.
    """

    ttft_s: float
    #: seconds from the call to the last token
    total_s: float
    prompt_tokens: int
    computed_tokens: int
    #: prompt tokens that were not computed, by the tier that their KV came from
    reused_tokens: dict[str, int]
    #: payload bytes that this request read from the pool, of blocks that were given up as well
    bytes_read: int
    #: payload bytes that this request handed over to be written; a full queue may still drop some
    bytes_written: int
    token_ids: tuple[int, ...]
    text: str
    #: ``stop``: the model or a stop text ended it; ``length``: `max_new_tokens` did
    finish: Literal["stop", "length"]
    #: seconds that computing waited for blocks to be loaded
    load_s: float = 0.0


Event = FirstToken | TextPiece | Result
