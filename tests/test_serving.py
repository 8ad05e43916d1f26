"""The embedded server: what clients of the OpenAI API rely on, and what happens when things go wrong."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Sequence

import pytest

pytestmark = pytest.mark.engine
pytest.importorskip("torch")
pytest.importorskip("transformers")
pytest.importorskip("aiohttp")

import aiohttp  # noqa: E402
from aiohttp import web  # noqa: E402

from kvdepot.cli.main import run  # noqa: E402
from kvdepot.cli.serve import serve  # noqa: E402
from kvdepot.clock import SystemClock  # noqa: E402
from kvdepot.engines.transformers.events import FirstToken, Result, TextPiece  # noqa: E402
from kvdepot.engines.transformers.lookahead import Waiting  # noqa: E402
from kvdepot.errors import ConfigError  # noqa: E402
from kvdepot.metrics import METRICS  # noqa: E402
from kvdepot.policy.admission import AdmissionSettings  # noqa: E402
from kvdepot.serving.app import make_app  # noqa: E402
from kvdepot.serving.exposition import Exposition  # noqa: E402
from kvdepot.serving.queueing import EngineThread  # noqa: E402
from kvdepot.serving.running import serve_embedded  # noqa: E402
from kvdepot.serving.settings import ServerSettings, decode_settings  # noqa: E402
from kvdepot.serving.wire import ApiError, decode_ask  # noqa: E402
from tests.tiny_models import save_tiny  # noqa: E402
from tests.tries import in_one_try_of  # noqa: E402

TEXT = "The quick brown fox jumps over the lazy dog. " * 4


class ScriptedEngine:
    """An engine whose answers wait for the test."""

    context_tokens = 512
    token_bytes = 1024
    device = "cpu"

    def __init__(self):
        self.go = threading.Event()
        self.begun = threading.Event()
        self.closed = 0
        self.seen = []
        self.fails_after_first = False
        self.bad_text = ""
        self.waiting: Callable[[], Sequence[Waiting]] | None = None

    def chat_text(self, messages):
        return "|".join(each["content"] for each in messages)

    def tokenize(self, text):
        assert text != self.bad_text
        return list(text.encode())

    def generate(self, prompt, **options):
        if not prompt:
            raise ConfigError("the prompt is empty")
        self.seen.append((prompt, options))
        return self._stream(prompt, options["max_new_tokens"])

    def _stream(self, prompt, tokens):
        try:
            self.begun.set()
            assert self.go.wait(30)
            yield FirstToken(0.25)
            if self.fails_after_first:
                raise RuntimeError("broken")
            for index in range(tokens):
                yield TextPiece(f"{index} ")
            reused = {"device": 0, "host": 1, "disk": 2}
            yield Result(
                ttft_s=0.25,
                total_s=0.5,
                prompt_tokens=10,
                computed_tokens=7,
                reused_tokens=reused,
                bytes_read=3,
                bytes_written=4,
                token_ids=tuple(range(tokens)),
                text="".join(f"{index} " for index in range(tokens)),
                finish="length",
            )
        finally:
            self.closed += 1


def with_server(engine, scenario, *, queue_requests=4):
    """Run a scenario (session, base url) against a served engine."""

    async def main():
        thread = EngineThread(engine, queue_requests=queue_requests, clock=SystemClock())
        app = make_app(
            thread,
            model="toy",
            version="1",
            clock=SystemClock(),
            depot=(lambda: {"load_bytes_total": 5}, lambda timeout_s: timeout_s > 0),
            body_bytes_max=100_000,
        )
        runner = web.AppRunner(app, access_log=None, handler_cancellation=True, shutdown_timeout=1)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        thread.start()
        try:
            async with aiohttp.ClientSession(
                f"http://127.0.0.1:{runner.addresses[0][1]}"
            ) as session:
                return await scenario(session)
        finally:
            engine.go.set()
            await asyncio.to_thread(thread.stop)
            await runner.cleanup()

    return asyncio.run(main())


def events_of(body):
    lines = [line[6:] for line in body.decode().split("\n\n") if line]
    assert lines[-1] == "[DONE]"
    return [json.loads(line) for line in lines[:-1]]


async def post(session, path, **body):
    async with session.post(path, json=body) as response:
        return response.status, await response.read()


def test_completions_stream_with_usage_and_tiers():
    engine = ScriptedEngine()
    engine.go.set()

    async def scenario(session):
        return await post(
            session,
            "/v1/completions",
            model="toy",
            prompt="hello",
            max_tokens=3,
            temperature=0,
            stream=True,
            stream_options={"include_usage": True},
            cache_salt="s",
            ignore_eos=True,
            min_tokens=3,
        )

    status, body = with_server(engine, scenario)
    assert status == 200
    *pieces, end, usage = events_of(body)
    assert [each["choices"][0]["text"] for each in pieces] == ["0 ", "1 ", "2 "]
    assert end["choices"][0]["finish_reason"] == "length"
    assert usage["choices"] == []
    assert usage["usage"] == {
        "prompt_tokens": 10,
        "completion_tokens": 3,
        "total_tokens": 13,
        "prompt_tokens_details": {
            "cached_tokens": 3,
            "cached_tokens_by_tier": {"device": 0, "host": 1, "disk": 2},
        },
    }
    prompt, options = engine.seen[0]
    assert prompt == "hello"
    assert options["extras"].tenant_salt == "s"
    assert options["ignore_end"] is True


def test_chat_streams_and_answers_whole():
    engine = ScriptedEngine()
    engine.go.set()
    messages = [{"role": "user", "content": [{"type": "text", "text": "hi"}]}]

    async def scenario(session):
        streamed = await post(
            session, "/v1/chat/completions", messages=messages, max_completion_tokens=2, stream=True
        )
        whole = await post(session, "/v1/chat/completions", messages=messages, max_tokens=2)
        return streamed, whole

    (_, streamed), (_, whole) = with_server(engine, scenario)
    first, *rest = events_of(streamed)
    assert first["choices"][0]["delta"] == {"role": "assistant"}
    assert "".join(each["choices"][0]["delta"].get("content", "") for each in rest) == "0 1 "
    answer = json.loads(whole)
    assert answer["choices"][0]["message"]["content"] == "0 1 "
    assert answer["usage"]["prompt_tokens"] == 10
    assert engine.seen[0][0] == "hi"


def test_a_full_queue_refuses_at_once_and_a_metric_counts_it():
    engine = ScriptedEngine()

    async def scenario(session):
        running = [
            asyncio.ensure_future(post(session, "/v1/completions", prompt="a", max_tokens=1))
            for _ in range(1)
        ]
        await asyncio.to_thread(engine.begun.wait, 60)
        running.append(
            asyncio.ensure_future(post(session, "/v1/completions", prompt="b", max_tokens=1))
        )
        while True:
            async with session.get("/metrics") as response:
                page = await response.text()
            if "kvdepot_engine_requests_waiting 1" in page:
                break
        assert "kvdepot_engine_requests_running 1" in page
        refused = await post(session, "/v1/completions", prompt="c", max_tokens=1)
        engine.go.set()
        statuses = [(await each)[0] for each in running]
        async with session.get("/metrics") as response:
            return refused, statuses, await response.text()

    (status, body), statuses, page = with_server(engine, scenario, queue_requests=1)
    assert status == 429
    assert json.loads(body)["error"]["type"] == "rate_limit_error"
    assert statuses == [200, 200]
    lines = page.splitlines()
    assert 'kvdepot_engine_requests_total{status="refused"} 1.0' in lines
    assert 'kvdepot_engine_requests_total{status="answered"} 2.0' in lines
    assert 'kvdepot_engine_info{device="cpu"} 1' in lines
    assert 'kvdepot_engine_prompt_tokens_total{source="computed"} 14.0' in lines
    assert 'kvdepot_engine_prompt_tokens_total{source="disk"} 4.0' in lines
    assert "kvdepot_load_bytes_total 5" in lines


def test_a_client_that_leaves_frees_the_engine():
    engine = ScriptedEngine()

    async def scenario(session):
        leaving = asyncio.ensure_future(
            post(session, "/v1/completions", prompt="a", max_tokens=1000, stream=True)
        )
        await asyncio.to_thread(engine.begun.wait, 60)
        leaving.cancel()
        await asyncio.gather(leaving, return_exceptions=True)
        await asyncio.sleep(0.2)  # for the server to see the connection close
        engine.go.set()
        return await post(session, "/v1/completions", prompt="b", max_tokens=1)

    status, _ = with_server(engine, scenario)
    assert status == 200
    assert engine.closed == 2


@pytest.mark.parametrize(
    ("path", "body", "status", "words"),
    [
        ("/v1/completions", b"{", 400, "not a valid request"),
        ("/v1/completions", b'{"prompt": ""}', 400, "empty"),
        ("/v1/completions", b'{"model": "other", "prompt": "x"}', 404, "not served"),
        ("/v1/completions", b'{"prompt": "x", "n": 2}', 400, "n must be 1"),
        ("/v1/completions", b'{"prompt": "x", "echo": true}', 400, "echo"),
        ("/v1/completions", b'{"prompt": "x", "cache_salt": ""}', 400, "cache_salt"),
        ("/v1/completions", b'{"prompt": "x", "min_tokens": 4}', 400, "min_tokens"),
        (
            "/v1/chat/completions",
            b'{"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}',
            400,
            "only text",
        ),
        ("/v1/nothing", b"{}", 404, "Not Found"),
        ("/tokenize", b"{}", 400, "either prompt or messages"),
        ("/v1/completions", b"x" * 100_001, 413, "Too Large"),
    ],
)
def test_errors_are_json_with_a_reason(path, body, status, words):
    engine = ScriptedEngine()
    engine.go.set()

    async def scenario(session):
        async with session.post(path, data=body) as response:
            return response.status, await response.json()

    found, answer = with_server(engine, scenario)
    assert found == status
    assert words in answer["error"]["message"]
    assert answer["error"]["code"] == status


def test_a_failure_in_mid_stream_is_told_and_the_stream_has_no_end_mark():
    engine = ScriptedEngine()
    engine.go.set()
    engine.fails_after_first = True

    async def scenario(session):
        return await post(session, "/v1/completions", prompt="a", max_tokens=2, stream=True)

    status, body = with_server(engine, scenario)
    assert status == 200
    assert b"the engine failed" in body
    assert b"[DONE]" not in body


def test_health_models_version_tokenize_and_drain():
    engine = ScriptedEngine()

    async def scenario(session):
        found = {}
        for path in ("/health", "/v1/models", "/version"):
            async with session.get(path) as response:
                found[path] = response.status, await response.text()
        found["tokens"] = await post(session, "/tokenize", prompt="abc")
        found["drain"] = await post(session, "/drain")
        return found

    found = with_server(engine, scenario)
    assert found["/health"][0] == 200
    assert json.loads(found["/v1/models"][1])["data"][0]["id"] == "toy"
    assert json.loads(found["tokens"][1])["count"] == 3
    assert json.loads(found["drain"][1]) == {"drained": True}


def test_settings_come_as_json():
    assert decode_settings('{"port": 1234, "pool": ["/srv/kv"]}').port == 1234
    with pytest.raises(ConfigError, match="prot"):
        decode_settings('{"prot": 1}')
    with pytest.raises(ConfigError, match="a pool is named"):
        ServerSettings(memory_only=True, pool=("/p",))


def test_the_api_s_default_temperature_is_one_and_greedy_is_asked_for():
    assert decode_ask(b'{"prompt": "x"}', is_chat=False).temperature == 1.0
    assert decode_ask(b'{"prompt": "x", "temperature": 0}', is_chat=False).temperature == 0.0
    with pytest.raises(ApiError):
        decode_ask(b"[]", is_chat=True)


def test_the_exposition_names_a_metric_once():
    page = Exposition()
    page.add("a_total", 1, 'x="1"', help_text="of a")
    page.add("a_total", 2, 'x="2"')
    assert page.text() == (
        '# HELP a_total of a\n# TYPE a_total counter\na_total{x="1"} 1\na_total{x="2"} 2\n'
    )


# the real thing: a process, a model, a pool


def start(settings):
    process = subprocess.Popen(
        [sys.executable, "-P", "-m", "kvdepot.serving", json.dumps(settings)],
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    for line in process.stderr:
        if "serving at" in line:
            return process, line.rsplit(" ", 1)[1].strip()
    raise AssertionError("it did not start")


def stop(process):
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=60)
    assert process.returncode == 0


def ask(url, salt, max_tokens=4):
    body = {
        "prompt": TEXT,
        "max_tokens": max_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "cache_salt": salt,
    }
    request = urllib.request.Request(f"{url}/v1/completions", json.dumps(body).encode())
    with urllib.request.urlopen(request, timeout=60) as response:
        return json.load(response)


def pool_settings(tmp_path, folder, **more):
    return {
        "model": str(folder),
        "pool": [str(tmp_path / "pool")],
        "capacity_bytes": 1 << 26,
        "free_bytes_min": 0,
        "host_bytes": 1 << 22,
        "port": 0,
        "block_tokens": 8,
        **more,
    }


def counters(url):
    """The depot's counters, by their names in `METRICS`."""
    with urllib.request.urlopen(f"{url}/metrics", timeout=60) as response:
        lines = [line.split() for line in response.read().decode().splitlines()]
    values = {name: float(value) for name, value in (each for each in lines if len(each) == 2)}
    return {name: values[f"kvdepot_{name}"] for name in METRICS}


def drain(url):
    with urllib.request.urlopen(f"{url}/drain", b"", timeout=60) as response:
        assert json.load(response)["drained"]


def test_the_command_serves_the_embedded_engine(tmp_path, capsys, monkeypatch):
    started = []
    monkeypatch.setattr(
        "kvdepot.serving.running.serve_embedded",
        lambda settings, on_ready: started.append(settings),
    )
    pool = str(tmp_path / "pool")
    arguments = [
        "serve",
        "--engine",
        "embedded",
        "--pool",
        pool,
        "--port",
        "1",
        "--capacity",
        "1GiB",
    ]
    assert run(arguments) == 0
    assert started == [ServerSettings(pool=(pool,), port=1, capacity_bytes=1 << 30)]
    for wrong, words in [
        (["serve", "m", "--engine", "embedded", "--", "-tp", "2"], "for vLLM"),
        (["serve", "m"], "no pool"),
        (["serve", "--pool", pool], "no model"),
        (["serve", "m", "--pool", pool, "--port", "1"], "behind a --"),
        (["serve", "m", "--pool", pool, "--store-generated"], "embedded engine's"),
        (["serve", "--engine", "embedded", "--write-budget", "much"], "not a size"),
    ]:
        assert run(wrong) == 2
        assert words in capsys.readouterr().err
    assert serve.__doc__


def test_the_command_says_what_is_written(monkeypatch):
    started = []
    monkeypatch.setattr(
        "kvdepot.serving.running.serve_embedded",
        lambda settings, on_ready: started.append(settings),
    )
    chosen = "--admit second_sight --admit-tokens-min 256 --write-budget 500GB --store-generated"
    assert run(["serve", "--engine", "embedded", *chosen.split()]) == 0
    admission = AdmissionSettings(
        when="second_sight", prompt_tokens_min=256, bytes_per_day=500 * 10**9
    )
    assert started == [ServerSettings(admission=admission, store_generated=True)]
    as_json = (
        '{"admission": {"when": "second_sight", "prompt_tokens_min": 256,'
        ' "bytes_per_day": 500000000000}, "store_generated": true}'
    )
    assert decode_settings(as_json) == started[0]
    with pytest.raises(ConfigError, match="does not want them"):
        ServerSettings(admission=AdmissionSettings(generated=False), store_generated=True)


def test_a_server_writes_what_was_asked_for_twice(tmp_path):
    folder = save_tiny(tmp_path / "model")
    settings = pool_settings(
        tmp_path, folder, admission={"when": "second_sight"}, store_generated=True
    )
    blocks = len(TEXT) // 8
    process, url = start(settings)
    try:
        ask(url, "a")
        once = counters(url)
        ask(url, "a")
        drain(url)
        twice = counters(url)
    finally:
        stop(process)
    assert once["store_not_admitted_blocks_total"] >= blocks
    assert once["store_blocks_total"] == 0
    assert twice["store_blocks_total"] >= blocks


def test_a_second_process_reuses_what_the_first_one_stored(tmp_path):
    folder = save_tiny(tmp_path / "model")
    settings = pool_settings(tmp_path, folder, load_share=1e9)
    process, url = start(settings)
    try:
        first = ask(url, "a")
        with pytest.raises(urllib.error.HTTPError) as caught:
            urllib.request.urlopen(f"{url}/v1/completions", b"{}", timeout=60)
        assert caught.value.code == 400
        caught.value.close()
    finally:
        stop(process)
    process, url = start(settings)
    try:
        again, other = ask(url, "a"), ask(url, "b")
        with pytest.raises(ConfigError, match="cannot listen"):
            serve_embedded(ServerSettings(model=str(folder), port=int(url.rsplit(":", 1)[1])))
    finally:
        stop(process)
    tokens = len(TEXT)
    assert first["usage"]["prompt_tokens"] == tokens
    assert first["usage"]["completion_tokens"] == 4
    assert first["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    tiers = again["usage"]["prompt_tokens_details"]["cached_tokens_by_tier"]
    assert tiers == {"device": 0, "host": 0, "disk": tokens // 8 * 8}
    assert again["choices"] == first["choices"]
    assert other["usage"]["prompt_tokens_details"]["cached_tokens"] == 0


@pytest.mark.timeout(300)
@in_one_try_of(3)
def test_who_waits_is_read_ahead_for_while_another_one_is_answered(tmp_path):
    folder = save_tiny(tmp_path / "model")
    settings = pool_settings(tmp_path, folder)
    process, url = start(settings)
    try:
        ask(url, "a")
        drain(url)
    finally:
        stop(process)
    process, url = start(settings)
    try:
        long = threading.Thread(target=ask, args=(url, "other"), kwargs={"max_tokens": 300})
        long.start()
        while counters(url)["decided_compute_total"] == 0:
            time.sleep(0.01)
        waited = ask(url, "a")
        long.join()
        after = counters(url)
    finally:
        stop(process)
    tiers = waited["usage"]["prompt_tokens_details"]["cached_tokens_by_tier"]
    assert tiers == {"device": 0, "host": len(TEXT) // 8 * 8, "disk": 0}
    assert after["prefetch_requests_total"] == 1
    assert after["prefetch_bytes_total"] == after["load_bytes_total"] > 0


def test_a_prompt_that_cannot_be_read_ahead_harms_nobody_else():
    engine = ScriptedEngine()
    looked: list[Waiting] = []

    async def scenario(session):
        first = asyncio.ensure_future(post(session, "/v1/completions", prompt="a", max_tokens=1))
        await asyncio.to_thread(engine.begun.wait, 60)
        engine.bad_text = "bad"
        others = [
            asyncio.ensure_future(post(session, "/v1/completions", prompt=prompt, max_tokens=1))
            for prompt in ("bad", "good", [1, 2])
        ]
        while len(looked) < 2:
            await asyncio.sleep(0.01)
            assert engine.waiting is not None
            looked[:] = await asyncio.to_thread(engine.waiting)
        engine.go.set()
        return [(await each)[0] for each in (first, *others)]

    assert with_server(engine, scenario) == [200] * 4
    assert [each.ids for each in looked] == [list(b"good"), [1, 2]]
    assert [prompt for prompt, _ in engine.seen] == ["a", "bad", list(b"good"), [1, 2]]
