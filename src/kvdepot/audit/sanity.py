"""Before anything is blamed: is the log whole, in order, and rendered as the server rendered it?"""

from __future__ import annotations

import hashlib
import itertools
from typing import NamedTuple

import msgspec

from kvdepot.audit.records import Reading, Record
from kvdepot.audit.tokenlog import Ints

__all__ = ["Ordered", "distrust", "in_order", "usage_mismatches"]

_BROKEN_MOST = 0.05
_CUT_MOST = 0.01
_DIFFER_MOST = 0.01
_SLACK_TOKENS = 8


class Ordered(NamedTuple):
    """Records in the order of their time."""

    records: list[Record]
    #: rows that say the same as an earlier one, id and prompt; left out
    duplicates: int
    #: how the log was: "in order", "back to front", "mixed", "without times"
    order: str


def in_order(reading: Reading) -> Ordered:
    """Sort by time and leave out rows that were logged twice.

    Records without a time take that of the one before; a log without times is taken as it is.
    """
    records, duplicates = _without_doubles(reading.records)
    known = [each.time_s for each in records if each.time_s is not None]
    if len(known) < 2:
        for number, each in enumerate(records):
            each.time_s = float(number)
        return Ordered(records, duplicates, "without times")
    steps = list(itertools.pairwise(known))
    falling = sum(later < earlier for earlier, later in steps)
    order = "in order" if not falling else "mixed"
    if falling > 0.9 * len(steps):
        order = "back to front"
        # records of one second stay in the order in which they happened
        records.reverse()
    last = known[0] if order != "back to front" else known[-1]
    for each in records:
        if each.time_s is None:
            each.time_s = last
        last = each.time_s
    records.sort(key=lambda each: each.time_s or 0.0)
    return Ordered(records, duplicates, order)


def _without_doubles(records: list[Record]) -> tuple[list[Record], int]:
    seen: set[tuple[str, bytes]] = set()
    kept = []
    for each in records:
        if each.request_id is None:
            kept.append(each)
            continue
        content = msgspec.json.encode(
            [
                each.body and each.body.get("messages"),
                each.prompt,
                each.ids is not None and each.ids.tobytes(),
                each.time_s,
            ]
        )
        key = (each.request_id, hashlib.sha256(content).digest())
        if key not in seen:
            seen.add(key)
            kept.append(each)
    return kept, len(records) - len(kept)


def usage_mismatches(records: list[Record], lengths: Ints) -> tuple[int, int]:
    """How many requests log their prompt tokens, and how many of those differ from ours."""
    logged = differ = 0
    for each, length in zip(records, lengths.tolist(), strict=True):
        if each.usage_prompt is None:
            continue
        logged += 1
        differ += abs(each.usage_prompt - length) > max(_SLACK_TOKENS, 0.01 * length)
    return logged, differ


def distrust(reading: Reading, usage: tuple[int, int], *, is_estimate: bool) -> list[str]:
    """Reasons why the result cannot be trusted; none if it can."""
    reasons = []
    lines = max(reading.lines, 1)
    if reading.broken > _BROKEN_MOST * lines:
        reasons.append(f"{reading.broken} of {reading.lines} lines cannot be read")
    if reading.cut > _CUT_MOST * max(len(reading.records), 1):
        reasons.append(f"the logger cut {reading.cut} of {len(reading.records)} prompts")
    logged, differ = usage
    if not is_estimate and differ > _DIFFER_MOST * max(logged, 1):
        reasons.append(
            f"{differ} of {logged} requests have another number of tokens than the server counted:"
            " another tokenizer or chat template served them"
        )
    return reasons
