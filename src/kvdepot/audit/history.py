"""Conversations: what became of the messages that were sent the turn before.

Compared on the messages, not on copied tokens: after a compaction little is left to copy, and it is a
break all the same.
"""

from __future__ import annotations

import json
import re
from typing import Any, NamedTuple

from kvdepot.audit.records import Body
from kvdepot.audit.render import content_text, message_text
from kvdepot.audit.texts import canonical_json, common_prefix, common_suffix, normalised

__all__ = [
    "Event",
    "common_run",
    "event",
    "is_media_change",
    "message_key",
    "without_reasoning",
]

_THINK = re.compile(r"<think>.*?</think>\s*|<\|channel\|>analysis.*?<\|end\|>", re.DOTALL)
_VALUE_CHARS = 80


class Event(NamedTuple):
    """What happened to the message at `at`."""

    cause: str
    at: int
    #: for a window: messages that fell out
    dropped: int = 0
    detail: str = ""


def message_key(message: Body) -> str:
    """Equal for messages that reach the model as the same text."""
    return f"{message.get('role')}\n{message.get('name') or ''}\n{message_text(message)}"


def without_reasoning(message: Body) -> Body:
    """A message without its reasoning."""
    made = {
        key: value
        for key, value in message.items()
        if key not in ("reasoning_content", "reasoning")
    }
    if isinstance(made.get("content"), str):
        made["content"] = _THINK.sub("", made["content"])
    return made


def is_media_change(ours: Body, theirs: Body) -> bool:
    """Whether two messages differ in the content of images alone."""
    left, right = ours.get("content"), theirs.get("content")
    if not isinstance(left, list) or not isinstance(right, list) or len(left) != len(right):
        return False
    changed = False
    for one, other in zip(left, right, strict=True):
        if one == other:
            continue
        both = isinstance(one, dict) and isinstance(other, dict)
        if not both or one.get("type") != other.get("type") or "text" in one:
            return False
        changed = True
    return changed


def event(ours: Body, theirs: Body) -> Event | None:
    """What became of the messages of the turn before (`theirs`); None where they only grew.

    None as well for a change that is not a conversation's: of the system prompt, or of a short value.
    """
    now, before = ours["messages"], theirs["messages"]
    our_keys = [message_key(each) for each in now]
    their_keys = [message_key(each) for each in before]
    index = next(
        (
            number
            for number, (one, other) in enumerate(zip(our_keys, their_keys, strict=False))
            if one != other
        ),
        min(len(now), len(before)),
    )
    if index >= len(before) or index == 0:
        return None
    if index >= len(now):
        return None  # the turn before again, without its end: a retry, or another branch
    return _moved(our_keys, their_keys, index) or _rewritten(now, before, index)


def _moved(now: list[str], before: list[str], index: int) -> Event | None:
    """A window that slid, or a summary in the place of messages."""
    rest = before[index:]
    if now[index] in rest:
        dropped = rest.index(now[index])
        kept = len(rest) - dropped
        same = common_run(now[index:], rest[dropped:])
        if dropped and same >= min(2, kept):
            return Event("window", index, dropped)
        return None
    if len(now) < len(before) or _meets_later(now, before, index):
        return Event("compaction", index)
    return None


def common_run(left: list[str], right: list[str]) -> int:
    """How many first elements agree."""
    count = 0
    for one, other in zip(left, right, strict=False):
        if one != other:
            break
        count += 1
    return count


def _meets_later(now: list[str], before: list[str], index: int) -> bool:
    """Whether some messages were replaced by fewer new ones, and the rest follows."""
    for skipped in range(index + 1, min(index + 4, len(now))):
        if now[skipped] in before[index:]:
            gone = before.index(now[skipped], index) - index
            return gone > skipped - index
    return False


def _rewritten(now: list[Body], before: list[Body], index: int) -> Event | None:
    """The message at `index` is the same one in other words."""
    one, other = now[index], before[index]
    if one.get("role") != other.get("role"):
        return None
    if message_text(without_reasoning(one)) == message_text(without_reasoning(other)):
        return Event("reasoning", index)
    if is_media_change(one, other):
        return Event("media", index)
    if _meaning(one) == _meaning(other):
        return Event("answer_rewritten", index)
    left, right = message_text(one), message_text(other)
    head, tail = common_prefix(left, right), common_suffix(left, right)
    changed = max(len(left), len(right)) - head - tail
    if changed <= _VALUE_CHARS:
        return None
    if head >= 20 or head + tail >= 0.3 * min(len(left), len(right)):
        return Event("edited_later", index)
    return None


def _meaning(message: Body) -> str:
    """A message's content and calls, however its JSON and blanks are written."""
    calls = message.get("tool_calls")
    parsed: list[Any] = []
    for call in calls if isinstance(calls, list) else []:
        function = call.get("function") if isinstance(call, dict) else None
        arguments = function.get("arguments") if isinstance(function, dict) else None
        try:
            value = json.loads(arguments) if isinstance(arguments, str) else arguments
        except (ValueError, RecursionError):
            value = arguments
        parsed.append([function.get("name") if isinstance(function, dict) else None, value])
    text = " ".join(normalised(content_text(message.get("content"))).split())
    return f"{text}\n{canonical_json(parsed)}"
