"""Charts as SVG in the page: lines and steps over linear or logarithmic axes, readable in print.

Lines are told apart by dashes as well as by colour, and named at the side. No scripts.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

from kvdepot.report.page import Html, join, tag, text

__all__ = ["Axis", "Line", "chart", "share_steps"]

_WIDTH, _HEIGHT = 640, 300
_LEFT, _RIGHT, _TOP, _BOTTOM = 64, 16, 12, 44
_DASHES = ("", "7 4", "2 3", "9 3 2 3", "14 4", "1 5")
_COLOURS = ("a", "b", "c", "d", "e", "f")


def _dash(index: int) -> str:
    """A line's dashes: when the colours begin again, they go with other dashes than before."""
    return _DASHES[(index + index // len(_COLOURS)) % len(_DASHES)]


class Axis(NamedTuple):
    """How one direction is drawn."""

    name: str
    #: a value for people
    label: Callable[[float], str]
    is_log: bool = False
    low: float | None = None
    high: float | None = None


class Line(NamedTuple):
    """A named line through points."""

    name: str
    points: Sequence[tuple[float, float]]
    has_marks: bool = False


def share_steps(values: Sequence[float]) -> list[tuple[float, float]]:
    """Points of the share of values that are at most x, as steps."""
    ordered = sorted(values)
    points: list[tuple[float, float]] = []
    for index, value in enumerate(ordered):
        points.append((value, index / len(ordered)))
        points.append((value, (index + 1) / len(ordered)))
    return points


def chart(lines: Sequence[Line], x: Axis, y: Axis, *, describes: str) -> Html:
    """A chart with its legend.

    Args:
        lines: those without points are left out.
        x: to the right.
        y: upwards.
        describes: for people who hear the page.
    """
    drawn = [line for line in lines if line.points]
    if not drawn:
        return Html("")
    xs = _Scale(x, [px for line in drawn for px, _ in line.points], _LEFT, _WIDTH - _RIGHT)
    ys = _Scale(y, [py for line in drawn for _, py in line.points], _HEIGHT - _BOTTOM, _TOP)
    body = [*_grid(xs, ys), *(_line(line, index, xs, ys) for index, line in enumerate(drawn))]
    svg = tag(
        "svg",
        *body,
        viewBox=f"0 0 {_WIDTH} {_HEIGHT}",
        class_="chart",
        role="img",
        aria_label=describes,
    )
    return tag("figure", svg, _legend(drawn))


class _Scale:
    """From values to places."""

    def __init__(self, axis: Axis, values: Sequence[float], first: float, last: float) -> None:
        self.axis = axis
        self._first, self._last = first, last
        used = [value for value in values if not axis.is_log or value > 0]
        self.low = axis.low if axis.low is not None else min(used, default=1.0)
        self.high = axis.high if axis.high is not None else max(used, default=1.0)
        if axis.is_log:
            self.low, self.high = self.low / 1.1, self.high * 1.1
        elif axis.low is None:
            self.low = min(self.low, 0.0)
        if self.high <= self.low:
            self.high = self.low + (abs(self.low) or 1.0)

    def __call__(self, value: float) -> float:
        if self.axis.is_log:
            value = max(value, self.low)
            share = math.log(value / self.low) / math.log(self.high / self.low)
        else:
            share = (value - self.low) / (self.high - self.low)
        return self._first + min(max(share, 0.0), 1.0) * (self._last - self._first)

    def ticks(self) -> list[float]:
        """Round values within the scale: a few."""
        if self.axis.is_log:
            powers = range(math.floor(math.log10(self.low)), math.ceil(math.log10(self.high)) + 1)
            fine = [m * 10.0**power for power in powers for m in (1, 2, 5)]
            found = [value for value in fine if self.low <= value <= self.high]
            coarse = [value for value in found if f"{value:e}".startswith("1")]
            return coarse if len(found) > 8 and len(coarse) > 2 else found
        step = 10 ** math.floor(math.log10((self.high - self.low) / 4))
        for multiple in (1, 2, 5, 10):
            if (self.high - self.low) / (step * multiple) <= 5:
                step *= multiple
                break
        first = math.ceil(self.low / step)
        return [i * step for i in range(first, math.floor(self.high / step + 1e-9) + 1)]


def _grid(xs: _Scale, ys: _Scale) -> list[Html]:
    parts = []
    for value in xs.ticks():
        at = xs(value)
        parts.append(_rule(at, _TOP, at, _HEIGHT - _BOTTOM))
        parts.append(_word(at, _HEIGHT - _BOTTOM + 16, xs.axis.label(value), "middle"))
    for value in ys.ticks():
        at = ys(value)
        parts.append(_rule(_LEFT, at, _WIDTH - _RIGHT, at))
        parts.append(_word(_LEFT - 6, at + 4, ys.axis.label(value), "end"))
    parts.append(_word((_LEFT + _WIDTH - _RIGHT) / 2, _HEIGHT - 8, xs.axis.name, "middle"))
    parts.append(
        tag(
            "text",
            text(ys.axis.name),
            x="0",
            y="0",
            text_anchor="middle",
            transform=f"translate(13 {(_TOP + _HEIGHT - _BOTTOM) / 2:.0f}) rotate(-90)",
        )
    )
    return parts


def _line(line: Line, index: int, xs: _Scale, ys: _Scale) -> Html:
    places = [(xs(px), ys(py)) for px, py in line.points]
    colour = _COLOURS[index % len(_COLOURS)]
    path = tag(
        "polyline",
        points=" ".join(f"{px:.1f},{py:.1f}" for px, py in places),
        class_=f"line {colour}",
        stroke_dasharray=_dash(index),
    )
    marks = [
        tag("circle", cx=f"{px:.1f}", cy=f"{py:.1f}", r="3.5", class_=f"mark {colour}")
        for px, py in (places if line.has_marks or len(places) == 1 else [])
    ]
    return tag("g", path, *marks)


def _legend(lines: Sequence[Line]) -> Html:
    return tag(
        "figcaption",
        *(
            tag(
                "span",
                tag(
                    "svg",
                    tag(
                        "line",
                        x1="0",
                        y1="5",
                        x2="34",
                        y2="5",
                        class_=f"line {_COLOURS[index % len(_COLOURS)]}",
                        stroke_dasharray=_dash(index),
                    ),
                    viewBox="0 0 34 10",
                    class_="sample",
                    aria_hidden="true",
                ),
                text(line.name),
            )
            for index, line in enumerate(lines)
        ),
        class_="legend",
    )


def _rule(x1: float, y1: float, x2: float, y2: float) -> Html:
    return tag(
        "line", x1=f"{x1:.1f}", y1=f"{y1:.1f}", x2=f"{x2:.1f}", y2=f"{y2:.1f}", class_="grid"
    )


def _word(x: float, y: float, word: str, anchor: str) -> Html:
    return join([tag("text", text(word), x=f"{x:.1f}", y=f"{y:.1f}", text_anchor=anchor)])
