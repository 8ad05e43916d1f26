"""The template around a changing value: what stands before and behind it in every request.

Learned from the breaks of one site: the text from the line's start (left), and the text where all agree
again (right). With it, the value is found in all requests, not only in those that broke.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Sequence
from typing import NamedTuple

from kvdepot.audit.breaks import Break
from kvdepot.audit.records import Body
from kvdepot.audit.texts import common_prefix, common_suffix
from kvdepot.audit.values import time_around

__all__ = ["Span", "Variants", "learn_span", "learn_variants", "mapped_text", "message_texts"]

_WORD = re.compile(r"[\w]")
_RIGHT_MIN = 3


class Span(NamedTuple):
    """Finds a value in the messages of one role."""

    role: str
    #: only the first message is looked at, as for system prompts
    is_first: bool
    regex: re.Pattern[str]

    def value(self, body: Body) -> str | None:
        """The value in a request; None if it has no such place."""
        for message in self.messages(body):
            for text in message_texts(message):
                match = self.regex.search(text)
                if match:
                    return match["value"]
        return None

    def messages(self, body: Body) -> list[Body]:
        """The messages in which the value is looked for."""
        if self.is_first:
            return [each for each in body["messages"][:1] if each.get("role") == self.role]
        return [each for each in body["messages"] if each.get("role") == self.role]


class Variants(NamedTuple):
    """A few texts that stand at one place."""

    span: Span
    before: str
    after: str
    texts: tuple[str, ...]

    def of(self, body: Body) -> str | None:
        """Which of them a request has."""
        for message in self.span.messages(body):
            for text in message_texts(message):
                for each in sorted(self.texts, key=len, reverse=True):
                    if f"{self.before}{each}{self.after}" in text:
                        return each
        return None


def message_texts(message: Body) -> list[str]:
    """The texts of a message's content."""
    content = message.get("content")
    if isinstance(content, str):
        return [content]
    parts = content if isinstance(content, list) else []
    return [
        part["text"]
        for part in parts
        if isinstance(part, dict) and isinstance(part.get("text"), str)
    ]


def mapped_text(message: Body, change: Callable[[str], str]) -> Body:
    """A message with each text of its content changed; the same object if nothing is."""
    content = message.get("content")
    if isinstance(content, str):
        changed = change(content)
        return message if changed == content else {**message, "content": changed}
    if isinstance(content, list):
        parts = [
            {**part, "text": change(part["text"])}
            if isinstance(part, dict) and isinstance(part.get("text"), str)
            else part
            for part in content
        ]
        return message if parts == content else {**message, "content": parts}
    return message


def _role_and_place(breaks: Sequence[Break], bodies: Sequence[Body]) -> tuple[str, bool]:
    first = breaks[0]
    number = int(first.path[first.path.index("[") + 1 : -1])
    messages = bodies[first.request]["messages"]
    role = str(messages[number].get("role")) if number < len(messages) else "user"
    return role, number == 0


def learn_span(breaks: Sequence[Break], bodies: Sequence[Body]) -> Span | None:
    """The value's place, from breaks of one site; None where no template can be seen."""
    role, is_first = _role_and_place(breaks, bodies)
    lead = _without_time(min((each.lead for each in breaks), key=len), breaks)
    prefix = _prefix(lead, breaks)
    gaps = [gap for each in breaks for gap in (each.gap, each.donor_gap)]
    tail = _of_many_lines(breaks, gaps)
    if tail is not None:
        regex = re.compile(f"{prefix}(?P<value>.*?){re.escape(tail)}", re.DOTALL | re.MULTILINE)
        return Span(role, is_first, regex)
    probe = Span(role, is_first, re.compile(f"{prefix}(?P<value>[^\n]*)", re.MULTILINE))
    lines = {value for body in bodies if (value := probe.value(body)) is not None}
    if len(lines) < 2:
        return None
    suffix = _suffix(lines)
    if suffix:
        ends = [time_around(line, 0, len(line) - len(suffix))[1] for line in lines]
        suffix = suffix[
            max(
                0, max(end - len(line) for end, line in zip(ends, lines, strict=True)) + len(suffix)
            ) :
        ]
    longest_gap = max(len(gap) for gap in gaps)
    shortest = min(len(line) - len(suffix) for line in lines)
    if shortest > 2 * longest_gap + 20:
        # the line goes on with text that is not the value's: the value by its number of words
        words = max(len(gap.split()) for gap in gaps) or 1
        value = rf"\S+(?:[ \t]+\S+){{{words - 1}}}"
        return Span(role, is_first, re.compile(f"{prefix}(?P<value>{value})", re.MULTILINE))
    regex = re.compile(f"{prefix}(?P<value>[^\n]*?){re.escape(suffix)}$", re.MULTILINE)
    return Span(role, is_first, regex)


def _without_time(lead: str, breaks: Sequence[Break]) -> str:
    """The text before a value, less the beginning of a date that the value is the rest of."""
    starts = [
        time_around(f"{lead}{each.gap}{each.after[:20]}", len(lead), len(lead) + len(each.gap))[0]
        for each in breaks
        if each.lead == lead
    ]
    return lead[: min(starts, default=len(lead))]


def _prefix(lead: str, breaks: Sequence[Break]) -> str:
    """What must stand before the value, as a pattern: from the line's start, or from the text's."""
    if all(each.line == 0 for each in breaks) and len(lead) < 200:
        return rf"\A{re.escape(lead)}"
    if len(lead) >= 200:
        return re.escape(lead)
    if lead.strip():
        return f"^{re.escape(lead)}"
    contexts = Counter(each.context for each in breaks)
    context, count = contexts.most_common(1)[0]
    if context and count == len(breaks):
        return re.escape(context) + re.escape(lead)
    line = Counter(each.line for each in breaks).most_common(1)[0][0]
    return rf"\A(?:[^\n]*\n){{{line}}}{re.escape(lead)}"


def _of_many_lines(breaks: Sequence[Break], gaps: Sequence[str]) -> str | None:
    """For values of several lines, the text behind them in all; None for values within a line."""
    if 2 * sum("\n" in gap.strip("\n") for gap in gaps) < len(gaps):
        return None
    afters = [each.after for each in breaks if each.after]
    if not afters or _is_line_by_line(gaps):
        return None
    right = afters[0]
    for each in afters[1:]:
        right = right[: common_prefix(right, each)]
    return right if len(right.strip()) >= _RIGHT_MIN else None


def _is_line_by_line(gaps: Sequence[str]) -> bool:
    """Whether several values stand below each other, each behind a text of its own: one at a time."""
    split = [gap.split("\n") for gap in gaps]
    if len({len(lines) for lines in split}) != 1:
        return False
    for lines in zip(*[each[1:] for each in split], strict=True):
        head = lines[0]
        for line in lines[1:]:
            head = head[: common_prefix(head, line)]
        if len(head) < _RIGHT_MIN and len(set(lines)) > 1:
            return False
    return True


def _suffix(lines: set[str]) -> str:
    ordered = sorted(lines)
    suffix = ordered[0]
    for each in ordered[1:]:
        count = common_suffix(suffix, each)
        suffix = suffix[len(suffix) - count :]
        if not suffix:
            return ""
    while suffix and _WORD.match(suffix[0]):
        suffix = suffix[1:]
    return suffix


def learn_variants(breaks: Sequence[Break], bodies: Sequence[Body]) -> Variants | None:
    """The versions of a text at one place, if there are at most five."""
    role, is_first = _role_and_place(breaks, bodies)
    before = min((each.before for each in breaks), key=len)
    after = min((each.after for each in breaks), key=len)[:24]
    texts = {gap for each in breaks for gap in (each.gap, each.donor_gap)}
    if not 2 <= len(texts) <= 5 or (len(before) + len(after)) < 8:
        return None
    if any(not each.before.endswith(before[-12:]) for each in breaks):
        return None
    span = Span(role, is_first, re.compile("(?P<value>)"))
    return Variants(span, before[-40:], after, tuple(sorted(texts)))
