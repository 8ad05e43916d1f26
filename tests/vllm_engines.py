"""Starts engines for tests, each in a child process, and reads what they report."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

from tests.children import ROOT, SOURCE

START_S = 300


class Answer(NamedTuple):
    cached: int
    tokens: list[int]
    #: until all that were asked together have their answers
    took_s: float


class Report(NamedTuple):
    answers: list[Answer]
    counters: dict[str, int]
    identity: dict[str, Any] | None
    refusal: str | None
    stored: dict[str, str]
    loaded: dict[str, str]
    errors: dict[str, int]
    calls: dict[str, int]
    #: by name and label values
    metrics: dict[str, float]
    log: str


def environment(**changes: str) -> dict[str, str]:
    return {
        **os.environ,
        "PYTHONPATH": f"{SOURCE}{os.pathsep}{ROOT}",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "OMP_NUM_THREADS": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
        **changes,
    }


def run_engine(
    scratch: Path, *, asks: list[dict[str, Any]], env: dict[str, str] | None = None, **settings: Any
) -> Report:
    """One engine from start to end."""
    place = scratch / "result.json"
    place.unlink(missing_ok=True)
    done = subprocess.run(
        [sys.executable, "-m", "tests.vllm_child", json.dumps({"asks": asks, **settings})],
        env=environment(KVDEPOT_TEST_RESULT=str(place), **(env or {})),
        cwd=scratch,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=START_S,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-6000:]
    found = json.loads(place.read_text())
    return Report(
        answers=[Answer(**answer) for answer in found["answers"]],
        log=done.stdout,
        **{name: found.get(name) for name in Report._fields if name not in ("answers", "log")},
    )
