"""The audit's passes over token ids: CPU, memory, and whether both grow with the tokens alone.

Prompts of 10,000 tokens: a common head, an id that changes, one of 50 documents, a question. Each size
runs in a process of its own. Text is tokenized by the built-in tokenizer, and by a model's with --model.

python benchmarks/audit_scale.py --out benchmarks/results/audit_scale.json

With --log, the whole of `kvdepot audit` on the same prompts as a JSONL file of token ids: reading, passes,
causes, the edit's proof on all, curves, verdict. Sizes already measured are kept; a machine that allows
short commands only measures one size at a time.

python benchmarks/audit_scale.py --log 1000 --out benchmarks/results/audit_scale_log.json
"""

from __future__ import annotations

import itertools
import json
import os
import random
import resource
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Callable
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
from kvdepot.audit.tokens import Encoder, PieceMemo

PROMPT_TOKENS = 10_000
DOCUMENTS = 50
HEAD, ID, QUESTION = 40, 8, 32


def main() -> None:
    options = parser(__doc__ or "")
    options.add_argument("--requests", type=int, nargs="*", default=[1000, 3000, 10_000])
    options.add_argument("--model", help="a model's folder, to tokenize with its tokenizer as well")
    options.add_argument("--one", type=int, help="measure this size in this process, and print it")
    options.add_argument("--write", nargs=2, help="write so many requests to this file")
    options.add_argument("--log", type=int, help="audit a file of this many requests instead")
    args = options.parse_args()
    if args.log:
        report(of_log(args.log, args.out), args.out)
        return
    if args.write:
        write_log(int(args.write[0]), args.write[1])
        return
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


def of_log(requests: int, out: str | None) -> dict[str, Any]:
    """The command on a file, and what earlier calls measured for other sizes."""
    path = Path(out) if out else None
    known = json.loads(path.read_text())["sizes"] if path is not None and path.exists() else []
    with tempfile.TemporaryDirectory() as folder:
        log, found = Path(folder, "log.jsonl"), Path(folder, "result.json")
        # in a process of its own: a child's peak begins at what its parent had
        subprocess.run([sys.executable, __file__, "--write", str(requests), str(log)], check=True)
        command = [sys.executable, "-m", "kvdepot", "audit", str(log), "--json", str(found)]
        began = time.perf_counter()
        child = subprocess.Popen(command, stdout=subprocess.DEVNULL)
        _, status, usage = os.wait4(child.pid, 0)
        child.returncode = os.waitstatus_to_exitcode(status)
        wall_s = time.perf_counter() - began
        if child.returncode:
            raise SystemExit(f"kvdepot audit: status {child.returncode}")
        result = json.loads(found.read_text())
        size = {
            "requests": requests,
            "tokens": result["totals"]["input_tokens"],
            "file_mib": log.stat().st_size / 2**20,
            "cpu_s": usage.ru_utime + usage.ru_stime,
            "wall_s": wall_s,
            "rss_mib": usage.ru_maxrss / 1024,
            "findings": [
                [each["cause"], each["place"], each["proved_tokens"]] for each in result["findings"]
            ],
        }
    sizes = [*(each for each in known if each["requests"] != requests), size]
    return {
        "benchmark": "audit_scale_log",
        "prompt_tokens": PROMPT_TOKENS,
        "sizes": sorted(sizes, key=lambda each: each["requests"]),
        "environment": environment(),
    }


def write_log(requests: int, path: str) -> None:
    """The traffic as JSONL."""
    log = traffic(requests)
    with open(path, "wb", buffering=1 << 22) as file:
        for number in range(requests):
            ids = ",".join(map(str, log.prompt(number).tolist()))
            row = f'{{"request_id":"r{number}","timestamp":{number},"prompt_token_ids":[{ids}]}}\n'
            file.write(row.encode())


def tokenize(model: str | None) -> dict[str, Any]:
    """Microseconds a token, for traffic that repeats its lines and for text that does not."""
    encoder = load_model(model).encoder
    texts = {
        "lines_again_and_again": repeating(),
        "no_line_twice": sentences(),
        "source_code_no_line_twice": source_code(),
        "no_word_twice": random_words(),
    }
    found: dict[str, Any] = {"tokenizer": "built-in" if model is None else "a model's"}
    for name, prompts in texts.items():
        memo = PieceMemo(encoder)
        memo.verify(prompts)
        if model is not None:
            whole = [encoder.encode([prompt])[0].tobytes() for prompt in prompts[:50]]
            assert [ids.tobytes() for ids in memo.fresh().prompts(prompts[:50])] == whole
        found[name] = {"cut_at": [memo.cuts, memo.words], **_timed(memo, prompts)}
        if model is not None:
            found[name]["whole"] = _timed_whole(encoder, prompts)
    return found


def repeating() -> list[str]:
    """Prompts of 20 documents behind a changing id, with changing questions."""
    rng, words = random.Random(7), _words()
    documents = [_sentences(rng, words, 400) for _ in range(20)]
    return [
        f"<|im_start|>user\nid {rng.random()}\n{rng.choice(documents)}\n{' '.join(rng.choices(words, k=20))}"
        "<|im_end|>\n"
        for _ in range(400)
    ]


def sentences() -> list[str]:
    """Known words in lines that do not come again."""
    rng, words = random.Random(8), _words()
    return [_sentences(rng, words, 400) for _ in range(60)]


def source_code() -> list[str]:
    """The standard library: each line at its first place alone."""
    seen: set[str] = set()
    made, chars = [], 0
    folder = Path(sysconfig.get_path("stdlib"))
    for path in sorted([*folder.glob("*.py"), *folder.glob("*/*.py")]):
        lines = path.read_text(errors="replace").split("\n")
        fresh = [line for line in dict.fromkeys(lines) if line.strip() not in seen]
        seen.update(line.strip() for line in lines)
        made.append("\n".join(fresh))
        chars += len(made[-1])
        if chars > 6_000_000:
            break
    return made


def random_words() -> list[str]:
    """The worst there is: no word comes again."""
    rng = random.Random(9)
    letters = "abcdefghijklmnopqrstuvwxyz"
    lines = (
        " ".join("".join(rng.choices(letters, k=rng.randint(3, 10))) for _ in range(14))
        for _ in range(8000)
    )
    return ["\n".join(itertools.islice(lines, 400)) for _ in range(20)]


def _words() -> list[str]:
    return (Path(__file__).parent.parent / "docs" / "architecture.md").read_text().split()


def _sentences(rng: random.Random, words: list[str], count: int) -> str:
    return "\n".join(" ".join(rng.choices(words, k=14)) for _ in range(count))


def _timed(memo: PieceMemo, prompts: list[str]) -> dict[str, float]:
    return _per_token(lambda: sum(map(len, memo.fresh().prompts(prompts))))


def _timed_whole(encoder: Encoder, prompts: list[str]) -> dict[str, float]:
    """Prompts tokenized whole, on all cores at once."""
    return _per_token(lambda: sum(map(len, encoder.encode(prompts))))


def _per_token(work: Callable[[], int]) -> dict[str, float]:
    cpu, wall = time.process_time(), time.perf_counter()
    tokens = work()
    cpu, wall = time.process_time() - cpu, time.perf_counter() - wall
    return {
        "tokens": tokens,
        "cpu_us_per_token": cpu * 1e6 / tokens,
        "wall_us_per_token": wall * 1e6 / tokens,
    }


if __name__ == "__main__":
    main()
