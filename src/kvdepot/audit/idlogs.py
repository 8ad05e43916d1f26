"""Large logs of bare token ids: told from a sample, proved on all, never as text all at once.

As pseudo-words a token takes ten bytes instead of four, and every prompt is one long line. So the passes
run on the ids; causes and edits are searched in a sample of some million tokens; and each edit is proved on
the whole log in portions.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import overload

import msgspec
import numpy as np

from kvdepot.audit.copies import bodies as shared_bodies
from kvdepot.audit.engine import grains
from kvdepot.audit.findings import Shown, prompt_findings
from kvdepot.audit.parts import Parts
from kvdepot.audit.peel import Step, peel, proved_tokens
from kvdepot.audit.prefix import exact_hits
from kvdepot.audit.records import Body, Record
from kvdepot.audit.render import Renderer, taken_apart
from kvdepot.audit.result import Finding, Grain, WaterfallBar
from kvdepot.audit.sanity import usage_mismatches
from kvdepot.audit.tokenlog import Ids, Ints, TokenLog
from kvdepot.audit.tokens import PieceMemo, PseudoEncoder
from kvdepot.audit.traffic import Measure, Traffic, Workshop
from kvdepot.audit.words import edit_text

__all__ = ["IdBodies", "IdLog", "id_parts", "look_at_ids", "words_of"]

_SAMPLE_TOKENS = 2_000_000
_PORTION_TOKENS = 2_000_000


def words_of(ids: Ids) -> str:
    """Token ids as pseudo-words, one token each."""
    return " ".join([f"~{each}~1" for each in ids.tolist()])


class IdBodies(Sequence[Body]):
    """Bodies of prompts of ids, made when they are looked at."""

    def __init__(self, prompts: Sequence[Ids]) -> None:
        self._prompts = prompts

    def __len__(self) -> int:
        return len(self._prompts)

    @overload
    def __getitem__(self, number: int) -> Body: ...

    @overload
    def __getitem__(self, number: slice) -> Sequence[Body]: ...

    def __getitem__(self, number: int | slice) -> Body | Sequence[Body]:
        if isinstance(number, slice):
            return IdBodies(self._prompts[number])
        return taken_apart(words_of(self._prompts[number]))


class IdLog(msgspec.Struct):
    """What the passes and the proof give for a log of ids."""

    log: TokenLog
    hit_tokens: Ints
    exact_tokens: Ints
    copied: Ints
    findings: list[Finding]
    waterfall: list[WaterfallBar]
    proved_tokens: int


def look_at_ids(
    records: Sequence[Record],
    traffic: Traffic,
    workshop: Workshop,
    *,
    threshold: float,
    show_values: bool,
    prefill_tokens_per_s: float,
) -> IdLog:
    """Run the passes on all ids, search in a sample, prove on all.

    Args:
        records: in the order of time, with ids.
        traffic: the same; its bodies are not looked at.
        workshop: with an encoder of pseudo-words that keeps nothing.
        threshold: see `peel`.
        show_values: see `Shown`.
        prefill_tokens_per_s: see `Shown`.
    """
    log = workshop.log_of_ids(traffic, [each.ids for each in records if each.ids is not None])
    # the ids are in the log now: no second copy is kept
    for number, record in enumerate(records):
        record.ids = log.prompt(number)
    traffic = dataclasses.replace(
        traffic, bodies=IdBodies([log.prompt(number) for number in range(log.requests)])
    )
    blocks = workshop.blocks(log)
    hits = blocks.hit_tokens()
    exact, _ = exact_hits(log, blocks)
    shared = shared_bodies(log, exact)
    del blocks  # the proof needs room for its own
    now = Measure(log.total, int(hits.sum()))
    sample = traffic.selected(_sampled(log))
    found = peel(sample, workshop, threshold=threshold)
    shown = Shown(
        sample, workshop, show_values=show_values, prefill_tokens_per_s=prefill_tokens_per_s
    )
    told = prompt_findings(found, shown)
    findings, bars = _proved(
        traffic,
        workshop,
        now,
        steps=found.steps,
        told=told,
        prefill_tokens_per_s=prefill_tokens_per_s,
    )
    if findings:
        more = f"; told from {sample.requests} requests, proved on all"
        findings = [
            msgspec.structs.replace(each, evidence=each.evidence + more) for each in findings
        ]
        estimate = int(shared.copied.sum())
        findings[0] = msgspec.structs.replace(findings[0], estimate_tokens=estimate)
    proved = sum(each.proved_tokens or 0 for each in findings)
    return IdLog(log, hits, exact, shared.copied, findings, bars, proved)


def _proved(
    traffic: Traffic,
    workshop: Workshop,
    now: Measure,
    *,
    steps: Sequence[Step],
    told: Sequence[Finding],
    prefill_tokens_per_s: float,
) -> tuple[list[Finding], list[WaterfallBar]]:
    """Findings of a sample with the numbers of the whole, and the whole's waterfall."""
    bars = [
        WaterfallBar(name="now", input_tokens=now.input_tokens, reused_tokens=now.reused_tokens)
    ]
    findings = []
    before = now
    for number, (step, finding) in enumerate(zip(steps, told, strict=False)):
        after = _measured(traffic, workshop, steps[: number + 1])
        alone = after if number == 0 else _measured(traffic, workshop, [step])
        gain = proved_tokens(before, after, step.edit.what)
        findings.append(
            msgspec.structs.replace(
                finding,
                proved_tokens=gain,
                proved_points=round(100 * gain / max(now.input_tokens, 1), 2),
                alone_tokens=proved_tokens(now, alone, step.edit.what),
                input_tokens_added=after.input_tokens - before.input_tokens,
                computed_tokens_saved=before.computed_tokens - after.computed_tokens,
                prefill_seconds_saved=round(max(gain, 0) / prefill_tokens_per_s, 2),
            )
        )
        bars.append(
            WaterfallBar(
                name=f"{step.site.cause}: {edit_text(step.edit.what)}",
                input_tokens=after.input_tokens,
                reused_tokens=after.reused_tokens,
            )
        )
        before = after
    return findings, bars


def _sampled(log: TokenLog) -> list[int]:
    """Requests one behind the other, from the middle of the log: neighbours share what is shared."""
    half = log.requests // 2
    order = sorted(range(log.requests), key=lambda each: abs(each - half))
    chosen: list[int] = []
    tokens = 0
    for each in order:
        if tokens >= _SAMPLE_TOKENS and len(chosen) >= 50:
            break
        chosen.append(each)
        tokens += int(log.lengths[each])
    return sorted(chosen)


def _portions(traffic: Traffic, lengths: Sequence[int]) -> Iterator[Traffic]:
    numbers: list[int] = []
    tokens = 0
    for number, length in enumerate(lengths):
        numbers.append(number)
        tokens += length
        if tokens >= _PORTION_TOKENS:
            yield traffic.selected(numbers)
            numbers, tokens = [], 0
    if numbers:
        yield traffic.selected(numbers)


def _measured(traffic: Traffic, workshop: Workshop, steps: Sequence[Step]) -> Measure:
    """Edits made on all requests, in portions; only the ids are kept."""
    lengths = [len(record.ids) for record in traffic.records if record.ids is not None]

    def edited_ids() -> Iterator[Ids]:
        for portion in _portions(traffic, lengths):
            edited = portion
            for step in steps:
                edited = step.edit.apply(edited)
            yield from workshop.memo.prompts(prompt.text for prompt in workshop.prompts(edited))

    log = workshop.log_of_ids(traffic, edited_ids(), tokens=sum(lengths))
    reused = int(np.sum(workshop.blocks(log).hit_tokens()))
    return Measure(log.total, reused)


def id_parts(
    records: Sequence[Record],
    renderer: Renderer,
    *,
    block_tokens: int,
    threshold: float,
    show_values: bool,
    prefill_tokens_per_s: float,
    tell: Callable[[str], None],
) -> Parts:
    """The parts of a result for a large log of ids."""
    known = [record for record in records if record.ids is not None]
    workshop = Workshop(renderer, PieceMemo(PseudoEncoder(), keeps=False), block_tokens)
    bare = Traffic.of([dataclasses.replace(record, ids=None, prompt="") for record in known])
    traffic = dataclasses.replace(bare, records=known)
    tell(f"{len(known)} requests of token ids: passes, and what edits prove")
    found = look_at_ids(
        known,
        traffic,
        workshop,
        threshold=threshold,
        show_values=show_values,
        prefill_tokens_per_s=prefill_tokens_per_s,
    )
    return Parts(
        found.findings,
        found.waterfall,
        [],
        [Grain(**r._asdict()) for r in grains(found.log, found.exact_tokens, block_tokens)],
        [],
        workshop.blocks(found.log),
        None,
        int(found.exact_tokens.sum()),
        int(found.copied.sum()),
        found.proved_tokens,
        workshop,
        usage_mismatches(known, found.log.lengths),
    )
