"""What vLLM itself writes: debug lines of requests, and KV events.

At DEBUG, with ``--enable-log-requests``, vLLM writes a line with the prompt and its token ids. At INFO it
writes neither, and ``--max-log-len`` cuts both: that is said instead of auditing a stump. `BlockStored`
events carry token ids and parents, so the prompts' tree can be rebuilt without touching a client; they
say nothing about hits, and a prompt's end is only known to a block.
"""

from __future__ import annotations

import ast
import datetime as dt
import re
from typing import Any

import numpy as np

from kvdepot.audit.chatlog import is_int_list, packed_ids
from kvdepot.audit.records import Problem, Record, parse_time
from kvdepot.audit.render import clean_text
from kvdepot.audit.tokenlog import Ids

__all__ = ["EngineLines", "EventTree", "is_event_row"]

_DETAILS = re.compile(
    r"Request (?P<id>\S+) details: prompt: (?P<prompt>None|'(?:[^'\\]|\\.)*'|\"(?:[^\"\\]|\\.)*\")"
    r"(?:, prompt_token_ids: (?P<ids>None|\[[0-9, ]*\]))?"
)
_RECEIVED = re.compile(r"Received request (?P<id>\S+?):")
_STAMP = re.compile(r"(?P<month>\d\d)-(?P<day>\d\d) (?P<h>\d\d):(?P<m>\d\d):(?P<s>\d\d)")
_LORA = re.compile(r"lora_request: (?P<lora>None|.+?)(?:, prompt|$)")
_CUT_FROM = 0.2


class EngineLines:
    """Reads lines of an engine's log, in order."""

    def __init__(self) -> None:
        self.records: list[Record] = []
        self.problems: list[Problem] = []
        self._without_prompt = 0
        self._lengths: list[int] = []

    def feed(self, text: str, line: int) -> bool:
        """Take one line; whether it was one of a request.

        Raises:
            ValueError: its prompt or its token ids cannot be read.
        """
        match = _DETAILS.search(text)
        if match is None:
            self._without_prompt += _RECEIVED.search(text) is not None
            return False
        ids = match["ids"]
        record = Record(line, _stamp(text), request_id=match["id"])
        if ids and ids != "None":
            numbers = [int(each) for each in ids[1:-1].split(",") if each.strip()]
            record.ids = packed_ids(numbers) if numbers else None
        if record.ids is None and match["prompt"] != "None":
            record.prompt = _text_of(match["prompt"])
        if record.ids is None and record.prompt is None:
            self._without_prompt += 1
            return False
        self._lengths.append(
            len(record.ids) if record.ids is not None else len(record.prompt or "")
        )
        lora = _LORA.search(text)
        if lora and lora["lora"] != "None":
            record.extra = (("lora", lora["lora"]),)
        self.records.append(record)
        return True

    def finish(self) -> int:
        """Add what can only be said at the end; how many prompts look cut."""
        if self._without_prompt and not self.records:
            self.problems.append(
                Problem(
                    0,
                    f"{self._without_prompt} requests are logged without their prompt: vLLM writes"
                    " prompts only at DEBUG (VLLM_LOGGING_LEVEL=DEBUG with --enable-log-requests)",
                )
            )
        longest = max(self._lengths, default=0)
        same = sum(length == longest for length in self._lengths)
        if len(self._lengths) < 10 or same < _CUT_FROM * len(self._lengths):
            return 0
        if len(set(self._lengths)) == 1:
            return 0  # equal by nature, for all that is known
        self.problems.append(
            Problem(
                0,
                f"{same} of {len(self._lengths)} prompts are exactly {longest} long, the longest of"
                " all: --max-log-len cut them, so what stands behind is unknown",
            )
        )
        return same


def _text_of(literal: str) -> str:
    try:
        text = str(ast.literal_eval(literal))
    except (SyntaxError, ValueError) as error:
        raise ValueError(f"the prompt is no text as Python writes it: {error}") from error
    return clean_text(text)


def _stamp(text: str) -> float | None:
    match = _STAMP.search(text[:80])
    if match is None:
        return None
    # the log has no year; only differences of times are used
    try:
        at = dt.datetime(
            2024, int(match["month"]), int(match["day"]), int(match["h"]), int(match["m"]),
            int(match["s"]), tzinfo=dt.UTC,
        )  # fmt: skip
    except ValueError:
        return None
    return at.timestamp()


def is_event_row(row: object) -> bool:
    """Whether a decoded line is a batch of KV events, or one of them."""
    if isinstance(row, dict):
        return row.get("type") in _KINDS or _is_batch(row.get("events"))
    if isinstance(row, list) and len(row) >= 2 and isinstance(row[1], list):
        return _is_batch(row[1])
    return False


_KINDS = ("BlockStored", "BlockRemoved", "AllBlocksCleared")
_STORED_FIELDS = ("block_hashes", "parent_block_hash", "token_ids", "block_size", "lora_id")


def _is_batch(events: object) -> bool:
    return (
        isinstance(events, list)
        and bool(events)
        and all(
            (isinstance(event, dict) and event.get("type") in _KINDS)
            or (isinstance(event, list) and bool(event) and event[0] in _KINDS)
            for event in events
        )
    )


class EventTree:
    """Rebuilds prompts from `BlockStored` events: each event that extends no later one is a leaf."""

    def __init__(self) -> None:
        self.problems: list[Problem] = []
        #: block hash -> (parent hash, token ids)
        self._blocks: dict[str, tuple[str | None, Ids]] = {}
        self._ends: list[tuple[int, float | None, str, dict[str, Any]]] = []
        self._orphans = 0

    def feed(self, row: Any, line: int) -> None:
        """Take one decoded line.

        Raises:
            ValueError: a token id is out of range.
            TypeError: it is no batch of events.
        """
        at, events = self._events(row)
        for event in events:
            if event.get("type") != "BlockStored":
                continue
            hashes, ids = event.get("block_hashes"), event.get("token_ids")
            if (
                not isinstance(hashes, list)
                or not hashes
                or not isinstance(ids, list)
                or not is_int_list(ids)
            ):
                self.problems.append(
                    Problem(line, "a BlockStored event without hashes or token ids")
                )
                continue
            packed = packed_ids(ids)
            size = event.get("block_size")
            if not isinstance(size, int) or size < 1:
                size = max(1, len(ids) // len(hashes))
            parent = event.get("parent_block_hash")
            if parent is not None and parent not in self._blocks:
                self._orphans += 1
                continue
            for number, each in enumerate(hashes):
                key = str(each)
                # a block is known behind its parent alone, so the tree has no circle
                self._blocks.setdefault(key, (parent, packed[number * size : (number + 1) * size]))
                parent = key
            self._ends.append((line, at, str(hashes[-1]), event))

    @staticmethod
    def _events(row: Any) -> tuple[float | None, list[dict[str, Any]]]:
        if isinstance(row, list):
            at, events = parse_time(row[0]), row[1]
        else:
            at = parse_time(row.get("ts", row.get("timestamp")))
            events = row.get("events", [row])
        made = []
        for event in events:
            named = event
            if isinstance(event, list):
                named = {"type": event[0], **dict(zip(_STORED_FIELDS, event[1:], strict=False))}
            parent = named.get("parent_block_hash")
            made.append({**named, "parent_block_hash": None if parent is None else str(parent)})
        return at, made

    def finish(self) -> list[Record]:
        """The prompts, as far as they were stored, in the order of their last block."""
        if self._orphans:
            self.problems.append(
                Problem(0, f"{self._orphans} events extend blocks stored before the log began")
            )
        parents = {self._blocks[end][0] for _, _, end, _ in self._ends}
        inner = {parent for _, (parent, _) in self._blocks.items()} | parents
        records = []
        for line, at, end, event in self._ends:
            if end in inner:
                continue  # a later event goes on from here: one prompt, stored in steps
            chain: list[Ids] = []
            key: str | None = end
            while key is not None:
                key, ids = self._blocks[key]
                chain.append(ids)
            session = event.get("session_id")
            extra = [("lora", event.get("lora_name")), ("extra_keys", event.get("extra_keys"))]
            records.append(
                Record(
                    line,
                    at,
                    session=None if session is None else str(session),
                    extra=tuple((name, str(value)) for name, value in extra if value),
                    ids=np.concatenate(chain[::-1]),
                )
            )
        return records
