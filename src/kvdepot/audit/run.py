"""The audit from an input to its result: read, check, measure, look, prove, judge."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import numpy as np

from kvdepot import __version__
from kvdepot.audit.apps import app_rows
from kvdepot.audit.blocklog import BlockLog
from kvdepot.audit.edges import edge_log
from kvdepot.audit.engine import cache_check, grains, too_early_tokens
from kvdepot.audit.findings import (
    Shown,
    considered,
    engine_finding,
    prompt_findings,
    waterfall,
)
from kvdepot.audit.idlogs import id_parts, words_of
from kvdepot.audit.model import ModelParts, load_model
from kvdepot.audit.parts import Parts, trace_parts
from kvdepot.audit.peel import THRESHOLD, Peeling, peel, peel_sampled
from kvdepot.audit.records import Problem, Reading, Record
from kvdepot.audit.result import (
    SCHEMA,
    AuditResult,
    Finding,
    Grain,
    Input,
    Totals,
)
from kvdepot.audit.routing import follow_ups
from kvdepot.audit.sanity import Ordered, distrust, in_order, usage_mismatches
from kvdepot.audit.sizing import capacity_points, fleet_rows, keep_points, revisit_times
from kvdepot.audit.tokens import FallbackEncoder, ModelEncoder, PieceMemo, PseudoEncoder
from kvdepot.audit.traffic import Traffic, Workshop
from kvdepot.audit.verdict import verdict
from kvdepot.errors import ConfigError

__all__ = ["SAMPLE_REQUESTS", "AuditOptions", "audit"]

#: an engine fault is worth a finding from this share of the input tokens on
_ENGINE_SHARE = 0.05
_EARLY_SHARE = 0.03
_LOST_PER_REQUEST = 16
#: more token ids than these are not turned into words all at once
_IDS_AS_TEXT = 3_000_000
#: larger logs are searched in a sample of sessions, and proved in full
SAMPLE_REQUESTS = 2000
_KIND_ANSWERS = {
    "chat": (["reuse", "breaks", "causes", "proof", "time", "capacity", "routing"], []),
    "prompts": (["reuse", "breaks", "causes", "proof", "time", "capacity", "routing"], []),
    "audit trace": (
        ["reuse", "breaks", "causes", "proof", "time", "capacity", "routing"],
        ["the prompts' text"],
    ),
    "engine log": (
        ["reuse", "breaks", "causes", "proof", "time", "capacity", "routing"],
        ["sessions and users"],
    ),
    "ids": (["reuse", "breaks", "proof", "time", "capacity", "routing"], []),
    "events": (
        ["the tree of prefixes", "breaks"],
        ["how often each prompt was asked", "hits", "where a prompt ends within a block"],
    ),
    "chained trace": (
        ["reuse", "time", "capacity", "routing"],
        ["breaks, causes and proof: an id stands for a whole prefix"],
    ),
    "content trace": (
        ["reuse", "order of pieces", "time", "capacity", "routing"],
        ["causes within a piece", "tokens of a piece (equal shares are taken)"],
    ),
}


@dataclasses.dataclass(frozen=True, slots=True)
class AuditOptions:
    """What may be chosen."""

    #: model folder or hub id; None for the built-in estimate
    model: str | None = None
    block_tokens: int = 16
    prefill_tokens_per_s: float = 10_000.0
    #: tokens that each instance's own cache holds
    capacity_tokens: int = 1_000_000
    shared_tokens: int | None = None
    instances: int | None = None
    kv_bytes_per_token: int | None = None
    show_values: bool = False
    threshold: float = THRESHOLD
    sample_requests: int = SAMPLE_REQUESTS


def audit(
    reading: Reading,
    name: str,
    options: AuditOptions,
    *,
    tell: Callable[[str], None] = lambda _: None,
) -> AuditResult:
    """Audit what was read.

    Args:
        reading: the input's requests.
        name: what the input is called in the report.
        options: what was chosen.
        tell: told what is being done, for people who wait.

    Raises:
        ConfigError: a model's parts are missing, or no prompt could be rendered.
    """
    if options.block_tokens < 1 or options.prefill_tokens_per_s <= 0:
        raise ConfigError("the block and the prefill rate must be positive")
    ordered = in_order(reading)
    if not ordered.records:
        raise ConfigError(f"{name}: no requests")
    bytes_per_token = options.kv_bytes_per_token
    if reading.kind in ("chained trace", "content trace"):
        parts = trace_parts(
            ordered.records,
            threshold=options.threshold,
            prefill_tokens_per_s=options.prefill_tokens_per_s,
        )
    else:
        model = _model(reading, options)
        bytes_per_token = bytes_per_token or model.kv_bytes_per_token
        parts = _prompt_parts(reading, ordered, model, options, tell)
    tell("curves")
    return _result(
        reading,
        name,
        ordered=ordered,
        parts=parts,
        options=options,
        bytes_per_token=bytes_per_token,
    )


def _model(reading: Reading, options: AuditOptions) -> ModelParts:
    if reading.is_pseudo:
        fallback = load_model(None)
        return fallback._replace(encoder=PseudoEncoder())
    return load_model(options.model)


# --- prompts


def _prompt_parts(
    reading: Reading,
    ordered: Ordered,
    model: ModelParts,
    options: AuditOptions,
    tell: Callable[[str], None],
) -> Parts:
    is_words = any(each.ids is not None for each in ordered.records) and not isinstance(
        model.encoder, ModelEncoder
    )
    if is_words and _id_tokens(ordered.records) > _IDS_AS_TEXT:
        return id_parts(
            ordered.records,
            model.renderer,
            block_tokens=options.block_tokens,
            threshold=options.threshold,
            show_values=options.show_values,
            prefill_tokens_per_s=options.prefill_tokens_per_s,
            tell=tell,
        )
    records = _with_text(ordered.records, model)
    memo = PieceMemo(PseudoEncoder() if is_words else model.encoder)
    workshop = Workshop(model.renderer, memo, options.block_tokens)
    traffic = _renderable(Traffic.of(records), workshop, reading)
    tell(f"{traffic.requests} requests: tokens")
    prompts = workshop.prompts(traffic)
    memo.verify([prompt.text for prompt in prompts])
    del prompts
    tell("breaks, and what edits prove")
    if traffic.requests > options.sample_requests:
        peeling = peel_sampled(
            traffic, workshop, threshold=options.threshold, requests=options.sample_requests
        )
    else:
        peeling = peel(traffic, workshop, threshold=options.threshold)
    base = peeling.base
    blocks = workshop.blocks(base.log)
    shown = Shown(
        traffic,
        workshop,
        show_values=options.show_values,
        prefill_tokens_per_s=options.prefill_tokens_per_s,
    )
    rows = grains(base.log, base.exact_tokens, options.block_tokens)
    findings = prompt_findings(peeling, shown)
    findings += _engine_findings(traffic, peeling, blocks, options)
    return Parts(
        findings,
        waterfall(peeling),
        considered(peeling.unproved),
        [Grain(**row._asdict()) for row in rows],
        app_rows(traffic, base, base.donors, show_values=options.show_values),
        blocks,
        _edited_blocks(peeling, workshop),
        int(base.exact_tokens.sum()),
        int(base.copied.sum()),
        sum(step.proved for step in peeling.steps),
        workshop,
        usage_mismatches(traffic.records, base.log.lengths),
    )


def _id_tokens(records: list[Record]) -> int:
    return sum(len(record.ids) for record in records if record.ids is not None)


def _edited_blocks(peeling: Peeling, workshop: Workshop) -> BlockLog | None:
    if not peeling.steps:
        return None
    return workshop.blocks(workshop.token_log(peeling.edited, workshop.prompts(peeling.edited)))


def _with_text(records: list[Record], model: ModelParts) -> list[Record]:
    """Records of token ids with their text, or with pseudo-words where there is no tokenizer."""
    if not any(record.ids is not None for record in records):
        return records
    encoder = model.encoder
    made = []
    for record in records:
        if record.ids is None:
            made.append(record)
        elif isinstance(encoder, ModelEncoder):
            text = encoder.decode(record.ids.tolist())
            made.append(dataclasses.replace(record, prompt=text, ids=None))
        else:
            made.append(dataclasses.replace(record, prompt=words_of(record.ids), ids=None))
    return made


def _renderable(traffic: Traffic, workshop: Workshop, reading: Reading) -> Traffic:
    """Without the requests that the template refuses; they are counted as broken."""
    kept = []
    for number, body in enumerate(traffic.bodies):
        try:
            workshop.renderer.render(body, traffic.times_s[number])
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
            reading.broken += 1
            reading.problems.append(
                Problem(traffic.records[number].line, f"cannot be rendered: {error}")
            )
        else:
            kept.append(number)
    if not kept:
        raise ConfigError(
            f"no request can be rendered: {reading.problems[-1].what}",
            hint="is it the template of the model that serves?",
        )
    return traffic if len(kept) == traffic.requests else traffic.selected(kept)


def _engine_findings(
    traffic: Traffic, peeling: Peeling, blocks: BlockLog, options: AuditOptions
) -> list[Finding]:
    total = max(peeling.now.input_tokens, 1)
    rate, found = options.prefill_tokens_per_s, []
    early = too_early_tokens(blocks, rate)
    if early >= _EARLY_SHARE * total:
        text = f"{early} tokens are reused from requests still in prefill at {rate:.0f} tokens/s"
        found.append(engine_finding("too_early", early, text, requests=traffic.requests, rate=rate))
    check = cache_check(traffic.records, peeling.base.log.lengths, peeling.base.hit_tokens)
    if check is not None and check.lost_tokens >= _ENGINE_SHARE * max(check.input_tokens, 1):
        text = (
            f"the server logs {check.logged_tokens} cached tokens in {check.requests} requests;"
            f" a cache that keeps everything has {check.predicted_tokens}"
        )
        found.append(
            engine_finding("evicted", check.lost_tokens, text, requests=check.requests, rate=rate)
        )
    lost = max(0, int(peeling.base.exact_tokens.sum()) - peeling.now.reused_tokens)
    if lost >= max(_ENGINE_SHARE * total, _LOST_PER_REQUEST * traffic.requests):
        text = f"{lost} tokens are equal to an earlier request's, but fill no block of {options.block_tokens}"
        found.append(
            engine_finding("granularity", lost, text, requests=traffic.requests, rate=rate)
        )
    return found


# --- the whole


def _result(
    reading: Reading,
    name: str,
    *,
    ordered: Ordered,
    parts: Parts,
    options: AuditOptions,
    bytes_per_token: int | None,
) -> AuditResult:
    blocks = parts.blocks
    edges = edge_log(blocks)
    hits = blocks.hit_tokens()
    total, reused = blocks.total, int(hits.sum())
    extends = follow_ups(blocks)
    fleet = fleet_rows(blocks, options.capacity_tokens, options.shared_tokens, options.instances)
    encoder = parts.workshop.memo.encoder if parts.workshop else None
    reasons = distrust(
        reading, parts.usage, is_estimate=encoder is None or isinstance(encoder, FallbackEncoder)
    )
    return AuditResult(
        schema=SCHEMA,
        kvdepot_version=__version__,
        input=_input(reading, name, ordered, parts, blocks),
        is_trustworthy=not reasons,
        distrust=reasons,
        totals=Totals(
            requests=blocks.requests,
            input_tokens=total,
            reused_tokens=reused,
            computed_tokens=total - reused,
            exact_tokens=parts.exact_tokens,
            copied_tokens=parts.copied_tokens,
            token_share=reused / max(total, 1),
            block_tokens=options.block_tokens
            if parts.workshop
            else int(blocks.tokens.max(initial=1)),
            follow_up_requests=int(extends.sum()),
            follow_up_reused_tokens=int(hits[extends].sum()),
            first_ask_reused_tokens=int(hits[~extends].sum()),
        ),
        findings=parts.findings,
        waterfall=parts.waterfall,
        considered=parts.considered,
        grains=parts.grains,
        apps=parts.apps,
        revisits=revisit_times(edges),
        keep_curve=keep_points(edges),
        capacity_curve=capacity_points(
            edges, bytes_per_token, edge_log(parts.edited) if parts.edited is not None else None
        ),
        fleet=fleet,
        verdict=verdict(
            input_tokens=total,
            reused_tokens=reused,
            proved_tokens=parts.proved_tokens,
            fleet=fleet,
            edges=edges,
            instances=options.instances,
            prefill_tokens_per_s=options.prefill_tokens_per_s,
            bytes_per_token=bytes_per_token,
            knows_order=parts.workshop is not None or bool(parts.findings),
        ),
        prefill_tokens_per_s=options.prefill_tokens_per_s,
        kv_bytes_per_token=bytes_per_token,
    )


def _input(reading: Reading, name: str, ordered: Ordered, parts: Parts, blocks: BlockLog) -> Input:
    answers, cannot = _KIND_ANSWERS[reading.kind]
    workshop = parts.workshop
    times = blocks.times_s
    is_timed = ordered.order != "without times"
    return Input(
        name=name,
        kind=reading.kind,
        lines=reading.lines,
        requests=blocks.requests,
        span_s=float(np.ptp(times)) if is_timed and len(times) else 0.0,
        order=ordered.order,
        broken_lines=reading.broken,
        duplicate_rows=ordered.duplicates,
        cut_prompts=reading.cut,
        problems=[
            f"line {each.line}: {each.what}" if each.line else each.what
            for each in reading.problems
        ],
        answers=list(answers),
        cannot_answer=[*cannot, *([] if is_timed else ["anything about time"])],
        tokenizer=f"{workshop.memo.encoder.name}, cut at "
        + ", ".join(filter(None, (workshop.memo.cuts, workshop.memo.words)))
        if workshop
        else "none",
        tokenizer_error=workshop.memo.encoder.error if workshop else "",
        template=workshop.renderer.name if workshop else "none",
        usage_logged=parts.usage[0],
        usage_differs=parts.usage[1],
    )
