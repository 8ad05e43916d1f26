"""Open the engine and its depot, serve until SIGINT or SIGTERM, publish what was stored, and end.

python -P -m kvdepot.serving '{"port": 8000, "pool": ["/srv/kv"]}'
"""

from __future__ import annotations

import asyncio
import logging
import signal
import sys
from collections.abc import Callable

from aiohttp import web

from kvdepot import __version__
from kvdepot.clock import Clock, SystemClock
from kvdepot.config import PoolConfig
from kvdepot.depot import Depot
from kvdepot.engines.transformers import EmbeddedEngine
from kvdepot.errors import ConfigError, KvdepotError
from kvdepot.identity import Identity
from kvdepot.io.models import ModelFiles, model_files, small_model
from kvdepot.policy.policies import Policies
from kvdepot.serving.app import Depots, make_app
from kvdepot.serving.queueing import EngineThread
from kvdepot.serving.settings import ServerSettings, decode_settings

__all__ = ["main", "serve_embedded"]

log = logging.getLogger(__name__)

_FAILED = 2
#: streams that are still open at the end may finish so long
_GRACE_S = 5.0


def serve_embedded(
    settings: ServerSettings,
    *,
    on_ready: Callable[[str], None] = lambda _url: None,
    clock: Clock | None = None,
) -> None:
    """Serve until a signal. Blocks.

    Args:
        settings: what and where.
        on_ready: told the base URL once requests are taken.
        clock: for tests that own the time.

    Raises:
        ConfigError: a setting, or the address is taken.
        KvdepotError: as the engine's and the depot's opening.
    """
    clock = clock or SystemClock()
    files = model_files(settings.model) if settings.model else small_model(_log_step())
    with _opened(settings, files) as engine:
        thread = EngineThread(engine, queue_requests=settings.queue_requests, clock=clock)
        app = make_app(
            thread,
            model=files.name,
            version=__version__,
            clock=clock,
            depot=_depot_of(engine),
            body_bytes_max=settings.body_bytes_max,
            block_tokens=engine.plan.block_tokens,
        )
        thread.start()
        try:
            asyncio.run(_serve(app, settings, on_ready))
        finally:
            thread.stop()


def _opened(settings: ServerSettings, files: ModelFiles) -> EmbeddedEngine:
    def open_depot(identity: Identity) -> Depot:
        options = {
            name: value
            for name, value in (
                ("capacity_bytes", settings.capacity_bytes),
                ("free_bytes_min", settings.free_bytes_min),
            )
            if value is not None
        }
        config = PoolConfig.of(*settings.pool, **options) if settings.pool else None
        return Depot.open(
            identity,
            pool=config,
            host_bytes=settings.host_bytes,
            policies=Policies(admission=settings.admission),
        )

    return EmbeddedEngine.open(
        files.folder,
        model_name=files.name,
        dtype=settings.dtype,
        block_tokens=settings.block_tokens,
        load_share=settings.load_share,
        store_generated=settings.store_generated,
        depot=open_depot if settings.pool or settings.memory_only else None,
    )


def _depot_of(engine: EmbeddedEngine) -> Depots | None:
    return None if engine.depot is None else (engine.depot.counters, engine.depot.drain)


async def _serve(
    app: web.Application, settings: ServerSettings, on_ready: Callable[[str], None]
) -> None:
    stopped = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stopped.set)
    # a handler ends with its client, or the engine would answer nobody
    runner = web.AppRunner(
        app, access_log=None, handler_cancellation=True, shutdown_timeout=_GRACE_S
    )
    await runner.setup()
    site = web.TCPSite(runner, settings.host, settings.port)
    try:
        await site.start()
    except OSError as error:
        await runner.cleanup()
        raise ConfigError(
            f"cannot listen on {settings.host}:{settings.port}: {error.strerror}",
            hint="choose another port: --port",
        ) from error
    host, port = runner.addresses[0][:2]
    on_ready(f"http://{f'[{host}]' if ':' in host else host}:{port}")
    await stopped.wait()
    await runner.cleanup()


def _log_step() -> Callable[[str, int, int], None]:
    """A teller that says each step once."""
    told: set[str] = set()

    def tell(step: str, _done: int, _total: int) -> None:
        if step not in told:
            told.add(step)
            log.info("%s", step)

    return tell


def main() -> int:
    """Serve with the settings in the first argument; 0 after a signal, 2 after an error."""
    logging.basicConfig(stream=sys.stderr, format="%(levelname)s %(name)s: %(message)s")
    try:
        settings = decode_settings(sys.argv[1] if len(sys.argv) > 1 else "{}")
        serve_embedded(settings, on_ready=lambda url: log.warning("serving at %s", url))
    except KvdepotError as error:
        log.error("%s%s", error, f" ({error.hint})" if error.hint else "")  # noqa: TRY400
        return _FAILED
    return 0
