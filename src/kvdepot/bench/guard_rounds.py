"""Guards over the rounds: isolation, closure of tokens and bytes, equal work, equal answers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from kvdepot.bench.guards import Finding, invalid, note
from kvdepot.bench.plan import Plan
from kvdepot.bench.rows import Row
from kvdepot.bench.runstats import median
from kvdepot.bench.windows import Window
from kvdepot.units import format_bytes

__all__ = ["Result", "check_pair", "check_result", "check_salts"]

_BYTES_TOLERANCE = 0.03
_ISOLATION_SHARE = 0.98
_RESIDENCY_MAX = 0.01
_ERRORS_MAX = 0.001
_RATE_MIN = 0.87
_MATCH_SLACK = 0.05
_WARMUPS_MIN = 3
_MATCH_CHARACTERS = 120
#: what claims to be reused and takes so much of the time of computing was hardly reused
_LIE_SHARE = 0.8


class Result(NamedTuple):
    """All there is about one round of one arm, or one load point: rows and windows of all runs."""

    name: str
    arm: str
    expects: str
    rows: Sequence[Row]
    windows: Sequence[Window]

    @property
    def good(self) -> list[Row]:
        """Answered and measured."""
        return [row for row in self.rows if row.is_ok and row.kind == "measured"]


def check_result(result: Result, plan: Plan) -> Iterator[Finding]:
    """Everything that can be said by looking at one result alone."""
    yield from _tokens(result)
    yield from _bytes(result)
    yield from _isolation(result)
    yield from _work(result, plan)
    yield from _warmth(result)
    yield from _errors(result)


def check_salts(results: Sequence[Result]) -> Iterator[Finding]:
    """G3: every measured read is of bytes that nobody has read before."""
    for result in results:
        seen: Counter[tuple[str, str]] = Counter()
        runs: dict[str, set[int]] = {}
        for row in result.rows:
            if row.salt and not row.load and row.kind == "measured":
                seen[row.salt, str(row.length)] += 1
                runs.setdefault(row.salt, set()).add(row.run)
        if any(len(each) > 1 for each in runs.values()):
            yield invalid(
                "G3", result.name, result.arm,
                "runs used the same salts: a later run could find what an earlier one had stored",
            )  # fmt: skip
        elif any(count > 1 for count in seen.values()):
            yield invalid(
                "G3", result.name, result.arm,
                "a read set contains an earlier one: a prompt was asked twice in one round",
            )  # fmt: skip


def check_pair(
    recompute: Result, other: Result, *, ttft_of_tokens: float | None = None
) -> Iterator[Finding]:
    """What shows only when a round is laid beside the recompute round.

    Args:
        recompute: R1a.
        other: of a tier.
        ttft_of_tokens: seconds that the calibration's curve gives for the prompt; None without one.
    """
    yield from _same_work(recompute, other)
    yield from _same_answer(recompute, other)
    if other.expects == "computed" and other.name != "R2n":
        yield from _baseline(recompute, other, ttft_of_tokens)
    yield from _plausible(recompute, other)


# one result


def _tokens(result: Result) -> Iterator[Finding]:
    where, arm = result.name, result.arm
    for window in result.windows:
        counts = window.counts()
        rows = _of_window(result, window)
        if counts is None:
            yield invalid("G1", where, arm, "a counter went back: the engine restarted in between")
            continue
        if not counts.tokens:
            yield note(
                "G1", where, arm, "not evaluated: the engine does not count tokens by source"
            )
            continue
        good = [row for row in rows if row.prompt_tokens is not None]
        asked = sum(row.prompt_tokens or 0 for row in good)
        failed = len(rows) - len(good)
        if counts.prompt_tokens != asked and not failed:
            yield invalid(
                "G1", where, arm,
                f"the engine counted {counts.prompt_tokens:,} prompt tokens, the answers {asked:,}",
            )  # fmt: skip
        reused = counts.prompt_tokens - counts.tokens.get("computed", 0)
        told = [row.cached_tokens for row in good if row.cached_tokens is not None]
        if told and len(told) == len(good) and sum(told) != reused and not failed:
            yield invalid(
                "G1", where, arm,
                f"the answers claim {sum(told):,} cached tokens, the engine counted {reused:,}",
            )  # fmt: skip


def _bytes(result: Result) -> Iterator[Finding]:
    where, arm = result.name, result.arm
    if result.expects != "storage":
        return
    for window in result.windows:
        counts, moved = window.counts(), window.device_read_bytes()
        expected = counts.load_bytes if counts is not None else None
        if expected is None or moved is None:
            missing = "the device's bytes" if moved is None else "the bytes that the tier loaded"
            yield note("G2", where, arm, f"not evaluated: {missing} are not known")
            continue
        by_tokens = _bytes_by_tokens(window)
        if by_tokens is not None and abs(expected / by_tokens - 1) > _BYTES_TOLERANCE:
            yield invalid(
                "G2", where, arm,
                f"the tier loaded {format_bytes(expected)}, the reused tokens are "
                f"{format_bytes(by_tokens)}",
            )  # fmt: skip
        if expected == 0:
            yield invalid("G2", where, arm, "the tier loaded nothing")
        elif moved < expected * (1 - _BYTES_TOLERANCE):
            yield invalid(
                "G2", where, arm,
                f"the device gave {format_bytes(moved)} of the {format_bytes(expected)} that were "
                "loaded: the rest came from a cache",
            )  # fmt: skip
        elif moved > expected * (1 + _BYTES_TOLERANCE):
            yield note(
                "G2", where, arm,
                f"the device gave {format_bytes(moved)} for {format_bytes(expected)} that were loaded",
            )  # fmt: skip


def _bytes_by_tokens(window: Window) -> float | None:
    counts = window.counts()
    if counts is None or counts.token_bytes is None:
        return None
    tokens = counts.tokens.get("disk", 0) + counts.tokens.get("external", 0)
    return tokens * counts.token_bytes or None


def _isolation(result: Result) -> Iterator[Finding]:
    where, arm = result.name, result.arm
    good = result.good
    reused = {source: 0 for row in good for source in (row.reused or {})}
    for row in good:
        for source, tokens in (row.reused or {}).items():
            reused[source] += tokens
    cached = sum(row.cached_tokens or 0 for row in good) or sum(reused.values())
    if result.expects == "computed" and cached:
        yield invalid(
            "G3", where, arm, f"{cached:,} prompt tokens were reused where all had to be computed"
        )
    if result.expects == "host" and (reused.get("disk") or reused.get("device")):
        yield invalid("G3", where, arm, "tokens came from elsewhere than host memory")
    if result.expects != "storage":
        return
    oracle = sum(row.oracle_tokens for row in good)
    for source in ("device", "host"):
        if reused.get(source):
            yield invalid(
                "G3", where, arm,
                f"{reused[source]:,} tokens came from {source} memory and not from storage",
            )  # fmt: skip
    stored = reused.get("disk", 0) + reused.get("external", 0) if reused else cached
    if oracle and stored < _ISOLATION_SHARE * oracle:
        yield invalid(
            "G3", where, arm,
            f"storage served {stored:,} of the {oracle:,} tokens that were stored",
        )  # fmt: skip
    if not reused:
        yield note("G3", where, arm, "the engine does not say which tier tokens came from")
    elif reused.get("external"):
        yield note(
            "G3", where, arm,
            "the engine does not tell host memory and storage apart; that it was storage rests on "
            "the restart and on the device's bytes",
        )  # fmt: skip
    yield from _isolation_of_windows(result)


def _isolation_of_windows(result: Result) -> Iterator[Finding]:
    where, arm = result.name, result.arm
    for window in result.windows:
        if not window.is_restarted:
            refused = any("REFUSED" in each for each in window.notes)
            check = invalid if refused else note
            yield check("G3", where, arm, "; ".join(window.notes) or "no restart before the round")
        if window.is_settled is False:
            yield note("G3", where, arm, "the pool still changed when the round began")
        if window.page_residency is None:
            yield note("G3", where, arm, "not evaluated: the page cache (no pool folder is named)")
        elif window.page_residency > _RESIDENCY_MAX:
            yield invalid(
                "G3", where, arm,
                f"{window.page_residency:.0%} of the pool's pages were in the page cache before the "
                "first read",
            )  # fmt: skip


def _work(result: Result, plan: Plan) -> Iterator[Finding]:
    where, arm = result.name, result.arm
    good = result.good
    if any(row.prompt_tokens is None or row.output_tokens is None for row in good):
        yield invalid(
            "G6", where, arm, "answers without usage: tokens are unknown, chunks are not tokens"
        )
    is_round = not any(window.load for window in result.windows)
    if is_round and any(row.output_tokens not in (None, plan.output_tokens) for row in good):
        yield invalid("G6", where, arm, f"an answer has not {plan.output_tokens} output tokens")
    if any(row.finish not in ("length", "") for row in good):
        yield note("G6", where, arm, "an answer ended before its length")


def _warmth(result: Result) -> Iterator[Finding]:
    for window in result.windows:
        if window.warmups < _WARMUPS_MIN and not window.load:
            yield note(
                "G8",
                result.name,
                result.arm,
                f"{window.warmups} warm-up requests, not {_WARMUPS_MIN}",
            )
        if window.compile_lines:
            yield note(
                "G8", result.name, result.arm, f"the engine's log says: {window.compile_lines[0]}"
            )


def _errors(result: Result) -> Iterator[Finding]:
    where, arm = result.name, result.arm
    rows = [row for row in result.rows if row.kind == "measured"]
    planned = sum(window.planned for window in result.windows)
    if len(rows) < planned:
        yield invalid(
            "G11", where, arm,
            f"{planned - len(rows)} of {planned} requests are not in the rows: failures were dropped",
        )  # fmt: skip
    failed = [row for row in rows if not row.is_ok]
    if failed:
        words = f"{len(failed)} of {len(rows)} requests failed, the first with: {failed[0].error}"
        is_few = len(failed) <= _ERRORS_MAX * len(rows)
        yield (note if is_few else invalid)("G11", where, arm, words)
    for window in result.windows:
        counts = window.counts()
        if counts is not None and counts.given_up_blocks:
            yield note("G11", where, arm, f"{counts.given_up_blocks} blocks fell back to computing")
        if counts is not None and counts.corrupt_blocks:
            yield note("G11", where, arm, f"{counts.corrupt_blocks} blocks were corrupt")


# two results


def _same_work(one: Result, other: Result) -> Iterator[Finding]:
    def tokens(result: Result) -> dict[tuple[int, int], set[int | None]]:
        found: dict[tuple[int, int], set[int | None]] = {}
        for row in result.good:
            found.setdefault((row.length, row.question), set()).add(row.prompt_tokens)
        return found

    ours, theirs = tokens(one), tokens(other)
    for key in ours.keys() & theirs.keys():
        if ours[key] != theirs[key]:
            yield invalid(
                "G6", other.name, other.arm, "the same prompt has another number of tokens here"
            )
            return


def _same_answer(recompute: Result, other: Result) -> Iterator[Finding]:
    ours, theirs = _answers(recompute), _answers(other)
    common = ours.keys() & theirs.keys()
    if not common:
        return
    # the recompute arm beside itself, in another run, shows what the engine itself varies
    own = [ours[key] for key in common if len(ours[key]) > 1]
    baseline = sum(len(set(texts)) == 1 for texts in own) / len(own) if own else 1.0
    match = sum(theirs[key][0] in ours[key] for key in common) / len(common)
    if match < baseline - _MATCH_SLACK:
        yield invalid(
            "G7", other.name, other.arm,
            f"{match:.0%} of the answers are those of recomputing, which repeats itself in "
            f"{baseline:.0%}",
        )  # fmt: skip


def _answers(result: Result) -> dict[tuple[int, int], list[str]]:
    found: dict[tuple[int, int], list[str]] = {}
    for row in result.good:
        found.setdefault((row.length, row.question), []).append(row.output[:_MATCH_CHARACTERS])
    return found


def _baseline(
    recompute: Result, storing: Result, ttft_of_tokens: float | None
) -> Iterator[Finding]:
    ours, theirs = _ttft(recompute), _ttft(storing)
    if ours is None or theirs is None:
        return
    if theirs / ours < _RATE_MIN:
        yield invalid(
            "G4", recompute.name, recompute.arm,
            f"recomputing ran at {theirs / ours:.0%} of the speed of arm {storing.arm} while it "
            "computed the same prompts: the baseline is slow",
        )  # fmt: skip
    if ttft_of_tokens is not None and ttft_of_tokens / ours < _RATE_MIN:
        yield invalid(
            "G4", recompute.name, recompute.arm,
            f"recomputing ran at {ttft_of_tokens / ours:.0%} of the calibration's speed",
        )  # fmt: skip


def _plausible(recompute: Result, other: Result) -> Iterator[Finding]:
    ours, theirs = _ttft(recompute), _ttft(other)
    tokens = sum(row.prompt_tokens or 0 for row in other.good)
    cached = sum(row.cached_tokens or 0 for row in other.good)
    if ours is None or theirs is None or not tokens or cached < tokens / 2:
        return
    if theirs > _LIE_SHARE * ours:
        yield note(
            "G1", other.name, other.arm,
            f"{cached / tokens:.0%} of the tokens are said to be reused, and yet it takes "
            f"{theirs / ours:.0%} of the time of computing",
        )  # fmt: skip


def _ttft(result: Result) -> float | None:
    found = [row.ttft_s for row in result.good if row.ttft_s is not None]
    return median(found) if found else None


def _of_window(result: Result, window: Window) -> list[Row]:
    return [
        row
        for row in result.rows
        if row.kind == "measured"
        and (row.run, row.attempt, row.length, row.load)
        == (window.run, window.attempt, window.length, window.load)
    ]
