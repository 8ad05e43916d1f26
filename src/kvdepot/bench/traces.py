"""Public traces in one form: when, how much, and which blocks of it are the same as before.

Formats: Mooncake, Bailian, Weka, RAGPulse (each with block ids), Azure (arrivals and lengths only).
"""

from __future__ import annotations

import csv
import random
import re
from collections.abc import Callable, Iterator, Sequence
from datetime import datetime
from itertools import pairwise
from typing import Any, NamedTuple

import msgspec

from kvdepot.errors import ConfigError

__all__ = ["FORMATS", "TraceRow", "read_trace_rows", "spread_bins"]

_MOONCAKE_BLOCK = 512
_BAILIAN_BLOCK = 16
#: RAGPulse gives ids of passages, not of blocks of one size; a passage is about so long
_RAGPULSE_BLOCK = 256


class TraceRow(NamedTuple):
    """One request. Equal block ids stand for equal text."""

    at_s: float
    input_tokens: int
    output_tokens: int
    blocks: Sequence[int]
    block_tokens: int
    #: empty: a request of its own
    session: str = ""
    #: between the answer before and this request
    think_s: float = 0.0


def read_trace_rows(content: bytes, form: str, source: str) -> list[TraceRow]:
    """Requests of a trace, by time, the first one at 0.

    Raises:
        ConfigError: an unknown format, or a line that is not of it; names the line.
    """
    reader = FORMATS.get(form)
    if reader is None:
        raise ConfigError(
            f"no trace format {form!r}", hint=f"there are: {', '.join(sorted(FORMATS))}"
        )
    rows: list[TraceRow] = []
    for number, record in enumerate(_records(content, source), start=1):
        try:
            rows.append(reader(record))
        except (LookupError, TypeError, ValueError) as error:
            raise ConfigError(
                f"record {number} of {source} is not of format {form}: {type(error).__name__} {error}"
            ) from error
    if not rows:
        raise ConfigError(f"{source} has no requests")
    rows.sort(key=lambda row: row.at_s)
    first_s = rows[0].at_s
    return [row._replace(at_s=row.at_s - first_s) for row in rows]


def spread_bins(rows: Sequence[TraceRow], *, seed: int) -> tuple[list[TraceRow], float]:
    """Spread requests whose times are rounded evenly over their bins; also gives the bin's seconds.

    Mooncake's conversation trace has steps of 3 s: replayed as it stands, it is a burst every 3 s.
    """
    times = sorted({row.at_s for row in rows})
    gaps = [b - a for a, b in pairwise(times)]
    bin_s = min(gaps, default=0.0)
    is_rounded = bin_s > 0 and all(abs(gap / bin_s - round(gap / bin_s)) < 1e-6 for gap in gaps)
    if not is_rounded or bin_s < 1.0:
        return list(rows), 0.0
    drawn = random.Random(seed)
    spread = [row._replace(at_s=row.at_s + drawn.random() * bin_s) for row in rows]
    spread.sort(key=lambda row: row.at_s)
    return spread, bin_s


def _records(content: bytes, source: str) -> Iterator[dict[str, Any]]:
    try:
        text = content.decode()
    except UnicodeDecodeError as error:
        raise ConfigError(f"{source} is not a UTF-8 text") from error
    if not text.lstrip().startswith("{"):
        yield from csv.DictReader(text.splitlines())
        return
    for number, line in enumerate(text.splitlines(), start=1):
        if not line.strip():
            continue
        try:
            record = msgspec.json.decode(line)
        except msgspec.MsgspecError as error:
            raise ConfigError(f"line {number} of {source}: {error}") from error
        if not isinstance(record, dict):
            raise ConfigError(f"line {number} of {source} is not an object")
        yield record


def _mooncake(record: dict[str, Any]) -> TraceRow:
    return TraceRow(
        float(record["timestamp"]) / 1000,
        int(record["input_length"]),
        int(record["output_length"]),
        [int(each) for each in record["hash_ids"]],
        _MOONCAKE_BLOCK,
    )


def _bailian(record: dict[str, Any]) -> TraceRow:
    return TraceRow(
        float(record["timestamp"]),
        int(record["input_length"]),
        int(record["output_length"]),
        [int(each) for each in record["hash_ids"]],
        _BAILIAN_BLOCK,
        # the ids name the conversation, so that a turn waits for the one before
        session=str(record.get("root_chat_id", "")),
    )


def _weka(record: dict[str, Any]) -> TraceRow:
    block = int(record["block_size"])
    blocks = [
        each
        for first, last in record["hash_id_ranges"]
        for each in range(int(first), int(last) + 1)
    ]
    name = f"{record['conv']}/{record.get('agent') or ''}"
    # ids are of one conversation: made unique by its name
    base = int(re.sub(r"\D", "", str(record["conv"])) or 0) << 32
    return TraceRow(
        float(record["t"]),
        int(record["in"]),
        int(record["out"]),
        [base + each for each in blocks],
        block,
        session=name,
        think_s=float(record.get("think_time") or 0.0),
    )


def _ragpulse(record: dict[str, Any]) -> TraceRow:
    parts = record["hash_ids"]
    order = ("sys_prompt", "passages_ids", "history", "web_search", "user_input")
    blocks = [int(each) for name in order for each in parts.get(name, [])]
    tokens = int(record["input_length"])
    return TraceRow(
        float(record["timestamp"]),
        tokens,
        int(record["output_length"]),
        blocks,
        # one width for all requests, or equal passages would not be equal text
        _RAGPULSE_BLOCK,
    )


def _azure(record: dict[str, Any]) -> TraceRow:
    fields = {name.lower(): value for name, value in record.items()}
    stamp = str(fields["timestamp"])
    # seven digits of a second are more than Python takes
    moment = datetime.fromisoformat(re.sub(r"(\.\d{6})\d+", r"\1", stamp))
    tokens = fields.get("context_tokens", fields.get("contexttokens"))
    made = fields.get("generated_tokens", fields.get("generatedtokens"))
    if tokens is None or made is None:
        raise ValueError("no lengths")
    at_s = (moment.replace(tzinfo=None) - datetime(2000, 1, 1)).total_seconds()  # noqa: DTZ001
    return TraceRow(at_s, max(1, int(tokens)), int(made), [], _MOONCAKE_BLOCK)


FORMATS: dict[str, Callable[[dict[str, Any]], TraceRow]] = {
    "mooncake": _mooncake,
    "bailian": _bailian,
    "weka": _weka,
    "ragpulse": _ragpulse,
    "azure": _azure,
}
