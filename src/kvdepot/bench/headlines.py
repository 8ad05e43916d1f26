"""The headlines: ratios between rounds with their intervals, claims of equality, break-even."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import msgspec

from kvdepot.bench.breakeven import BreakEven, Curve, fit_curve, predict
from kvdepot.bench.ceilings import Ceilings
from kvdepot.bench.figures import per_run_median, tokens_of
from kvdepot.bench.guard_rounds import Result
from kvdepot.bench.guards import Finding, invalid
from kvdepot.bench.runstats import Equivalence, Estimate, equivalence, holm, median, ratio

__all__ = [
    "Equal",
    "Ratio",
    "break_even_of",
    "check_token_bytes",
    "curve_of",
    "equals_of",
    "ratios_of",
    "recompute_beside",
]


_TOKEN_BYTES_MAX = 0.01
#: of a TTFT; a smaller rest is within what the curve may be off, and says nothing about reading
_LOAD_SHARE_MIN = 0.2


class Ratio(msgspec.Struct, frozen=True, kw_only=True):
    """A headline: one round's TTFT over another's, by runs."""

    name: str
    over: str
    under: str
    arm: str
    length: int
    estimate: Estimate
    #: by Holm over all headlines; None with a single run
    p_adjusted: float | None = None


class Equal(msgspec.Struct, frozen=True, kw_only=True):
    """A claim that two rounds are equal."""

    name: str
    length: int
    result: Equivalence


def recompute_beside(results: Sequence[Result], other: Result) -> Result | None:
    """The recompute round of the same length."""
    length = _length(other)
    return next((r for r in results if r.name == "R1a" and _length(r) == length), None)


def ratios_of(results: Sequence[Result]) -> list[Ratio]:
    """All headlines, with p values adjusted over them together."""
    found: list[Ratio] = []
    for other in results:
        base = recompute_beside(results, other)
        if base is None or other.name in ("R0", "R1a"):
            continue
        if other.name == "R1b":
            found += _ratio("store overhead", other, base, other)
        elif other.expects in ("storage", "host") or other.name == "R3":
            found += _ratio("speed-up", base, other, other)
    found += _between_arms(results)
    p_values = {str(i): r.estimate.p for i, r in enumerate(found) if r.estimate.p is not None}
    adjusted = holm(p_values)
    return [
        msgspec.structs.replace(each, p_adjusted=adjusted.get(str(index)))
        for index, each in enumerate(found)
    ]


def equals_of(results: Sequence[Result]) -> Iterator[Equal]:
    """Sharing costs nothing: another instance reads as fast as the one that stored."""
    for shared in results:
        own = [r for r in results if r.name == "R2" and _length(r) == _length(shared)]
        if shared.name == "R2x" and own:
            a, b = per_run_median(shared.good), per_run_median(own[0].good)
            if a and b:
                yield Equal(name="R2x = R2", length=_length(shared), result=equivalence(a, b))


def curve_of(results: Sequence[Result]) -> Curve | None:
    """Seconds to compute a prompt, by its tokens: from the calibration and the recompute rounds."""
    points = [
        (row.prompt_tokens, row.ttft_s)
        for result in results
        if result.name == "R0"
        for row in result.good
        if row.prompt_tokens is not None and row.ttft_s is not None
    ]
    return fit_curve(points)


def break_even_of(
    results: Sequence[Result], curve: Curve | None, ceilings: Mapping[str, Ceilings]
) -> Iterator[BreakEven]:
    """Promised against measured, of each storage round."""
    for read in results:
        base = recompute_beside(results, read)
        if base is None or read.name != "R2" or not (read.good and base.good):
            continue
        stored = next(
            (r for r in results if (r.name, r.arm, _length(r)) == ("R1b", read.arm, _length(read))),
            None,
        )
        yield _break_even(base, read, stored, curve, ceilings.get(read.arm, Ceilings()))


def check_token_bytes(found: Sequence[BreakEven]) -> Iterator[Finding]:
    """G2: the KV bytes of a token are those of the config, or all other bytes are in doubt."""
    for each in found:
        config, written = each.token_bytes, each.stored_token_bytes
        if config and written and abs(written / config - 1) > _TOKEN_BYTES_MAX:
            yield invalid(
                "G2", "R1b", each.arm,
                f"{written:,.0f} bytes were written for a token, and its KV is {config:,} bytes",
            )  # fmt: skip


def _break_even(
    base: Result, read: Result, stored: Result | None, curve: Curve | None, ceilings: Ceilings
) -> BreakEven:
    prompt = median([row.prompt_tokens or 0 for row in read.good])
    reused = tokens_of(read.good).reused / len(read.good)
    computing_s, reading_s = _ttft(base), _ttft(read)
    counts = [each for window in read.windows if (each := window.counts()) is not None]
    token_bytes = next((each.token_bytes for each in counts if each.token_bytes), None)
    written = _stored_token_bytes(stored)
    width = token_bytes or written
    ceiling, most = ceilings.least or (None, None)
    predicted = None
    if curve is not None and width and most and reused:
        seconds = predict(
            curve,
            prompt_tokens=round(prompt),
            reused_tokens=round(reused),
            token_bytes=width,
            read_rate=most,
        )
        predicted = curve.seconds(round(prompt)) / seconds
    rate = prompt / computing_s
    tail_s = curve.seconds(round(prompt), after=round(reused)) if curve is not None else 0.0
    load_s = reading_s - tail_s
    # where the tail takes as long as all of it, computing and reading have run at once
    is_least = curve is None or load_s < _LOAD_SHARE_MIN * reading_s
    read_rate = width * reused / (reading_s if is_least else load_s) if width else None
    return BreakEven(
        arm=read.arm,
        length=_length(read),
        token_bytes=token_bytes,
        stored_token_bytes=written,
        compute_rate=rate,
        read_ceiling=ceilings.read_rate,
        least_bandwidth=width * rate if width else None,
        predicted_speed_up=predicted,
        measured_speed_up=computing_s / reading_s,
        read_rate=read_rate,
        is_least_rate=is_least,
        least_ceiling=ceiling,
        least_ceiling_rate=most,
        ceiling_share=read_rate / most if read_rate is not None and most else None,
    )


def _stored_token_bytes(stored: Result | None) -> float | None:
    """Bytes written for each token that was to be stored, in whole blocks."""
    if stored is None:
        return None
    counts = [each for window in stored.windows if (each := window.counts()) is not None]
    written = sum(each.store_bytes or 0 for each in counts)
    block = next((each.block_tokens for each in counts if each.block_tokens), 1)
    tokens = sum((row.prompt_tokens or 0) // block * block for row in stored.good)
    return written / tokens if written and tokens else None


def _ratio(name: str, over: Result, under: Result, of: Result) -> list[Ratio]:
    a, b = per_run_median(over.good), per_run_median(under.good)
    if not a or not b:
        return []
    estimate: Estimate = ratio(a, b)
    return [
        Ratio(
            name=f"{name}, {of.name}",
            over=over.name,
            under=under.name,
            arm=of.arm,
            length=_length(of),
            estimate=estimate,
        )
    ]


def _between_arms(results: Sequence[Result]) -> list[Ratio]:
    """The same round of two tiers, in the order in which the plan has them."""
    found: list[Ratio] = []
    for index, first in enumerate(results):
        for second in results[index + 1 :]:
            is_same = first.name == second.name and _length(first) == _length(second)
            if is_same and first.arm != second.arm and first.name in ("R2", "R3", "R1b"):
                found += _ratio(f"{second.arm} over {first.arm}", second, first, second)
    return found


def _ttft(result: Result) -> float:
    return median([row.ttft_s for row in result.good if row.ttft_s is not None])


def _length(result: Result) -> int:
    return result.rows[0].length if result.rows else 0
