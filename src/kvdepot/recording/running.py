"""Serve the recording proxy until SIGINT or SIGTERM; what was taken is written before it ends."""

from __future__ import annotations

import asyncio
import logging
import signal
from collections.abc import Callable
from pathlib import Path

from aiohttp import web
from yarl import URL

from kvdepot.clock import Clock, SystemClock
from kvdepot.errors import ConfigError
from kvdepot.io.appender import LineAppender
from kvdepot.recording.proxy import Recorder, proxy_runner, upstream_url
from kvdepot.recording.rows import Redaction

__all__ = ["record"]

log = logging.getLogger(__name__)

#: streams that are still open at the end may finish so long
_GRACE_S = 60.0


def record(
    upstream: str,
    out: Path,
    *,
    host: str = "127.0.0.1",
    port: int = 8001,
    redaction: Redaction | None = None,
    on_ready: Callable[[str], None] = lambda _url: None,
    clock: Clock | None = None,
) -> int:
    """Pass requests on and record them. Blocks until a signal.

    Args:
        upstream: base URL of the server behind.
        out: the log; appended to.
        host: address to listen on.
        port: 0 for any free one.
        redaction: what is not written as it is.
        on_ready: told the base URL once requests are taken.
        clock: for tests that own the time.

    Returns:
        How many requests were recorded.

    Raises:
        ConfigError: the URL, the file or the address cannot be used.
    """
    url = upstream_url(upstream)
    appender = LineAppender(out)
    recorder = Recorder(appender, redaction or Redaction(), clock or SystemClock())
    try:
        asyncio.run(_serve(url, recorder, host, port, on_ready))
    finally:
        appender.close()
    if recorder.unreadable:
        log.warning("%d requests had no JSON body and were not recorded", recorder.unreadable)
    if appender.lines_failed:
        log.error("%d requests could not be written", appender.lines_failed)
    return appender.lines_written


async def _serve(
    upstream: URL, recorder: Recorder, host: str, port: int, on_ready: Callable[[str], None]
) -> None:
    runner = proxy_runner(upstream, recorder, shutdown_timeout_s=_GRACE_S)
    await runner.setup()
    try:
        site = web.TCPSite(runner, host, port)
        try:
            await site.start()
        except OSError as error:
            raise ConfigError(f"cannot listen on {host}:{port}: {error.strerror}") from error
        ended = asyncio.Event()
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, ended.set)
        address = runner.addresses[0]
        on_ready(f"http://{host}:{address[1]}")
        await ended.wait()
    finally:
        await runner.cleanup()
