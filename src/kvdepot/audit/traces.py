"""Public trace formats: prompts known by the ids of their pieces.

In Mooncake, Bailian and Weka traces an id stands for everything up to its block's end (chained): they
answer questions about reuse, time, capacity and routing. In RAGPulse an id stands for one piece of text
wherever it is (content): there the order of pieces can be audited too. Which of the two a trace has is
detected: an id seen under two parents is a content id.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

from kvdepot.audit.records import Record, Trace, parse_time

__all__ = ["RAG_ORDER", "are_chained", "is_trace_row", "trace_record"]

#: the order in which RAGPulse's components stand in a prompt
RAG_ORDER = ("sys_prompt", "passages_ids", "history", "web_search", "user_input")
_MOONCAKE_BLOCK = 512
_BAILIAN_BLOCK = 16


def is_trace_row(row: dict[str, Any]) -> bool:
    """Whether a row is of a format that `trace_record` reads."""
    return ("hash_ids" in row and "input_length" in row) or (
        "hash_id_ranges" in row and "in" in row
    )


def trace_record(row: dict[str, Any], line: int) -> Record:
    """Read one row.

    Raises:
        ValueError: a field is missing or is not what it should be.
    """
    if "hash_id_ranges" in row:
        return _weka(row, line)
    if isinstance(row["hash_ids"], dict):
        return _ragpulse(row, line)
    is_bailian = "chat_id" in row
    default = _BAILIAN_BLOCK if is_bailian else _MOONCAKE_BLOCK
    block = _whole(row.get("block_size", default))
    time_s = parse_time(row.get("timestamp"))
    if time_s is not None and not is_bailian:
        time_s = float(row["timestamp"]) / 1000
    ids = [_whole(each) for each in row["hash_ids"]]
    return Record(
        line,
        time_s,
        session=_name(row.get("session_id")),
        trace=_blocks(ids, _whole(row["input_length"]), block),
    )


def _whole(value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        raise TypeError(f"{value!r:.40} is not a number")
    return int(value)


def _name(value: object) -> str | None:
    return None if value is None else str(value)


def _blocks(ids: list[int], length: int, block: int) -> Trace:
    """Blocks of equal size; the last one may be partly full."""
    if block < 1 or length < 0:
        raise ValueError(f"block of {block} tokens in a prompt of {length}")
    sizes = [max(0, min(block, length - block * number)) for number in range(len(ids))]
    return Trace(ids, sizes, length=length)


def _weka(row: dict[str, Any], line: int) -> Record:
    ranges = row["hash_id_ranges"]
    if sum(_whole(last) - _whole(first) + 1 for first, last in ranges) > 1 << 22:
        raise ValueError("more than 4 million blocks in one prompt")
    ids = [each for first, last in ranges for each in range(_whole(first), _whole(last) + 1)]
    session = f"{row.get('conv')}"
    length, block = _whole(row["in"]), _whole(row.get("block_size", 64))
    return Record(
        line,
        parse_time(row.get("t")),
        session=session,
        # ids are local to a conversation
        extra=(("conversation", session),),
        trace=_blocks(ids, length, block),
    )


def _ragpulse(row: dict[str, Any], line: int) -> Record:
    pieces = row["hash_ids"]
    ids = [_whole(each) for part in RAG_ORDER for each in pieces.get(part) or []]
    length = _whole(row["input_length"])
    # the trace has no length per piece: each gets an equal share, the first ones the rest
    share, rest = divmod(length, max(len(ids), 1))
    tokens = [share + (number < rest) for number in range(len(ids))]
    return Record(
        line,
        parse_time(row.get("timestamp")),
        session=_name(row.get("session_id")),
        trace=Trace(ids, tokens, tuple((part, len(pieces.get(part) or [])) for part in RAG_ORDER)),
    )


def are_chained(traces: Sequence[tuple[object, Sequence[int]]]) -> bool:
    """Whether ids stand for whole prefixes: no id is seen under two parents.

    Args:
        traces: per request, what the ids are local to, and the ids.
    """
    parents: dict[tuple[object, int], int] = {}
    for scope, ids in traces:
        for parent, each in itertools.pairwise([-1, *ids]):
            if parents.setdefault((scope, each), parent) != parent:
                return False
    return True
