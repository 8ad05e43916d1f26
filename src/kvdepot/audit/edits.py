"""Edits that repair a break, made on all requests, so that the traffic can be run again.

Each is a plain function from traffic to traffic. Nothing is changed in place.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

from kvdepot.audit.records import Body
from kvdepot.audit.render import LITERAL
from kvdepot.audit.spans import Span, Variants, mapped_text
from kvdepot.audit.texts import (
    canonical_json,
    normalised,
    pieces,
    with_canonical_json,
    with_sorted_json,
    with_sorted_pieces,
)
from kvdepot.audit.toolsets import tool_name, tools_of
from kvdepot.audit.traffic import PIN_TIME, Traffic

__all__ = [
    "Edit",
    "align",
    "canonical_messages",
    "canonical_tools",
    "drop_extra",
    "every_tool",
    "move",
    "normal_text",
    "one_template",
    "sort_messages",
    "sort_pieces",
    "sort_tools",
    "sorted_messages_json",
    "with_last_user",
]


#: a line that says no more than this beside a value goes with it
_LABEL_CHARS = 48


class Edit(NamedTuple):
    """A change to all requests of a traffic."""

    #: key of the text that says what is done (see `words`)
    what: str
    apply: Callable[[Traffic], Traffic]


def _each(traffic: Traffic, change: Callable[[Body], Body]) -> Traffic:
    return traffic.edited([change(body) for body in traffic.bodies])


def _messages(body: Body, change: Callable[[Body], Body]) -> Body:
    return {**body, "messages": [change(message) for message in body["messages"]]}


def with_last_user(messages: Sequence[Body], text: str) -> list[Body]:
    """Messages with a text added to the last user message, or to the last one if there is none."""
    made = list(messages)
    users = [number for number, each in enumerate(made) if each.get("role") == "user"]
    at = users[-1] if users else len(made) - 1
    content = made[at].get("content")
    if isinstance(content, list):
        made[at] = {**made[at], "content": [*content, {"type": "text", "text": text}]}
    else:
        made[at] = {**made[at], "content": f"{content or ''}{text}"}
    return made


def move(span: Span) -> Edit:
    """Take the value out of its place and add it to the end: of its own message, if a user's."""

    def of_body(body: Body) -> Body:
        taken: list[str] = []

        def out(text: str) -> str:
            match = span.regex.search(text)
            if match is None:
                return text
            start, end = _moved_span(text, match)
            taken.append(text[start:end].strip("\n"))
            return text[:start] + text[end:]

        wanted = {id(message) for message in span.messages(body)}
        messages = []
        for message in body["messages"]:
            if id(message) not in wanted:
                messages.append(message)
                continue
            changed = mapped_text(message, out)
            if span.role == "user" and taken:
                changed = with_last_user([changed], f"\n{taken.pop()}")[0]
            messages.append(changed)
        if taken:
            messages = with_last_user(messages, "".join(f"\n{value}" for value in taken))
        return {**body, "messages": messages}

    return Edit("move", lambda traffic: _each(traffic, of_body))


def _moved_span(text: str, match: re.Match[str]) -> tuple[int, int]:
    """The value; its whole line where that says little else, as a person would move it."""
    start, end = match.span("value")
    line_start = text.rfind("\n", 0, start) + 1
    line_end = text.find("\n", end)
    if line_end < 0 or "\n" in match["value"]:
        return start, end
    if (start - line_start) + (line_end - end) > _LABEL_CHARS:
        return start, end
    return line_start, line_end + 1


def align(variants: Variants, text: str) -> Edit:
    """One version for all."""

    def of_text(content: str) -> str:
        for each in sorted(variants.texts, key=len, reverse=True):
            found = f"{variants.before}{each}{variants.after}"
            if each != text and found in content:
                return content.replace(found, f"{variants.before}{text}{variants.after}", 1)
        return content

    def of_body(body: Body) -> Body:
        wanted = {id(message) for message in variants.span.messages(body)}
        return _messages(
            body, lambda each: mapped_text(each, of_text) if id(each) in wanted else each
        )

    return Edit("align", lambda traffic: _each(traffic, of_body))


def sort_tools() -> Edit:
    """Tools by name."""

    def of_body(body: Body) -> Body:
        tools = tools_of(body)
        if not tools:
            return body
        return {
            **body,
            "tools": sorted(tools, key=lambda tool: (tool_name(tool), canonical_json(tool))),
        }

    return Edit("sort_tools", lambda traffic: _each(traffic, of_body))


def canonical_tools() -> Edit:
    """Keys of tools in one order, tools by name."""

    def of_body(body: Body) -> Body:
        tools = tools_of(body)
        if not tools:
            return body
        ordered = sorted(tools, key=lambda tool: (tool_name(tool), canonical_json(tool)))
        return {**body, "tools": [_sorted_keys(tool) for tool in ordered]}

    return Edit("canonical_tools", lambda traffic: _each(traffic, of_body))


def _sorted_keys(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _sorted_keys(value[key]) for key in sorted(value, key=str)}
    if isinstance(value, list):
        return [_sorted_keys(each) for each in value]
    return value


def every_tool() -> Edit:
    """Always the whole set, each tool in its most frequent form, by name."""

    def of_traffic(traffic: Traffic) -> Traffic:
        forms: dict[str, Counter[str]] = {}
        kept: dict[str, Any] = {}
        for body in traffic.bodies:
            for tool in tools_of(body):
                written = canonical_json(tool)
                forms.setdefault(tool_name(tool), Counter())[written] += 1
                kept.setdefault(written, tool)
        whole = [_sorted_keys(kept[forms[name].most_common(1)[0][0]]) for name in sorted(forms)]
        return _each(traffic, lambda body: {**body, "tools": whole} if tools_of(body) else body)

    return Edit("every_tool", of_traffic)


def normal_text() -> Edit:
    """One kind of line end, no trailing blanks, one Unicode form."""
    return Edit(
        "normal_text",
        lambda traffic: _each(
            traffic, lambda body: _messages(body, lambda each: mapped_text(each, normalised))
        ),
    )


def canonical_messages() -> Edit:
    """JSON in messages written in one way."""
    return Edit(
        "canonical_json",
        lambda traffic: _each(
            traffic,
            lambda body: _messages(body, lambda each: mapped_text(each, with_canonical_json)),
        ),
    )


def sorted_messages_json() -> Edit:
    """Keys of JSON in messages in one order."""
    return Edit(
        "sorted_json",
        lambda traffic: _each(
            traffic,
            lambda body: _messages(body, lambda each: mapped_text(each, with_sorted_json)),
        ),
    )


def sort_pieces(split: str, role: str, *, by_popularity: bool) -> Edit:
    """Pieces of a message in one order: the most frequent first, or an order that means nothing."""

    def of_traffic(traffic: Traffic) -> Traffic:
        counts: Counter[str] = Counter()
        for body in traffic.bodies:
            for message in body["messages"]:
                if message.get("role") == role and isinstance(message.get("content"), str):
                    found = pieces(message["content"], split)
                    counts.update({each.key for each in found[:-1]})
        known = _Prefixes(counts)

        def rank(key: str) -> tuple[int, str]:
            return (-counts[key] if by_popularity else 0, key)

        def of_message(message: Body) -> Body:
            if message.get("role") != role:
                return message
            return mapped_text(
                message, lambda text: with_sorted_pieces(text, split, rank, known.of(text, split))
            )

        return _each(traffic, lambda body: _messages(body, of_message))

    return Edit("popular_first" if by_popularity else "sort_pieces", of_traffic)


class _Prefixes:
    """Known pieces by their first characters, so that few are compared with a text's last piece."""

    _CHARS = 16

    def __init__(self, keys: Iterable[str]) -> None:
        self._by_head: dict[str, list[str]] = {}
        for key in keys:
            self._by_head.setdefault(key[: self._CHARS], []).append(key)

    def of(self, text: str, split: str) -> list[str]:
        """Pieces that the last one of a text may be."""
        found = pieces(text, split)
        return self._by_head.get(found[-1].key[: self._CHARS], []) if found else []


def sort_messages(index: int) -> Edit:
    """Example messages in one order: pairs of user and assistant between `index` and the last one."""

    def of_body(body: Body) -> Body:
        messages = body["messages"]
        users = [number for number, each in enumerate(messages) if each.get("role") == "user"]
        end = users[-1] if users else len(messages)
        middle = messages[index:end]
        groups: list[list[Body]] = []
        for message in middle:
            if message.get("role") == "user" or not groups:
                groups.append([])
            groups[-1].append(message)
        groups.sort(key=lambda group: canonical_json([each.get("content") for each in group]))
        ordered = [message for group in groups for message in group]
        return {**body, "messages": [*messages[:index], *ordered, *messages[end:]]}

    return Edit("sort_pieces", lambda traffic: _each(traffic, of_body))


def drop_extra(names: Iterable[str]) -> Edit:
    """One salt, adapter or model for all; the others stay apart."""
    dropped = set(names)

    def of_traffic(traffic: Traffic) -> Traffic:
        made = traffic.edited(traffic.bodies)
        numbers: dict[tuple[tuple[str, str], ...], int] = {}
        left = [
            tuple(pair for pair in traffic.extra_names[extra] if pair[0] not in dropped)
            for extra in traffic.extras
        ]
        made.extras = [numbers.setdefault(each, len(numbers)) for each in left]
        made.extra_names = list(numbers)
        return made

    return Edit("one_extra", of_traffic)


def one_template() -> Edit:
    """The same glue for all: one date, one set of template arguments, one start of text."""

    def of_traffic(traffic: Traffic) -> Traffic:
        arguments = Counter(
            canonical_json(body.get("chat_template_kwargs")) for body in traffic.bodies
        )
        usual = arguments.most_common(1)[0][0] if arguments else "null"
        pinned = next(
            (
                body.get("chat_template_kwargs")
                for body in traffic.bodies
                if canonical_json(body.get("chat_template_kwargs")) == usual
            ),
            None,
        )
        glue = [Counter(body[LITERAL][:1]) for body in traffic.bodies if LITERAL in body]
        firsts: Counter[str] = sum(glue, Counter())
        first = firsts.most_common(1)[0][0] if firsts else ""

        def of_body(body: Body) -> Body:
            if LITERAL in body:
                return {**body, LITERAL: [first, *body[LITERAL][1:]]}
            made = {**body, PIN_TIME: True}
            made.pop("chat_template_kwargs", None)
            return {**made, "chat_template_kwargs": pinned} if pinned is not None else made

        return _each(traffic, of_body)

    return Edit("one_template", of_traffic)
