"""The result on a terminal: short, 100 columns, readable without colours."""

from __future__ import annotations

import textwrap

from kvdepot.audit.page import short_count
from kvdepot.audit.result import AuditResult, Finding
from kvdepot.audit.verdict import duration
from kvdepot.audit.words import finding_advice, finding_title, in_language, say

__all__ = ["summary"]

_WIDTH = 96
_BAR = 40


def summary(result: AuditResult, language: str = "en") -> str:
    """The whole text."""
    totals, given = result.totals, result.input
    size = f"{totals.requests} requests in {given.lines} lines"
    lines = [
        f"{given.name}: {given.kind}, {size}, {duration(given.span_s)}",
        *_wrapped(
            say("lead", language).format(
                share=totals.token_share,
                tokens=short_count(totals.input_tokens),
                points=result.proved_points,
            ),
            0,
        ),
    ]
    if given.tokenizer_error:
        lines += _wrapped(f"({given.tokenizer}: {given.tokenizer_error})", 1)
    lines += [f"!! {say('distrust', language)}: {each}" for each in result.distrust]
    lines += [f"!  {each}" for each in given.problems[:8]]
    lines += ["", say("verdict", language)]
    for line in result.verdict:
        points = f"{line.points:.1f} %" if line.what == "more_gpus" else f"{line.points:+.1f}"
        lines += _wrapped(
            f"  {say(line.what, language):<24} {points:>8}  {in_language(line.text, language)}", 36
        )
    if len(result.waterfall) > 1:
        lines += ["", say("waterfall", language), *_waterfall(result)]
    nothing = "clean" if "causes" in given.answers else "unknown"
    lines += ["", say("findings" if result.findings else nothing, language)]
    for number, finding in enumerate(result.findings, start=1):
        lines += _finding(number, finding, result, language)
    return "\n".join(lines) + "\n"


def _wrapped(text: str, indent: int) -> list[str]:
    return textwrap.wrap(
        text, _WIDTH, subsequent_indent=" " * indent, break_long_words=False, break_on_hyphens=False
    )


def _waterfall(result: AuditResult) -> list[str]:
    rows = []
    for bar in result.waterfall:
        share = bar.reused_tokens / max(bar.input_tokens, 1)
        drawn = "#" * round(_BAR * share)
        rows.append(f"  {share:6.1%} {drawn:<{_BAR}} {bar.name}")
    return rows


def _finding(number: int, finding: Finding, result: AuditResult, language: str) -> list[str]:
    if finding.proved_points is not None:
        gain = f"{finding.proved_points:+.1f} points proved"
        gain += f" ({finding.proved_tokens} tokens, {duration(finding.prefill_seconds_saved)})"
    else:
        share = 100 * finding.estimate_tokens / max(result.totals.input_tokens, 1)
        gain = f"about {share:.1f} points ({finding.estimate_tokens} tokens), not proved"
    lines = [f"{number}. [{finding.cause}] {finding_title(finding, language)}", f"   {gain}"]
    where = f"   {finding.place}: " if finding.place else "   "
    lines += _wrapped(f"{where}{in_language(finding.evidence, language)}", 3)
    if finding.example is not None and finding.example.values:
        lines += _wrapped("   " + " | ".join(finding.example.values), 3)
    lines += _wrapped(f"   -> {finding_advice(finding, language)}", 6)
    if finding.hint:
        lines.append(f"      {finding.hint}")
    return lines
