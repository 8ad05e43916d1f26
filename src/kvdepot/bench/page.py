"""The report as one HTML page: verdict and guards first, then what was measured, then what it is made of."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from kvdepot.bench.guards import GUARDS
from kvdepot.bench.pagebreakeven import break_even_part
from kvdepot.bench.pageloads import contention_part, loads_part
from kvdepot.bench.pageparts import Cell, data_table, interval_text, tail_text, with_below
from kvdepot.bench.quantiles import Quantile
from kvdepot.bench.summary import RoundFigures, Summary
from kvdepot.bench.words import (
    Lang,
    Words,
    count_text,
    seconds_text,
    share_text,
)
from kvdepot.report.bars import Bar, bars, legend
from kvdepot.report.charts import Axis, Line, chart, share_steps
from kvdepot.report.page import Html, definitions, join, page, paragraph, tag, text
from kvdepot.units import format_bytes

__all__ = ["result_page"]

_SOURCES = ("computed", "device", "host", "disk", "external", "cached")
_KINDS = ("e", "a", "c", "b", "d", "f")
#: guards that say something about rounds only
_OF_ROUNDS = ("G2", "G3", "G4", "G7", "G9")
_BADGES = {"VALID": "good", "VALID WITH NOTES": "fair", "INVALID": "poor"}


def result_page(
    summary: Summary, *, lang: Lang = "en", samples: dict[str, list[float]] | None = None
) -> str:
    """The page.

    Args:
        summary: of a result.
        lang: of its words; names of arms and reasons of guards stay as they are.
        samples: all TTFTs of a round and arm, ``"R2 kvdepot"``; without them there is no distribution.
    """
    words = Words(lang)
    name = summary.state.plan.name
    parts = [
        *_verdict(summary, words),
        *_rounds(summary, words),
        *_headlines(summary, words),
        *_parts(summary.rounds, words),
        *_sources(summary.rounds, words),
        *_distributions(summary, samples or {}, words),
        *_bytes(summary, words),
        *loads_part(summary.loads, words),
        *contention_part(summary.loads, words),
        *break_even_part(summary, words),
        *_record(summary, words),
    ]
    return page(f"{words('title')}: {name}", *parts, language="zh-Hans" if lang == "zh" else "en")


def _verdict(summary: Summary, words: Words) -> Iterator[Html]:
    badge = tag("span", text(words(summary.verdict)), class_=f"badge {_BADGES[summary.verdict]}")
    yield tag("p", badge, class_="lead")
    if summary.state.plan.is_indicative:
        yield paragraph(words("indicative"))
    yield tag("h2", text(words("guards")))
    rows = [_guard_row(name, summary, words) for name in GUARDS]
    yield data_table((words("guard"), words("holds"), words("result")), rows)


def _guard_row(name: str, summary: Summary, words: Words) -> tuple[object, ...]:
    mine = [each for each in summary.findings if each.guard == name]
    if not mine:
        is_asked = summary.rounds if name in _OF_ROUNDS else summary.rounds or summary.loads
        return name, words(name), words("passed" if is_asked else "not_asked")
    said = []
    for each in mine:
        where = " ".join(part for part in (each.where, each.arm) if part)
        line = f"{words(each.level)}: {where}{': ' if where else ''}{each.reason}"
        said.append(tag("div", text(line), class_="bad" if each.level == "invalid" else "soft"))
    return name, words(name), Cell(join(said))


def _rounds(summary: Summary, words: Words) -> Iterator[Html]:
    if not summary.rounds:
        return
    yield tag("h2", text(words("rounds")))
    yield paragraph(words("rounds_lead"), class_="soft")
    rows = []
    for each in summary.rounds:
        ttft = each.ttft
        rows.append(
            (
                Cell(join([text(words(each.round)), _rows_link(each)])),
                each.arm,
                # what is looked for comes first: a phone shows no more without scrolling
                "-" if ttft is None else _with_interval(ttft.p50),
                share_text(each.tokens.share),
                share_text(each.tokens.capture),
                words(each.verdict),
                "-" if ttft is None else tail_text(ttft.p95, words),
                "-" if each.tpot is None else seconds_text(each.tpot.p50.value),
                count_text(each.tokens.prompt / max(each.tokens.requests, 1)),
                each.runs,
                f"{each.requests}" + (f" ({each.failed} {words('failed')})" if each.failed else ""),
            )
        )
    yield data_table(
        (
            words("round"),
            words("arm"),
            words("p50_interval"),
            words("token_share"),
            words("capture"),
            words("verdict"),
            "TTFT p95",
            "TPOT p50",
            words("tokens"),
            words("runs"),
            words("requests"),
        ),
        rows,
    )
    asked = sum(each.needle[1] for each in summary.rounds)
    if asked:
        found = sum(each.needle[0] for each in summary.rounds)
        yield paragraph(words("needle", found=found, asked=asked), class_="soft")


def _with_interval(value: Quantile) -> Cell | str:
    interval = interval_text(value)
    shown = seconds_text(value.value)
    return shown if interval == "-" else with_below(shown, interval)


def _rows_link(each: RoundFigures) -> Html:
    query = f"round={each.round} arm={each.arm} length={each.length}"
    return tag("div", tag("a", text(query), href="rows.jsonl"), class_="rows")


def _headlines(summary: Summary, words: Words) -> Iterator[Html]:
    if not summary.ratios:
        return
    yield tag("h2", text(words("headlines")))
    yield paragraph(words("headlines_lead"), class_="soft")
    rows = []
    for each in summary.ratios:
        name, _, of = each.name.partition(", ")
        low, high = each.estimate.low, each.estimate.high
        rows.append(
            (
                f"{words(name)}{', ' if of else ''}{of}",
                f"{each.estimate.value:.2f}",
                "-" if low is None or high is None else f"{low:.2f} to {high:.2f}",
                each.arm,
                f"{each.over} / {each.under}",
                count_text(each.length),
                each.estimate.runs,
                "-" if each.p_adjusted is None else f"{each.p_adjusted:.2g}",
            )
        )
    yield data_table(
        (
            "",
            words("ratio"),
            words("interval"),
            words("arm"),
            words("rounds"),
            words("tokens"),
            words("runs"),
            words("p"),
        ),
        rows,
    )
    for equal in summary.equals:
        verdict = words("equal") if equal.result.is_equal else words("not_equal")
        p = "" if equal.result.p is None else f", p = {equal.result.p:.2g}"
        yield paragraph(f"{equal.name}: {equal.result.ratio:.2f}, {verdict}{p}")


def _parts(rounds: Sequence[RoundFigures], words: Words) -> Iterator[Html]:
    shown = [(each, each.parts) for each in rounds if each.parts is not None]
    if not shown:
        return
    yield tag("h2", text(words("parts")))
    yield paragraph(words("parts_lead"), class_="soft")
    rows = [
        (
            each.round,
            each.arm,
            count_text(each.length),
            seconds_text(parts.total_s),
            "-" if parts.queue_s is None else seconds_text(parts.queue_s),
            seconds_text(parts.load_s),
            seconds_text(parts.compute_s),
            seconds_text(parts.rest_s),
        )
        for each, parts in shown
    ]
    heads = ("round", "arm", "tokens", "mean_ttft", "queue", "load_part", "compute_part", "rest")
    yield data_table([words(head) for head in heads], rows)


def _sources(rounds: Sequence[RoundFigures], words: Words) -> Iterator[Html]:
    shown = [each for each in rounds if each.tokens.prompt]
    if not shown:
        return
    used = [s for s in _SOURCES if any(each.tokens.by_source.get(s) for each in shown)]
    kinds = [_KINDS[_SOURCES.index(source)] for source in used]
    yield tag("h2", text(words("sources")))
    yield legend([words(source) for source in used], kinds=kinds)
    rows = []
    for each in shown:
        tokens = each.tokens
        share = share_text(tokens.share)
        value = words("of_tokens", share=share, count=count_text(tokens.prompt))
        parts = [tokens.by_source.get(source, 0) / tokens.prompt for source in used]
        rows.append(Bar(f"{each.round} {each.arm} {each.length}", value, parts))
    yield bars(rows, kinds=kinds)
    for each in shown:
        if each.tokens.amplification is not None and each.tokens.oracle:
            value = words("amplification", value=f"{each.tokens.amplification:.2f}")
            how = f"{words('attribution')}: {words(each.attribution)}"
            yield paragraph(f"{each.round} {each.arm}: {value}; {how}", class_="soft")
    hits = sum(each.tokens.requests_with_reuse for each in shown)
    total = sum(each.tokens.requests for each in shown)
    yield paragraph(words("footnote_hits", hits=hits, all=total), class_="soft")


def _distributions(
    summary: Summary, samples: dict[str, list[float]], words: Words
) -> Iterator[Html]:
    """One picture of the rounds and one of the loads: together they would be too many lines."""
    rounds = {f"{each.round} {each.arm}" for each in summary.rounds}
    of_rounds = {name: values for name, values in samples.items() if name in rounds}
    of_loads = {name: values for name, values in samples.items() if name not in rounds}
    yield from _distribution(words("ttft_of_rounds"), of_rounds, words)
    yield from _distribution(words("ttft_of_loads"), of_loads, words)


def _distribution(title: str, samples: dict[str, list[float]], words: Words) -> Iterator[Html]:
    lines = [Line(name, share_steps(values)) for name, values in samples.items() if values]
    if not lines:
        return
    yield tag("h2", text(title))
    yield paragraph(words("cdf_lead"), class_="soft")
    yield chart(
        lines,
        Axis("TTFT", seconds_text, is_log=True),
        Axis(words("requests"), lambda share: f"{100 * share:.0f} %", low=0.0, high=1.0),
        describes=words("cdf_lead"),
    )


def _bytes(summary: Summary, words: Words) -> Iterator[Html]:
    shown = [each for each in summary.rounds if each.loaded_bytes or each.stored_bytes]
    if not shown:
        return
    width = {(b.arm, b.length): b.token_bytes for b in summary.break_even}
    yield tag("h2", text(words("bytes")))
    yield paragraph(words("bytes_lead"), class_="soft")
    rows = []
    for each in shown:
        sources = each.tokens.by_source
        far = sources.get("disk", 0) + sources.get("external", 0)
        token_bytes = width.get((each.arm, each.length))
        rows.append(
            (
                each.round,
                each.arm,
                "-" if not token_bytes else format_bytes(far * token_bytes),
                "-" if each.loaded_bytes is None else format_bytes(each.loaded_bytes),
                "-" if each.device_read_bytes is None else format_bytes(each.device_read_bytes),
                "-" if each.stored_bytes is None else format_bytes(each.stored_bytes),
            )
        )
    heads = ("round", "arm", "by_tokens", "loaded", "device_gave", "stored")
    yield data_table([words(head) for head in heads], rows)


def _record(summary: Summary, words: Words) -> Iterator[Html]:
    state = summary.state
    yield tag("h2", text(words("record")))
    yield definitions(
        [
            (words("tool"), f"{summary.tool} {state.version}"),
            (words("plan"), f"{state.plan.name}, seed {state.plan.seed}, {state.plan.order}"),
            (words("plan_hash"), state.digest),
            (words("document"), f"{state.material} (sha256 {state.material_digest[:16]})"),
            (words("arm"), "; ".join(f"{arm.name} ({arm.role})" for arm in state.arms)),
            *((f"{words('engine')}, {arm}", told) for arm, told in summary.engines.items()),
        ]
    )
    if state.environment:
        yield tag("h2", text(words("environment")))
        yield definitions(state.environment.items())
    yield tag("h2", text(words("files")))
    yield paragraph(words("rows_hint"), class_="soft")
    links = [tag("a", text(name), href=name) for name in summary.files]
    yield tag("p", join(links))
