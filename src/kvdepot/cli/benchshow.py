"""`kvdepot bench` on a terminal: progress with the time that is left, and the table in the end."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table

from kvdepot.bench.budget import Costs, Phase
from kvdepot.bench.compare import Comparison
from kvdepot.bench.quantiles import Quantile
from kvdepot.bench.summary import Summary
from kvdepot.bench.words import rate_text, seconds_text
from kvdepot.units import format_bytes

__all__ = ["BenchShow", "print_budget", "print_comparison", "print_summary"]


class BenchShow:
    """Progress on standard error. Use as a context manager."""

    def __init__(self) -> None:
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            TextColumn("{task.completed:.0f}/{task.total:.0f}"),
            TimeElapsedColumn(),
            TextColumn("left"),
            TimeRemainingColumn(),
            console=Console(stderr=True),
            # a measured machine is not to be kept busy by its progress bar
            refresh_per_second=2,
        )
        self._task = self._progress.add_task("starting", total=None)
        self._said = ""

    def __enter__(self) -> Self:
        if sys.stderr.isatty():
            self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()

    def tell(self, what: str, done: int, total: int) -> None:
        """Show a step."""
        if sys.stderr.isatty():
            self._progress.update(self._task, description=what, completed=done, total=total)
        elif what.partition(":")[0] != self._said:
            self._said = what.partition(":")[0]
            print(f"{done}/{total} {what}", file=sys.stderr)


def print_summary(summary: Summary) -> None:
    """Verdict, rounds, headlines and loads."""
    console = Console()
    console.print(f"{summary.state.plan.name}: {summary.verdict}", style="bold")
    for found in summary.findings:
        where = " ".join(part for part in (found.where, found.arm) if part)
        console.print(
            f"  {found.level.upper():7} {found.guard} {where}: {found.reason}", highlight=False
        )
    table = Table("round", "arm", "n", "TTFT p50", "95 %", "p95", "token share", "of possible")
    for each in summary.rounds:
        if each.ttft is None:
            continue
        capture = each.tokens.capture
        table.add_row(
            f"{each.round} {each.length}",
            each.arm,
            str(each.ttft.n),
            seconds_text(each.ttft.p50.value),
            _interval_text(each.ttft.p50),
            _tail_text(each.ttft.p95),
            f"{each.tokens.share:.1%}",
            "-" if capture is None else f"{capture:.1%}",
        )
    console.print(table)
    for ratio in summary.ratios:
        low, high = ratio.estimate.low, ratio.estimate.high
        interval = "" if low is None or high is None else f" ({low:.2f} to {high:.2f})"
        console.print(
            f"{ratio.name}, {ratio.arm}, {ratio.length} tokens: "
            f"{ratio.estimate.value:.2f}{interval} over {ratio.estimate.runs} runs",
            highlight=False,
        )
    _print_ceilings(console, summary)
    for read in summary.break_even:
        if read.read_rate is not None and read.ceiling_share is not None:
            least = "at least " if read.is_least_rate else ""
            console.print(
                f"R2 read rate, {read.arm}, {read.length} tokens: {least}"
                f"{rate_text(read.read_rate)}, {read.ceiling_share:.0%} of the least ceiling "
                f"({read.least_ceiling}, {rate_text(read.least_ceiling_rate)})",
                highlight=False,
            )
    _print_loads(console, summary)


def _print_ceilings(console: Console, summary: Summary) -> None:
    if not summary.ceilings:
        return
    table = Table("ceilings of", "one read", "reads at once", "network", "host to device", "binds")
    for arm, each in summary.ceilings.items():
        least = each.least
        table.add_row(
            arm,
            format_bytes(each.unit_bytes),
            "\n".join(f"{read.depth}: {rate_text(read.rate)}" for read in each.reads),
            rate_text(each.network),
            "\n".join(
                f"{format_bytes(copy.copy_bytes)} x {copy.threads}: {rate_text(copy.rate)}"
                for copy in each.copies
            )
            or "-",
            "-" if least is None else least[0],
        )
    console.print(table)


def print_budget(name: str, phases: Sequence[Phase], costs: Costs) -> None:
    """What a plan does, phase by phase, with its time."""
    console = Console()
    table = Table("phase", "arm", "starts", "warm-ups", "requests", "computed tokens", "time")
    for each in phases:
        numbers = (each.starts, each.warmups, each.requests, each.computed_tokens)
        table.add_row(
            each.part, each.arm, *(f"{number:,}" for number in numbers), _span_text(each.seconds)
        )
    table.add_section()
    totals = (
        sum(each.starts for each in phases),
        sum(each.warmups for each in phases),
        sum(each.requests for each in phases),
        sum(each.computed_tokens for each in phases),
    )
    table.add_row(
        "all",
        "",
        *(f"{number:,}" for number in totals),
        _span_text(sum(each.seconds for each in phases)),
    )
    console.print(f"plan {name}", style="bold")
    console.print(table)
    console.print(
        f"at {costs.start_s:g} s a start, {costs.prefill_rate:g} computed tokens a second, "
        f"{costs.output_s * 1000:g} ms an output token; requests one after the other",
        highlight=False,
    )


def _span_text(seconds: float) -> str:
    whole = round(seconds)
    if whole < 3600:
        return f"{whole // 60}:{whole % 60:02}"
    return f"{whole // 3600}:{whole // 60 % 60:02}:{whole % 60:02}"


def print_comparison(comparison: Comparison) -> None:
    """Ratios of the other results over the first."""
    console = Console()
    for note in comparison.notes:
        console.print(f"note: {note}", highlight=False)
    table = Table("TTFT of", "result", "ratio", "95 %", "p (Holm)", "says")
    for each in comparison.figures:
        low, high = each.estimate.low, each.estimate.high
        table.add_row(
            each.figure,
            each.other,
            f"{each.estimate.value:.3f}",
            "-" if low is None or high is None else f"{low:.3f} to {high:.3f}",
            "-" if each.p_adjusted is None else f"{each.p_adjusted:.2g}",
            each.says,
        )
    console.print(table)


def _print_loads(console: Console, summary: Summary) -> None:
    if not summary.loads:
        return
    table = Table(
        "load", "arm", "req/s", "F p50", "F p95", "U p50", "U p95", "M p50", "token share"
    )
    for each in summary.loads:
        by_class = {figures.ask_class: figures.ttft for figures in each.classes}
        cells = []
        for name in ("F", "U"):
            times = by_class.get(name)
            cells += (
                ["-", "-"]
                if times is None
                else [seconds_text(times.p50.value), _tail_text(times.p95)]
            )
        rest = by_class.get("M")
        cells.append("-" if rest is None else seconds_text(rest.p50.value))
        name = each.load if each.noise == "peak" else f"{each.load}, {each.noise}"
        table.add_row(name, each.arm, f"{each.throughput:.2f}", *cells, f"{each.tokens.share:.1%}")
    console.print(table)


def _interval_text(value: Quantile) -> str:
    """An interval as far as it is bounded."""
    if value.low is None or value.high is None:
        return "-"
    return f"{seconds_text(value.low)} to {seconds_text(value.high)}"


def _tail_text(value: Quantile) -> str:
    """A tail quantile with its interval; or the largest value, when there is no upper bound."""
    if not value.is_bounded:
        return f"max of {value.n}: {seconds_text(value.maximum)}"
    return f"{seconds_text(value.value)} ({_interval_text(value)})"
