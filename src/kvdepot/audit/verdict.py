"""Four lines: reorder the prompt, route sticky, more cache, more GPUs; each with its number."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from kvdepot.audit.edges import EdgeLog
from kvdepot.audit.result import Fleet, VerdictLine
from kvdepot.audit.sizing import keep_time_s
from kvdepot.units import format_bytes

__all__ = ["duration", "verdict"]

_WORTH_POINTS = 1.0


def duration(seconds: float) -> str:
    """Seconds for people."""
    for size, unit in ((86400, "d"), (3600, "h"), (60, "min")):
        if seconds >= 2 * size:
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds:.3g} s"


def verdict(
    *,
    input_tokens: int,
    reused_tokens: int,
    proved_tokens: int,
    fleet: Sequence[Fleet],
    edges: EdgeLog | None,
    instances: int | None,
    prefill_tokens_per_s: float,
    bytes_per_token: int | None,
    knows_order: bool = True,
) -> list[VerdictLine]:
    """The lines, of which the first three are ordered by what they bring."""
    total = max(input_tokens, 1)

    def line(what: str, tokens: int, text: str) -> VerdictLine:
        return VerdictLine(
            what=what,
            points=round(100 * tokens / total, 2),
            tokens=tokens,
            prefill_seconds=round(tokens / prefill_tokens_per_s, 2),
            text=text,
        )

    lines = [
        line(
            "reorder",
            proved_tokens,
            f"edits of the prompts prove {100 * proved_tokens / total:+.1f} points; they cost nothing to run"
            if proved_tokens
            else "no edit of the prompts is worth it"
            if knows_order
            else "the order of prompts cannot be told from this input",
        )
    ]
    row = next((each for each in fleet if each.instances == instances), None) or (
        fleet[len(fleet) // 2] if fleet else None
    )
    if row is not None:
        lines += _fleet_lines(
            row,
            total=total,
            reused=reused_tokens,
            edges=edges,
            bytes_per_token=bytes_per_token,
            line=line,
        )
    lines.sort(key=lambda each: -each.tokens)
    left = input_tokens - reused_tokens - proved_tokens
    lines.append(
        line(
            "more_gpus",
            left,
            f"{100 * left / total:.1f} % of the input tokens are new and have to be computed,"
            " whatever is kept",
        )
    )
    return lines


def _fleet_lines(
    row: Fleet,
    *,
    total: int,
    reused: int,
    edges: EdgeLog | None,
    bytes_per_token: int | None,
    line: Callable[[str, int, str], VerdictLine],
) -> list[VerdictLine]:
    sticky = row.sticky_private_tokens - row.random_private_tokens
    at = f"with {row.instances} instances of {row.capacity_tokens} tokens each"
    made = [line("route", sticky, f"sticky routing against random routing, {at}")]
    more = max(row.shared_tokens - row.sticky_private_tokens, 0)
    size = f"{row.shared_capacity_tokens} tokens"
    if bytes_per_token:
        size += f" ({format_bytes(row.shared_capacity_tokens * bytes_per_token)})"
    text = f"one cache of {size} for all, over sticky routing"
    if 100 * more / total < _WORTH_POINTS:
        text += ": not worth it"
    elif edges is not None:
        text += f"; to have 95 % of all reuse, keep blocks {duration(keep_time_s(edges))}"
    if row.shared_tokens < 0.9 * reused:
        text += f"; a cache that keeps everything would reuse {100 * reused / total:.1f} %"
    made.append(line("cache", more, text))
    return made
