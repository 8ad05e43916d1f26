"""The result for people: one HTML file that loads nothing, in English or Chinese."""

from __future__ import annotations

from collections.abc import Iterator

from kvdepot.audit.causes import CAUSES
from kvdepot.audit.result import AuditResult, Finding, Strip
from kvdepot.audit.verdict import duration
from kvdepot.audit.words import EDITS, finding_advice, finding_title, in_language, say
from kvdepot.report.bars import Bar, bars, legend
from kvdepot.report.lines import Line, Mark, line_chart
from kvdepot.report.page import Html, definitions, join, page, paragraph, table, tag, text
from kvdepot.units import format_bytes

__all__ = ["audit_page", "short_count"]

_STYLE = """
.strip { display: flex; height: 1.3rem; border-radius: 3px; overflow: hidden; background: var(--track); }
.strip div { min-width: 1px; border-right: 1px solid var(--paper); }
.hit { background: var(--c); } .gap { background: var(--bad); }
.body { background-color: var(--b); background-image: repeating-linear-gradient(45deg,
  transparent 0 4px, rgba(255,255,255,.45) 4px 6px); }
.new { background: var(--track); }
.keys span { margin-right: 1rem; white-space: nowrap; font-size: .9rem; }
.keys i { display: inline-block; width: 1rem; height: .8rem; margin-right: .3rem; border-radius: 2px;
  border: 1px solid var(--rule); }
pre { overflow-x: auto; padding: .6rem .75rem; border: 1px solid var(--rule); border-radius: 3px;
  font: .82rem/1.4 ui-monospace, monospace; white-space: pre; }
.finding { border-top: 1px solid var(--rule); padding-top: .75rem; margin-top: 1.25rem; }
.finding h3 { font-size: 1.05rem; margin: 0 0 .4rem; }
.gain { float: right; font-weight: 700; margin-left: 1rem; font-variant-numeric: tabular-nums; }
ol.verdict { padding-left: 1.3rem; } ol.verdict li { margin: .35rem 0; }
ol.verdict b { font-variant-numeric: tabular-nums; }
details summary { cursor: pointer; color: var(--soft); }
@media print { details > * { display: block; } }
"""


def short_count(number: float) -> str:
    """A number of tokens for people: 12.3 M."""
    for size, unit in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(number) >= size:
            return f"{number / size:.3g} {unit}"
    return f"{number:.0f}"


def audit_page(result: AuditResult, language: str = "en") -> str:
    """The whole page."""
    title = f"{say('title', language)}: {result.input.name}"
    return page(
        title, Html(f"<style>{_STYLE}</style>"), *_parts(result, language), language=language
    )


def _parts(result: AuditResult, language: str) -> Iterator[Html]:
    totals = result.totals
    if result.distrust:
        yield tag("h2", text(say("distrust", language)))
        yield tag("ul", *(tag("li", text(each), class_="bad") for each in result.distrust))
    yield paragraph(
        say("lead", language).format(
            share=totals.token_share,
            tokens=short_count(totals.input_tokens),
            points=result.proved_points,
        ),
        class_="lead",
    )
    if result.input.tokenizer_error:
        yield paragraph(f"{result.input.tokenizer}: {result.input.tokenizer_error}", class_="soft")
    yield from _verdict(result, language)
    yield from _waterfall(result, language)
    yield tag("h2", text(say("findings", language)))
    if not result.findings:
        yield paragraph(say("clean" if "causes" in result.input.answers else "unknown", language))
    else:
        yield _strip_keys(language)
    for number, finding in enumerate(result.findings, start=1):
        yield _finding(number, finding, result, language)
    yield from _curves(result, language)
    yield from _tables(result, language)
    yield from _input(result, language)


def _verdict(result: AuditResult, language: str) -> Iterator[Html]:
    yield tag("h2", text(say("verdict", language)))
    yield tag(
        "ol",
        *(
            tag(
                "li",
                tag("b", text(f"{say(line.what, language)}: {_points(line.what, line.points)}")),
                text(
                    f" \u00b7 {duration(line.prefill_seconds)} \u00b7 {in_language(line.text, language)}"
                ),
            )
            for line in result.verdict
        ),
        class_="verdict",
    )


def _points(what: str, points: float) -> str:
    return f"{points:.1f} %" if what == "more_gpus" else f"{points:+.1f} points"


def _waterfall(result: AuditResult, language: str) -> Iterator[Html]:
    if len(result.waterfall) < 2:
        return
    yield tag("h2", text(say("waterfall", language)))
    yield legend((say("reused", language), say("computed", language)), kinds=("c", "a"))
    yield bars(
        [
            Bar(
                say("now", language) if bar.name == "now" else _bar_name(bar.name, language),
                f"{bar.reused_tokens / max(bar.input_tokens, 1):.1%} \u00b7 "
                f"{short_count(bar.input_tokens - bar.reused_tokens)} {say('computed', language)}",
                (bar.reused_tokens, bar.input_tokens - bar.reused_tokens),
            )
            for bar in result.waterfall
        ],
        kinds=("c", "a"),
    )


def _bar_name(name: str, language: str) -> str:
    cause, _, edit = name.partition(": ")
    if language == "en":
        return edit
    known = dict(EDITS.values())
    return f"{CAUSES[cause].title_zh}: {known.get(edit, edit)}" if cause in CAUSES else name


def _strip_keys(language: str) -> Html:
    return tag(
        "p",
        *(
            tag("span", tag("i", class_=kind), text(say(f"strip_{kind}", language)))
            for kind in ("hit", "gap", "body", "new")
        ),
        class_="keys",
    )


def _finding(number: int, finding: Finding, result: AuditResult, language: str) -> Html:
    share = 100 * finding.estimate_tokens / max(result.totals.input_tokens, 1)
    gain = (
        f"{finding.proved_points:+.1f} points"
        if finding.proved_points is not None
        else f"~{share:.1f} points"
    )
    facts: list[tuple[str, object]] = []
    if finding.place:
        facts.append((say("place", language), finding.place))
    facts.append((say("evidence", language), in_language(finding.evidence, language)))
    facts.append((say("requests", language), finding.requests))
    if finding.proved_tokens is not None:
        edit = _bar_name(f"{finding.cause}: {finding.edit}", language).split(": ")[-1]
        facts.append((say("edit", language), edit))
        seconds = duration(finding.prefill_seconds_saved)
        proved = f"{finding.proved_tokens} {say('tokens', language)}, {seconds}"
        if finding.alone_tokens != finding.proved_tokens:
            proved += f" ({say('alone', language)}: {finding.alone_tokens})"
        facts.append((say("proved", language), proved))
    facts.append((say("estimate", language), finding.estimate_tokens))
    parts = [
        tag("span", text(gain), class_="gain"),
        tag("h3", text(f"{number}. {finding_title(finding, language)}")),
        definitions(facts),
        paragraph(f"{say('advice', language)}: {finding_advice(finding, language)}"),
    ]
    if finding.hint:
        parts.append(tag("pre", text(finding.hint)))
    if finding.needs_decision:
        parts.append(paragraph(say("decide", language), class_="soft"))
    if finding.example is not None:
        parts.append(_example(finding, language))
    return tag("div", *parts, class_="finding")


def _example(finding: Finding, language: str) -> Html:
    example = finding.example
    assert example is not None
    parts = []
    if example.strip is not None:
        parts.append(_strip(example.strip, language))
    if example.values:
        parts.append(paragraph(" \u00b7 ".join(example.values), class_="soft"))
    if example.diff:
        summary = f"{say('example', language)} ({say('lines', language)} {example.line})"
        parts.append(tag("details", tag("summary", text(summary)), tag("pre", text(example.diff))))
    return join(parts)


def _strip(strip: Strip, language: str) -> Html:
    pairs = [
        ("hit", strip.hit_tokens),
        ("gap", strip.gap_tokens),
        ("body", strip.body_tokens),
        ("new", strip.new_tokens),
    ]
    total = sum(count for _, count in pairs) or 1
    label = ", ".join(f"{say(f'strip_{kind}', language)} {count}" for kind, count in pairs)
    return tag(
        "div",
        *(
            tag("div", class_=kind, style=f"width:{100 * count / total:.2f}%")
            for kind, count in pairs
            if count
        ),
        class_="strip",
        role="img",
        aria_label=label,
        title=label,
    )


def _curves(result: AuditResult, language: str) -> Iterator[Html]:
    total = max(result.totals.input_tokens, 1)
    points = result.capacity_curve
    if len(points) >= 2:
        yield tag("h2", text(say("capacity", language)))
        per_token = result.kv_bytes_per_token
        fleet = result.fleet[0] if result.fleet else None
        edited = max(result.waterfall[-1].input_tokens, 1)
        marks = [Mark(fleet.capacity_tokens, say("instances", language))] if fleet else []
        yield line_chart(
            [
                Line("LRU", [(p.capacity_tokens, p.lru_tokens / total) for p in points]),
                Line(
                    say("after_edits", language),
                    [
                        (p.capacity_tokens, p.edited_lru_tokens / edited)
                        for p in points
                        if p.edited_lru_tokens is not None
                    ],
                ),
                Line(
                    say("bound", language),
                    [
                        (p.capacity_tokens, p.bound_tokens / total)
                        for p in points
                        if p.bound_tokens is not None
                    ],
                ),
            ],
            label=say("capacity", language),
            x_label=say("capacity_axis", language)
            + (f" \u00d7 {format_bytes(per_token)}" if per_token else ""),
            x_text=short_count,
            y_text=_share,
            marks=marks,
        )
    if result.revisits is not None:
        yield tag("h2", text(say("keep", language)))
        yield line_chart(
            [Line("LRU", [(k.keep_s, k.reused_tokens / total) for k in result.keep_curve])],
            label=say("keep", language),
            x_label=say("keep_axis", language),
            x_text=duration,
            y_text=_share,
        )
        again = result.revisits
        yield paragraph(
            f"{say('revisit', language)}: p50 {duration(again.p50_s)}, p90 {duration(again.p90_s)}, "
            f"p99 {duration(again.p99_s)}",
            class_="soft",
        )


def _share(value: float) -> str:
    return f"{value:.1%}" if 0 < value < 0.1 else f"{value:.0%}"


def _tables(result: AuditResult, language: str) -> Iterator[Html]:
    total = max(result.totals.input_tokens, 1)

    def percent(tokens: int) -> str:
        return f"{tokens / total:.1%}"

    if result.fleet:
        yield tag("h2", text(say("fleet", language)))
        keys = ("instances", "random", "sticky", "shared", "load")
        yield table(
            [say(key, language) for key in keys],
            [
                [
                    row.instances,
                    percent(row.random_private_tokens),
                    percent(row.sticky_private_tokens),
                    percent(row.shared_tokens),
                    f"{row.sticky_load:.2f}",
                ]
                for row in result.fleet
            ],
            numbers=4,
        )
        row = result.fleet[0]
        yield paragraph(
            f"{say('instances', language)}: {short_count(row.capacity_tokens)} {say('tokens', language)};"
            f" {say('shared', language)}: {short_count(row.shared_capacity_tokens)}",
            class_="soft",
        )
    if result.grains:
        yield tag("h2", text(say("grains", language)))
        yield table(
            [say("block", language), say("reused", language), say("lost", language)],
            [
                [g.block_tokens, percent(g.reused_tokens), percent(g.lost_tokens)]
                for g in result.grains
            ],
            numbers=2,
        )
    if len(result.apps) > 1:
        yield tag("h2", text(say("apps", language)))
        heads = ("app", "requests", "tokens", "reused")
        yield table(
            [say(key, language) for key in heads],
            [
                [
                    app.name,
                    app.requests,
                    short_count(app.input_tokens),
                    f"{app.reused_tokens / max(app.input_tokens, 1):.1%}",
                ]
                for app in result.apps
            ],
            numbers=3,
        )


def _input(result: AuditResult, language: str) -> Iterator[Html]:
    given, totals = result.input, result.totals
    yield tag("h2", text(say("input", language)))
    reused = f"{short_count(totals.follow_up_reused_tokens)} {say('reused', language)}"
    follow_ups = f"{totals.follow_up_requests} ({reused})"
    usage = f"{given.usage_differs} / {given.usage_logged}" if given.usage_logged else "\u2013"
    facts: list[tuple[str, object]] = [
        (say("kind", language), given.kind),
        (say("lines", language), given.lines),
        (say("requests", language), given.requests),
        (say("follow_ups", language), follow_ups),
        (say("order", language), f"{given.order}, {duration(given.span_s)}"),
        (say("tokenizer", language), given.tokenizer),
        (say("template", language), given.template),
        (say("broken", language), given.broken_lines),
        (say("doubles", language), given.duplicate_rows),
        (say("cut", language), given.cut_prompts),
        (say("usage", language), usage),
        (say("rate", language), f"{result.prefill_tokens_per_s:.0f}"),
        ("kvdepot", result.kvdepot_version),
    ]
    if given.cannot_answer:
        facts.append((say("cannot", language), "; ".join(given.cannot_answer)))
    yield definitions(facts)
    if given.problems:
        yield paragraph(say("problems", language), class_="soft")
        yield tag("ul", *(tag("li", text(each)) for each in given.problems))
