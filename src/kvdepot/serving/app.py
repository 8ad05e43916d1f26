"""The routes of the embedded server. Everything here runs on one event loop; nothing blocks it."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from typing import Any

import msgspec
from aiohttp import web

from kvdepot.clock import Clock
from kvdepot.engines.transformers.events import Event, FirstToken, Result, TextPiece
from kvdepot.metrics import METRICS
from kvdepot.serving.exposition import Exposition
from kvdepot.serving.queueing import EngineThread, Job
from kvdepot.serving.wire import (
    ApiError,
    Ask,
    chunk,
    decode_ask,
    decode_tokenize,
    error_body,
    event,
    usage_of,
    whole,
)

__all__ = ["Depots", "make_app"]

#: counters of the depot, and a wait until what was stored is visible to others
Depots = tuple[Callable[[], Mapping[str, int]], Callable[[float], bool]]

_DRAIN_S = 60.0


def make_app(
    thread: EngineThread,
    *,
    model: str,
    version: str,
    clock: Clock,
    depot: Depots | None,
    body_bytes_max: int,
    block_tokens: int = 1,
) -> web.Application:
    """The application.

    Args:
        thread: started; stopped by whoever started it.
        model: the name that requests may ask for.
        version: of kvdepot.
        clock: for the time of creation in answers.
        depot: how to see and to settle the depot; None without one.
        body_bytes_max: larger bodies are refused.
        block_tokens: that reuse comes in, for the metrics.
    """
    routes = _Routes(
        thread, model=model, version=version, clock=clock, depot=depot, block_tokens=block_tokens
    )
    app = web.Application(client_max_size=body_bytes_max, middlewares=[_errors_as_json])
    app.router.add_post("/v1/completions", routes.completions)
    app.router.add_post("/v1/chat/completions", routes.chat)
    app.router.add_post("/tokenize", routes.tokenize)
    app.router.add_post("/drain", routes.drain)
    app.router.add_get("/v1/models", routes.models)
    app.router.add_get("/health", routes.health)
    app.router.add_get("/version", routes.version)
    app.router.add_get("/metrics", routes.metrics)
    return app


@web.middleware
async def _errors_as_json(request: web.Request, handler: Any) -> web.StreamResponse:
    try:
        answer: web.StreamResponse = await handler(request)
        return answer
    except ApiError as error:
        return _json(error_body(error, status=error.status), status=error.status)
    except web.HTTPException as error:
        if error.status < 400:
            raise
        told = ApiError(error.status, error.reason or "refused")
        return _json(error_body(told, status=error.status), status=error.status)


def _json(body: Any, *, status: int = 200) -> web.Response:
    headers = {"Retry-After": "1"} if status in (429, 503) else None
    return web.Response(
        body=msgspec.json.encode(body),
        status=status,
        content_type="application/json",
        headers=headers,
    )


class _Routes:
    """Handlers, and what they share."""

    def __init__(
        self,
        thread: EngineThread,
        *,
        model: str,
        version: str,
        clock: Clock,
        depot: Depots | None,
        block_tokens: int,
    ) -> None:
        self._thread = thread
        self._model = model
        self._version = version
        self._clock = clock
        self._depot = depot
        self._block_tokens = block_tokens
        self._count = 0

    async def completions(self, request: web.Request) -> web.StreamResponse:
        return await self._generate(request, is_chat=False)

    async def chat(self, request: web.Request) -> web.StreamResponse:
        return await self._generate(request, is_chat=True)

    async def tokenize(self, request: web.Request) -> web.Response:
        asked = decode_tokenize(await request.read())
        messages = asked.as_messages()
        engine = self._thread.engine
        text = engine.chat_text(messages) if messages is not None else asked.prompt or ""
        ids = await asyncio.to_thread(engine.tokenize, text)
        return _json({"count": len(ids), "max_model_len": engine.context_tokens, "tokens": ids})

    async def drain(self, _: web.Request) -> web.Response:
        """Wait until what was stored is visible to other processes."""
        is_drained = True
        if self._depot is not None:
            is_drained = await asyncio.to_thread(self._depot[1], _DRAIN_S)
        return _json({"drained": is_drained}, status=200 if is_drained else 503)

    async def models(self, _: web.Request) -> web.Response:
        context = self._thread.engine.context_tokens
        entry = {"id": self._model, "object": "model", "owned_by": "kvdepot"}
        return _json({"object": "list", "data": [{**entry, "max_model_len": context}]})

    async def health(self, _: web.Request) -> web.Response:
        return web.Response()

    async def version(self, _: web.Request) -> web.Response:
        return _json({"version": self._version, "engine": "kvdepot embedded"})

    async def metrics(self, _: web.Request) -> web.Response:
        page = Exposition()
        for (name, label), value in sorted(self._thread.account.snapshot().items()):
            page.add(f"kvdepot_engine_{name}", value, label)
        page.add("kvdepot_engine_requests_waiting", self._thread.waiting)
        page.add("kvdepot_engine_requests_running", int(self._thread.is_running))
        page.add("kvdepot_engine_kv_token_bytes", self._thread.engine.token_bytes)
        page.add("kvdepot_engine_block_tokens", self._block_tokens)
        page.add("kvdepot_engine_info", 1, f'device="{self._thread.engine.device}"')
        page.add("kvdepot_build_info", 1, f'version="{self._version}"')
        for name, count in (self._depot[0]() if self._depot is not None else {}).items():
            page.add(f"kvdepot_{name}", count, help_text=METRICS[name])
        return web.Response(text=page.text(), content_type="text/plain", charset="utf-8")

    # one generation

    async def _generate(self, request: web.Request, *, is_chat: bool) -> web.StreamResponse:
        ask = decode_ask(await request.read(), is_chat=is_chat)
        if ask.model not in (None, "", self._model):
            raise ApiError(404, f"the model {ask.model!r} is not served; {self._model!r} is")
        job = self._thread.submit(ask)
        self._count += 1
        head = {
            "id": f"kvdepot-{self._count}",
            "created": int(self._clock.wall_s()),
            "model": self._model,
        }
        try:
            if not ask.is_streamed:
                return await _answered(job, head, is_chat=is_chat)
            return await self._streamed(request, job, ask, head, is_chat=is_chat)
        finally:
            # also when the client has gone: the engine must not go on for nobody
            job.is_abandoned.set()

    async def _streamed(
        self, request: web.Request, job: Job, ask: Ask, head: dict[str, Any], *, is_chat: bool
    ) -> web.StreamResponse:
        events = _events(job)
        # nothing is sent before the first event, so that a refused prompt still gets its status
        first = await anext(events)
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        response.headers["Cache-Control"] = "no-cache"
        with contextlib.suppress(ConnectionResetError):
            await response.prepare(request)
            if is_chat:
                await response.write(chunk(head, is_chat=True, is_first=True))
            try:
                async for each in _with_first(first, events):
                    for part in _parts(each, head, is_chat=is_chat, with_usage=ask.with_usage):
                        await response.write(part)
            except ApiError as error:
                # the status is long sent; a stream without its end is what is left to say it with
                await response.write(event(error_body(error, status=error.status)))
            else:
                await response.write(b"data: [DONE]\n\n")
            await response.write_eof()
        return response


def _parts(
    each: Event, head: dict[str, Any], *, is_chat: bool, with_usage: bool
) -> Iterator[bytes]:
    """The events of a stream that stand for one event of the engine."""
    if isinstance(each, TextPiece):
        yield chunk(head, is_chat=is_chat, text=each.text)
    elif isinstance(each, Result):
        yield chunk(head, is_chat=is_chat, finish=each.finish)
        if with_usage:
            kind = "chat.completion.chunk" if is_chat else "text_completion"
            yield event({**head, "object": kind, "choices": [], "usage": _usage(each)})


async def _answered(job: Job, head: dict[str, Any], *, is_chat: bool) -> web.Response:
    async for each in _events(job):
        if isinstance(each, Result):
            body = whole(
                head, is_chat=is_chat, text=each.text, finish=each.finish, usage=_usage(each)
            )
            return _json(body)
    raise AssertionError("a stream ends with its result")


async def _events(job: Job) -> AsyncIterator[Event]:
    while True:
        each = await job.events.get()
        if isinstance(each, Exception):
            raise each
        yield each
        if isinstance(each, Result):
            return


async def _with_first(first: Event, rest: AsyncIterator[Event]) -> AsyncIterator[Event]:
    if not isinstance(first, FirstToken):
        yield first
    async for each in rest:
        yield each


def _usage(result: Result) -> dict[str, Any]:
    return usage_of(result.prompt_tokens, len(result.token_ids), result.reused_tokens)
