"""Where two prompts part, and what can be told from the two alone.

A break is between a request and its body donor: the earlier request that holds most of the text behind
the break. Structural causes (tools, white space, JSON, order of pieces, images, the template) are proved
by the two texts; for a value that changes, the pattern over all requests decides (see `values`).
"""

from __future__ import annotations

import re
from typing import NamedTuple

from kvdepot.audit.history import is_media_change, message_key
from kvdepot.audit.records import Body
from kvdepot.audit.render import GLUE, Part, Prompt
from kvdepot.audit.texts import (
    canonical_json,
    common_prefix,
    json_blocks,
    meeting,
    normalised,
    reordered,
    snapped,
)
from kvdepot.audit.toolsets import tool_change, tools_of

__all__ = ["VALUE", "Break", "find_break", "place_of"]

#: the kind of a break at a value whose cause is told by its pattern
VALUE = "value"
_LEAD_CHARS = 200
_CONTEXT_CHARS = 24
_VOLATILE = re.compile(r"[0-9a-fA-F]{6,}|\d+")
_NORMAL_CHARS = 100
#: what templates write in front of a date of their own
_TEMPLATE_DATE = re.compile(r"(?:Today Date|Current [Dd]ate|Today's Date): $")


class Break(NamedTuple):
    """One request's break."""

    request: int
    donor: int
    #: slug of a structural cause, or `VALUE`
    kind: str
    #: ``messages[0]``, ``tools``, ``template``
    path: str
    #: character of the request's prompt, at a word's start
    at: int
    #: tokens behind the break that the donor holds as well
    estimate: int
    detail: str = ""
    #: for values: the line's text before it, what stands before the line, and where the line is
    lead: str = ""
    context: str = ""
    line: int = 0
    gap: str = ""
    donor_gap: str = ""
    #: the text around both gaps
    before: str = ""
    after: str = ""

    @property
    def site(self) -> tuple[str, str, str]:
        """Breaks of one site are equal in this; values of one line are put together later."""
        if self.kind != VALUE:
            return (self.kind, self.path, "")
        return (self.kind, self.path, f"{_VOLATILE.sub('#', self.context)}")


class _Pair(NamedTuple):
    request: int
    donor: int
    ours: Body
    theirs: Body
    prompt: Prompt
    other: Prompt
    estimate: int


def find_break(
    request: int,
    donor: int,
    bodies: tuple[Body, Body],
    prompts: tuple[Prompt, Prompt],
    estimate: int,
) -> Break | None:
    """Tell where a request parts from its donor, and how.

    Args:
        request: its number.
        donor: the number of the donor.
        bodies: of both.
        prompts: of both.
        estimate: tokens behind the break that the donor holds.

    Returns:
        The break; None where one prompt is the beginning of the other.
    """
    pair = _Pair(request, donor, *bodies, *prompts, estimate)
    at = common_prefix(pair.prompt.text, pair.other.text)
    if at >= min(len(pair.prompt.text), len(pair.other.text)):
        return None
    part = pair.prompt.part_at(at)
    tools = _tools_break(pair, part, at)
    if tools is not None:
        return tools
    if part.path == GLUE and pair.other.part_at(at).path != GLUE:
        # one content goes on where the other one ends: it is about that message
        part = Part(pair.other.part_at(at).path, min(part.start, at), at)
        part = pair.prompt.part(part.path) or part
    if part.path == GLUE:
        moved = _moved_messages(pair, at)
        return moved or Break(request, donor, "template", GLUE, at, estimate, *_glue(pair, at))
    return _message_break(pair, part, at)


def _tools_break(pair: _Pair, part: Part, at: int) -> Break | None:
    if not (part.path.startswith("tools[") or part.path == GLUE):
        return None
    ours, theirs = tools_of(pair.ours), tools_of(pair.theirs)
    if not ours and not theirs:
        return None
    change = tool_change(ours, theirs)
    if change is None:
        return None
    return Break(pair.request, pair.donor, change.cause, "tools", at, pair.estimate, change.detail)


def _glue(pair: _Pair, at: int) -> tuple[str]:
    """What of the template differs, for people."""
    start = max(0, at - 40)
    ours, theirs = pair.prompt.text[start : at + 40], pair.other.text[start : at + 40]
    return (f"{ours!r} against {theirs!r}",)


def _moved_messages(pair: _Pair, at: int) -> Break | None:
    """Messages that both have, in another order: examples, or a history put together anew."""
    ours = [message_key(each) for each in pair.ours["messages"]]
    theirs = [message_key(each) for each in pair.theirs["messages"]]
    index = next(
        (n for n, (one, other) in enumerate(zip(ours, theirs, strict=False)) if one != other), -1
    )
    if (
        index < 0
        or ours[index] not in theirs[index + 1 :]
        or theirs[index] not in ours[index + 1 :]
    ):
        return None
    return Break(
        pair.request, pair.donor, "piece_order", f"messages[{index}]", at, pair.estimate, "messages"
    )


def _message_break(pair: _Pair, part: Part, at: int) -> Break:
    path = part.path
    number = int(path[path.index("[") + 1 : path.index("]")])
    their_part = pair.other.part(path)
    text = pair.prompt.text[part.start : part.end]
    other = pair.other.text[their_part.start : their_part.end] if their_part else ""
    inner = min(at - part.start, len(text))

    def structural(kind: str, detail: str = "") -> Break:
        return Break(pair.request, pair.donor, kind, path, at, pair.estimate, detail)

    moved = _moved_messages(pair, at)
    if moved is not None:
        return moved
    messages = pair.ours["messages"], pair.theirs["messages"]
    if all(number < len(each) for each in messages) and is_media_change(
        messages[0][number], messages[1][number]
    ):
        return structural("media")
    # the line before the break is looked at as well: a line end differs at its very end
    start = max(0, text.rfind("\n", 0, max(inner - 1, 0)))
    if _is_white_space(text[start:], other[start:], inner - start):
        return structural("white_space")
    if _is_json_form(text, other, inner):
        return structural("json_form")
    splits = reordered(text, other)
    if splits:
        return structural("piece_order", " ".join(splits))
    return _value_break(pair, part, at)


def _is_white_space(text: str, other: str, inner: int) -> bool:
    """Whether both go on alike once normalised, for a good way behind the break."""
    window = inner + 40 * _NORMAL_CHARS
    one, two = normalised(text[:window]), normalised(other[:window])
    head = len(normalised(text[:inner]))
    same = common_prefix(one, two)
    return same >= min(len(one), len(two), head + _NORMAL_CHARS) and same > head


def _is_json_form(text: str, other: str, inner: int) -> bool:
    """Whether the break is in JSON that says the same, or nearly the same, in both."""
    ours = [(start, value) for start, end, value in json_blocks(text) if start <= inner < end]
    if not ours:
        return False
    start, value = ours[0]
    theirs = [each for first, end, each in json_blocks(other) if first == start]
    if not theirs or not isinstance(theirs[0], type(value)):
        return False
    one, two = canonical_json(value), canonical_json(theirs[0])
    if one == two:
        return True
    was = common_prefix(text, other) - start
    return common_prefix(one, two) > max(2 * was, was + 200)


def _value_break(pair: _Pair, part: Part, at: int) -> Break:
    text, other = pair.prompt.text, pair.other.text
    at = snapped(text, at, part.start)
    line_start = max(text.rfind("\n", part.start, at) + 1, part.start)
    met = meeting(text, other, at)
    end, their_end = (met.left, met.right) if met else (part.end, len(other))
    end = min(end, part.end)
    gap, donor_gap = text[at:end], other[at : min(their_end, at + 4000)]
    if _TEMPLATE_DATE.search(text[line_start:at]) and part.path == "messages[0]":
        return Break(
            pair.request, pair.donor, "template", GLUE, at, pair.estimate, f"the date {gap!r}"
        )
    return Break(
        pair.request,
        pair.donor,
        VALUE,
        part.path,
        at,
        pair.estimate,
        "",
        text[line_start:at][-_LEAD_CHARS:],
        text[max(part.start, line_start - _CONTEXT_CHARS) : line_start],
        text.count("\n", part.start, line_start),
        gap,
        donor_gap,
        text[max(part.start, at - 40) : at],
        text[end : end + 60] if end < part.end else "",
    )


def place_of(path: str, roles: list[str]) -> str:
    """A path for people: with the message's role."""
    match = re.fullmatch(r"messages\[(-?\d+)\]", path)
    if match is None or not roles:
        return path
    number = int(match[1])
    if -len(roles) <= number < len(roles):
        return f"{path} ({roles[number]})"
    return path
