"""From steps and sites to findings: numbers, words, an example."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np

from kvdepot.audit.causes import CAUSES
from kvdepot.audit.content import ContentStep
from kvdepot.audit.mask import masked, prompt_diff
from kvdepot.audit.peel import Peeling, Step
from kvdepot.audit.result import Considered, Example, Finding, Strip, WaterfallBar
from kvdepot.audit.site import Site
from kvdepot.audit.sites import Survey
from kvdepot.audit.texts import meeting
from kvdepot.audit.traffic import Traffic, Workshop
from kvdepot.audit.words import edit_text

__all__ = [
    "Shown",
    "considered",
    "content_findings",
    "engine_finding",
    "prompt_findings",
    "waterfall",
]

_CONSIDERED_MOST = 8
#: causes that no edit repairs, and that are worth knowing all the same
_PRICED = ("compaction",)


class Shown:
    """How findings are written.

    Args:
        traffic: the requests as logged.
        workshop: renders examples.
        show_values: whether real values and texts are shown.
        prefill_tokens_per_s: turns tokens into seconds.
    """

    def __init__(
        self,
        traffic: Traffic,
        workshop: Workshop,
        *,
        show_values: bool,
        prefill_tokens_per_s: float,
    ) -> None:
        self.traffic = traffic
        self.workshop = workshop
        self.show_values = show_values
        self.rate = prefill_tokens_per_s


def prompt_findings(peeling: Peeling, shown: Shown) -> list[Finding]:
    """Findings about prompts: proved edits in their order, then what no edit repairs."""
    made = []
    work = shown.traffic
    for step in peeling.steps:
        after = step.edit.apply(work)
        made.append(_of_step(step, peeling, shown, work, after))
        work = after
    least = 0.01 * peeling.now.input_tokens
    left = [site for site in peeling.unproved if site.cause in _PRICED and site.estimate >= least]
    return [*made, *(_finding(site, peeling, shown) for site in left)]


def _of_step(step: Step, peeling: Peeling, shown: Shown, work: Traffic, after: Traffic) -> Finding:
    total = max(peeling.now.input_tokens, 1)
    saved = step.before.computed_tokens - step.after.computed_tokens
    request = max(step.site.example[0], 0)
    if not step.site.requests:
        diff = ""
    else:
        pair = [shown.workshop.prompts(each.selected([request]))[0].text for each in (work, after)]
        diff = prompt_diff(*pair, show_values=shown.show_values)
    return _finding(
        step.site,
        peeling,
        shown,
        proved=step.proved,
        points=round(100 * step.proved / total, 2),
        alone=step.alone,
        added=step.after.input_tokens - step.before.input_tokens,
        saved=saved,
        edit=edit_text(step.edit.what),
        diff=diff,
    )


def _finding(
    site: Site,
    peeling: Peeling,
    shown: Shown,
    *,
    proved: int | None = None,
    points: float | None = None,
    alone: int | None = None,
    added: int = 0,
    saved: int = 0,
    edit: str = "",
    diff: str = "",
) -> Finding:
    cause = CAUSES[site.cause]
    records = [shown.traffic.records[each] for each in site.requests]
    positions = peeling.base.exact_tokens[site.requests] if site.requests else np.zeros(1)
    return Finding(
        cause=site.cause,
        number=cause.number,
        title=cause.title,
        place=site.place,
        evidence=site.evidence,
        advice=cause.advice,
        hint=cause.hint,
        is_prompt_fault=cause.is_prompt_fault,
        needs_decision=cause.needs_decision,
        requests=len(site.requests) or shown.traffic.requests,
        users=len({each.user for each in records if each.user}),
        sessions=len({each.session for each in records if each.session}),
        distinct_values=site.distinct,
        position_p50=int(np.percentile(positions, 50)),
        position_p95=int(np.percentile(positions, 95)),
        estimate_tokens=site.estimate,
        proved_tokens=proved,
        proved_points=points,
        alone_tokens=alone,
        input_tokens_added=added,
        computed_tokens_saved=saved,
        prefill_seconds_saved=round(max(proved or 0, 0) / shown.rate, 2),
        edit=edit,
        example=_example(site, peeling.base, shown, diff),
    )


def _example(site: Site, base: Survey, shown: Shown, diff: str) -> Example | None:
    request, donor = site.example
    if request < 0:
        return None
    values = [value if shown.show_values else masked(value) for _, value in site.values]
    return Example(
        line=shown.traffic.records[request].line,
        donor_line=shown.traffic.records[donor].line if donor >= 0 else 0,
        values=values,
        diff=diff,
        strip=_strip(base, request, donor),
    )


def _strip(base: Survey, request: int, donor: int) -> Strip | None:
    if donor < 0:
        return None
    length = int(base.log.lengths[request])
    hit = int(base.exact_tokens[request])
    body = min(int(base.copied[request]), length - hit)
    text, other = base.prompts[request].text, base.prompts[donor].text
    share = len(text) / max(length, 1)
    met = meeting(text, other, min(round(hit * share), len(text)))
    gap = round((met.left - hit * share) / share) if met else 0
    gap = max(0, min(gap, length - hit - body))
    return Strip(
        hit_tokens=hit, gap_tokens=gap, body_tokens=body, new_tokens=length - hit - gap - body
    )


def engine_finding(
    cause: str, tokens: int, evidence: str, *, requests: int, rate: float
) -> Finding:
    """A finding that no edit of the prompts repairs."""
    return msgspec.structs.replace(
        _bare(cause, evidence, requests),
        estimate_tokens=tokens,
        prefill_seconds_saved=round(tokens / rate, 2),
    )


def content_findings(
    steps: Sequence[ContentStep], total: int, requests: int, rate: float
) -> list[Finding]:
    """Findings about the order of a trace's pieces."""
    return [
        msgspec.structs.replace(
            _bare(step.cause, f"tried on the ids of {requests} requests", requests),
            place="sys_prompt" if step.what == "behind" else "passages_ids",
            is_prompt_fault=True,
            needs_decision=CAUSES[step.cause].needs_decision,
            estimate_tokens=step.proved,
            proved_tokens=step.proved,
            proved_points=round(100 * step.proved / max(total, 1), 2),
            alone_tokens=step.alone,
            computed_tokens_saved=step.proved,
            prefill_seconds_saved=round(step.proved / rate, 2),
            edit=edit_text(step.what),
        )
        for step in steps
    ]


def _bare(cause: str, evidence: str, requests: int) -> Finding:
    told = CAUSES[cause]
    return Finding(
        cause=cause,
        number=told.number,
        title=told.title,
        place="",
        evidence=evidence,
        advice=told.advice,
        hint=told.hint,
        is_prompt_fault=False,
        needs_decision=False,
        requests=requests,
        users=0,
        sessions=0,
        distinct_values=0,
        position_p50=0,
        position_p95=0,
        estimate_tokens=0,
        proved_tokens=None,
        proved_points=None,
        alone_tokens=None,
        input_tokens_added=0,
        computed_tokens_saved=0,
        prefill_seconds_saved=0.0,
        edit="",
    )


def waterfall(peeling: Peeling) -> list[WaterfallBar]:
    """Where the traffic stands now, and after each edit."""
    now = peeling.now
    bars = [
        WaterfallBar(name="now", input_tokens=now.input_tokens, reused_tokens=now.reused_tokens)
    ]
    bars += [
        WaterfallBar(
            name=f"{step.site.cause}: {edit_text(step.edit.what)}",
            input_tokens=step.after.input_tokens,
            reused_tokens=step.after.reused_tokens,
        )
        for step in peeling.steps
    ]
    return bars


def considered(sites: Sequence[Site]) -> list[Considered]:
    """Sites whose edits did not prove enough."""
    return [
        Considered(
            cause=site.cause,
            place=site.place,
            estimate_tokens=site.estimate,
            evidence=site.evidence,
        )
        for site in sites
        if site.cause not in _PRICED
    ][:_CONSIDERED_MOST]
