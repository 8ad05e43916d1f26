"""Horizontal bars in plain HTML: readable without colours, because each has its number beside it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from kvdepot.report.page import Html, tag, text

__all__ = ["KINDS", "Bar", "bars", "legend"]

#: the looks that parts may have, told apart by pattern as well as by colour
KINDS = ("a", "b", "c", "d", "e", "f")


class Bar(NamedTuple):
    """One bar."""

    name: str
    #: what stands at its end, for people
    value: str
    #: its parts from the left; their lengths are in the unit of all bars of a chart
    parts: Sequence[float]


def bars(rows: Sequence[Bar], *, kinds: Sequence[str] = KINDS) -> Html:
    """A chart whose longest bar takes the whole width.

    Args:
        rows: at most as many parts each as there are kinds.
        kinds: the look of each part.
    """
    longest = max((sum(row.parts) for row in rows), default=0) or 1
    return tag("div", *(_row(row, kinds, longest) for row in rows), class_="bars")


def _row(row: Bar, kinds: Sequence[str], longest: float) -> Html:
    parts = [
        tag("div", class_=f"part {kind}", style=f"width:{100 * part / longest:.3f}%")
        for part, kind in zip(row.parts, kinds, strict=False)
        if part > 0
    ]
    return tag(
        "div",
        tag(
            "div",
            tag("b", text(row.name)),
            tag("span", text(row.value), class_="value"),
            class_="name",
        ),
        tag("div", *parts, class_="track", role="img", aria_label=f"{row.name}: {row.value}"),
        class_="bar",
    )


def legend(names: Sequence[str], *, kinds: Sequence[str] = KINDS) -> Html:
    """What the parts mean, in their order."""
    return tag(
        "div",
        *(
            tag("span", tag("span", class_=f"key {kind}"), text(name))
            for name, kind in zip(names, kinds, strict=False)
        ),
        class_="legend",
    )
