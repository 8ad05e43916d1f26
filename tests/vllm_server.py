"""`kvdepot serve` as a person runs it: a process of its own on a free port, asked over HTTP.

Everything is limited in time, and nothing outlives a test: a server is the leader of a process group
that is killed as a whole. Its output is kept, and shown when something goes wrong.
"""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from tests.children import SOURCE

#: imports take most of it; two servers at once on two busy cores take longest
START_S = 240.0
ASK_S = 120.0
STOP_S = 40.0
NAME = "served"
#: even a test run that is killed leaves no server: the kernel ends it with the thread that started it
_DIE_WITH_US = (
    "import ctypes, os, signal, sys\n"
    "ctypes.CDLL(None).prctl(1, signal.SIGKILL)\n"
    "os.execv(sys.argv[1], sys.argv[1:])\n"
)
_ENVIRONMENT = {
    "PYTHONPATH": str(SOURCE),
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    # gives /reset_prefix_cache
    "VLLM_SERVER_DEV_MODE": "1",
    "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    # several servers share few cores: bound to the same one, they would wait for each other
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_NUM_THREADS": "1",
}
#: why a tier may compute what it could load
GIVEN_UP = (
    "kvdepot_reuse_ended_refused_cost_total",
    "kvdepot_reuse_ended_deadline_total",
    "kvdepot_reuse_ended_breaker_total",
)


class Answer(NamedTuple):
    """What a server said, and how much of the question it did not compute."""

    text: str
    tokens: tuple[int, ...]
    prompt: tuple[int, ...]
    cached_tokens: int


class Server:
    """A running server."""

    def __init__(self, process: subprocess.Popen[bytes], port: int, log: Path) -> None:
        self.process = process
        self.log = log
        self._base = f"http://127.0.0.1:{port}"

    def wait_until_up(self, timeout_s: float = START_S) -> None:
        """Until it is healthy; fails with its last words when it ends or takes too long."""
        until_s = time.monotonic() + timeout_s
        while time.monotonic() < until_s:
            if self.process.poll() is not None:
                raise AssertionError(f"the server ended: {self.process.returncode}\n{self.tail()}")
            if self.is_up():
                return
            time.sleep(0.5)
        raise AssertionError(f"the server is not up after {timeout_s:.0f} s\n{self.tail()}")

    def is_up(self) -> bool:
        """Whether it says that it is healthy."""
        try:
            self._call("/health", timeout_s=5)
        except OSError:
            return False
        return True

    def ask(
        self, prompt: Sequence[int] | str, *, tokens: int = 8, model: str = NAME, **fields: Any
    ) -> Answer:
        """A greedy completion of a text, or of token ids."""
        body = {
            "model": model,
            "prompt": list(prompt) if not isinstance(prompt, str) else prompt,
            "max_tokens": tokens,
            "temperature": 0,
            "return_token_ids": True,
            **fields,
        }
        said = json.loads(self._call("/v1/completions", body))
        (choice,) = said["choices"]
        return Answer(
            text=choice["text"],
            tokens=tuple(choice["token_ids"]),
            prompt=tuple(choice["prompt_token_ids"]),
            cached_tokens=said["usage"]["prompt_tokens_details"]["cached_tokens"] or 0,
        )

    def forget(self) -> None:
        """Empty the device's and the host's cache, so that only the pool is left."""
        checked = self.metric("kvdepot_resets_checked_total")
        until_s = time.monotonic() + 30
        # refused while blocks are on their way
        while not json.loads(self._call("/reset_prefix_cache?reset_external=true", {}))["success"]:
            if time.monotonic() > until_s:
                raise AssertionError(f"the caches are not emptied\n{self.tail()}")
            time.sleep(0.2)
        # nothing is shared until a request has had the model's files looked at, on a thread
        self.wait_for(checked + 1, "kvdepot_resets_checked_total")

    def found(self, prompt: Sequence[int], whole: int, **fields: Any) -> Answer:
        """The answer to a prompt that is in the pool and nowhere nearer, once all of it is loaded.

        A tiny model computes in milliseconds. So a load that a busy machine holds up is late, or is not
        begun because computing is quicker, and both are right. What is not right: that it goes on, or
        that no counter says why.
        """
        until_s = time.monotonic() + 60
        while True:
            given_up = sum(map(self.metric, GIVEN_UP))
            answer = self.ask(prompt, **fields)
            if answer.cached_tokens == whole:
                return answer
            if time.monotonic() > until_s:
                raise AssertionError(f"{answer.cached_tokens} of {whole} loaded\n{self.tail()}")
            self.wait_for(given_up + 1, *GIVEN_UP)
            self.forget()

    def load_adapter(self, name: str, folder: Path) -> None:
        """Have a LoRA adapter loaded, to be asked as a model of that name."""
        self._call("/v1/load_lora_adapter", {"lora_name": name, "lora_path": str(folder)})

    def metric(self, name: str, **labels: str) -> float:
        """Sum of a metric over all its label sets that have these; 0 where there is none."""
        total = 0.0
        for line in self._call("/metrics").decode().splitlines():
            match = re.fullmatch(r"([a-zA-Z_:]+)(?:\{(.*)\})? (\S+)", line)
            if match is None or match[1] not in (name, f"{name}_total"):
                continue
            found = dict(re.findall(r'([a-z_]+)="([^"]*)"', match[2] or ""))
            if labels.items() <= found.items():
                total += float(match[3])
        return total

    def cached_from(self, source: str) -> float:
        """Prompt tokens that vLLM says it took from a source: device, host, disk."""
        return self.metric("vllm:prompt_tokens_cached_by_source", source=source)

    def wait_for(self, least: float, *names: str, timeout_s: float = 30.0) -> float:
        """Until the sum of metrics has reached a value.

        The engine tells its numbers while it computes, a few times a second, so it is given something to
        compute.
        """
        until_s = time.monotonic() + timeout_s
        while (value := sum(map(self.metric, names))) < least:
            if time.monotonic() > until_s:
                raise AssertionError(f"{names} are {value}, expected {least}\n{self.tail()}")
            time.sleep(0.3)
            self.ask([1], tokens=1)
        return value

    def tail(self, lines: int = 60) -> str:
        """The end of its output."""
        text = self.log.read_text(errors="replace").splitlines()
        return "\n".join([f"--- the last lines of {self.log.name}:", *text[-lines:]])

    def stop(self) -> int:
        """As a service manager does it: SIGTERM, and SIGKILL to what is left. Gives the exit status."""
        if self.process.poll() is None:
            self.process.terminate()
        try:
            self.process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            pass
        self.kill()
        return self.process.returncode

    def kill(self) -> None:
        """The whole process group, at once."""
        try:
            os.killpg(self.process.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
        self.process.wait(STOP_S)

    def _call(self, path: str, body: Any = None, *, timeout_s: float = ASK_S) -> bytes:
        request = urllib.request.Request(
            self._base + path,
            data=None if body is None else json.dumps(body).encode(),
            headers={"Content-Type": "application/json"},
        )
        try:
            with urllib.request.urlopen(request, timeout=timeout_s) as response:
                found: bytes = response.read()
        except urllib.error.HTTPError as error:
            with error:
                said = error.read().decode(errors="replace")
            raise AssertionError(f"{path}: {error.code} {said}\n{self.tail()}") from None
        return found


def start(
    model: Path,
    pool: Path,
    log: Path,
    *,
    options: Sequence[str] = (),
    arguments: Sequence[str] = (),
    environment: dict[str, str] | None = None,
) -> Server:
    """Start a server, and do not wait for it.

    Args:
        model: a folder.
        pool: a folder.
        log: where its output goes.
        options: of `kvdepot serve`.
        arguments: for vLLM.
        environment: added to this process's own.
    """
    port = _free_port()
    command = [sys.executable, "-c", _DIE_WITH_US, sys.executable, "-m", "kvdepot", "serve"]
    command += [str(model), "--pool", str(pool), *options]
    command += ["--", "--host", "127.0.0.1", "--port", str(port), "--served-model-name", NAME]
    command += ["--disable-uvicorn-access-log", *arguments]
    with log.open("ab") as output:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env={**os.environ, **_ENVIRONMENT, **(environment or {})},
            start_new_session=True,
        )
    return Server(process, port, log)


@contextmanager
def serving(model: Path, pool: Path, log: Path, **options: Any) -> Iterator[Server]:
    """A server that is up, and stopped at the end."""
    server = start(model, pool, log, **options)
    try:
        server.wait_until_up()
        yield server
        server.stop()
    finally:
        server.kill()


def segments(pool: Path) -> set[Path]:
    """The segments of a pool, in all its namespaces."""
    return set(pool.glob("ns/*/*/*.kvseg"))


def wait_for_new_segments(pool: Path, before: set[Path], *, timeout_s: float = 60.0) -> set[Path]:
    """Until what was stored since `before` is visible to others, and they have had time to look."""
    until_s = time.monotonic() + timeout_s
    while not segments(pool) - before:
        if time.monotonic() > until_s:
            raise AssertionError(f"no new segment in {pool} after {timeout_s:.0f} s")
        time.sleep(0.2)
    # a request's last segment comes a second after its first at most, and others look twice a second;
    # a busy machine makes all of them late
    time.sleep(2.5)
    return segments(pool) - before


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
