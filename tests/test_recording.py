"""kvdepot.recording.proxy, kvdepot.recording.rows, kvdepot.recording.running, kvdepot.cli.record and
kvdepot.io.appender: passed on byte for byte, recorded once, whatever happens.
"""

from __future__ import annotations

import asyncio
import contextlib
import gzip
import json
import os
import random
import signal
import stat
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

pytest.importorskip("aiohttp")

import aiohttp
from aiohttp import web
from yarl import URL

from kvdepot.audit.run import AuditOptions, audit
from kvdepot.audit.sources import read_log
from kvdepot.clock import SystemClock
from kvdepot.errors import ConfigError
from kvdepot.io.appender import LineAppender
from kvdepot.recording.proxy import Recorder, proxy_runner, upstream_url
from kvdepot.recording.rows import Redaction, is_prompt_path, row_of, usage_of
from tests.audit_traffic import passage
from tests.children import SOURCE
from tests.tries import eventually, in_one_try_of

TEXT = passage(random.Random(1), 200)
MESSAGES = [{"role": "user", "content": "Ada's number is 555-1234"}]
CHAT = "/v1/chat/completions"
#: as a client wrote it: odd blanks, escapes, a key order of its own
RAW = b'{ "messages":[{"content" : "caf\\u00e9 555-1234","role":"user"}],"stream": false , "user":"ada"}'


class Upstream:
    """A server that says what it was asked."""

    def __init__(self):
        self.asked = []
        self.gate = asyncio.Event()

    async def handle(self, request):
        body = await request.read()
        self.asked.append((request.method, request.raw_path, dict(request.headers), body))
        if request.path == "/stream":
            return await self._stream(request)
        if request.path == "/v1/slow/completions":
            await self.gate.wait()
        if request.path == "/zip":
            packed = gzip.compress(json.dumps({"usage": {"prompt_tokens": 7}}).encode())
            return web.Response(body=packed, headers={"Content-Encoding": "gzip"})
        if request.path == "/teapot":
            return web.Response(
                status=418, reason="Short and stout", headers={"X-Kind": "tea"}, body=b"\0\xff"
            )
        return web.json_response({"id": "x", "usage": {"prompt_tokens": 9, "completion_tokens": 1}})

    async def _stream(self, request):
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        await response.write(b'data: {"n": 1}\n\n')
        await self.gate.wait()
        await response.write(b'data: {"usage": {"prompt_tokens": 3}}\n\ndata: [DONE]\n\n')
        return response


def server(app):
    """What serves the server behind; packed requests are seen as they came."""
    return web.AppRunner(
        app,
        access_log=None,
        handler_cancellation=True,
        shutdown_timeout=1,
        auto_decompress=False,
    )


@contextlib.asynccontextmanager
async def served(runner):
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


@contextlib.asynccontextmanager
async def rig(path, redaction=None, base=""):
    upstream = Upstream()
    app = web.Application()
    app.router.add_route("*", "/{path:.*}", upstream.handle)
    appender = LineAppender(path)
    recorder = Recorder(appender, redaction or Redaction(), SystemClock())
    try:
        async with (
            served(server(app)) as behind,
            served(proxy_runner(URL(behind + base), recorder, shutdown_timeout_s=1)) as front,
            aiohttp.ClientSession(auto_decompress=False) as client,
        ):
            yield upstream, client, front, recorder
    finally:
        appender.close()


def rows_of(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_requests_and_answers_are_passed_on_byte_for_byte(tmp_path):
    async def scene():
        async with rig(tmp_path / "log") as (upstream, client, front, _):
            headers = {"Authorization": "Bearer secret", "X-Session-Id": "s1", "X-Odd": "\u00e9"}
            url = URL(front + CHAT + "?a=%2Fb&c=d+e", encoded=True)
            async with client.post(url, data=RAW, headers=headers) as found:
                assert found.status == 200
                assert (await found.json())["id"] == "x"
            method, raw_path, seen, body = upstream.asked[0]
            assert (method, raw_path, body) == ("POST", CHAT + "?a=%2Fb&c=d+e", RAW)
            assert seen["Authorization"] == "Bearer secret"
            assert seen["X-Odd"] == "\u00e9"
            async with client.get(front + "/teapot") as found:
                assert (found.status, found.reason) == (418, "Short and stout")
                assert found.headers["X-Kind"] == "tea"
                assert await found.read() == b"\0\xff"
            async with client.get(front + "/zip") as found:
                assert found.headers["Content-Encoding"] == "gzip"
                assert gzip.decompress(await found.read()).startswith(b"{")
            async with client.delete(front + "/v1/x") as found:
                assert found.status == 200
            assert [each[0] for each in upstream.asked] == ["POST", "GET", "GET", "DELETE"]

    asyncio.run(scene())
    (row,) = rows_of(tmp_path / "log")  # only prompts are recorded
    assert row["body"] == json.loads(RAW)
    assert list(row["body"]) == ["messages", "stream", "user"]
    assert row["usage"]["prompt_tokens"] == 9
    assert (row["session_id"], row["status"], row["path"]) == ("s1", 200, CHAT)
    assert "secret" not in (tmp_path / "log").read_text()
    assert stat.S_IMODE(os.stat(tmp_path / "log").st_mode) == 0o600


@pytest.mark.parametrize(
    ("encoding", "packed"), [("gzip", gzip.compress(RAW)), ("br", b"\x0b\x00")]
)
def test_a_packed_request_is_passed_on_packed(tmp_path, encoding, packed):
    async def scene():
        async with rig(tmp_path / "log") as (upstream, client, front, recorder):
            headers = {"Content-Encoding": encoding}
            async with client.post(front + CHAT, data=packed, headers=headers) as found:
                assert found.status == 200
            _, _, seen, body = upstream.asked[0]
            assert (seen["Content-Encoding"], body) == (encoding, packed)
            assert (recorder.recorded, recorder.unreadable) == (
                (1, 0) if encoding == "gzip" else (0, 1)
            )

    asyncio.run(scene())
    assert [row["body"] for row in rows_of(tmp_path / "log")] == [json.loads(RAW)] * (
        encoding == "gzip"
    )


def test_a_base_path_is_put_before_the_request_s(tmp_path):
    async def scene():
        async with rig(tmp_path / "log", base="/api") as (upstream, client, front, _):
            await (await client.get(front + "/v1/models")).read()
            assert upstream.asked[0][1] == "/api/v1/models"

    asyncio.run(scene())


def test_streams_come_piece_by_piece_and_their_usage_is_recorded(tmp_path):
    async def scene():
        async with rig(tmp_path / "log") as (upstream, client, front, recorder):
            upstream_path = "/stream"
            async with client.post(front + upstream_path, data=b"{}") as found:
                first = await asyncio.wait_for(found.content.readuntil(b"\n\n"), 60)
                assert first == b'data: {"n": 1}\n\n'  # while the server still holds the rest
                upstream.gate.set()
                assert (await found.read()).endswith(b"data: [DONE]\n\n")
            assert recorder.recorded == 0  # no path of prompts

    asyncio.run(scene())
    tail = b'data: {"a": 1}\n\ndata: {"usage": {"prompt_tokens": 3}, "choices": []}\n\ndata: [DONE]\n\n'
    assert usage_of(tail) == {"prompt_tokens": 3}


def test_many_at_once_and_none_is_lost(tmp_path):
    async def scene():
        async with rig(tmp_path / "log") as (upstream, client, front, recorder):

            async def one(number):
                body = json.dumps({"messages": MESSAGES, "n": number, "pad": "x" * 5000}).encode()
                async with client.post(front + CHAT, data=body) as found:
                    await found.read()
                    return found.status

            statuses = await asyncio.gather(*[one(number) for number in range(200)])
            assert set(statuses) == {200}
            assert recorder.recorded == len(upstream.asked) == 200

    asyncio.run(scene())
    assert sorted(row["body"]["n"] for row in rows_of(tmp_path / "log")) == list(range(200))


def test_a_server_that_does_not_answer_is_a_502_and_recorded(tmp_path):
    async def scene():
        appender = LineAppender(tmp_path / "log")
        recorder = Recorder(appender, Redaction(), SystemClock())
        async with (
            served(
                proxy_runner(URL("http://127.0.0.1:9"), recorder, shutdown_timeout_s=1)
            ) as front,
            aiohttp.ClientSession() as client,
            client.post(front + CHAT, data=RAW) as found,
        ):
            assert found.status == 502
            assert "does not answer" in (await found.json())["error"]["message"]
        appender.close()

    asyncio.run(scene())
    assert rows_of(tmp_path / "log")[0]["status"] == 502


def test_a_client_that_leaves_is_recorded(tmp_path):
    async def scene():
        async with rig(tmp_path / "log") as (upstream, client, front, recorder):
            leaving = asyncio.ensure_future(client.post(front + "/v1/slow/completions", data=RAW))
            assert await asyncio.to_thread(eventually, lambda: upstream.asked)
            leaving.cancel()
            await asyncio.gather(leaving, return_exceptions=True)
            assert await asyncio.to_thread(eventually, lambda: recorder.recorded)
            assert recorder.recorded == 1
            upstream.gate.set()

    asyncio.run(scene())
    assert rows_of(tmp_path / "log")[0]["body"]["user"] == "ada"


def test_what_cannot_be_recorded_is_passed_on_all_the_same(tmp_path):
    bodies = [b"", b"not json", b"[1]", b"\xff\xfe", b'{"messages": ' * 5000, b'{"x": "\\ud800"}']

    async def scene():
        async with rig(tmp_path / "log") as (upstream, client, front, recorder):
            for body in bodies:
                async with client.post(front + CHAT, data=body) as found:
                    assert found.status == 200
            assert [each[3] for each in upstream.asked] == bodies
            assert recorder.unreadable == 5

    asyncio.run(scene())
    assert rows_of(tmp_path / "log")[0]["body"] == {"x": "\ud800"}


# --- rows


def made(body, redaction, **headers):
    row = row_of(
        json.dumps(body).encode(), headers=headers, path=CHAT, time_s=1.0, status=200, usage=None,
        redaction=redaction,
    )  # fmt: skip
    assert row is not None
    return json.loads(row)


def test_redaction_writes_hashes_that_are_equal_for_equal_values():
    redaction = Redaction(hash_users=True, patterns=[r"\d{3}-\d{4}"], drop=["metadata"])
    body = {"messages": MESSAGES, "user": "ada", "metadata": {"x": 1}}
    one, other = made(body, redaction, **{"X-Session-Id": "s"}), made(body, redaction)
    content = one["body"]["messages"][0]["content"]
    assert "555" not in content
    assert content == other["body"]["messages"][0]["content"]
    assert one["body"]["user"].startswith("h-")
    assert one["session_id"].startswith("h-")
    assert "metadata" not in one["body"]
    assert (
        made(body, Redaction(hash_users=True))["body"]["user"] != one["body"]["user"]
    )  # another salt
    with pytest.raises(ConfigError, match="regular expression"):
        Redaction(patterns=["("])


def test_usage_is_read_from_any_end():
    assert usage_of(b'{"usage": {"a": 1}}') == {"a": 1}
    assert usage_of(gzip.compress(b'{"usage": {"a": 1}}'), encoding="gzip") == {"a": 1}
    for tail in (b"", b"[1]", b"data: {", b'data: {"usage": 1', b'data: {"usage": null}'):
        assert usage_of(tail) is None
    assert usage_of(b"xx", encoding="gzip") is None
    assert usage_of(b"xx", encoding="br") is None
    assert usage_of(b"xx", encoding="gzip", is_whole=False) is None
    assert is_prompt_path("/v1/completions/")
    assert not is_prompt_path("/v1/models")


@pytest.mark.parametrize("text", ["", "localhost:8000", "ftp://x", "http://"])
def test_an_upstream_that_is_no_url_is_refused(text):
    with pytest.raises(ConfigError):
        upstream_url(text)


# --- the file


def test_lines_are_written_in_order_before_close_returns(tmp_path):
    path = tmp_path / "log"
    path.write_bytes(b"before\n")
    appender = LineAppender(path)
    lines = [b"%d\n" % number for number in range(3000)]
    assert all(appender.put(line) for line in lines)
    appender.close()
    appender.close()
    assert path.read_bytes() == b"before\n" + b"".join(lines)
    assert appender.lines_written == 3000


def test_a_slow_disk_makes_the_caller_wait_and_a_full_one_is_counted(tmp_path, monkeypatch):
    gate = threading.Event()
    write = os.write

    def slow(fd, data):
        gate.wait(20)
        return write(fd, data)

    monkeypatch.setattr("os.write", slow)
    appender = LineAppender(tmp_path / "log", bytes_max=100)
    assert appender.put(b"x" * 60)
    taken = [appender.put(b"y" * 60) for _ in range(5)]
    assert taken.count(False) >= 4
    gate.set()
    appender.close()
    assert appender.lines_written == 1 + taken.count(True)
    full = LineAppender(Path("/dev/full"))
    full.put(b"x\n")
    full.close()
    assert (full.lines_written, full.lines_failed) == (0, 1)
    with pytest.raises(ConfigError, match="cannot write"):
        LineAppender(tmp_path / "no" / "folder")


# --- the command


def test_the_command_records_for_an_audit_until_it_is_told_to_stop(tmp_path):
    path = tmp_path / "log.jsonl"
    command = [sys.executable, "-m", "kvdepot", "record", "--port", "0", "--out", path]
    environment = {**os.environ, "PYTHONPATH": str(SOURCE)}

    async def scene():
        upstream = Upstream()
        app = web.Application()
        app.router.add_route("*", "/{path:.*}", upstream.handle)
        async with served(server(app)) as behind:
            child = await asyncio.to_thread(
                subprocess.Popen,
                [str(each) for each in [*command, "--upstream", behind]],
                stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment,
            )  # fmt: skip
            try:
                ready = await asyncio.to_thread(child.stderr.readline)
                front = ready.split()[1]
                async with aiohttp.ClientSession() as client:
                    for number in range(12):
                        messages = [
                            {
                                "role": "system",
                                "content": f"Request: r{number * 7919:08x}\n" + TEXT,
                            },
                            {"role": "user", "content": f"Question {number}?"},
                        ]
                        async with client.post(front + CHAT, json={"messages": messages}) as found:
                            assert found.status == 200
                child.send_signal(signal.SIGTERM)
                out, err = await asyncio.to_thread(child.communicate, None, 60)
                assert child.returncode == 0, err
                assert "recorded 12 requests" in out
            finally:
                child.kill()
                child.wait()

    asyncio.run(scene())
    result = audit(read_log(path), "log", AuditOptions())
    assert result.totals.requests == 12
    assert result.input.usage_logged == 12
    assert result.findings[0].cause == "request_id"


def test_the_command_refuses_what_cannot_be_used(tmp_path, capsys):
    from kvdepot.cli.main import run

    out = str(tmp_path / "log")
    assert run(["record", "--upstream", "nonsense", "--out", out]) == 2
    assert run(["record", "--upstream", "http://h", "--out", "/proc/no/log"]) == 2
    assert run(["record", "--upstream", "http://h", "--out", out, "--redact", "("]) == 2
    assert (
        run(["record", "--upstream", "http://127.0.0.1:9", "--out", out, "--host", "192.0.2.1"])
        == 2
    )
    assert "cannot listen" in capsys.readouterr().err


@in_one_try_of(5)
def test_passing_on_adds_little(tmp_path):
    async def scene():
        async with rig(tmp_path / "log") as (_, client, front, _):
            spent = []
            for _ in range(60):
                began = time.perf_counter()
                async with client.post(front + CHAT, data=RAW) as found:
                    await found.read()
                spent.append(time.perf_counter() - began)
            # two hops and a record; generous, for a machine that does other things as well
            assert sorted(spent)[len(spent) // 2] < 0.1

    asyncio.run(scene())
