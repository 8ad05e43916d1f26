"""What is shown of real prompts: values masked, lines cut, the change and little around it."""

from __future__ import annotations

import difflib
import re

from kvdepot.audit.texts import common_prefix, common_suffix

__all__ = ["masked", "prompt_diff"]

_KEPT = 4
_LINE_CHARS = 160
_CONTEXT_LINES = 2
_DIFF_LINES = 60
_LINES_MAX = 2000


def masked(value: str) -> str:
    """The first characters of a value, and how long it is."""
    value = value.strip()
    if not value:
        return "(nothing)"
    shown = value[:_KEPT] if len(value) > 2 * _KEPT else value[:1]
    return f"{shown}\u2026 ({len(value)} characters)"


def prompt_diff(before: str, after: str, *, show_values: bool) -> str:
    """A unified diff of the lines that an edit changes; "" where it changes none.

    Unless values are shown, letters and digits of changed lines are replaced beyond the first word.
    """
    head = before.rfind("\n", 0, common_prefix(before, after) + 1) + 1
    head = max(0, _line_back(before, head, _CONTEXT_LINES))
    tail = min(common_suffix(before[head:], after[head:]), 400)
    end, other_end = len(before) - tail, len(after) - tail
    left = before[head : max(head, end) + min(tail, 200)].splitlines()[:_LINES_MAX]
    right = after[head : max(head, other_end) + min(tail, 200)].splitlines()[:_LINES_MAX]
    lines = difflib.unified_diff(left, right, "before", "after", lineterm="", n=_CONTEXT_LINES)
    made = [_shown(line, show_values=show_values) for line in lines]
    if len(made) > _DIFF_LINES:
        made = [*made[:_DIFF_LINES], f"\u2026 {len(made) - _DIFF_LINES} lines more"]
    return "\n".join(made)


def _line_back(text: str, at: int, lines: int) -> int:
    for _ in range(lines):
        at = text.rfind("\n", 0, max(at - 1, 0)) + 1
    return at


def _shown(line: str, *, show_values: bool) -> str:
    is_changed = line[:1] in "+-" and not line.startswith(("+++", "---"))
    if is_changed and not show_values:
        # names of fields stay readable; what may be a value does not
        head, sep, rest = line.partition(":")
        if not sep or re.fullmatch(r"[+-][A-Za-z_ -]{1,30}", head) is None:
            head, sep, rest = line[:5], "", line[5:]
        line = head + sep + re.sub(r"\w", "x", rest)
    return line if len(line) <= _LINE_CHARS else line[:_LINE_CHARS] + "\u2026"
