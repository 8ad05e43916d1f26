"""A line chart as SVG inside the page: axes with numbers, lines told apart by dashes as well as colour."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

from kvdepot.report.page import Html, join, tag, text

__all__ = ["Line", "Mark", "line_chart"]

_WIDTH, _HEIGHT = 640, 260
_LEFT, _RIGHT, _TOP, _BOTTOM = 52, 16, 12, 46
_DASHES = ("", "6 4", "2 3", "10 3 2 3")
_COLOURS = ("var(--a)", "var(--b)", "var(--c)", "var(--soft)")


class Line(NamedTuple):
    """One line."""

    name: str
    points: Sequence[tuple[float, float]]


class Mark(NamedTuple):
    """A vertical mark at a place of the horizontal axis."""

    at: float
    name: str


def line_chart(
    lines: Sequence[Line],
    *,
    label: str,
    x_label: str,
    x_text: Callable[[float], str],
    y_text: Callable[[float], str],
    y_most: float | None = None,
    marks: Sequence[Mark] = (),
    is_log: bool = True,
) -> Html:
    """A chart; nothing where no line has two points.

    Args:
        lines: points in ascending order.
        label: what the chart shows, for readers that see no picture.
        x_label: the name of the horizontal axis.
        x_text: writes a place on it.
        y_text: writes a value.
        y_most: the top of the vertical axis; by default the largest value.
        marks: places to point out.
        is_log: whether the horizontal axis is logarithmic; places must then be positive.
    """
    shown = [line for line in lines if len(line.points) >= 2]
    if not shown:
        return Html("")
    places = [at for line in shown for at, _ in line.points]
    low, high = min(places), max(places)
    top = y_most or max(value for line in shown for _, value in line.points) or 1.0
    scale = math.log if is_log else float

    def x_of(at: float) -> float:
        span = scale(high) - scale(low) or 1.0
        share = (scale(min(max(at, low), high)) - scale(low)) / span
        return _LEFT + share * (_WIDTH - _LEFT - _RIGHT)

    def y_of(value: float) -> float:
        return _TOP + (1 - min(value / top, 1.0)) * (_HEIGHT - _TOP - _BOTTOM)

    parts = [_grid(top, y_of, y_text), _ticks(low, high, x_of, x_text, is_log=is_log)]
    parts += [_mark(mark, x_of) for mark in marks if low <= mark.at <= high]
    parts += [_line(line, number, x_of, y_of) for number, line in enumerate(shown)]
    parts.append(
        _svg_text(_LEFT + (_WIDTH - _LEFT - _RIGHT) / 2, _HEIGHT - 8, x_label, anchor="middle")
    )
    chart = tag(
        "svg",
        *parts,
        viewBox=f"0 0 {_WIDTH} {_HEIGHT}",
        role="img",
        aria_label=label,
        style="width:100%;max-width:44rem;height:auto;display:block",
    )
    return join([_names(shown), tag("div", chart)])


def _svg_text(x: float, y: float, value: str, *, anchor: str) -> Html:
    return tag(
        "text",
        text(value),
        x=f"{x:.1f}",
        y=f"{y:.1f}",
        fill="var(--soft)",
        style=f"font-size:12px;text-anchor:{anchor}",
    )


def _grid(top: float, y_of: Callable[[float], float], y_text: Callable[[float], str]) -> Html:
    made = []
    for part in range(5):
        value = top * part / 4
        y = f"{y_of(value):.1f}"
        made.append(
            tag("line", x1=str(_LEFT), x2=str(_WIDTH - _RIGHT), y1=y, y2=y, stroke="var(--rule)")
        )
        made.append(_svg_text(_LEFT - 6, y_of(value) + 4, y_text(value), anchor="end"))
    return join(made)


def _ticks(
    low: float,
    high: float,
    x_of: Callable[[float], float],
    x_text: Callable[[float], str],
    *,
    is_log: bool,
) -> Html:
    made = []
    for part in range(5):
        share = part / 4
        at = low * (high / low) ** share if is_log else low + (high - low) * share
        anchor = "start" if part == 0 else "end" if part == 4 else "middle"
        made.append(_svg_text(x_of(at), _HEIGHT - _BOTTOM + 18, x_text(at), anchor=anchor))
    return join(made)


def _line(
    line: Line, number: int, x_of: Callable[[float], float], y_of: Callable[[float], float]
) -> Html:
    points = " ".join(f"{x_of(at):.1f},{y_of(value):.1f}" for at, value in line.points)
    return tag(
        "polyline",
        points=points,
        fill="none",
        stroke=_COLOURS[number % len(_COLOURS)],
        stroke_width="2",
        stroke_dasharray=_DASHES[number % len(_DASHES)],
    )


def _mark(mark: Mark, x_of: Callable[[float], float]) -> Html:
    x = x_of(mark.at)
    is_right = x > _WIDTH * 0.7
    return join(
        [
            tag(
                "line",
                x1=f"{x:.1f}",
                x2=f"{x:.1f}",
                y1=str(_TOP),
                y2=str(_HEIGHT - _BOTTOM),
                stroke="var(--soft)",
                stroke_dasharray="3 3",
            ),
            _svg_text(
                x - 4 if is_right else x + 4,
                _TOP + 12,
                mark.name,
                anchor="end" if is_right else "start",
            ),
        ]
    )


def _names(lines: Sequence[Line]) -> Html:
    if len(lines) < 2:
        return Html("")
    return tag(
        "div",
        *(
            tag(
                "span",
                Html(
                    '<svg width="28" height="10" aria-hidden="true"><line x1="0" x2="28" y1="5" y2="5"'
                    f' stroke="{_COLOURS[number % len(_COLOURS)]}" stroke-width="2"'
                    f' stroke-dasharray="{_DASHES[number % len(_DASHES)]}"/></svg> '
                ),
                text(line.name),
            )
            for number, line in enumerate(lines)
        ),
        class_="legend",
    )
