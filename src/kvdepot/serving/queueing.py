"""One engine thread, a bounded queue before it, and the accounts of what it did.

Ownership: the engine is used by the thread alone, from `start` to the end of `stop`. The event loop
hands over jobs and hears their events through `Job.events`, an asyncio queue that only the loop
touches (the thread posts with `call_soon_threadsafe`). Counters are written by the thread and read by
the loop, under one lock.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import queue
import threading
from collections.abc import Callable, Generator, Sequence
from typing import Protocol

from kvdepot.clock import Clock
from kvdepot.engines.transformers.events import Event, FirstToken, Result
from kvdepot.engines.transformers.lookahead import Waiting
from kvdepot.errors import KvdepotError
from kvdepot.keys import RequestExtras
from kvdepot.serving.wire import ApiError, Ask

__all__ = ["Account", "Engine", "EngineThread", "Job"]

log = logging.getLogger(__name__)

_STOP_S = 60.0
#: of those that wait, so many are looked at before their turn
_AHEAD_MAX = 4


class Engine(Protocol):
    """What a server needs of an engine; one thread uses it."""

    context_tokens: int
    token_bytes: int
    #: where the KV memory is, as torch calls it
    device: str
    #: asked by the engine, on its thread, for those who wait
    waiting: Callable[[], Sequence[Waiting]] | None

    def chat_text(self, messages: Sequence[dict[str, str]]) -> str:
        """Messages as the model's template writes them."""

    def tokenize(self, text: str) -> list[int]:
        """Token ids of a text."""

    def generate(
        self,
        prompt: str | Sequence[int],
        *,
        max_new_tokens: int,
        temperature: float = 0.0,
        top_p: float = 1.0,
        seed: int | None = None,
        stop: Sequence[str] = (),
        ignore_end: bool = False,
        extras: RequestExtras = RequestExtras(),
    ) -> Generator[Event, None, None]:
        """Answer one prompt, streamed."""


class Account:
    """Sums since the start. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._sums: dict[tuple[str, str], float] = {}

    def add(self, name: str, value: float, label: str = "") -> None:
        """Add to one sum; the label is its ``label="value"`` text, if it has one."""
        with self._lock:
            self._sums[name, label] = self._sums.get((name, label), 0.0) + value

    def snapshot(self) -> dict[tuple[str, str], float]:
        """All sums now."""
        with self._lock:
            return dict(self._sums)


class Job:
    """One request on its way through the engine."""

    def __init__(
        self, ask: Ask, number: int, loop: asyncio.AbstractEventLoop, arrived_s: float
    ) -> None:
        self.ask = ask
        self.number = number
        #: the prompt's token ids, once the engine's thread has looked at it
        self.ids: list[int] | None = None
        self.arrived_s = arrived_s
        self.is_abandoned = threading.Event()
        self.events: asyncio.Queue[Event | Exception] = asyncio.Queue()
        self._loop = loop

    def post(self, what: Event | Exception) -> None:
        """Called by the engine's thread."""
        try:
            self._loop.call_soon_threadsafe(self.events.put_nowait, what)
        except RuntimeError:
            # the loop is closed: nobody listens any more
            self.is_abandoned.set()


class EngineThread:
    """Runs jobs one after the other, first come first served.

    Args:
        engine: becomes the thread's.
        queue_requests: that may wait.
        clock: of the waiting times.
    """

    def __init__(self, engine: Engine, *, queue_requests: int, clock: Clock) -> None:
        self.engine = engine
        self.account = Account()
        self.is_running = False
        self._clock = clock
        self._waiting: queue.Queue[Job | None] = queue.Queue()
        self._limit = queue_requests
        self._is_stopping = False
        self._jobs = 0
        engine.waiting = self._look_ahead
        self._thread = threading.Thread(target=self._run, name="kvdepot-engine", daemon=True)

    def start(self) -> None:
        """Begin to take jobs."""
        self._thread.start()

    def stop(self) -> None:
        """Finish the running job, refuse those that wait. Blocks for up to a minute."""
        self._is_stopping = True
        self._waiting.put(None)
        self._thread.join(_STOP_S)

    @property
    def waiting(self) -> int:
        """Jobs in the queue."""
        return self._waiting.qsize()

    def submit(self, ask: Ask) -> Job:
        """Queue a request; called on the event loop.

        Raises:
            ApiError: the queue is full, or the server is going down.
        """
        if self._is_stopping or not self._thread.is_alive():
            raise ApiError(503, "the server is going down", kind="service_unavailable")
        if self._waiting.qsize() >= self._limit:
            self.account.add("requests_total", 1, 'status="refused"')
            raise ApiError(429, f"{self._limit} requests are waiting", kind="rate_limit_error")
        self._jobs += 1
        job = Job(ask, self._jobs, asyncio.get_running_loop(), self._clock.monotonic_s())
        self._waiting.put(job)
        return job

    # the thread

    def _run(self) -> None:
        while (job := self._waiting.get()) is not None:
            if self._is_stopping:
                job.post(ApiError(503, "the server is going down", kind="service_unavailable"))
                continue
            if job.is_abandoned.is_set():
                self.account.add("requests_total", 1, 'status="abandoned"')
                continue
            self.is_running = True
            try:
                self._answer(job)
            except KvdepotError as error:
                self.account.add("requests_total", 1, 'status="refused"')
                job.post(ApiError(400, str(error)))
            except Exception:
                log.exception("a request failed")
                self.account.add("requests_total", 1, 'status="failed"')
                job.post(ApiError(500, "the engine failed; see its log", kind="server_error"))
            finally:
                self.is_running = False

    def _answer(self, job: Job) -> None:
        ask = job.ask
        began_s = self._clock.monotonic_s()
        # what was looked at while it waited is not tokenised again
        prompt = job.ids or self._prompt_of(ask)
        stream = self.engine.generate(
            prompt,
            max_new_tokens=ask.max_tokens,
            temperature=ask.temperature,
            top_p=ask.top_p,
            seed=ask.seed,
            stop=ask.stop,
            ignore_end=ask.ignore_eos,
            extras=_extras_of(ask),
        )
        self.account.add("queue_seconds_total", began_s - job.arrived_s)
        try:
            for event in stream:
                if job.is_abandoned.is_set():
                    self.account.add("requests_total", 1, 'status="abandoned"')
                    return
                if isinstance(event, Result):
                    self._count(event)
                elif isinstance(event, FirstToken):
                    self.account.add("ttft_seconds_total", event.ttft_s)
                job.post(event)
        finally:
            stream.close()

    def _prompt_of(self, ask: Ask) -> str | list[int]:
        return self.engine.chat_text(ask.messages) if ask.messages else ask.prompt

    def _look_ahead(self) -> list[Waiting]:
        """The next ones in the queue, for the engine to read ahead for."""
        with self._waiting.mutex:
            jobs = list(itertools.islice(self._waiting.queue, _AHEAD_MAX))
        return [
            Waiting(job.number, ids, _extras_of(job.ask))
            for job in jobs
            if job is not None and not job.is_abandoned.is_set() and (ids := self._ids_of(job))
        ]

    def _ids_of(self, job: Job) -> list[int]:
        if job.ids is None:
            job.ids = []
            try:
                prompt = self._prompt_of(job.ask)
                job.ids = self.engine.tokenize(prompt) if isinstance(prompt, str) else prompt
            except Exception:
                log.debug("a prompt that waits cannot be tokenised", exc_info=True)
        return job.ids

    def _count(self, result: Result) -> None:
        self.account.add("requests_total", 1, 'status="answered"')
        self.account.add("prompt_tokens_total", result.computed_tokens, 'source="computed"')
        for tier, tokens in result.reused_tokens.items():
            self.account.add("prompt_tokens_total", tokens, f'source="{tier}"')
        self.account.add("generated_tokens_total", len(result.token_ids))
        self.account.add("request_read_bytes_total", result.bytes_read)
        self.account.add("load_seconds_total", result.load_s)


def _extras_of(ask: Ask) -> RequestExtras:
    return RequestExtras(tenant_salt=ask.cache_salt)
