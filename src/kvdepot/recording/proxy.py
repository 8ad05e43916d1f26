"""Passes requests to the server behind it and answers back, byte for byte, and records prompts beside.

The client is served first: a request is never changed, and a record that cannot be made never fails it.
Streams are passed on piece by piece as they come. One row is written when an answer has ended, whatever
way it ended.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import aiohttp
from aiohttp import web
from multidict import CIMultiDict, CIMultiDictProxy
from yarl import URL

from kvdepot.clock import Clock
from kvdepot.errors import ConfigError
from kvdepot.io.appender import LineAppender
from kvdepot.recording.rows import TAIL_BYTES, Redaction, is_prompt_path, row_of, usage_of

__all__ = ["Recorder", "proxy_runner", "upstream_url"]

log = logging.getLogger(__name__)

#: of one connection, so they are not passed on (RFC 9110, 7.6.1)
_HOP_HEADERS = frozenset(
    {
        "connection",
        "keep-alive",
        "proxy-authenticate",
        "proxy-authorization",
        "proxy-connection",
        "te",
        "trailer",
        "transfer-encoding",
        "upgrade",
        "host",
        "content-length",
    }
)
_BODY_BYTES_MAX = 1 << 30
_CONNECT_S = 30.0
#: shorter than any server's, which may close a connection in the moment in which a request is sent on it:
#: that request would be lost (uvicorn keeps connections for 5 s)
_KEEP_ALIVE_S = 2.0
_WAIT_S = 0.01
_CHUNK_BYTES = 64 * 1024


def upstream_url(text: str) -> URL:
    """The base URL of the server behind.

    Raises:
        ConfigError: it is no HTTP URL.
    """
    try:
        url = URL(text)
    except ValueError as error:
        raise ConfigError(f"not a URL: {text!r}") from error
    if url.scheme not in ("http", "https") or not url.host:
        raise ConfigError(
            f"not an HTTP URL: {text!r}", hint="write for example http://127.0.0.1:8000"
        )
    return url


class Recorder:
    """Makes rows of requests, and counts them.

    Args:
        appender: takes the rows.
        redaction: what is not written as it is.
        clock: for the rows' times.
    """

    def __init__(self, appender: LineAppender, redaction: Redaction, clock: Clock) -> None:
        self._appender = appender
        self._redaction = redaction
        self._clock = clock
        self.recorded = 0
        #: requests to prompts' paths whose body is no JSON object
        self.unreadable = 0

    def now_s(self) -> float:
        """The time of a request."""
        return self._clock.wall_s()

    async def record(
        self, request: web.Request, body: bytes, *, time_s: float, status: int, usage: object
    ) -> None:
        """Write one row; never fails."""
        try:
            row = row_of(
                body,
                headers=request.headers,
                path=request.path,
                time_s=time_s,
                status=status,
                usage=usage,
                redaction=self._redaction,
            )
        except Exception:  # whatever a strange body brings, the client has its answer
            log.exception("a request could not be recorded")
            row = None
        if row is None:
            self.unreadable += 1
            return
        # the disk is behind: this request's end waits, the others go on
        while not self._appender.put(row):  # noqa: ASYNC110 - the writer is a thread
            await asyncio.sleep(_WAIT_S)
        self.recorded += 1


class _Answer:
    """The status of an answer, and its last bytes."""

    def __init__(self) -> None:
        self.status = 0
        self.encoding = ""
        self._tail = bytearray()
        self._length = 0

    def add(self, piece: bytes) -> None:
        self._tail += piece
        self._length += len(piece)
        if len(self._tail) > 2 * TAIL_BYTES:
            del self._tail[:-TAIL_BYTES]

    def usage(self) -> object:
        is_whole = self._length == len(self._tail)
        return usage_of(bytes(self._tail), encoding=self.encoding, is_whole=is_whole)


def proxy_runner(upstream: URL, recorder: Recorder, *, shutdown_timeout_s: float) -> web.AppRunner:
    """What serves the proxy.

    Args:
        upstream: every path and method goes there.
        recorder: told of each request to a path of prompts.
        shutdown_timeout_s: streams that are still open at the end may finish so long.
    """
    return web.AppRunner(
        _make_app(upstream, recorder),
        access_log=None,
        handler_cancellation=True,
        shutdown_timeout=shutdown_timeout_s,
        # a packed request is passed on packed, as its headers say
        auto_decompress=False,
    )


def _make_app(upstream: URL, recorder: Recorder) -> web.Application:
    app = web.Application(client_max_size=_BODY_BYTES_MAX)
    session_key = web.AppKey("session", aiohttp.ClientSession)

    async def session(app: web.Application) -> AsyncIterator[None]:
        app[session_key] = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=_KEEP_ALIVE_S),
            # a long prefill answers late, and a stream lasts as long as it lasts
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=_CONNECT_S),
            auto_decompress=False,
            skip_auto_headers=("User-Agent", "Accept", "Accept-Encoding", "Content-Type"),
        )
        yield
        await app[session_key].close()

    async def handle(request: web.Request) -> web.StreamResponse:
        time_s = recorder.now_s()
        body = await request.read()
        answer = _Answer()
        try:
            return await _passed(request, body, upstream, app[session_key], answer)
        finally:
            if request.method == "POST" and is_prompt_path(request.path):
                await asyncio.shield(
                    recorder.record(
                        request, body, time_s=time_s, status=answer.status, usage=answer.usage()
                    )
                )

    app.cleanup_ctx.append(session)
    app.router.add_route("*", "/{path:.*}", handle)
    return app


async def _passed(
    request: web.Request,
    body: bytes,
    upstream: URL,
    session: aiohttp.ClientSession,
    answer: _Answer,
) -> web.StreamResponse:
    # the path as it was written, so that nothing is encoded anew
    url = URL(f"{str(upstream).rstrip('/')}{request.raw_path}", encoded=True)
    try:
        async with _asked(request, body, url, session) as found:
            answer.status = found.status
            answer.encoding = found.headers.get("Content-Encoding", "").lower()
            response = web.StreamResponse(
                status=found.status, reason=found.reason, headers=_end_to_end(found.headers)
            )
            length = found.headers.get("Content-Length")
            if length is not None:
                response.content_length = int(length)
            await response.prepare(request)
            async for piece in found.content.iter_any():
                answer.add(piece)
                await response.write(piece)
            await response.write_eof()
            return response
    except (aiohttp.ClientConnectionError, TimeoutError) as error:
        if answer.status:
            raise  # the answer has begun: it breaks off for the client as it did for us
        answer.status = web.HTTPBadGateway.status_code
        return web.json_response(
            {
                "error": {
                    "message": f"{upstream.origin()} does not answer: {error}",
                    "type": "upstream",
                }
            },
            status=answer.status,
        )


@asynccontextmanager
async def _asked(
    request: web.Request, body: bytes, url: URL, session: aiohttp.ClientSession
) -> AsyncIterator[aiohttp.ClientResponse]:
    has_body = bool(body) or "Content-Length" in request.headers
    async with session.request(
        request.method,
        url,
        headers=_end_to_end(request.headers),
        data=body if has_body else None,
        allow_redirects=False,
    ) as found:
        yield found


def _end_to_end(headers: CIMultiDictProxy[str]) -> CIMultiDict[str]:
    """Headers that are for the other end: without those of one connection."""
    named = {
        each.strip().lower()
        for value in headers.getall("Connection", [])
        for each in value.split(",")
    }
    made: CIMultiDict[str] = CIMultiDict()
    for key, value in headers.items():
        if key.lower() not in _HOP_HEADERS and key.lower() not in named:
            made.add(key, value)
    return made
