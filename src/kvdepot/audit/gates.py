"""Exit statuses for CI: 0 clean, 1 input error, 2 a finding over a limit, 3 not to be trusted."""

from __future__ import annotations

from collections.abc import Sequence

from kvdepot.audit.causes import CAUSES
from kvdepot.audit.result import AuditResult
from kvdepot.errors import ConfigError

__all__ = [
    "CLEAN",
    "FAILED",
    "INPUT_ERROR",
    "UNTRUSTWORTHY",
    "check_causes",
    "exit_status",
    "parse_points",
]

CLEAN, INPUT_ERROR, FAILED, UNTRUSTWORTHY = range(4)


def parse_points(text: str) -> float:
    """Percentage points from ``2``, ``2pp`` or ``2 %``.

    Raises:
        ConfigError: it is no number.
    """
    try:
        return float(text.strip().removesuffix("pp").removesuffix("%").strip())
    except ValueError as error:
        raise ConfigError(
            f"not percentage points: {text!r}", hint='write for example "2pp"'
        ) from error


def check_causes(fail_on: Sequence[str]) -> None:
    """Refuse names that are no causes.

    Raises:
        ConfigError: a cause that does not exist.
    """
    unknown = [each for each in fail_on if each not in CAUSES and each != "any"]
    if unknown:
        raise ConfigError(
            f"no such cause: {', '.join(unknown)}", hint=f"causes: any, {', '.join(CAUSES)}"
        )


def exit_status(
    result: AuditResult,
    *,
    fail_under: float | None = None,
    fail_on: Sequence[str] = (),
    baseline: AuditResult | None = None,
    max_regress: float | None = None,
) -> tuple[int, list[str]]:
    """The status and why.

    Args:
        result: of this run.
        fail_under: least token share, 0 to 1.
        fail_on: causes that must not be found; ``any`` for all of the prompts' faults.
        baseline: an earlier result.
        max_regress: points of token share that may be lost against it; by default none.
    """
    if not result.is_trustworthy:
        return UNTRUSTWORTHY, list(result.distrust)
    reasons = []
    share = result.totals.token_share
    if fail_under is not None and share < fail_under:
        reasons.append(f"token share {share:.3f} is under {fail_under}")
    reasons += [
        f"{finding.cause} at {finding.place or 'the engine'}"
        for finding in result.findings
        if finding.cause in fail_on or ("any" in fail_on and finding.is_prompt_fault)
    ]
    if baseline is not None:
        lost = 100 * (baseline.totals.token_share - share)
        if lost > (max_regress or 0.0) + 1e-9:
            reasons.append(f"token share fell by {lost:.2f} points against the baseline")
    return (FAILED if reasons else CLEAN), reasons
