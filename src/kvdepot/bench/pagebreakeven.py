"""The report's part on break-even: what storage can give at most, what was promised and what came out."""

from __future__ import annotations

from collections.abc import Iterator

from kvdepot.bench.breakeven import BreakEven
from kvdepot.bench.ceilings import Ceilings
from kvdepot.bench.pageparts import data_table
from kvdepot.bench.summary import Summary
from kvdepot.bench.words import Words, count_text, rate_text, seconds_text
from kvdepot.io.copyrate import CopyRate
from kvdepot.report.charts import Axis, Line, chart
from kvdepot.report.page import Html, paragraph, tag, text
from kvdepot.units import format_bytes

__all__ = ["break_even_part", "read_rate_text"]


def break_even_part(summary: Summary, words: Words) -> Iterator[Html]:
    """Break-even with its curve and the ceilings; nothing where no round read from storage."""
    if not summary.break_even:
        return
    yield tag("h2", text(words("breakeven")))
    yield paragraph(words("breakeven_lead"), class_="soft")
    rows = []
    for each in summary.break_even:
        config = "-" if each.token_bytes is None else count_text(each.token_bytes)
        written = "-" if each.stored_token_bytes is None else count_text(each.stored_token_bytes)
        predicted = each.predicted_speed_up
        rows.append(
            (
                each.arm,
                count_text(each.length),
                f"{config} / {written}",
                f"{each.compute_rate:.0f}/s",
                rate_text(each.least_bandwidth),
                _least_text(each, words),
                read_rate_text(each, words),
                "-" if predicted is None else f"{predicted:.1f}",
                f"{each.measured_speed_up:.1f}",
            )
        )
    heads = ("arm", "tokens", "kv_bytes", "compute_rate", "least", "ceiling", "rate")
    yield data_table(
        [*(words(head) for head in heads), words("predicted"), words("measured")], rows
    )
    if summary.curve is not None:
        yield _curve(summary, words)
    if summary.ceilings:
        yield from _ceilings(summary, words)


def read_rate_text(each: BreakEven, words: Words) -> str:
    """The rate that R2 read with, and its share of the least ceiling."""
    rate = rate_text(each.read_rate)
    if each.read_rate is None or each.ceiling_share is None:
        return rate
    share = f"{100 * each.ceiling_share:.0f} %"
    if each.is_least_rate:
        return words("at_least", rate=rate, share=share)
    return f"{rate} ({share})"


def _least_text(each: BreakEven, words: Words) -> str:
    if each.least_ceiling is None:
        return "-"
    return f"{rate_text(each.least_ceiling_rate)} ({words(f'ceiling {each.least_ceiling}')})"


def _ceilings(summary: Summary, words: Words) -> Iterator[Html]:
    yield tag("h2", text(words("ceilings")))
    yield paragraph(words("ceilings_lead"), class_="soft")
    rows = []
    for arm, each in summary.ceilings.items():
        least = each.least
        rows.append(
            (
                arm,
                f"{format_bytes(each.unit_bytes)}, {words('direct' if each.is_direct else 'buffered')}",
                "; ".join(f"{read.depth}: {rate_text(read.rate)}" for read in each.reads) or "-",
                rate_text(each.network),
                _copies_text(each, words),
                "-" if least is None else words(f"ceiling {least[0]}"),
            )
        )
    heads = ("arm", "read_unit", "reads_at_once", "ceiling network", "copies", "least_of_them")
    yield data_table([words(head) for head in heads], rows)


def _copies_text(each: Ceilings, words: Words) -> str:
    def how(copy: CopyRate) -> str:
        size = format_bytes(copy.copy_bytes)
        return f"{size} x {copy.threads}: {rate_text(copy.rate)}"

    if not each.copies:
        return "-"
    return f"{words('into', device=each.copy_device)} {'; '.join(map(how, each.copies))}"


def _curve(summary: Summary, words: Words) -> Html:
    curve = summary.curve
    assert curve is not None
    last = max(tokens for tokens, _ in curve.points)
    steps = [last * step // 40 for step in range(1, 41)]
    return chart(
        [
            Line("a + bN + cN²", [(float(n), curve.seconds(n)) for n in steps]),
            Line(words("curve"), [(float(n), s) for n, s in sorted(curve.points)], has_marks=True),
        ],
        Axis(words("tokens"), count_text),
        Axis("TTFT", seconds_text),
        describes=words("curve"),
    )
