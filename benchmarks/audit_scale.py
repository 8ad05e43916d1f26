"""The audit's passes over token ids: CPU, memory, and whether both grow with the tokens alone.

Prompts of 10,000 tokens: a common head, an id that changes, one of 50 documents, a question. Each size
runs in a process of its own. Text is tokenized by the built-in tokenizer, and by a model's with --model.

python benchmarks/audit_scale.py --out benchmarks/results/audit_scale.json
"""

from __future__ import annotations

import json
import random
import resource
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
from common import environment, parser, report

from kvdepot.audit.copies import bodies
from kvdepot.audit.curves import lru_curve
from kvdepot.audit.edges import edge_log
from kvdepot.audit.model import load_model
from kvdepot.audit.prefix import blocks_of, exact_hits, mismatches
from kvdepot.audit.routing import fleet
from kvdepot.audit.tokenlog import TokenLog, token_log
from kvdepot.audit.tokens import PieceMemo

PROMPT_TOKENS = 10_000
DOCUMENTS = 50
HEAD, ID, QUESTION = 40, 8, 32


def main() -> None:
    options = parser(__doc__ or "")
    options.add_argument("--requests", type=int, nargs="*", default=[1000, 3000, 10_000])
    options.add_argument("--model", help="a model's folder, to tokenize with its tokenizer as well")
    options.add_argument("--one", type=int, help="measure this size in this process, and print it")
    args = options.parse_args()
    if args.one:
        print(json.dumps(measure(args.one)))
        return
    command = [sys.executable, __file__, "--one"]
    sizes = [
        json.loads(subprocess.run([*command, str(count)], check=True, capture_output=True).stdout)
        for count in args.requests
    ]
    result = {
        "benchmark": "audit_scale",
        "prompt_tokens": PROMPT_TOKENS,
        "documents": DOCUMENTS,
        "sizes": sizes,
        "ns_per_token": {
            str(each["tokens"]): each["cpu_s"]["passes"] * 1e9 / each["tokens"] for each in sizes
        },
        "text": [tokenize(None), *([tokenize(args.model)] if args.model else [])],
        "environment": environment(),
    }
    report(result, args.out)


def traffic(requests: int) -> TokenLog:
    """So many prompts."""
    rng = np.random.default_rng(7)
    body = PROMPT_TOKENS - HEAD - ID - QUESTION
    documents = rng.integers(0, 100_000, (DOCUMENTS, body), np.int32)
    prompts = np.empty((requests, PROMPT_TOKENS), np.int32)
    prompts[:, :HEAD] = rng.integers(0, 100_000, HEAD)
    prompts[:, HEAD : HEAD + ID] = rng.integers(0, 100_000, (requests, ID))
    for number, document in enumerate(rng.integers(0, DOCUMENTS, requests)):
        prompts[number, HEAD + ID : HEAD + ID + body] = documents[document]
    prompts[:, -QUESTION:] = rng.integers(0, 100_000, (requests, QUESTION))
    ids = prompts.reshape(-1)
    empty = token_log([])
    return empty._replace(
        ids=ids,
        starts=np.arange(0, len(ids) + 1, PROMPT_TOKENS),
        extras=np.zeros(requests, np.int64),
        times_s=np.arange(requests, dtype=np.float64),
        sessions=np.full(requests, -1, np.int64),
    )


def measure(requests: int) -> dict[str, Any]:
    """One size: CPU seconds of each pass, and the most memory that the process had."""
    log = traffic(requests)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    cpu: dict[str, float] = {}
    began = time.process_time()

    def lap(name: str) -> None:
        cpu[name] = time.process_time() - began - sum(cpu.values())

    blocks = blocks_of(log, 16)
    hits = blocks.hit_tokens()
    lap("reuse")
    exact, _ = exact_hits(log, blocks)
    collisions = mismatches(log, blocks)
    lap("exact")
    shared = bodies(log, exact)
    lap("bodies")
    edges = edge_log(blocks)
    lru_curve(edges, np.geomspace(1e3, 1e8, 24).tolist())
    lap("curves")
    fleet(blocks, 4, 1e6, 1e7)
    lap("fleet")
    cpu["passes"] = sum(cpu.values())
    return {
        "requests": requests,
        "tokens": log.total,
        "reused_tokens": int(hits.sum()),
        "exact_tokens": int(exact.sum()),
        "copied_tokens": int(shared.copied.sum()),
        "collisions": collisions,
        "cpu_s": cpu,
        "rss_mib": {
            "with_tokens": before / 1024,
            "most": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
        },
    }


def tokenize(model: str | None) -> dict[str, Any]:
    """Microseconds a token for prompts of lines that come again and again, and for the lines alone."""
    rng = random.Random(7)
    words = (Path(__file__).parent.parent / "docs" / "architecture.md").read_text().split()
    documents = [
        "\n".join(" ".join(rng.choices(words, k=14)) for _ in range(400)) for _ in range(20)
    ]
    prompts = [
        f"<|im_start|>user\nid {rng.random()}\n{rng.choice(documents)}\n{' '.join(rng.choices(words, k=20))}"
        "<|im_end|>\n"
        for _ in range(400)
    ]
    memo = PieceMemo(load_model(model).encoder)
    memo.verify(prompts)
    unlike = ["\n".join(" ".join(rng.choices(words, k=14)) for _ in range(400)) for _ in range(40)]
    return {
        "tokenizer": "built-in" if model is None else "a model's",
        "cuts": memo.cuts,
        "lines_again_and_again": _timed(memo, prompts),
        "no_line_twice": _timed(memo, unlike),
    }


def _timed(memo: PieceMemo, prompts: list[str]) -> dict[str, float]:
    fresh = PieceMemo(memo.encoder)
    fresh.cuts = memo.cuts
    began = time.process_time()
    tokens = sum(map(len, fresh.prompts(prompts)))
    return {"tokens": tokens, "us_per_token": (time.process_time() - began) * 1e6 / tokens}


if __name__ == "__main__":
    main()
