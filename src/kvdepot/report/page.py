"""The frame of a page: one file, readable on a phone and on paper, light and dark.

Text becomes HTML in one way only: through `text`, which escapes it. A `Html` value is markup already.
"""

from __future__ import annotations

import html
from collections.abc import Iterable, Sequence
from typing import NewType

__all__ = ["STYLE", "Html", "definitions", "join", "page", "paragraph", "table", "tag", "text"]

#: markup, as opposed to text that has to be escaped
Html = NewType("Html", str)

STYLE = """
:root { color-scheme: light dark; --ink: #1a1c1e; --soft: #5b6167; --paper: #fff; --rule: #d6d9dc;
  --track: #eef0f2; --a: #1f6feb; --b: #9a6700; --c: #1a7f37; --d: #8250df; --e: #57606a;
  --f: #bf3989; --bad: #b42318; }
@media (prefers-color-scheme: dark) { :root { --ink: #e8eaed; --soft: #a2a9b0; --paper: #16181b;
  --rule: #3a3f44; --track: #24282c; --a: #4c94ff; --b: #d4a72c; --c: #3fb950; --d: #b48cf2;
  --e: #8b949e; --f: #f778ba; --bad: #ff7b72; } }
* { box-sizing: border-box; }
body { margin: 0 auto; padding: 1rem; max-width: 60rem; background: var(--paper); color: var(--ink);
  font: 1rem/1.5 system-ui, sans-serif; overflow-wrap: anywhere; }
h1 { font-size: 1.5rem; line-height: 1.25; margin: 0 0 .5rem; }
h2 { font-size: 1.15rem; margin: 2rem 0 .5rem; }
p { margin: .5rem 0; }
.soft { color: var(--soft); font-size: .9rem; }
.bad { color: var(--bad); font-weight: 600; }
.lead { font-size: 1.1rem; }
blockquote { margin: .25rem 0 1rem; padding: .25rem .75rem; border-left: 3px solid var(--rule);
  white-space: pre-wrap; }
.wide { overflow-x: auto; }
.many table { min-width: 54rem; }
table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums; }
th, td { padding: .3rem .6rem .3rem 0; border-bottom: 1px solid var(--rule); text-align: left;
  vertical-align: top; overflow-wrap: normal; }
td.number, th.number { text-align: right; white-space: nowrap; }
dl { display: grid; grid-template-columns: max-content 1fr; gap: .2rem 1rem; margin: .5rem 0; }
dt { color: var(--soft); } dd { margin: 0; }
.bars { display: grid; gap: .6rem; margin: .5rem 0 1rem; }
.bar .name { display: flex; justify-content: space-between; gap: 1rem; font-size: .9rem; }
.bar .name b { font-weight: 600; }
.bar .value { white-space: nowrap; font-variant-numeric: tabular-nums; }
.track { display: flex; height: 1.1rem; background: var(--track); border-radius: 3px; overflow: hidden; }
.part { height: 100%; min-width: 1px; border-right: 1px solid var(--paper); }
.part.a, .key.a { background-color: var(--a); }
.part.b, .key.b { background-color: var(--b); background-image: repeating-linear-gradient(45deg,
  transparent 0 4px, rgba(255,255,255,.45) 4px 6px); }
.part.c, .key.c { background-color: var(--c); background-image: repeating-linear-gradient(90deg,
  transparent 0 3px, rgba(255,255,255,.45) 3px 5px); }
.part.d, .key.d { background-color: var(--d); background-image: repeating-linear-gradient(0deg,
  transparent 0 3px, rgba(255,255,255,.45) 3px 5px); }
.part.e, .key.e { background-color: var(--e); background-image: repeating-linear-gradient(20deg,
  transparent 0 7px, rgba(255,255,255,.45) 7px 8px); }
.part.f, .key.f { background-color: var(--f); background-image: repeating-linear-gradient(135deg,
  transparent 0 4px, rgba(255,255,255,.45) 4px 6px); }
figure { margin: .5rem 0 1rem; }
.chart { width: 100%; height: auto; max-width: 48rem; }
.chart text { fill: var(--soft); font-size: 12px; font-variant-numeric: tabular-nums; }
.grid { stroke: var(--rule); stroke-width: 1; }
.line { fill: none; stroke-width: 2; stroke: var(--e); }
.line.a { stroke: var(--a); } .line.b { stroke: var(--b); } .line.c { stroke: var(--c); }
.line.d { stroke: var(--d); } .line.f { stroke: var(--f); }
.mark { fill: var(--e); } .mark.a { fill: var(--a); } .mark.b { fill: var(--b); }
.mark.c { fill: var(--c); } .mark.d { fill: var(--d); } .mark.f { fill: var(--f); }
.sample { width: 34px; height: 10px; margin-right: .35rem; }
.badge { display: inline-block; padding: .1rem .6rem; border: 2px solid currentColor;
  border-radius: 3px; font-weight: 600; }
.badge.good { color: var(--c); } .badge.fair { color: var(--b); } .badge.poor { color: var(--bad); }
.below { color: var(--soft); font-size: .85em; }
.rows { color: var(--soft); font-size: .8rem; font-family: ui-monospace, monospace; }
.legend { display: flex; flex-wrap: wrap; gap: .25rem 1.25rem; font-size: .9rem; }
.key { display: inline-block; width: 1rem; height: .8rem; margin-right: .35rem; border-radius: 2px; }
.part, .key, .track { -webkit-print-color-adjust: exact; print-color-adjust: exact; }
@media (max-width: 30rem) { dl { grid-template-columns: 1fr; gap: 0; } dd { margin-bottom: .4rem; } }
@media print { body { max-width: none; padding: 0; } h2 { break-after: avoid; }
  .bar, tr, figure, blockquote { break-inside: avoid; }
  .wide { overflow: visible; } table { font-size: .8rem; } .many table { min-width: 0; font-size: .68rem; }
  .many th, .many td { padding-right: .35rem; } .many .rows { font-size: .6rem; }
  td .soft, td .bad { font-size: inherit; } }
""".strip()


def text(value: object) -> Html:
    """Any value as text: escaped for element content and for quoted attributes."""
    return Html(html.escape(str(value), quote=True))


def join(parts: Iterable[Html]) -> Html:
    """Markup one after the other."""
    return Html("\n".join(parts))


def tag(name: str, *content: Html, **attributes: str) -> Html:
    """An element; ``class_`` stands for ``class``. Attribute values are escaped here."""
    written = "".join(
        f' {key.rstrip("_").replace("_", "-")}="{text(value)}"' for key, value in attributes.items()
    )
    return Html(f"<{name}{written}>{''.join(content)}</{name}>")


def paragraph(value: str, *, class_: str = "") -> Html:
    """A paragraph of plain text."""
    return tag("p", text(value), class_=class_) if class_ else tag("p", text(value))


def definitions(pairs: Iterable[tuple[str, object]]) -> Html:
    """Names and their values."""
    return tag(
        "dl",
        *(join([tag("dt", text(name)), tag("dd", text(value))]) for name, value in pairs),
    )


def table(heads: Sequence[str], rows: Iterable[Sequence[object]], *, numbers: int = 0) -> Html:
    """A table of plain values that scrolls on a narrow screen.

    Args:
        heads: of the columns.
        rows: as many values each.
        numbers: so many columns at the right hold numbers.
    """

    def cells(name: str, values: Sequence[object]) -> Html:
        first_number = len(values) - numbers
        return tag(
            "tr",
            *(
                tag(name, text(value), class_="number")
                if column >= first_number
                else tag(name, text(value))
                for column, value in enumerate(values)
            ),
        )

    body = tag("tbody", *(cells("td", row) for row in rows))
    return tag("div", tag("table", tag("thead", cells("th", heads)), body), class_="wide")


def page(title: str, *content: Html, language: str = "en") -> str:
    """A whole document in a language; it loads nothing from anywhere."""
    head = join(
        [
            Html('<meta charset="utf-8">'),
            Html('<meta name="viewport" content="width=device-width, initial-scale=1">'),
            tag("title", text(title)),
            Html(f"<style>\n{STYLE}\n</style>"),
        ]
    )
    body = join([tag("h1", text(title)), *content])
    whole = f"<head>\n{head}\n</head>\n<body>\n{body}\n</body>"
    return f'<!doctype html>\n<html lang="{text(language)}">\n{whole}\n</html>\n'
