"""The demo in the terminal: progress while it works, a table when it is done.

Progress goes to standard error and the table to standard output, so that either can be sent elsewhere.
Without a terminal, progress becomes a line per step.
"""

from __future__ import annotations

from typing import Self

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.progress import (
    BarColumn,
    Progress,
    SpinnerColumn,
    TaskID,
    TaskProgressColumn,
    TextColumn,
    TimeElapsedColumn,
)
from rich.table import Table
from rich.text import Text

from kvdepot.demo.arms import ArmPlan
from kvdepot.demo.messages import Answered, Step
from kvdepot.demo.page import format_ratio, format_seconds
from kvdepot.demo.result import DemoResult
from kvdepot.units import format_bytes

__all__ = ["TerminalShow", "print_result"]


class TerminalShow:
    """Progress bars, one line at a time. Use it as a context manager."""

    def __init__(self, console: Console | None = None) -> None:
        self._console = console or Console(stderr=True)
        self._progress = Progress(
            SpinnerColumn(),
            TextColumn("{task.description}", markup=False),
            BarColumn(),
            TaskProgressColumn(),
            TimeElapsedColumn(),
            console=self._console,
            transient=True,
            # drawing is work that runs beside the timings: as little as still looks alive
            refresh_per_second=2,
        )
        #: (arm, step) -> its bar
        self._tasks: dict[tuple[str, str], TaskID] = {}
        self._last = ("", "")

    def __enter__(self) -> Self:
        if self._console.is_terminal:
            self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._console.is_terminal:
            self._progress.stop()

    def fetching(self, what: str, done: int, total: int) -> None:
        """The model is being fetched or prepared."""
        self.step("model", Step(what, done, total))

    def step(self, arm: str, step: Step) -> None:
        """An arm is doing something that takes time."""
        if not self._console.is_terminal:
            self._say_once(arm, step.what)
            return
        key = (arm, step.what)
        if key not in self._tasks:
            self._drop_others_of(arm)
            self._tasks[key] = self._progress.add_task(f"{arm}: {step.what}", total=None)
        # without a total the bar only shows that something is alive
        self._progress.update(self._tasks[key], completed=step.done, total=step.total or None)

    def finished(self, plan: ArmPlan, answered: Answered) -> None:
        """An arm has its answer."""
        self._drop_others_of(plan.name)
        self._console.print(
            Text(
                f"{plan.name}: first token after {format_seconds(answered.ttft_s)}, "
                f"{answered.computed_tokens} tokens computed, "
                f"{sum(answered.reused_tokens.values())} reused"
            )
        )

    def _drop_others_of(self, arm: str) -> None:
        for key in [key for key in self._tasks if key[0] == arm]:
            self._progress.remove_task(self._tasks.pop(key))

    def _say_once(self, arm: str, what: str) -> None:
        if self._last != (arm, what):
            self._last = (arm, what)
            self._console.print(Text(f"{arm}: {what}"))


def print_result(result: DemoResult, console: Console | None = None) -> None:
    """The table, the sentence, the answers and what went wrong."""
    console = console or Console()
    console.print(_table(result))
    console.print(Text(f"changed_first_line: {result.why_changed_first_line_reuses_nothing}"))
    console.print()
    for arm in result.arms:
        console.print(Text(f"{arm.name} | {arm.question}"))
        console.print(Text(f"    {arm.answer or '(no text)'}"))
    console.print()
    for problem in result.problems:
        console.print(Text(f"problem: {problem}", style="bold red"))


def _table(result: DemoResult) -> Table:
    # narrow enough for a terminal of 80 columns; where reused tokens came from is in the files
    table = Table(
        title="time to first token (TTFT) and tokens of the prompt",
        box=SIMPLE_HEAD,
        pad_edge=False,
        show_edge=False,
    )
    table.add_column("arm", no_wrap=True)
    for name in ("TTFT", "faster", "computed", "reused", "read", "written"):
        table.add_column(name, justify="right", no_wrap=True)
    for arm in result.arms:
        table.add_row(
            arm.name,
            format_seconds(arm.ttft_s),
            format_ratio(arm.speedup),
            str(arm.computed_tokens),
            str(arm.reused_total),
            format_bytes(arm.bytes_read),
            format_bytes(arm.bytes_written),
        )
    return table
