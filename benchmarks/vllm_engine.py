"""One vLLM engine in a process of its own, asked by a benchmark: no tier, vLLM's fs tier, or kvdepot.

    with Engine("kvdepot", place, log, host_bytes=GIB, tokens_max=4096) as engine:
        answers = engine.ask([Ask(0, 0, 1024)])

The small real model on vLLM's CPU build. All arms have the same settings; those with a tier stand on the
same copies, chunks and host tier. The benchmark's own process needs no vLLM. No benchmark of its own.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple, Self

import numpy as np

from kvdepot.bench.settling import stands_still
from kvdepot.clock import SystemClock
from kvdepot.engines.vllm import CONNECTOR, CPU_SPEC, TIER
from kvdepot.engines.vllm.arguments import VllmArguments
from kvdepot.engines.vllm.cpudefaults import equal_cores
from kvdepot.io.models import small_model

__all__ = [
    "ARMS",
    "ENGINE_BLOCK_TOKENS",
    "TOKEN_BYTES",
    "Answer",
    "Ask",
    "Engine",
    "calls_of",
    "wait_until_stored",
]

ARMS = ("none", "fs", "kvdepot")
#: tokens at a prompt's end that differ from question to question
QUESTION_TOKENS = 16
#: vLLM's own block; the least that its CPU build takes
ENGINE_BLOCK_TOKENS = 32
#: what `kvdepot vllm-config` chooses for this model; all arms with a tier have it
CHUNK_TOKENS = 32
#: 30 layers, K and V, 3 heads of 64, float32
TOKEN_BYTES = 30 * 2 * 3 * 64 * 4
_VOCABULARY = (1000, 40_000)
_STOP_S = 30.0


class Ask(NamedTuple):
    """One prompt: which document, which question, how long."""

    document: int
    question: int
    tokens: int


class Answer(NamedTuple):
    """What a request saw."""

    ttft_s: float
    #: between the tokens of its answer
    gaps_s: list[float]
    #: of its prompt, tokens that were not computed
    cached: int
    tokens: list[int]


class Engine:
    """One engine. Blocks where it is asked; use it as a context manager, which waits until it is up.

    Args:
        arm: of `ARMS`.
        place: the tier's folder.
        log: what the engine says.
        host_bytes: of the host tier.
        tokens_max: the longest prompt.
        **options: vLLM's own.
    """

    def __init__(
        self,
        arm: str,
        place: Path,
        log: Path,
        *,
        host_bytes: int,
        tokens_max: int,
        **options: Any,
    ) -> None:
        self.arm = arm
        self.place = place
        place.mkdir(parents=True, exist_ok=True)
        ours, theirs = socket.socketpair()
        given = {
            "arm": arm,
            "place": str(place),
            "host_bytes": host_bytes,
            "tokens_max": tokens_max,
            "options": options,
            "socket": theirs.fileno(),
        }
        self._log = log
        with log.open("w") as output:
            self._process = subprocess.Popen(
                [sys.executable, __file__, "--child", json.dumps(given)],
                stdout=output,
                stderr=subprocess.STDOUT,
                env=_environment(),
                pass_fds=[theirs.fileno()],
            )
        theirs.close()
        self._stream = ours.makefile("rw")
        ours.close()

    def __enter__(self) -> Self:
        self._call({})
        return self

    def __exit__(self, *_: object) -> None:
        self._stream.close()
        try:
            self._process.wait(_STOP_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def ask(self, asks: Sequence[Ask], *, answer_tokens: int = 32) -> list[Answer]:
        """Ask all at once, and wait for the answers."""
        found = self._call({"asks": asks, "answer_tokens": answer_tokens})
        return [Answer(*each) for each in found]

    def ask_each(self, asks: Sequence[Ask], *, answer_tokens: int = 32) -> list[Answer]:
        """Ask one after the other."""
        return [self.ask([each], answer_tokens=answer_tokens)[0] for each in asks]

    def scheduler_calls(self) -> dict[str, float]:
        """The tier's counters of calls on the scheduler's thread, by method; empty without kvdepot."""
        found: dict[str, float] = self._call({"count": "scheduler_calls"})
        return found

    def tokens_by_source(self) -> dict[str, float]:
        """Prompt tokens that were not computed, by where they came from."""
        found: dict[str, float] = self._call({"count": "tokens_by_source"})
        return found

    def _call(self, what: dict[str, Any]) -> Any:
        try:
            self._stream.write(json.dumps(what) + "\n")
            self._stream.flush()
            line = self._stream.readline()
        except OSError:
            line = ""
        if not line:
            said = self._log.read_text(errors="replace")
            raise RuntimeError(f"the engine of arm {self.arm} has ended:\n{said[-4000:]}")
        return json.loads(line)


def wait_until_stored(place: Path) -> None:
    """Block until what an engine has stored below a folder stands still."""
    asyncio.run(stands_still(str(place), SystemClock()))


def calls_of(counted: Sequence[dict[str, float]]) -> dict[str, float]:
    """Calls of the tier on the scheduler's thread: how many, and how many over 1 ms."""
    totals = {"calls": 0.0, "slow_calls": 0.0, "call_seconds": 0.0}
    for counters in counted:
        for name, value in counters.items():
            for kind in totals:
                if name.startswith(f"kvdepot_scheduler_{kind}_total"):
                    totals[kind] += value
    totals["slow_share"] = totals["slow_calls"] / totals["calls"] if totals["calls"] else 0.0
    return totals


def prompt_of(ask: Ask) -> list[int]:
    """Token ids: a document that its number makes, and a question."""
    low, high = _VOCABULARY
    document = np.random.default_rng((7, ask.document % 2**32, ask.tokens)).integers(
        low, high, ask.tokens - QUESTION_TOKENS
    )
    question = np.random.default_rng((11, ask.question)).integers(low, high, QUESTION_TOKENS)
    return [*document.tolist(), *question.tolist()]


def _environment() -> dict[str, str]:
    """Of an engine's process: every arm computes on all cores."""
    return (
        dict(os.environ)
        | {"OMP_NUM_THREADS": str(os.cpu_count()), "VLLM_CPU_KVCACHE_SPACE": "1"}
        | equal_cores(VllmArguments(()), os.environ)
        | {"VLLM_LOGGING_LEVEL": "WARNING"}
    )


# in the child


def child(given: dict[str, Any]) -> None:
    """Serve one engine until the socket is closed."""
    from vllm import LLM, SamplingParams  # noqa: PLC0415

    options: dict[str, Any] = given["options"]
    transfer = _transfer_config(given["arm"], given["place"], given["host_bytes"])
    if transfer is not None:
        options["kv_transfer_config"] = transfer
    llm = LLM(
        model=str(small_model().folder),
        dtype="float32",
        enforce_eager=True,
        block_size=ENGINE_BLOCK_TOKENS,
        max_model_len=given["tokens_max"] + 256,
        max_num_seqs=8,
        disable_log_stats=False,
        enable_prefix_caching=True,
        **options,
    )
    with socket.socket(fileno=given["socket"]) as joined, joined.makefile("rw") as stream:
        for number, line in enumerate(stream):
            wanted = json.loads(line)
            found: Any = None
            if "asks" in wanted:
                sampling = SamplingParams(
                    max_tokens=wanted["answer_tokens"], temperature=0, ignore_eos=True
                )
                asks = [Ask(*each) for each in wanted["asks"]]
                found = _answers(llm.llm_engine, f"request {number}", asks, sampling)
            elif wanted:
                found = _COUNTS[wanted["count"]](llm)
            stream.write(json.dumps(found) + "\n")
            stream.flush()


def _answers(engine: Any, name: str, asks: Sequence[Ask], sampling: Any) -> list[Answer]:
    """Requests step by step, each token timed as it is handed out."""
    prompts = [prompt_of(each) for each in asks]
    at_s: dict[str, list[float]] = {}
    last: dict[str, Any] = {}
    began_s = time.perf_counter()
    for number, prompt in enumerate(prompts):
        engine.add_request(f"{name}-{number}", {"prompt_token_ids": prompt}, sampling)
    while engine.has_unfinished_requests():
        for output in engine.step():
            now_s = time.perf_counter()
            last[output.request_id] = output
            times = at_s.setdefault(output.request_id, [])
            times += [now_s] * (len(output.outputs[0].token_ids) - len(times))
    found = []
    for number in range(len(asks)):
        output, times = last[f"{name}-{number}"], at_s[f"{name}-{number}"]
        gaps_s = [later - earlier for earlier, later in itertools.pairwise(times)]
        tokens = list(output.outputs[0].token_ids)
        found.append(Answer(times[0] - began_s, gaps_s, output.num_cached_tokens or 0, tokens))
    return found


def _scheduler_calls(_llm: Any) -> dict[str, float]:
    from prometheus_client import REGISTRY  # noqa: PLC0415

    # vLLM's own snapshot has only the names of vLLM
    return {
        f"{sample.name} {sample.labels['method']}": sample.value
        for family in REGISTRY.collect()
        for sample in family.samples
        if sample.name.startswith("kvdepot_scheduler") and sample.name.endswith("_total")
    }


def _tokens_by_source(llm: Any) -> dict[str, float]:
    return {
        metric.labels.get("source", ""): metric.value
        for metric in llm.get_metrics()
        if metric.name.endswith("prompt_tokens_cached_by_source")
    }


_COUNTS = {"scheduler_calls": _scheduler_calls, "tokens_by_source": _tokens_by_source}


def _transfer_config(arm: str, place: str, host_bytes: int) -> dict[str, Any] | None:
    """vLLM's setting of an arm."""
    if arm == "none":
        return None
    tiers: dict[str, dict[str, Any]] = {
        "fs": {"type": "fs", "root_dir": place},
        "kvdepot": {"type": TIER[0], "module_path": TIER[1], "urls": [place]},
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


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--child", required=True)
    child(json.loads(parser.parse_args().child))
