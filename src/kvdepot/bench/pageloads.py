"""The report's parts on load points: classes apart, rate against latency, storms, contention."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from kvdepot.bench.contention import degradation
from kvdepot.bench.loadfigures import LoadFigures
from kvdepot.bench.pageparts import Cell, data_table, tail_text
from kvdepot.bench.words import Words, seconds_text, share_text
from kvdepot.report.charts import Axis, Line, chart
from kvdepot.report.page import Html, join, paragraph, tag, text

__all__ = ["contention_part", "loads_part"]


def loads_part(loads: Sequence[LoadFigures], words: Words) -> Iterator[Html]:
    """The peak test."""
    shown = [each for each in loads if each.noise == "peak"]
    if not shown:
        return
    yield tag("h2", text(words("loads")))
    yield paragraph(words("loads_lead"), class_="soft")
    yield _table(shown, words)
    outcomes = [each for each in shown if any(c.outcomes for c in each.classes)]
    if outcomes:
        yield tag("h2", text(words("outcomes")))
        names = list(dict.fromkeys(k for e in outcomes for c in e.classes for k in c.outcomes))
        yield data_table(
            [words("load"), words("arm"), *(words(name) for name in names)],
            [
                (
                    each.load,
                    each.arm,
                    *(sum(c.outcomes.get(k, 0) for c in each.classes) for k in names),
                )
                for each in outcomes
            ],
        )
    yield from _curves(shown, words)
    yield from _storms(shown, words)


def contention_part(loads: Sequence[LoadFigures], words: Words) -> Iterator[Html]:
    """The contention test."""
    shown = [each for each in loads if each.noise != "peak"]
    if not shown:
        return
    yield tag("h2", text(words("contention")))
    yield paragraph(words("contention_lead"), class_="soft")
    rows = []
    for each in shown:
        lost = degradation(each, shown)
        follow_ups = next((c for c in each.classes if c.ask_class == "U"), None)
        ttft = None if follow_ups is None else follow_ups.ttft
        rows.append(
            (
                each.noise,
                each.arm,
                f"{each.throughput:.2f}",
                share_text(lost),
                "-" if ttft is None else seconds_text(ttft.p50.value),
                "-" if ttft is None else tail_text(ttft.p95, words),
                share_text(each.tokens.share),
                words(each.verdict),
            )
        )
    heads = (
        words("noise"),
        words("arm"),
        words("throughput"),
        words("degradation"),
        "U p50",
        "U p95",
        words("token_share"),
        words("verdict"),
    )
    yield data_table(heads, rows)


def _table(shown: Sequence[LoadFigures], words: Words) -> Html:
    rows = []
    for each in shown:
        for figures in each.classes:
            if figures.ttft is None:
                continue
            query = f"load={each.load} arm={each.arm} ask_class={figures.ask_class}"
            link = tag("div", tag("a", text(query), href="rows.jsonl"), class_="rows")
            rows.append(
                (
                    Cell(join([text(each.load), link])),
                    each.arm,
                    words(figures.ask_class),
                    figures.requests,
                    seconds_text(figures.ttft.p50.value),
                    tail_text(figures.ttft.p95, words),
                    tail_text(figures.ttft.p99, words),
                    share_text(figures.tokens.share),
                    f"{each.throughput:.2f}",
                    "-" if each.goodput is None else f"{each.goodput:.2f}",
                    words(each.verdict),
                )
            )
    heads = (
        words("load"),
        words("arm"),
        words("class"),
        words("requests"),
        "TTFT p50",
        "TTFT p95",
        "TTFT p99",
        words("token_share"),
        words("throughput"),
        words("goodput"),
        words("verdict"),
    )
    return data_table(heads, rows)


def _curves(shown: Sequence[LoadFigures], words: Words) -> Iterator[Html]:
    lines = []
    for arm in dict.fromkeys(each.arm for each in shown):
        for name in ("F", "U"):
            points = sorted(
                (each.throughput, figures.ttft.p50.value)
                for each in shown
                for figures in each.classes
                if each.arm == arm and figures.ask_class == name and figures.ttft is not None
            )
            lines.append(Line(f"{arm}, {words(name)}", points, has_marks=True))
    # one point is no curve; the table has it
    if any(len(line.points) > 1 for line in lines):
        yield tag("h2", text(words("curves")))
        yield paragraph(words("curves_lead"), class_="soft")
        yield chart(
            lines,
            Axis(words("throughput"), lambda rate: f"{rate:.3g}"),
            Axis("TTFT p50", seconds_text, is_log=True),
            describes=words("curves_lead"),
        )


def _storms(shown: Sequence[LoadFigures], words: Words) -> Iterator[Html]:
    lines = [
        Line(
            f"{each.load}, {each.arm}",
            [(float(rank), seconds) for rank, seconds in enumerate(each.by_rank_s, start=1)],
            has_marks=True,
        )
        for each in shown
        if each.by_rank_s
    ]
    if lines:
        yield tag("h2", text(words("storm")))
        yield chart(
            lines,
            Axis("", lambda rank: f"{rank:.0f}"),
            Axis("TTFT", seconds_text),
            describes=words("storm"),
        )
