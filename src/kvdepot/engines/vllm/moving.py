"""One job of vLLM's on its way through the pool, as several jobs of the pool's: its parts.

The scheduler's thread makes a job and asks how it does; a thread of ours begins its parts, one after the
other (`begin_part`). A job may be taken back before that thread has seen it: what was not begun then
never is. `_beginning` decides which of the two was first.
"""

from __future__ import annotations

import logging
import math
import threading
from collections.abc import Callable, Sequence

from vllm.v1.kv_offload.base import OffloadKey

from kvdepot.clock import Clock
from kvdepot.engines.vllm.blocks import RequestBlocks
from kvdepot.tiers import Job, Outcome

__all__ = ["LOAD_CHUNKS", "STORE_CHUNKS", "Moving"]

log = logging.getLogger(__name__)

#: chunks of a part: a quarter of a millisecond of work, and enough to read and write in long runs
LOAD_CHUNKS = 128
STORE_CHUNKS = 64


class Moving:
    """A job whose rows are in use from its making until `is_settled`.

    Args:
        number: vLLM's.
        keys: of its chunks.
        blocks: its request's.
        order: on the thread that begins parts: the keys in the order in which they are to be begun,
            without those that are to be left out.
        begin: begins a load or a store of some of them, given also how many are left with them; never
            waits. It says which it has begun, and the pool's job; None where it wants none.
        is_load: it loads; otherwise it stores.
        patience_s: a load that has not ended by then goes on without its request.
        clock: measures how long it takes.
    """

    def __init__(
        self,
        number: int,
        keys: Sequence[OffloadKey],
        blocks: RequestBlocks,
        order: Callable[[Sequence[OffloadKey]], Sequence[OffloadKey]],
        begin: Callable[[Sequence[OffloadKey], int], tuple[Sequence[OffloadKey], Job | None]],
        *,
        is_load: bool,
        patience_s: float = math.inf,
        clock: Clock,
    ) -> None:
        self.number = number
        self.keys = keys
        self.blocks = blocks
        self.is_load = is_load
        self.started_s = clock.monotonic_s()
        self.let_go_at_s = self.started_s + patience_s
        #: a bug of ours has ended it
        self.is_broken = False
        #: its request has been told to go on without it
        self.is_late_noted = False
        self._part_chunks = LOAD_CHUNKS if is_load else STORE_CHUNKS
        self._order = order
        self._begin = begin
        self._ordered: Sequence[OffloadKey] | None = None
        self._parts: list[tuple[Sequence[OffloadKey], Job]] = []
        self._begun_chunks = 0
        self._is_cancelled = False
        self._beginning = threading.Lock()
        self._is_begun = threading.Event()

    # the thread that begins parts

    def begin_part(self) -> bool:
        """Begin the next part; whether another one is left."""
        with self._beginning:
            if self._is_begun.is_set():
                return False
            try:
                is_more = self._begin_next()
            except Exception:
                log.exception("a job of %d chunks failed", len(self.keys))
                self.is_broken = True
                is_more = False
            if not is_more:
                self._is_begun.set()
            return is_more

    # the scheduler's thread

    def cancel(self) -> None:
        """Give up what has not begun, here and in the pool. Waits for a part that is being begun."""
        with self._beginning:
            if not self._is_begun.is_set():
                self._is_cancelled = True
                self._is_begun.set()
        for _, job in self._parts:
            job.cancel()

    @property
    def is_settled(self) -> bool:
        """Nothing of it touches its rows any more."""
        return self._is_begun.is_set() and all(job.is_settled for _, job in self._parts)

    @property
    def is_decided(self) -> bool:
        """It is known of each chunk what became of it."""
        return self._is_begun.is_set() and all(job.is_decided for _, job in self._parts)

    @property
    def is_whole(self) -> bool:
        """All that was to be moved has been."""
        return self._is_complete and all(
            job.outcomes.count(Outcome.DONE) == len(part) for part, job in self._parts
        )

    @property
    def done(self) -> list[OffloadKey]:
        """Chunks that were moved."""
        if self.is_whole:
            return [key for part, _ in self._parts for key in part]
        return [key for key, outcome in self.results if outcome is Outcome.DONE]

    @property
    def results(self) -> list[tuple[OffloadKey, Outcome]]:
        """What became of its chunks; of those that were never begun, that they were cancelled."""
        found = [pair for part, job in self._parts for pair in zip(part, job.outcomes, strict=True)]
        if not self._is_complete:
            known = {key for key, _ in found}
            found += [(key, Outcome.CANCELLED) for key in self.keys if key not in known]
        return found

    @property
    def outcomes(self) -> set[Outcome]:
        """All that occur."""
        found = {outcome for _, job in self._parts for outcome in set(job.outcomes)}
        return found if self._is_complete else found | {Outcome.CANCELLED}

    @property
    def bytes_done(self) -> int:
        """Payload bytes that were moved."""
        return sum(job.bytes_done for _, job in self._parts)

    @property
    def finished_s(self) -> float | None:
        """When the last chunk was decided, by the clock; None where nothing was begun."""
        ends = [job.finished_s for _, job in self._parts if job.finished_s is not None]
        return max(ends, default=None)

    def wait_settled(self, timeout_s: Callable[[], float]) -> bool:
        """Block until it is settled, or no time is left; whether it is."""
        return self._is_begun.wait(timeout_s()) and all(
            job.wait_settled(timeout_s()) for _, job in self._parts
        )

    # below

    @property
    def _is_complete(self) -> bool:
        return self._is_begun.is_set() and not (self._is_cancelled or self.is_broken)

    def _begin_next(self) -> bool:
        if self._ordered is None:
            self._ordered = self._order(self.keys)
            if not self.is_load:  # sorting thousands is a step of its own
                return bool(self._ordered)
        start = self._begun_chunks
        part = self._ordered[start : start + self._part_chunks]
        begun, job = self._begin(part, len(self._ordered) - start)
        if job is not None:
            self._parts.append((begun, job))
        self._begun_chunks += len(part)
        return self._begun_chunks < len(self._ordered)
