"""Lists of tools: the same in another order, in other writing, or another set."""

from __future__ import annotations

from collections import Counter
from typing import Any, NamedTuple

from kvdepot.audit.records import Body
from kvdepot.audit.texts import canonical_json

__all__ = ["ToolChange", "tool_change", "tool_name", "tools_of"]


class ToolChange(NamedTuple):
    """How two requests' tools differ."""

    #: tool_order, tool_keys or tool_set
    cause: str
    #: what changed, for people: names, or the path of a field in a schema
    detail: str


def tools_of(body: Body) -> list[Any]:
    """A body's tools; none where it has none."""
    tools = body.get("tools")
    return tools if isinstance(tools, list) else []


def tool_name(tool: object) -> str:
    """The name of a tool, in either of the forms that APIs take."""
    if not isinstance(tool, dict):
        return ""
    function = tool.get("function")
    return str((function if isinstance(function, dict) else tool).get("name", ""))


def tool_change(ours: list[Any], theirs: list[Any]) -> ToolChange | None:
    """How one list became another; None if they are written alike."""
    left, right = [canonical_json(tool) for tool in ours], [canonical_json(tool) for tool in theirs]
    if left == right:
        return None if _written(ours) == _written(theirs) else ToolChange("tool_keys", "")
    if Counter(left) == Counter(right):
        moved = sum(one != other for one, other in zip(left, right, strict=True))
        return ToolChange("tool_order", f"{moved} of {len(left)} tools stand at another place")
    names, others = Counter(map(tool_name, ours)), Counter(map(tool_name, theirs))
    if names != others:
        gone, new = sorted((others - names).elements()), sorted((names - others).elements())
        said = [f"without {', '.join(gone[:3])}"] if gone else []
        said += [f"with {', '.join(new[:3])}"] if new else []
        return ToolChange("tool_set", "; ".join(said))
    by_name = {tool_name(tool): tool for tool in theirs}
    for tool in ours:
        path = _difference(tool, by_name.get(tool_name(tool)))
        if path is not None:
            return ToolChange("tool_set", f"{tool_name(tool)}{path} differs")
    return ToolChange("tool_set", "")


def _written(tools: list[Any]) -> str:
    """As a server dumps them: key order matters, separators do not."""
    return repr(tools)


def _difference(one: object, other: object, path: str = "") -> str | None:
    """The path of the first field that differs."""
    if isinstance(one, dict) and isinstance(other, dict):
        for key in one:
            found = _difference(one[key], other.get(key), f"{path}.{key}")
            if found is not None:
                return found
        return None if one.keys() == other.keys() else path
    if isinstance(one, list) and isinstance(other, list) and len(one) == len(other):
        for number, (left, right) in enumerate(zip(one, other, strict=True)):
            found = _difference(left, right, f"{path}[{number}]")
            if found is not None:
                return found
        return None
    return None if one == other else path
