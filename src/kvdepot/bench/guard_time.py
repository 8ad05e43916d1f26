"""Guards over the rounds' times: their parts make them up, and the machine kept its speed."""

from __future__ import annotations

from collections.abc import Iterator

from kvdepot.bench.figures import parts_of
from kvdepot.bench.guard_rounds import Result
from kvdepot.bench.guards import Finding, note
from kvdepot.bench.runstats import median

__all__ = ["check_drift", "check_parts"]

_DRIFT_MAX = 0.05
#: of a TTFT, or so many seconds, may be in no part of it
_REST_SHARE = 0.05
_REST_S = 0.02


def check_parts(result: Result) -> Iterator[Finding]:
    """G5: what the engine tells of a TTFT leaves little over. Of rounds, where requests go one at a time."""
    rows = [row for row in result.rows if row.kind == "measured"]
    counts = [each for window in result.windows if (each := window.counts()) is not None]
    parts = parts_of(rows, counts)
    if parts is not None and abs(parts.rest_s) > max(_REST_SHARE * parts.total_s, _REST_S):
        yield note(
            "G5", result.name, result.arm,
            f"{parts.rest_s * 1000:.0f} of {parts.total_s * 1000:.0f} ms to the first token are in no part "
            "that the engine tells",
        )  # fmt: skip


def check_drift(recompute: Result) -> Iterator[Finding]:
    """G9: the first and the last block of the control arm."""
    runs = sorted({row.run for row in recompute.good})
    if len(runs) < 2:
        yield note("G9", "", "", "not evaluated: one run only")
        return
    first, last = (
        median([row.ttft_s or 0.0 for row in recompute.good if row.run == run])
        for run in (runs[0], runs[-1])
    )
    if abs(last / first - 1) > _DRIFT_MAX:
        yield note("G9", "", "", f"recomputing took {last / first - 1:+.0%} at the end of the test")
