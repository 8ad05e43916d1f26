"""What the recording proxy adds to a request, and whether all are passed on as they were, and recorded.

A server that answers at once, in a process of its own; `kvdepot record` before it, in another. The same
requests go to both by turns: short and long prompts with short answers, and a stream of 50 pieces.

python benchmarks/record_latency.py --out benchmarks/results/record_latency.json
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple

import aiohttp
import numpy as np
from aiohttp import web
from common import environment, parser, report

CHAT = "/v1/chat/completions"
PIECES = 50
KINDS = {"prompt_2_kB": 2_000, "prompt_1_MB": 1_000_000, "stream_of_50_pieces": 2_000}


class Timing(NamedTuple):
    """Seconds until the answer's first byte, and until its last."""

    first_s: float
    last_s: float


def main() -> None:
    options = parser(__doc__ or "")
    options.add_argument("--requests", type=int, default=300, help="of each kind, each way")
    options.add_argument("--server", action="store_true", help="be the server that answers at once")
    args = options.parse_args()
    if args.server:
        asyncio.run(server())
        return
    report(measured(args.requests), args.out)


async def server() -> None:
    """Answer with the digest of the body; prints its port."""

    async def answer(request: web.Request) -> web.StreamResponse:
        body = await request.read()
        digest = hashlib.sha256(body).hexdigest()
        if b'"stream": true' not in body[:100]:
            return web.json_response({"digest": digest, "usage": {"prompt_tokens": 1}})
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        for _ in range(PIECES):
            await response.write(b"data: " + json.dumps({"digest": digest}).encode() + b"\n\n")
            await asyncio.sleep(0.001)
        await response.write_eof()
        return response

    app = web.Application(client_max_size=1 << 30)
    app.router.add_post(CHAT, answer)
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    print(runner.addresses[0][1], flush=True)
    await asyncio.Event().wait()


def measured(requests: int) -> dict[str, Any]:
    """Start both, ask both, and count what was recorded."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder, "requests.jsonl")
        behind = child([sys.executable, __file__, "--server"])
        try:
            port = int(line_of(behind))
            command = [sys.executable, "-m", "kvdepot", "record", "--port", "0", "--out", str(out)]
            front = child([*command, "--upstream", f"http://127.0.0.1:{port}"])
            try:
                url = next(word for word in line_of(front).split() if word.startswith("http"))
                found = asyncio.run(asked(f"http://127.0.0.1:{port}", url.rstrip(".,"), requests))
            finally:
                front.send_signal(signal.SIGTERM)
                front.wait(30)
        finally:
            behind.kill()
            behind.wait()
        bodies = [json.loads(line)["body"] for line in out.read_text().splitlines()]
    numbers = sorted(body["number"] for body in bodies)
    return {
        "benchmark": "record_latency",
        "requests_each_way": requests,
        "kinds": found["kinds"],
        "answers_with_another_digest": found["wrong"],
        "asked_through_the_proxy": found["asked"],
        "recorded": len(bodies),
        "each_recorded_once": numbers == sorted(found["numbers"]),
        "environment": environment(),
    }


def child(command: list[str]) -> subprocess.Popen[str]:
    """A process; what it says, it says in lines on one pipe."""
    environ = {**os.environ, "PYTHONUNBUFFERED": "1"}
    pipe = subprocess.PIPE
    return subprocess.Popen(command, stdout=pipe, stderr=subprocess.STDOUT, text=True, env=environ)


def line_of(process: subprocess.Popen[str]) -> str:
    """The next line that a process says; blocks."""
    assert process.stdout is not None
    return process.stdout.readline()


async def asked(direct: str, proxied: str, requests: int) -> dict[str, Any]:
    """The same requests to both by turns; the first ten of each are not counted."""
    kinds: dict[str, Any] = {}
    wrong, numbers = 0, []
    async with aiohttp.ClientSession() as client:
        for kind, length in KINDS.items():
            spent: dict[str, list[Timing]] = {direct: [], proxied: []}
            for number in range(requests + 10):
                for url in (direct, proxied):
                    name = f"{kind} {number}"
                    body = {
                        "stream": kind.startswith("stream"),
                        "number": name,
                        "messages": [{"role": "user", "content": "x" * length}],
                    }
                    if url == proxied:
                        numbers.append(name)
                    timing, is_right = await one(client, url + CHAT, json.dumps(body).encode())
                    wrong += not is_right
                    if number >= 10:
                        spent[url].append(timing)
            kinds[kind] = {
                "direct_ms": in_ms(spent[direct]),
                "through_the_proxy_ms": in_ms(spent[proxied]),
                "added_ms_p50": {
                    each: in_ms(spent[proxied])[each]["p50"] - in_ms(spent[direct])[each]["p50"]
                    for each in ("first_byte", "last_byte")
                },
            }
    return {"kinds": kinds, "wrong": wrong, "asked": len(numbers), "numbers": numbers}


async def one(client: aiohttp.ClientSession, url: str, body: bytes) -> tuple[Timing, bool]:
    """Ask once; whether the server saw these bytes."""
    began = time.perf_counter()
    async with client.post(url, data=body) as found:
        first = await found.content.readany()
        first_s = time.perf_counter() - began
        rest = await found.read()
    last_s = time.perf_counter() - began
    return Timing(first_s, last_s), hashlib.sha256(body).hexdigest().encode() in first + rest


def in_ms(timings: list[Timing]) -> dict[str, dict[str, float]]:
    """Percentiles."""
    return {
        name: {
            f"p{q}": float(np.percentile([1e3 * each[column] for each in timings], q))
            for q in (50, 95)
        }
        for column, name in enumerate(("first_byte", "last_byte"))
    }


if __name__ == "__main__":
    main()
