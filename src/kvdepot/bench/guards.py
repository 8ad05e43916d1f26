"""The guards: every result is VALID, VALID WITH NOTES or INVALID, and says why.

Pure functions over rows and windows. A guard that could not look says so: that is a note, never
silence.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

import msgspec

__all__ = [
    "GUARDS",
    "VERDICTS",
    "Finding",
    "Level",
    "Verdict",
    "invalid",
    "note",
    "unique",
    "verdict_of",
]

Level = Literal["note", "invalid"]
Verdict = Literal["VALID", "VALID WITH NOTES", "INVALID"]

VERDICTS: tuple[Verdict, ...] = ("VALID", "VALID WITH NOTES", "INVALID")

#: their names; what each holds stands in `kvdepot.bench.words`
GUARDS = tuple(f"G{number}" for number in range(1, 13))


class Finding(msgspec.Struct, frozen=True, kw_only=True):
    """What a guard has to say about one result."""

    guard: str
    level: Level
    #: round, or load point, or empty for all
    where: str
    arm: str
    reason: str


def note(guard: str, where: str, arm: str, reason: str) -> Finding:
    """It holds with this remark."""
    return Finding(guard=guard, level="note", where=where, arm=arm, reason=reason)


def invalid(guard: str, where: str, arm: str, reason: str) -> Finding:
    """It does not hold."""
    return Finding(guard=guard, level="invalid", where=where, arm=arm, reason=reason)


def verdict_of(findings: Iterable[Finding], *, where: str = "", arm: str = "") -> Verdict:
    """The verdict on all, or on one result: what is said about everything counts there too."""
    seen = [
        each.level
        for each in findings
        if (not where or each.where in ("", where)) and (not arm or each.arm in ("", arm))
    ]
    if "invalid" in seen:
        return "INVALID"
    return "VALID WITH NOTES" if seen else "VALID"


def unique(findings: Iterable[Finding]) -> list[Finding]:
    """Each thing once, in the order of guards."""
    return sorted(dict.fromkeys(findings), key=lambda each: GUARDS.index(each.guard))
