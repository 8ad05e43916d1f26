"""Figures of load points: times of first asks and follow-ups apart, throughput, goodput, guards."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import msgspec

from kvdepot.bench.ceilings import Ceilings
from kvdepot.bench.figures import Times, Tokens, per_run_median, times_of, tokens_of
from kvdepot.bench.guard_machine import check_machine
from kvdepot.bench.guard_rounds import Result, check_result
from kvdepot.bench.guards import Finding, Verdict, note, verdict_of
from kvdepot.bench.plan import Limits, Plan
from kvdepot.bench.rows import Row
from kvdepot.bench.runstats import median
from kvdepot.bench.windows import Window

__all__ = ["ClassFigures", "LoadFigures", "check_loads", "load_figures", "with_verdicts"]

_LITTLE_MAX = 0.05
_OUTCOME_SHARE = 0.9
_HARM_MAX = 1.10


class ClassFigures(msgspec.Struct, frozen=True, kw_only=True):
    """One class of asks at one load."""

    ask_class: str
    requests: int
    ttft: Times | None
    tokens: Tokens
    #: requests by what became of their reusable tokens; follow-ups only
    outcomes: dict[str, int]
    run_ttft_s: list[float]


class LoadFigures(msgspec.Struct, frozen=True, kw_only=True):
    """One load point of one arm."""

    load: str
    #: ``peak`` or the name of the contention test's noise
    noise: str
    arm: str
    role: str
    verdict: Verdict
    runs: int
    requests: int
    failed: int
    connections: int
    #: completed requests a second, mean of the runs
    throughput: float
    mean_latency_s: float
    #: requests that kept all limits, a second; None where no limit can be known
    goodput: float | None
    classes: list[ClassFigures]
    tokens: Tokens
    tpot: Times | None
    itl: Times | None
    #: X W of the closed loop; c is `connections`
    little: float
    #: TTFT of the request that came 1st, 2nd, ... of a storm; empty otherwise
    by_rank_s: list[float]
    #: bytes of foreign work beside it; 0 where there was none
    noise_bytes: int = 0


def load_figures(rows: Sequence[Row], windows: Sequence[Window], plan: Plan) -> list[LoadFigures]:
    """Figures of every load point, in the order in which they were run."""
    keys = list(dict.fromkeys((w.load, w.round, w.arm) for w in windows if w.load))
    limits = plan.peak.limits if plan.peak is not None else Limits()
    solo_s = _solo(rows)
    found = []
    for load, name, arm in keys:
        mine = [w for w in windows if (w.load, w.round, w.arm) == (load, name, arm)]
        found.append(_figures(_rows_of(rows, mine), mine, limits, solo_s))
    return found


def check_loads(
    loads: Sequence[LoadFigures],
    rows: Sequence[Row],
    windows: Sequence[Window],
    plan: Plan,
    ceilings: Mapping[str, Ceilings],
) -> Iterator[Finding]:
    """Guards over load points, and whether a tier did harm."""
    for each in loads:
        where = _where(each)
        mine = [w for w in windows if (w.load, w.round, w.arm) == (each.load, each.noise, each.arm)]
        result = Result(where, each.arm, "any", _rows_of(rows, mine), mine)
        yield from check_result(result, plan)
        yield from check_machine(where, each.arm, mine, ceilings.get(each.arm))
        is_closed = mine[0].connections > 0
        if is_closed and abs(1 - each.little / each.connections) > _LITTLE_MAX:
            yield note(
                "G5", where, each.arm,
                f"throughput x latency is {each.little:.2f} for {each.connections} connections",
            )  # fmt: skip
        for text in dict.fromkeys(text for window in mine for text in window.notes):
            yield note("G3", where, each.arm, text)
        yield from _harm(each, loads)


def _where(each: LoadFigures) -> str:
    return each.load if each.noise == "peak" else f"{each.load}, {each.noise}"


def _harm(each: LoadFigures, loads: Sequence[LoadFigures]) -> Iterator[Finding]:
    """A tier must not make follow-ups slower than recomputing at the same load."""
    if each.role == "recompute":
        return
    base = next(
        (
            o
            for o in loads
            if o.role == "recompute" and (o.load, o.noise) == (each.load, each.noise)
        ),
        None,
    )
    ours, theirs = _p95(each), _p95(base) if base is not None else None
    if ours is not None and theirs is not None and ours > _HARM_MAX * theirs:
        yield note(
            "G4", _where(each), each.arm,
            f"the tier does harm: p95 of follow-ups is {ours / theirs:.2f} of recomputing's",
        )  # fmt: skip


def _p95(each: LoadFigures) -> float | None:
    follow_ups = next((c for c in each.classes if c.ask_class == "U" and c.ttft), None)
    return follow_ups.ttft.p95.value if follow_ups is not None and follow_ups.ttft else None


def _rows_of(rows: Sequence[Row], windows: Sequence[Window]) -> list[Row]:
    keys = {(w.run, w.arm, w.round, w.load, w.attempt) for w in windows}
    return [r for r in rows if r.load and (r.run, r.arm, r.round, r.load, r.attempt) in keys]


def _figures(
    rows: Sequence[Row], windows: Sequence[Window], limits: Limits, solo_s: float | None
) -> LoadFigures:
    first = windows[0]
    measured = [row for row in rows if row.kind == "measured"]
    good = [row for row in measured if row.is_ok]
    rates, latencies, littles = [], [], []
    for window in windows:
        mine = [row for row in good if (row.run, row.attempt) == (window.run, window.attempt)]
        if not mine:
            continue
        span_s = max(r.ended_s for r in mine) - min(r.scheduled_s for r in mine)
        mean_s = sum(r.ended_s - r.scheduled_s for r in mine) / len(mine)
        rates.append(len(mine) / span_s if span_s > 0 else 0.0)
        latencies.append(mean_s)
        littles.append(rates[-1] * mean_s)
    kept = [row for row in good if _is_kept(row, limits, solo_s)] if solo_s is not None else None
    throughput = sum(rates) / len(rates) if rates else 0.0
    return LoadFigures(
        load=first.load,
        noise=first.round,
        arm=first.arm,
        role=first.role,
        verdict=verdict_of([]),
        runs=len(windows),
        requests=len(measured),
        failed=len(measured) - len(good),
        connections=first.connections,
        throughput=throughput,
        mean_latency_s=sum(latencies) / len(latencies) if latencies else 0.0,
        goodput=throughput * len(kept) / len(good) if kept is not None and good else None,
        classes=[_class(name, good) for name in ("F", "U", "M")],
        tokens=tokens_of(good),
        tpot=times_of([row.tpot_s for row in good if row.tpot_s is not None]),
        itl=times_of([gap for row in good for gap in row.gaps_s]),
        little=sum(littles) / len(littles) if littles else 0.0,
        by_rank_s=_by_rank(good) if "storm" in first.load else [],
    )


def _class(name: str, good: Sequence[Row]) -> ClassFigures:
    mine = [row for row in good if row.ask_class == name]
    outcomes: dict[str, int] = {}
    if name == "U":
        for row in mine:
            outcome = _outcome(row)
            outcomes[outcome] = outcomes.get(outcome, 0) + 1
    return ClassFigures(
        ask_class=name,
        requests=len(mine),
        ttft=times_of([row.ttft_s for row in mine if row.ttft_s is not None]),
        tokens=tokens_of(mine),
        outcomes=outcomes,
        run_ttft_s=per_run_median(mine),
    )


def _outcome(row: Row) -> str:
    reused = row.reused if row.reused is not None else {"cached": row.cached_tokens or 0}
    total = sum(reused.values())
    if total == 0:
        return "miss"
    if total < _OUTCOME_SHARE * row.oracle_tokens:
        return "partial"
    # the farthest tier decides how long it took
    for source in ("external", "disk", "host", "device", "cached"):
        if reused.get(source):
            return source
    return "miss"


def _is_kept(row: Row, limits: Limits, solo_s: float) -> bool:
    most_s = limits.first_ask_ttft_factor * solo_s
    if row.ask_class == "U":
        most_s = max(limits.follow_up_ttft_s, limits.follow_up_ttft_factor * solo_s)
    is_fast = row.ttft_s is not None and row.ttft_s <= most_s
    return is_fast and (row.tpot_s is None or row.tpot_s <= limits.tpot_s)


def _solo(rows: Sequence[Row]) -> float | None:
    """TTFT of a first ask when nothing else runs and nothing is reused."""
    solo = [row.ttft_s for row in rows if row.round == "R1a" and row.is_ok and row.ttft_s]
    return median(solo) if solo else None


def _by_rank(good: Sequence[Row]) -> list[float]:
    """Mean over runs of the first, second, ... TTFT of a storm."""
    runs: dict[int, list[float]] = {}
    for row in good:
        if row.ttft_s is not None:
            runs.setdefault(row.run, []).append(row.ttft_s)
    ordered = [sorted(times) for times in runs.values()]
    count = min((len(times) for times in ordered), default=0)
    return [sum(times[rank] for times in ordered) / len(ordered) for rank in range(count)]


def with_verdicts(
    loads: Sequence[LoadFigures], findings: Sequence[Finding], noises: Mapping[str, int]
) -> list[LoadFigures]:
    """The figures with the verdict on each, and the foreign bytes beside it."""
    return [
        msgspec.structs.replace(
            each,
            verdict=verdict_of(findings, where=_where(each), arm=each.arm),
            noise_bytes=noises.get(f"{each.arm} {each.noise}", 0),
        )
        for each in loads
    ]
