"""Pieces that several parts of the report use."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from kvdepot.bench.quantiles import Quantile
from kvdepot.bench.words import Words, seconds_text
from kvdepot.report.page import Html, join, tag, text

__all__ = ["Cell", "data_table", "interval_text", "tail_text", "unbroken", "with_below"]


_NO_BREAK = "\N{NO-BREAK SPACE}"
_SHORT = 10
_COLUMNS = 6
_BEFORE_UNIT = re.compile(r"(?<=\d) (?=(?:us|ms|s|%|[KMGT]iB|[kMGT]?B(?:/s)?)(?![\w/]))")


class Cell(NamedTuple):
    """A cell of a table that is markup; everything else is text, and is escaped."""

    markup: Html


def interval_text(value: Quantile) -> str:
    """An interval, as far as it is bounded."""
    if value.low is None or value.high is None:
        return "-"
    return f"{seconds_text(value.low)} to {seconds_text(value.high)}"


def tail_text(value: Quantile, words: Words) -> str:
    """A tail quantile with its interval; the largest value where there is no upper bound."""
    if not value.is_bounded:
        return words("max_of", n=value.n, value=seconds_text(value.maximum))
    return f"{seconds_text(value.value)} ({interval_text(value)})"


def unbroken(words: str) -> str:
    """Words in which a number stays with its unit; a short name stays in one piece."""
    if len(words) <= _SHORT:
        return words.replace(" ", _NO_BREAK)
    return _BEFORE_UNIT.sub(_NO_BREAK, words)


def with_below(value: str, below: str) -> Cell:
    """A cell of a value and, smaller, what belongs to it."""
    under = tag("div", text(below.replace(" ", _NO_BREAK)), class_="below")
    return Cell(join([text(unbroken(value)), under]))


def data_table(heads: Sequence[str], rows: Iterable[Sequence[object]]) -> Html:
    """A table that scrolls on a narrow screen; cells are values or `Cell`s."""

    def cell(name: str, value: object) -> Html:
        if isinstance(value, Cell):
            return tag(name, value.markup)
        return tag(name, text(unbroken(str(value))))

    head = tag("tr", *(tag("th", text(each)) for each in heads))
    body = [tag("tr", *(cell("td", value) for value in row)) for row in rows]
    # many columns keep their width, and scroll on a phone
    class_ = "wide many" if len(heads) > _COLUMNS else "wide"
    return tag("div", tag("table", tag("thead", head), tag("tbody", *body)), class_=class_)
