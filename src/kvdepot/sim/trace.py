"""Traces of requests: who asked when, how much, and which blocks of it were seen before.

The format is Mooncake's: one JSON object a line with ``timestamp`` (milliseconds), ``input_length``,
``output_length`` and ``hash_ids``, one id for each block of the prompt, equal where the whole prefix up
to the block's end is equal. Nothing here opens a file.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import msgspec

from kvdepot.errors import ConfigError

__all__ = ["MOONCAKE_BLOCK_TOKENS", "TraceRequest", "read_trace", "repeated", "rescaled"]

MOONCAKE_BLOCK_TOKENS = 512


class TraceRequest(NamedTuple):
    """One request. `block_ids` has one id for each full block."""

    at_s: float
    input_tokens: int
    output_tokens: int
    block_ids: Sequence[int]


class _Line(msgspec.Struct):
    timestamp: float
    input_length: int
    output_length: int
    hash_ids: list[int]


def read_trace(
    lines: Iterable[bytes | str], *, block_tokens: int = MOONCAKE_BLOCK_TOKENS
) -> Iterator[TraceRequest]:
    """Requests of a trace, in its order. Fields that are not known are ignored; blank lines too.

    Raises:
        ConfigError: a line is not of this format, or time runs backwards; names the line.
    """
    decoder = msgspec.json.Decoder(_Line)
    last_s = float("-inf")
    for number, text in enumerate(lines, start=1):
        if not text.strip():
            continue
        try:
            line = decoder.decode(text)
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            raise ConfigError(
                f"line {number} of the trace: {error}",
                hint='each line is {"timestamp": ms, "input_length": n, "output_length": n,'
                ' "hash_ids": [...]}',
            ) from error
        at_s = line.timestamp / 1000
        if line.input_length < 1 or at_s < last_s:
            raise ConfigError(
                f"line {number} of the trace: an empty prompt, or time runs backwards"
            )
        last_s = at_s
        full = min(line.input_length // block_tokens, len(line.hash_ids))
        yield TraceRequest(at_s, line.input_length, line.output_length, line.hash_ids[:full])


def rescaled(requests: Iterable[TraceRequest], factor: float) -> Iterator[TraceRequest]:
    """The same requests with their times multiplied: 0.5 is twice the load."""
    for request in requests:
        yield request._replace(at_s=request.at_s * factor)


def repeated(
    requests: Sequence[TraceRequest], count: int, *, shared_ids: int = 1
) -> Iterator[TraceRequest]:
    """As many requests as asked for, by repeating a trace one copy after the other.

    Args:
        requests: one copy; not empty.
        count: requests to make.
        shared_ids: ids below this are common to all copies, as a system prompt is; the others are
            new in each copy.
    """
    span_s = requests[-1].at_s - requests[0].at_s + 1.0
    step = 1 + max((max(r.block_ids) for r in requests if r.block_ids), default=0)
    for number in range(count):
        copy, place = divmod(number, len(requests))
        request = requests[place]
        offset = copy * step
        ids = [each if each < shared_ids else each + offset for each in request.block_ids]
        yield request._replace(at_s=request.at_s + copy * span_s, block_ids=ids)
