"""Edits of conversations: what is sent again the next turn stays as it was sent."""

from __future__ import annotations

from collections import defaultdict

from kvdepot.audit.edits import Edit
from kvdepot.audit.history import is_media_change, message_key, without_reasoning
from kvdepot.audit.records import Body
from kvdepot.audit.traffic import Traffic

__all__ = ["final_form", "first_image", "no_reasoning", "wide_window"]


def no_reasoning() -> Edit:
    """Reasoning left out of every answer, of the last one too."""

    def of_body(body: Body) -> Body:
        messages = [
            without_reasoning(each) if each.get("role") == "assistant" else each
            for each in body["messages"]
        ]
        return {**body, "messages": messages}

    return Edit(
        "no_reasoning", lambda traffic: traffic.edited([of_body(body) for body in traffic.bodies])
    )


def _by_session(traffic: Traffic) -> list[list[int]]:
    groups: dict[int, list[int]] = defaultdict(list)
    for number, session in enumerate(traffic.sessions):
        if session >= 0:
            groups[session].append(number)
    return list(groups.values())


def final_form() -> Edit:
    """Each message from the first time on as it is sent the last time."""

    def of_traffic(traffic: Traffic) -> Traffic:
        bodies = list(traffic.bodies)
        for numbers in _by_session(traffic):
            last: dict[int, Body] = {}
            for number in reversed(numbers):
                messages = bodies[number]["messages"]
                made = []
                for index, message in enumerate(messages):
                    later = last.get(index)
                    is_same = later is not None and later.get("role") == message.get("role")
                    made.append(later if is_same and later is not None else message)
                    if not is_same:
                        last[index] = message
                bodies[number] = {**bodies[number], "messages": made}
        return traffic.edited(bodies)

    return Edit("final_form", of_traffic)


def first_image() -> Edit:
    """Each image as it was sent the first time in its session."""

    def of_traffic(traffic: Traffic) -> Traffic:
        bodies = list(traffic.bodies)
        for numbers in _by_session(traffic):
            first: dict[int, Body] = {}
            for number in numbers:
                messages = list(bodies[number]["messages"])
                for index, message in enumerate(messages):
                    earlier = first.setdefault(index, message)
                    if is_media_change(message, earlier):
                        messages[index] = earlier
                bodies[number] = {**bodies[number], "messages": messages}
        return traffic.edited(bodies)

    return Edit("first_image", of_traffic)


def wide_window(pinned: int) -> Edit:
    """A window that is cut in big steps: when twice as long as now, the older half is dropped.

    Args:
        pinned: messages before the window that stay.
    """

    def of_traffic(traffic: Traffic) -> Traffic:
        bodies = list(traffic.bodies)
        for numbers in _by_session(traffic):
            whole: list[Body] = []
            keys: list[str] = []
            dropped = 0
            for number in numbers:
                messages = traffic.bodies[number]["messages"]
                window = messages[pinned:]
                dropped = _shift(keys, [message_key(each) for each in window], dropped)
                whole[dropped:] = window
                keys[dropped:] = [message_key(each) for each in window]
                step = max(2, len(window) // 2 * 2)
                kept = dropped // step * step
                bodies[number] = {
                    **traffic.bodies[number],
                    "messages": [*messages[:pinned], *whole[kept:dropped], *window],
                }
        return traffic.edited(bodies)

    return Edit("wide_window", of_traffic)


def _shift(keys: list[str], window: list[str], dropped: int) -> int:
    """Where in the whole history a window begins; at its end for one that has nothing in common."""
    for shift in range(dropped, len(keys)):
        if window and keys[shift] == window[0]:
            return shift
    return len(keys) if keys else 0
