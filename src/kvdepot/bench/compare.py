"""Comparing results: ratios with intervals over runs, equality as a claim of its own, one family of tests.

What is not comparable is not compared, and the reason is said.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import msgspec

from kvdepot.bench.runstats import Equivalence, Estimate, equivalence, holm, ratio
from kvdepot.bench.summary import Summary
from kvdepot.errors import ConfigError

__all__ = ["Compared", "Comparison", "compare", "differences"]


class Compared(msgspec.Struct, frozen=True, kw_only=True):
    """One figure of two results: the other's over the first's."""

    #: such as ``R2 kvdepot 1024`` or ``closed 8 kvdepot U``
    figure: str
    other: str
    estimate: Estimate
    equality: Equivalence
    p_adjusted: float | None = None

    @property
    def says(self) -> str:
        """What may be said about it."""
        if self.equality.is_equal:
            return "equal within 10 %"
        if self.p_adjusted is None:
            return "one run: nothing can be said"
        if self.p_adjusted >= 0.05:
            return "no difference shown, and no equality either"
        return "slower" if self.estimate.value > 1 else "faster"


class Comparison(msgspec.Struct, frozen=True, kw_only=True):
    """Results beside the first of them."""

    schema: str = "kvdepot-bench-comparison/1"
    first: str
    figures: list[Compared]
    notes: list[str]


def differences(first: Summary, other: Summary) -> Iterator[str]:
    """Why two results must not be compared; nothing where they may."""
    a, b = first.state, other.state
    if first.tool != other.tool:
        yield f"they were measured by different tools: {first.tool} and {other.tool}"
    for name, ours, theirs in (
        ("document", a.material_digest, b.material_digest),
        ("document tokens", a.plan.document_tokens, b.plan.document_tokens),
        ("output tokens", a.plan.output_tokens, b.plan.output_tokens),
        ("API", a.plan.api, b.plan.api),
        ("models", _models(first), _models(other)),
        ("traffic of the peak test", _traffic(first), _traffic(other)),
        ("processor", a.environment.get("processor"), b.environment.get("processor")),
        ("cores", a.environment.get("cores"), b.environment.get("cores")),
    ):
        if ours != theirs:
            yield f"they differ in {name}: {ours} and {theirs}"
    if a.nonce == b.nonce:
        yield "they are the same result"


def compare(results: Sequence[tuple[str, Summary]], *, allows_invalid: bool = False) -> Comparison:
    """Compare results with the first of them.

    Args:
        results: names and summaries; two or more.
        allows_invalid: also those that a guard has declared INVALID; that is noted.

    Raises:
        ConfigError: they are not comparable; says why.
    """
    if len(results) < 2:
        raise ConfigError("a comparison needs two results")
    notes = []
    for name, summary in results:
        if summary.verdict == "INVALID":
            if not allows_invalid:
                raise ConfigError(
                    f"{name} is INVALID, and comparing it would make it look as if it were not",
                    hint="its report says why; --invalid compares it all the same",
                )
            notes.append(f"{name} is INVALID")
        if summary.state.plan.is_indicative:
            notes.append(f"{name} is indicative: its plan is too short to decide by")
    (first_name, first), *others = results
    figures: list[Compared] = []
    for name, other in others:
        reasons = list(differences(first, other))
        if reasons:
            raise ConfigError(f"{first_name} and {name} are not comparable: {'; '.join(reasons)}")
        figures += _figures(first, other, name)
    p_values = {str(i): f.estimate.p for i, f in enumerate(figures) if f.estimate.p is not None}
    adjusted = holm(p_values)
    return Comparison(
        first=first_name,
        figures=[
            msgspec.structs.replace(each, p_adjusted=adjusted.get(str(index)))
            for index, each in enumerate(figures)
        ],
        notes=notes,
    )


def _figures(first: Summary, other: Summary, name: str) -> Iterator[Compared]:
    ours, theirs = _samples(first), _samples(other)
    for figure in ours:
        a, b = ours[figure], theirs.get(figure, [])
        if a and b and min([*a, *b]) > 0:
            yield Compared(
                figure=figure, other=name, estimate=ratio(b, a), equality=equivalence(b, a)
            )


def _samples(summary: Summary) -> dict[str, list[float]]:
    """Median TTFT of each run, by figure."""
    found = {f"{each.round} {each.arm} {each.length}": each.run_ttft_s for each in summary.rounds}
    for load in summary.loads:
        name = load.load if load.noise == "peak" else f"{load.load}, {load.noise}"
        for figures in load.classes:
            if figures.run_ttft_s:
                found[f"{name} {load.arm} {figures.ask_class}"] = figures.run_ttft_s
    return found


def _models(summary: Summary) -> list[str]:
    return sorted({arm.model for arm in summary.state.arms})


def _traffic(summary: Summary) -> str:
    peak = summary.state.plan.peak
    return "" if peak is None else msgspec.json.encode(peak.traffic).decode()
