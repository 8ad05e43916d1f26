"""Traces whose ids name pieces of text wherever they are: the order of pieces can be audited.

The edits are the same as for texts, on ids: the piece that changes between requests with equal passages
goes behind them, passages go into one order. Each is kept if it pays together with those before it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence

import numpy as np

from kvdepot.audit.blocklog import BlockLog, block_log, chained
from kvdepot.audit.records import Record, Trace
from kvdepot.audit.traffic import Measure

__all__ = ["ContentStep", "content_steps", "measure_traces", "trace_blocks"]


def trace_blocks(records: Sequence[Record], traces: Sequence[Trace]) -> BlockLog:
    """Blocks of a trace, in the order of the records."""
    scopes: dict[object, int] = {}
    salts = [scopes.setdefault(record.extra, len(scopes)) for record in records]
    chains = chained([trace.ids for trace in traces], salts)
    starts = np.zeros(len(chains) + 1, np.int64)
    np.cumsum([len(chain) for chain in chains], out=starts[1:])
    sessions: dict[str, int] = {}
    return block_log(
        np.array([each for chain in chains for each in chain], np.int64),
        starts,
        tokens=np.array([each for trace in traces for each in trace.tokens], np.int64),
        lengths=np.array(
            [trace.length if trace.length >= 0 else sum(trace.tokens) for trace in traces], np.int64
        ),
        times_s=np.array([record.time_s or 0.0 for record in records], np.float64),
        sessions=np.array(
            [
                -1 if record.session is None else sessions.setdefault(record.session, len(sessions))
                for record in records
            ],
            np.int64,
        ),
    )


def measure_traces(records: Sequence[Record], traces: Sequence[Trace]) -> Measure:
    """Input and reused tokens."""
    blocks = trace_blocks(records, traces)
    return Measure(blocks.total, int(blocks.hit_tokens().sum()))


class ContentStep:
    """One edit of the order of pieces, and what it brings behind those before it."""

    def __init__(self, what: str, cause: str, before: Measure, after: Measure, alone: int) -> None:
        self.what = what
        self.cause = cause
        self.before = before
        self.after = after
        self.alone = alone

    @property
    def proved(self) -> int:
        """Reused tokens more than before."""
        return self.after.reused_tokens - self.before.reused_tokens


def content_steps(
    records: Sequence[Record], traces: Sequence[Trace], *, least: int
) -> list[ContentStep]:
    """Try the edits in the order in which they unmask each other; keep what brings `least` tokens."""
    if not any(trace.groups for trace in traces):
        return []
    popularity = Counter(each for trace in traces for each in _parts(trace).get("passages_ids", []))
    edits: list[tuple[str, str, Callable[[Trace], Trace]]] = [
        ("behind", "per_user", _changing_behind),
        (
            "popular_first",
            "piece_order",
            lambda trace: _sorted(trace, lambda i: (-popularity[i], i)),
        ),
        ("by_id", "piece_order", lambda trace: _sorted(trace, lambda i: (0, i))),
    ]
    steps: list[ContentStep] = []
    base = measure_traces(records, traces)
    work, now = list(traces), base
    done: set[str] = set()
    for what, cause, edit in edits:
        if cause in done:
            continue
        after = [edit(trace) for trace in work]
        measure = measure_traces(records, after)
        if measure.reused_tokens - now.reused_tokens >= least:
            alone = measure_traces(records, [edit(trace) for trace in traces])
            steps.append(
                ContentStep(what, cause, now, measure, alone.reused_tokens - base.reused_tokens)
            )
            work, now = after, measure
            done.add(cause)
    return steps


def _parts(trace: Trace) -> dict[str, list[int]]:
    parts = {}
    at = 0
    for name, count in trace.groups:
        parts[name] = trace.ids[at : at + count]
        at += count
    return parts


def _joined(trace: Trace, order: Sequence[int]) -> Trace:
    """The same pieces, each with its tokens, in another order (indices)."""
    return Trace(
        [trace.ids[each] for each in order], [trace.tokens[each] for each in order], trace.groups
    )


def _ranges(trace: Trace) -> dict[str, list[int]]:
    ranges = {}
    at = 0
    for name, count in trace.groups:
        ranges[name] = list(range(at, at + count))
        at += count
    return ranges


def _changing_behind(trace: Trace) -> Trace:
    """The last piece of the system prompt behind the passages."""
    ranges = _ranges(trace)
    system, passages = ranges.get("sys_prompt", []), ranges.get("passages_ids", [])
    if len(system) < 2:
        return trace
    moved = system[-1:]
    rest = [each for each in range(len(trace.ids)) if each not in {*system, *passages}]
    made = _joined(trace, [*system[:-1], *passages, *moved, *rest])
    groups = tuple(
        ("sys_prompt", len(system) - 1) if name == "sys_prompt" else (name, count)
        for name, count in trace.groups
    )
    with_moved = [pair for pair in groups if pair[0] in ("sys_prompt", "passages_ids")]
    others = [pair for pair in groups if pair[0] not in ("sys_prompt", "passages_ids")]
    return made._replace(groups=(*with_moved, ("changing", 1), *others))


def _sorted(trace: Trace, rank: Callable[[int], tuple[int, int]]) -> Trace:
    """Passages in the order of a rank of their ids."""
    ranges = _ranges(trace)
    passages = ranges.get("passages_ids", [])
    ordered = sorted(passages, key=lambda each: rank(trace.ids[each]))
    order = list(range(len(trace.ids)))
    for place, each in zip(passages, ordered, strict=True):
        order[place] = each
    return _joined(trace, order)
