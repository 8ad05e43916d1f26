"""The summary: what a report shows and what comparisons read. Its schema has a version."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import msgspec

from kvdepot.bench.breakeven import BreakEven, Curve
from kvdepot.bench.ceilings import Ceilings
from kvdepot.bench.figures import (
    Parts,
    Times,
    Tokens,
    parts_of,
    per_run_median,
    times_of,
    tokens_of,
)
from kvdepot.bench.guard_machine import check_machine
from kvdepot.bench.guard_rounds import (
    Result,
    check_pair,
    check_result,
    check_salts,
)
from kvdepot.bench.guard_time import check_drift, check_parts
from kvdepot.bench.guards import Finding, Verdict, note, unique, verdict_of
from kvdepot.bench.headlines import (
    Equal,
    Ratio,
    break_even_of,
    check_token_bytes,
    curve_of,
    equals_of,
    ratios_of,
    recompute_beside,
)
from kvdepot.bench.loadfigures import LoadFigures, check_loads, load_figures, with_verdicts
from kvdepot.bench.plan import Plan
from kvdepot.bench.rows import Row
from kvdepot.bench.scrape import Counts
from kvdepot.bench.session import Session, State
from kvdepot.bench.windows import Attribution, Window
from kvdepot.errors import ConfigError

__all__ = ["SCHEMA", "RoundFigures", "Summary", "decode_summary", "summarise"]

SCHEMA = "kvdepot-bench/1"


class RoundFigures(msgspec.Struct, frozen=True, kw_only=True):
    """One round of one arm at one length."""

    round: str
    arm: str
    role: str
    length: int
    verdict: Verdict
    runs: int
    requests: int
    failed: int
    ttft: Times | None
    #: median TTFT of each run
    run_ttft_s: list[float]
    tpot: Times | None
    itl: Times | None
    tokens: Tokens
    attribution: Attribution
    #: summed over windows; None where nobody says
    loaded_bytes: int | None
    stored_bytes: int | None
    device_read_bytes: int | None
    #: the planted code word was answered, of so many times asked
    needle: tuple[int, int]
    #: None where the engine does not tell them
    parts: Parts | None = None


class Summary(msgspec.Struct, frozen=True, kw_only=True):
    """Everything of a result but its rows."""

    schema: str = SCHEMA
    #: what made the rows: kvdepot bench, or the tool that a file was imported from
    tool: str = "kvdepot bench"
    state: State
    verdict: Verdict
    findings: list[Finding]
    rounds: list[RoundFigures]
    ratios: list[Ratio]
    equals: list[Equal]
    curve: Curve | None
    break_even: list[BreakEven]
    loads: list[LoadFigures]
    files: list[str]
    #: by arm
    ceilings: dict[str, Ceilings] = {}
    #: what the engines say that they are, by arm
    engines: dict[str, str] = {}


def summarise(session: Session, *, tool: str = "kvdepot bench") -> Summary:
    """Make the summary of what has been measured so far."""
    state, plan = session.state, session.state.plan
    rows = _counted(session)
    results = list(_results(plan, rows, session))
    curve = curve_of(results)
    ceilings = session.ceilings()
    break_even = list(break_even_of(results, curve, ceilings))
    findings = unique([*_findings(plan, results, curve, ceilings), *check_token_bytes(break_even)])
    figures = [_figures(result, findings, state) for result in results if result.name != "R0"]
    loads = load_figures(rows, session.windows, plan)
    findings = unique([*findings, *check_loads(loads, rows, session.windows, plan, ceilings)])
    if plan.is_indicative:
        findings = unique(
            [note("G12", "", "", "the plan is indicative: too short to decide by"), *findings]
        )
    return Summary(
        tool=tool,
        state=state,
        verdict=verdict_of(findings),
        findings=findings,
        rounds=figures,
        ratios=ratios_of(results),
        equals=list(equals_of(results)),
        curve=curve,
        break_even=break_even,
        loads=with_verdicts(loads, findings, session.noises()),
        files=["plan.json", "rows.jsonl", "windows.jsonl", "summary.json"],
        ceilings=ceilings,
        engines={w.arm: w.engine for w in session.windows if w.engine},
    )


def decode_summary(content: bytes, source: str) -> Summary:
    """A summary from its file.

    Raises:
        ConfigError: it is none, or of another schema.
    """
    try:
        summary = msgspec.json.decode(content, type=Summary)
    except msgspec.MsgspecError as error:
        raise ConfigError(f"{source} is no summary of kvdepot bench: {error}") from error
    if summary.schema != SCHEMA:
        raise ConfigError(f"{source} has schema {summary.schema}, this release reads {SCHEMA}")
    return summary


def _counted(session: Session) -> list[Row]:
    """Rows of the attempts that were finished; of blocks that were not, those of the last one."""
    rows = session.rows()
    last: dict[tuple[int, str], int] = {}
    for row in rows:
        if not row.load:
            last[row.run, row.arm] = max(last.get((row.run, row.arm), 0), row.attempt)
    for run, arm in last:
        if session.is_finished(run, arm):
            last[run, arm] = session.done_attempt(run, arm)
    return [row for row in rows if row.load or row.attempt == last[row.run, row.arm]]


def _results(plan: Plan, rows: Sequence[Row], session: Session) -> Iterator[Result]:
    expects = {each.name: each.expects for each in plan.rounds}
    expects["R0"] = "computed"
    for name, expected in expects.items():
        for arm in session.state.arms:
            mine = [r for r in rows if (r.round, r.arm) == (name, arm.name) and not r.load]
            lengths = [None] if name == "R0" else sorted({r.length for r in mine})
            for length in lengths if mine else []:
                some = [r for r in mine if length in (None, r.length)]
                attempts = {(r.run, r.attempt) for r in some}
                windows = [
                    w
                    for w in session.windows
                    if (w.round, w.arm) == (name, arm.name)
                    and (w.run, w.attempt) in attempts
                    and length in (None, w.length)
                ]
                yield Result(name, arm.name, expected, some, windows)


def _findings(
    plan: Plan,
    results: Sequence[Result],
    curve: Curve | None,
    ceilings: Mapping[str, Ceilings],
) -> Iterator[Finding]:
    yield from check_salts(results)
    for result in results:
        yield from check_result(result, plan)
        yield from check_parts(result)
        yield from check_machine(result.name, result.arm, result.windows, ceilings.get(result.arm))
        recompute = recompute_beside(results, result)
        if recompute is None or result.name == "R0":
            continue
        if result is recompute:
            yield from check_drift(recompute)
            continue
        predicted = None
        if curve is not None and recompute.good:
            predicted = curve.seconds(recompute.good[0].prompt_tokens or 0)
        yield from check_pair(recompute, result, ttft_of_tokens=predicted)
    for result in results:
        small = [r for r in result.good if r.ttft_s is not None]
        if result.name != "R0" and 0 < len(small) < 72:
            yield note("G12", "", "", "some p95 have too few requests and are shown as max of n")


def _figures(result: Result, findings: Sequence[Finding], state: State) -> RoundFigures:
    good = result.good
    measured = [row for row in result.rows if row.kind == "measured"]
    role = next(arm.role for arm in state.arms if arm.name == result.arm)
    asked = [row for row in good if row.question % 8 == 0]
    return RoundFigures(
        round=result.name,
        arm=result.arm,
        role=role,
        length=measured[0].length if measured else 0,
        verdict=verdict_of(findings, where=result.name, arm=result.arm),
        runs=len({row.run for row in good}),
        requests=len(measured),
        failed=len(measured) - len(good),
        ttft=times_of([row.ttft_s for row in good if row.ttft_s is not None]),
        run_ttft_s=per_run_median(good),
        tpot=times_of([row.tpot_s for row in good if row.tpot_s is not None]),
        itl=times_of([gap for row in good for gap in row.gaps_s]),
        tokens=tokens_of(good),
        attribution=result.windows[0].attribution if result.windows else "none",
        loaded_bytes=_summed([each.load_bytes for each in _counts(result.windows)]),
        stored_bytes=_summed([each.store_bytes for each in _counts(result.windows)]),
        device_read_bytes=_summed([each.device_read_bytes() for each in result.windows]),
        parts=parts_of(measured, _counts(result.windows)),
        needle=(sum("ZEBRA-" in row.output for row in asked), len(asked)),
    )


def _counts(windows: Sequence[Window]) -> list[Counts]:
    found = [window.counts() for window in windows]
    return [each for each in found if each is not None]


def _summed(values: Sequence[int | None]) -> int | None:
    known = [value for value in values if value is not None]
    return sum(known) if known else None
