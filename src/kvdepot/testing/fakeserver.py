"""A FAKE OpenAI-compatible server: programmed latencies, a programmed cache, and programmed lies.

It computes nothing. It is for tests that need to know the right answer of a measurement beforehand.
Tokens are runs of four characters; blocks are runs of tokens; a prompt's prefix is "cached" in a tier
when an earlier prompt of the same salt put it there.

It runs on an event loop in a thread of its own and speaks just enough HTTP/1.1. Writes of a stream are
timer callbacks, not tasks, so that it can feed many streams on a small machine.
"""

from __future__ import annotations

import asyncio
import hashlib
import threading
from dataclasses import dataclass, field
from typing import Any, Self

import msgspec

__all__ = ["FakeBehaviour", "FakeServer"]

TIERS = ("device", "host", "disk")
_TOKEN_CHARACTERS = 4


@dataclass
class FakeBehaviour:
    """What the fake does. May be changed while it runs."""

    #: before anything else of a request
    base_s: float = 0.0
    #: for each computed token
    token_s: float = 0.0
    #: for each token read from the tier
    read_s: dict[str, float] = field(default_factory=dict)
    #: between two output tokens
    gap_s: float = 0.0
    #: requests served at once
    slots: int = 1000
    block_tokens: int = 16
    token_bytes: int = 1024
    #: tiers that keep what was computed; none: no cache at all
    keeps: tuple[str, ...] = ()
    #: tiers that may be read from
    reads: tuple[str, ...] = TIERS
    #: bytes that devices see for each byte that is read from disk
    device_share: float = 1.0
    #: added to the cached tokens in a usage, but not to the metrics
    cached_lie: int = 0
    #: every so many requests, one fails with 500
    fails_every: int = 0
    gives_usage: bool = True
    gives_tiers: bool = True
    #: another answer to the same question
    other_answer: bool = False


class FakeServer:
    """The server. Use as a context manager; `url` is set then."""

    def __init__(self, behaviour: FakeBehaviour | None = None) -> None:
        self.behaviour = behaviour or FakeBehaviour()
        self.url = ""
        self.requests: list[dict[str, Any]] = []
        #: what the devices under the fake have moved
        self.device_bytes = {"read": 0, "written": 0}
        self._kept: dict[str, set[bytes]] = {tier: set() for tier in TIERS}
        self.counts: dict[str, float] = {}
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name="fake-server", daemon=True)
        self._is_up = threading.Event()
        self._busy = 0
        self._waiting: list[asyncio.Future[None]] = []

    def __enter__(self) -> Self:
        self._thread.start()
        self._is_up.wait(10)
        return self

    def __exit__(self, *_: object) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10)
        self._loop.close()

    def restart(self, behaviour: FakeBehaviour | None = None) -> None:
        """As if the process had been started anew: only what is on disk is left."""
        if behaviour is not None:
            self.behaviour = behaviour
        self._kept["device"].clear()
        self._kept["host"].clear()
        self.counts.clear()

    def wipe(self) -> None:
        """As if the pool had been emptied too."""
        for kept in self._kept.values():
            kept.clear()

    # the loop

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        server = self._loop.run_until_complete(
            self._loop.create_server(lambda: _Connection(self), "127.0.0.1", 0)
        )
        self.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        self._is_up.set()
        self._loop.run_forever()
        server.close()
        for task in asyncio.all_tasks(self._loop):
            task.cancel()
        self._loop.run_until_complete(asyncio.sleep(0.01))

    async def enter(self) -> None:
        """Wait for a slot, first come first served."""
        if self._busy >= self.behaviour.slots:
            turn: asyncio.Future[None] = self._loop.create_future()
            self._waiting.append(turn)
            await turn
        else:
            self._busy += 1

    def leave(self) -> None:
        """Give the slot to the next."""
        if self._waiting:
            self._waiting.pop(0).set_result(None)
        else:
            self._busy -= 1

    def account(self, text: str, salt: str) -> tuple[int, dict[str, int]]:
        """Tokens of a prompt, and how many of them come from which tier; keeps the prompt."""
        does = self.behaviour
        tokens = max(1, len(text) // _TOKEN_CHARACTERS)
        width = does.block_tokens * _TOKEN_CHARACTERS
        digest = hashlib.sha256(salt.encode())
        reused = dict.fromkeys(TIERS, 0)
        is_prefix = True
        # every full block is kept; of a prompt that is covered whole, the last one is computed again
        readable = (tokens - 1) // does.block_tokens
        for index in range(tokens // does.block_tokens):
            digest.update(text[index * width : (index + 1) * width].encode())
            key = digest.digest()
            tier = next((t for t in TIERS if t in does.reads and key in self._kept[t]), None)
            is_prefix = is_prefix and tier is not None and index < readable
            if is_prefix and tier is not None:
                reused[tier] += does.block_tokens
            for kept in does.keeps:
                if kept == "disk" and key not in self._kept["disk"]:
                    self.device_bytes["written"] += does.block_tokens * does.token_bytes
                    self.count("kvdepot_store_bytes_total", does.block_tokens * does.token_bytes)
                self._kept[kept].add(key)
        disk_bytes = reused["disk"] * does.token_bytes
        self.device_bytes["read"] += round(disk_bytes * does.device_share)
        self.count("kvdepot_load_bytes_total", disk_bytes)
        computed = tokens - sum(reused.values())
        for source, count in {"computed": computed, **reused}.items():
            self.count(f'kvdepot_engine_prompt_tokens_total{{source="{source}"}}', count)
        return tokens, reused

    def count(self, name: str, value: float) -> None:
        """Add to a metric."""
        self.counts[name] = self.counts.get(name, 0) + value

    def page(self) -> bytes:
        """The metrics."""
        counts = {
            "kvdepot_engine_kv_token_bytes": self.behaviour.token_bytes,
            "kvdepot_engine_block_tokens": self.behaviour.block_tokens,
            **self.counts,
        }
        return "".join(f"{name} {value}\n" for name, value in counts.items()).encode()


class _Connection(asyncio.Protocol):
    """One connection; requests come one after the other."""

    def __init__(self, server: FakeServer) -> None:
        self._server = server
        self._heard = b""
        self._transport: Any = None
        self._task: asyncio.Task[None] | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        self._heard += data
        head, found, rest = self._heard.partition(b"\r\n\r\n")
        if not found:
            return
        lines = head.decode().split("\r\n")
        length = next(
            (int(line[15:]) for line in lines if line.lower().startswith("content-length:")), 0
        )
        if len(rest) < length:
            return
        self._heard = rest[length:]
        _, path, _ = lines[0].split(" ")
        self._task = asyncio.ensure_future(self._serve(path, rest[:length]))

    async def _serve(self, path: str, body: bytes) -> None:
        if path in ("/v1/completions", "/v1/chat/completions"):
            await self._generate(msgspec.json.decode(body), is_chat="chat" in path)
        elif path == "/v1/models":
            self._reply(200, msgspec.json.encode({"data": [{"id": "fake"}]}))
        elif path == "/tokenize":
            text = _text_of(msgspec.json.decode(body))
            count = len(text) // _TOKEN_CHARACTERS
            ids = [sum(text[4 * i : 4 * i + 4].encode()) for i in range(count)]
            self._reply(200, msgspec.json.encode({"count": count, "tokens": ids}))
        elif path == "/metrics":
            self._reply(200, self._server.page())
        elif path == "/version":
            self._reply(200, b'{"version": "1.0", "engine": "fake"}')
        elif path in ("/health", "/drain"):
            self._reply(200, b"{}")
        else:
            self._reply(404, b"{}")

    def _reply(self, status: int, body: bytes) -> None:
        head = f"HTTP/1.1 {status} OK\r\nContent-Length: {len(body)}\r\n\r\n"
        self._transport.write(head.encode() + body)

    async def _generate(self, asked: dict[str, Any], *, is_chat: bool) -> None:
        server, does = self._server, self._server.behaviour
        server.requests.append(asked)
        if does.fails_every and len(server.requests) % does.fails_every == 0:
            self._reply(500, b'{"error": {"message": "programmed failure"}}')
            return
        await server.enter()
        try:
            tokens, reused = server.account(_text_of(asked), asked.get("cache_salt", ""))
            computed = tokens - sum(reused.values())
            reading_s = sum(does.read_s.get(tier, 0) * count for tier, count in reused.items())
            await asyncio.sleep(does.base_s + does.token_s * computed + reading_s)
            self._transport.write(
                b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n"
                b"Transfer-Encoding: chunked\r\n\r\n"
            )
            await self._stream(asked, is_chat=is_chat)
        finally:
            server.leave()
        cached = sum(reused.values()) + does.cached_lie
        details: dict[str, Any] = {"cached_tokens": cached}
        if does.gives_tiers:
            details["cached_tokens_by_tier"] = reused
        usage = {
            "prompt_tokens": tokens,
            "completion_tokens": asked["max_tokens"],
            "prompt_tokens_details": details,
        }
        end = {"choices": [{"delta": {}, "text": "", "finish_reason": "length"}]}
        self._write(_event(end))
        if does.gives_usage:
            self._write(_event({"choices": [], "usage": usage}))
        self._write(b"data: [DONE]\n\n")
        self._transport.write(b"0\r\n\r\n")

    async def _stream(self, asked: dict[str, Any], *, is_chat: bool) -> None:
        loop = asyncio.get_running_loop()
        done = loop.create_future()
        start_s, count, gap_s = loop.time(), asked["max_tokens"], self._server.behaviour.gap_s
        frame = self._frame(is_chat=is_chat)

        def write(index: int) -> None:
            self._transport.write(frame)
            if index + 1 < count:
                loop.call_at(start_s + (index + 1) * gap_s, write, index + 1)
            else:
                done.set_result(None)

        write(0)
        await done

    def _frame(self, *, is_chat: bool) -> bytes:
        word = "other " if self._server.behaviour.other_answer else "word "
        choice = {"delta": {"content": word}} if is_chat else {"text": word}
        data = _event({"choices": [choice]})
        return f"{len(data):x}\r\n".encode() + data + b"\r\n"

    def _write(self, data: bytes) -> None:
        self._transport.write(f"{len(data):x}\r\n".encode() + data + b"\r\n")


def _event(body: dict[str, Any]) -> bytes:
    return b"data: " + msgspec.json.encode(body) + b"\n\n"


def _text_of(asked: dict[str, Any]) -> str:
    if "messages" in asked:
        return "".join(str(each["content"]) for each in asked["messages"])
    return str(asked.get("prompt", ""))
