"""The parts of a result that depend on whether the prompts themselves are known."""

from __future__ import annotations

from typing import NamedTuple

from kvdepot.audit.blocklog import BlockLog
from kvdepot.audit.content import ContentStep, content_steps, trace_blocks
from kvdepot.audit.findings import content_findings
from kvdepot.audit.records import Record
from kvdepot.audit.result import AppRow, Considered, Finding, Grain, WaterfallBar
from kvdepot.audit.traffic import Workshop
from kvdepot.audit.words import edit_text

__all__ = ["Parts", "trace_parts"]


class Parts(NamedTuple):
    """What depends on whether the prompts are known."""

    findings: list[Finding]
    waterfall: list[WaterfallBar]
    considered: list[Considered]
    grains: list[Grain]
    apps: list[AppRow]
    blocks: BlockLog
    #: after the edits; None where there are none
    edited: BlockLog | None
    exact_tokens: int
    copied_tokens: int
    proved_tokens: int
    workshop: Workshop | None
    usage: tuple[int, int]


def trace_parts(records: list[Record], *, threshold: float, prefill_tokens_per_s: float) -> Parts:
    """The parts of a trace whose prompts are only known by ids."""
    traces = [record.trace for record in records if record.trace is not None]
    blocks = trace_blocks(records, traces)
    total, reused = blocks.total, int(blocks.hit_tokens().sum())
    steps: list[ContentStep] = content_steps(
        records, traces, least=max(1, round(threshold * total))
    )
    bars = [WaterfallBar(name="now", input_tokens=total, reused_tokens=reused)]
    bars += [
        WaterfallBar(
            name=f"{step.cause}: {edit_text(step.what)}",
            input_tokens=step.after.input_tokens,
            reused_tokens=step.after.reused_tokens,
        )
        for step in steps
    ]
    return Parts(
        content_findings(steps, total, len(records), prefill_tokens_per_s),
        bars,
        [],
        [],
        [],
        blocks,
        None,
        reused,
        0,
        sum(step.proved for step in steps),
        None,
        (0, 0),
    )
