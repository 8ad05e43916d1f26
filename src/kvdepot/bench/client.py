"""The client: one streamed request to an OpenAI-compatible endpoint, timed with little overhead.

Used on one event loop. Nothing is retried: what failed is an answer too, with its error.
"""

from __future__ import annotations

import asyncio
from typing import Any, Literal, NamedTuple, Self

import msgspec

from kvdepot.bench.sse import Arrival, Stream, parse_stream
from kvdepot.clock import Clock, SystemClock

__all__ = ["Answer", "Api", "Client", "Endpoint", "Prompt"]

Api = Literal["chat", "completions"]

_CONNECT_S = 30.0
#: an answer that takes longer has hung; the peak of an overloaded server is minutes, not hours
_ANSWER_S = 1800.0
_ERROR_CHARACTERS = 300
_VERSION_CHARACTERS = 80
#: control requests are small
_CONTROL_S = 60.0


class Endpoint(msgspec.Struct, frozen=True, kw_only=True):
    """A server, and how it is spoken to."""

    #: without /v1
    url: str
    model: str = ""
    api: Api = "chat"
    #: ``field``: the request's ``cache_salt``; ``nonce``: a text of fixed length before the prompt
    salt: Literal["field", "nonce"] = "field"
    #: sent as a bearer token; never written to a result
    api_key: str = ""
    #: fields that are added to every request's body
    extra_body: dict[str, Any] = {}


class Prompt(NamedTuple):
    """What is asked."""

    text: str
    output_tokens: int
    salt: str = ""


class Answer(NamedTuple):
    """What came back, and when (monotonic seconds)."""

    sent_s: float
    ended_s: float
    status: int
    error: str
    stream: Stream


class Client:
    """A session with one endpoint. Use as an async context manager."""

    def __init__(self, endpoint: Endpoint, *, clock: Clock | None = None) -> None:
        self.endpoint = endpoint
        self._clock = clock or SystemClock()
        self._session: Any = None
        self._failures: tuple[type[Exception], ...] = (OSError,)

    async def __aenter__(self) -> Self:
        import aiohttp  # noqa: PLC0415 - reports are read and compared without it

        self._failures = (aiohttp.ClientError, OSError, TimeoutError)
        headers = {"Content-Type": "application/json"}
        if self.endpoint.api_key:
            headers["Authorization"] = f"Bearer {self.endpoint.api_key}"
        self._session = aiohttp.ClientSession(
            # the load decides how many connections there are, not the library
            connector=aiohttp.TCPConnector(limit=0),
            timeout=aiohttp.ClientTimeout(total=_ANSWER_S, sock_connect=_CONNECT_S),
            headers=headers,
        )
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._session.close()

    async def ask(self, prompt: Prompt) -> Answer:
        """Send one request and read its stream to the end."""
        body = self.body(prompt)
        path = "chat/completions" if self.endpoint.api == "chat" else "completions"
        arrivals: list[Arrival] = []
        status, error = 0, ""
        now = self._clock.monotonic_s
        sent_s = now()
        try:
            async with self._session.post(f"{self.endpoint.url}/v1/{path}", data=body) as response:
                status = response.status
                read = response.content.readany
                while data := await read():
                    arrivals.append((now(), data))
        except TimeoutError:
            error = "no answer in time"
        except self._failures as failure:
            error = f"{type(failure).__name__}: {failure}"[:_ERROR_CHARACTERS]
        ended_s = now()
        if status >= 400:
            text = b"".join(data for _, data in arrivals).decode(errors="replace")
            return Answer(
                sent_s, ended_s, status, f"{status}: {text}"[:_ERROR_CHARACTERS], Stream()
            )
        stream = parse_stream(arrivals)
        if not error and stream.error:
            error = stream.error[:_ERROR_CHARACTERS]
        elif not error and not stream.is_whole:
            error = "the stream was cut off"
        return Answer(sent_s, ended_s, status, error, stream)

    def body(self, prompt: Prompt) -> bytes:
        """The request's body."""
        text = prompt.text
        fields: dict[str, Any] = {
            "max_tokens": prompt.output_tokens,
            "min_tokens": prompt.output_tokens,
            "ignore_eos": True,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
            **self.endpoint.extra_body,
        }
        if self.endpoint.model:
            fields["model"] = self.endpoint.model
        if prompt.salt and self.endpoint.salt == "field":
            fields["cache_salt"] = prompt.salt
        elif prompt.salt:
            text = f"[{prompt.salt}] {text}"
        if self.endpoint.api == "chat":
            fields["messages"] = [{"role": "user", "content": text}]
        else:
            fields["prompt"] = text
        return msgspec.json.encode(fields)

    # what is not timed

    async def token_ids(self, text: str) -> list[int] | None:
        """Tokens of a whole prompt as the server makes them; None where it does not say."""
        fields: dict[str, Any] = {"model": self.endpoint.model} if self.endpoint.model else {}
        if self.endpoint.api == "chat":
            fields["messages"] = [{"role": "user", "content": text}]
        else:
            fields["prompt"] = text
        body = await self._control("POST", "/tokenize", msgspec.json.encode(fields))
        try:
            return [int(each) for each in msgspec.json.decode(body or b"")["tokens"]]
        except (msgspec.MsgspecError, LookupError, TypeError, ValueError):
            return None

    async def metrics(self) -> str | None:
        """The page of metrics; None where there is none."""
        body = await self._control("GET", "/metrics")
        return None if body is None else body.decode(errors="replace")

    async def version(self) -> str:
        """The server's name and version as it tells them; empty where it does not."""
        body = await self._control("GET", "/version")
        try:
            told = msgspec.json.decode(body or b"", type=dict[str, Any])
        except msgspec.MsgspecError:
            return ""
        words = [told[name] for name in ("engine", "version") if isinstance(told.get(name), str)]
        return " ".join(words)[:_VERSION_CHARACTERS]

    async def post(self, path: str) -> bool:
        """Send an order without a body, such as a reset; whether it was accepted."""
        return await self._control("POST", path, b"{}") is not None

    async def is_up(self) -> bool:
        """It takes requests."""
        return (
            await self._control("GET", "/health") is not None
            or await self._control("GET", "/v1/models") is not None
        )

    async def _control(self, method: str, path: str, data: bytes | None = None) -> bytes | None:
        try:
            async with asyncio.timeout(_CONTROL_S):
                async with self._session.request(
                    method, f"{self.endpoint.url}{path}", data=data
                ) as response:
                    body: bytes = await response.read()
                    return body if response.status < 400 else None
        except self._failures:
            return None
