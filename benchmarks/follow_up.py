"""Time to first token of a follow-up in a new process, against computing the document again.

Each arm runs in a process of its own, with the small real model on this CPU; nothing else runs beside a
timed request. One round, the order turned around every other time:

    first_ask       the pool is empty; computes and stores
    other_instance  a process that started with the first one, with a writer of its own; it asks another
                    question while the first one is still there
    follow_up       a new process asks a third question
    recompute       a new process without a depot asks the second and the third question

    python benchmarks/follow_up.py --out benchmarks/results/follow_up.json
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, Self

from common import WorkFolder, environment, parser, report, summary

from kvdepot.config import PoolConfig
from kvdepot.demo.document import SHIPPED_QUESTIONS, shipped_document
from kvdepot.depot import Depot
from kvdepot.engines.transformers import EmbeddedEngine, Result
from kvdepot.io.models import small_model
from kvdepot.units import GIB


def main() -> None:
    options = parser(__doc__ or "")
    options.add_argument("--tokens", type=int, default=4096)
    options.add_argument("--child", help=argparse.SUPPRESS)
    options.set_defaults(repeats=5)
    args = options.parse_args()
    if args.child:
        child(json.loads(args.child))
        return
    small_model()
    rounds: dict[str, list[dict[str, Any]]] = {
        name: []
        for name in ("recompute", "recompute_other", "first_ask", "follow_up", "other_instance")
    }
    with WorkFolder(args.folder) as folder:
        for turn in range(args.repeats):
            for name, result in one_round(folder / f"pool{turn}", args.tokens, turn).items():
                rounds[name].append(result)
            shutil.rmtree(folder / f"pool{turn}")
        ttft = {name: [r["ttft_s"] for r in results] for name, results in rounds.items()}
        answers = {name: {r["answer"] for r in results} for name, results in rounds.items()}
        recompute = summary(ttft["recompute"])["median"]
        follow_up = summary(ttft["follow_up"])["median"]
        result = {
            "benchmark": "follow_up",
            "unit": "seconds from the call to the first token, median over rounds",
            "prompt_tokens": args.tokens,
            "ttft_s": {name: summary(values) for name, values in ttft.items()},
            "follow_up_to_recompute": follow_up / recompute,
            "recompute_over_follow_up": recompute / follow_up,
            "recompute_over_follow_up_by_round": [
                a / b for a, b in zip(ttft["recompute"], ttft["follow_up"], strict=True)
            ],
            "other_instance_to_follow_up": summary(ttft["other_instance"])["median"] / follow_up,
            "first_ask_to_recompute": summary(ttft["first_ask"])["median"] / recompute,
            "answers_are_equal": answers["recompute"] == answers["follow_up"]
            and answers["recompute_other"] == answers["other_instance"],
            "one_of_each": {name: results[0] for name, results in rounds.items()},
            "environment": environment(folder),
        }
    report(result, args.out)


def one_round(pool: Path, tokens: int, turn: int) -> dict[str, dict[str, Any]]:
    """All arms once."""
    found: dict[str, dict[str, Any]] = {}

    def recompute() -> None:
        with Child(None, tokens) as process:
            found["recompute_other"] = process.ask(1)
            found["recompute"] = process.ask(2)

    def depot_arms() -> None:
        with Child(pool, tokens) as first, Child(pool, tokens, awaits=True) as other:
            found["first_ask"] = first.ask(0)
            found["other_instance"] = other.ask(1)
        with Child(pool, tokens) as process:
            found["follow_up"] = process.ask(2)

    steps = (recompute, depot_arms) if turn % 2 == 0 else (depot_arms, recompute)
    for step in steps:
        step()
    return found


class Child:
    """A process with an engine, ready when the constructor returns; asks when it is told."""

    def __init__(self, pool: Path | None, tokens: int, *, awaits: bool = False) -> None:
        job = json.dumps({"pool": str(pool) if pool else None, "tokens": tokens, "awaits": awaits})
        self._process = subprocess.Popen(
            [sys.executable, __file__, "--child", job],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self._line()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._process.stdin is not None:
            self._process.stdin.close()
        if self._process.wait(timeout=60) != 0:
            raise RuntimeError("a child failed")

    def ask(self, question: int) -> dict[str, Any]:
        """Send a question and wait for its result."""
        stdin = self._process.stdin
        if stdin is None:
            raise RuntimeError("no pipe")
        stdin.write(f"{question}\n")
        stdin.flush()
        return self._line()

    def _line(self) -> dict[str, Any]:
        stdout = self._process.stdout
        line = stdout.readline() if stdout is not None else ""
        if not line:
            raise RuntimeError("a child ended early")
        found: dict[str, Any] = json.loads(line)
        return found


def child(job: dict[str, Any]) -> None:
    """Open the engine, say so, then answer each line of input with a line of output."""
    pool = job["pool"]
    engine = EmbeddedEngine.open(
        small_model().folder,
        depot=(
            None
            if pool is None
            else lambda identity: Depot.open(
                identity, pool=PoolConfig.of(pool), host_bytes=GIB // 2
            )
        ),
    )
    document = engine.tokenize(shipped_document().text)
    with engine:
        _say({"ready": True})
        for line in sys.stdin:
            question = engine.tokenize(f"\n\nQuestion: {SHIPPED_QUESTIONS[int(line)]}\nAnswer:")
            prompt = (document * 4)[: job["tokens"] - len(question)] + question
            awaited_s = await_blocks(engine, prompt, len(question)) if job["awaits"] else 0.0
            *_, last = engine.generate(prompt, max_new_tokens=16)
            if not isinstance(last, Result):
                raise TypeError("no result")
            if engine.depot is not None:
                engine.depot.drain(60)
            _say(
                {
                    "ttft_s": last.ttft_s,
                    "awaited_s": awaited_s,
                    "prompt_tokens": last.prompt_tokens,
                    "computed_tokens": last.computed_tokens,
                    "reused_tokens": last.reused_tokens,
                    "bytes_read": last.bytes_read,
                    "bytes_written": last.bytes_written,
                    "answer": last.text,
                }
            )


def await_blocks(engine: EmbeddedEngine, prompt: list[int], question_tokens: int) -> float:
    """Until this process has found what the other one published; not part of the timing."""
    keys = engine.keys(prompt[: len(prompt) - question_tokens])
    began = time.perf_counter()
    while engine.depot is not None and engine.depot.lookup(keys).blocks < len(keys):
        if time.perf_counter() - began > 30:
            raise RuntimeError("the other process's blocks do not come")
        time.sleep(0.01)
    return time.perf_counter() - began


def _say(line: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps(line) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
