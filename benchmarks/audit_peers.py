"""The audit beside kvlint and prefixlens on the same requests: what each says, and what it costs.

Chat requests about 50 documents behind an id that changes. kvlint reads them as they are, with the model's
tokenizer; prefixlens reads token ids, which are made for it beforehand and not timed. Both are installed in
an environment of their own, named by --peers.

python benchmarks/audit_peers.py --peers ENVIRONMENT --model FOLDER --out benchmarks/results/audit_peers.json
"""

from __future__ import annotations

import json
import os
import random
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from common import environment, parser, report

from kvdepot.audit.model import load_model
from kvdepot.audit.tokens import PieceMemo

DOCUMENTS = 50


def main() -> None:
    options = parser(__doc__ or "")
    options.add_argument(
        "--peers", required=True, help="a virtual environment with kvlint and prefixlens"
    )
    options.add_argument("--model", required=True, help="a model's folder")
    options.add_argument("--requests", type=int, nargs="*", default=[200, 800, 3200])
    args = options.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        sizes = [one(count, Path(folder), args) for count in args.requests]
    versions = subprocess.run(
        [f"{args.peers}/bin/pip", "list", "--format=json"], capture_output=True, check=True
    ).stdout
    result = {
        "benchmark": "audit_peers",
        "documents": DOCUMENTS,
        "sizes": sizes,
        "peers": {
            each["name"]: each["version"]
            for each in json.loads(versions)
            if each["name"] in ("kvlint", "prefixlens", "tokenizers")
        },
        "environment": environment(),
    }
    report(result, args.out)


def one(count: int, folder: Path, args: Any) -> dict[str, Any]:
    """Run each tool on so many requests."""
    rows = requests(count)
    log, ids = folder / "log.jsonl", folder / "ids.jsonl"
    log.write_text("\n".join(json.dumps(row) for row in rows))
    parts = load_model(args.model)
    texts = [parts.renderer.render({"messages": row["messages"]}).text for row in rows]
    prompts = PieceMemo(parts.encoder).prompts(texts)
    ids.write_text("\n".join(json.dumps({"token_ids": each.tolist()}) for each in prompts))
    out = folder / "out.json"
    bin_ = Path(args.peers) / "bin"
    commands = {
        "kvdepot": [
            sys.executable,
            "-m",
            "kvdepot",
            "audit",
            log,
            "--model",
            args.model,
            "--json",
            out,
        ],
        "kvlint": [bin_ / "kvlint", "lint", log, "--model", args.model, "--json", out],
        "prefixlens": [
            bin_ / "prefixlens",
            "analyze",
            ids,
            "--capacity-blocks",
            "100000000",
            "--json",
        ],
    }
    runs = {}
    for name, command in commands.items():
        out.unlink(missing_ok=True)
        runs[name] = run([str(each) for each in command], out)
    return {"requests": count, "tokens": sum(map(len, prompts)), "tools": runs}


def run(command: list[str], out: Path) -> dict[str, Any]:
    """CPU, memory and what was said."""
    began = time.perf_counter()
    with tempfile.TemporaryFile() as said:
        child = subprocess.Popen(
            command, stdout=said, stderr=subprocess.DEVNULL, env=clean_environment()
        )
        _, status, usage = os.wait4(child.pid, 0)
        said.seek(0)
        text = said.read().decode(errors="replace")
    return {
        "exit_status": os.waitstatus_to_exitcode(status),
        "wall_s": time.perf_counter() - began,
        "cpu_s": usage.ru_utime + usage.ru_stime,
        "rss_mib": usage.ru_maxrss / 1024,
        "said": verdict(json.loads(out.read_text()) if out.exists() else decoded(text)),
    }


def clean_environment() -> dict[str, str]:
    """The tools' own libraries, and nothing from a network."""
    return {**os.environ, "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}


def decoded(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return {"text": re.sub(r"\s+", " ", text)[-300:]}


def verdict(found: Any) -> Any:
    """The numbers and causes of a result, without lists of requests."""
    if isinstance(found, dict) and "schema" in found:
        return {
            "token_share": found["totals"]["token_share"],
            "findings": [[f["cause"], f["place"], f["proved_points"]] for f in found["findings"]],
        }
    return _short(found)


def _short(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _short(each) for key, each in list(value.items())[:20]}
    if isinstance(value, list):
        return [_short(each) for each in value[:3]]
    return value if not isinstance(value, str) else value[:120]


def requests(count: int) -> list[dict[str, Any]]:
    """Chat requests of about 2,500 tokens."""
    rng = random.Random(7)
    words = (Path(__file__).parent.parent / "docs" / "architecture.md").read_text().split()
    documents = [
        "\n".join(" ".join(rng.choices(words, k=14)) for _ in range(75)) for _ in range(DOCUMENTS)
    ]
    return [
        {
            "request_id": f"r{number}",
            "timestamp": 1_790_000_000 + number,
            "model": "m",
            "messages": [
                {"role": "system", "content": "You answer questions about documents."},
                {
                    "role": "user",
                    "content": f"Request-ID: req_{rng.getrandbits(48):012x}\n\n{rng.choice(documents)}\n\n"
                    f"Question: {' '.join(rng.choices(words, k=12))}?",
                },
            ],
        }
        for number in range(count)
    ]


if __name__ == "__main__":
    main()
