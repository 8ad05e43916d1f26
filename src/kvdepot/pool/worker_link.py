"""One worker process, as the engine's process sees it: started, listened to, and in the end killed.

A link lives as long as its process and is never used again; a new process gets a new link, with an
empty index and an empty outbox. All methods but `drain` and the outbox's posts are called by one
thread, the tier's own.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Sequence

import msgspec
import numpy as np

from kvdepot.clock import Clock
from kvdepot.config import PoolConfig, WorkerConfig
from kvdepot.errors import KvdepotError, PoolUnavailable
from kvdepot.identity import Identity
from kvdepot.io.childprocess import ChildProcess
from kvdepot.keys import BlockKey
from kvdepot.metrics import Counters
from kvdepot.pool.index import BlockIndex
from kvdepot.pool.segment import RECORD
from kvdepot.pool.worker_jobs import SharedRows
from kvdepot.pool.worker_outbox import Outbox
from kvdepot.pool.worker_wire import (
    MESSAGE_BYTES_MAX,
    PROTOCOL,
    Added,
    Change,
    Closed,
    Drained,
    Forgot,
    Notice,
    Open,
    Opened,
    Pong,
    Refused,
    Removed,
    Report,
    decode_notice,
    encode,
    error_of,
)
from kvdepot.tiers import TierLimits, TierUsage

__all__ = ["Link"]

log = logging.getLogger(__name__)

#: how often the opening looks whether it should stop
_TICK_S = 0.25
#: a process whose end of the channel is closed is as good as gone
_END_WAIT_S = 0.1
#: between two pieces of a long report, so that a lookup that waits for the index goes first
_YIELD_S = 0.0001


class Link:
    """A worker process.

    Args:
        command: what to run as the child.
        shared: the host buffers.
        settings: how the child is watched.
        store_bytes_max: bytes of stores in flight beyond which stores are dropped.
        counters: what the child counts is added here.

    Raises:
        PoolUnavailable: no process can be started.
    """

    def __init__(
        self,
        command: Sequence[str],
        shared: SharedRows,
        settings: WorkerConfig,
        *,
        store_bytes_max: int,
        counters: Counters,
        clock: Clock,
    ) -> None:
        self.index = BlockIndex()
        self.usage = TierUsage(0, 0, 0, 0)
        #: why the child serves no more; empty while it does
        self.lost = ""
        self.began_s = clock.monotonic_s()
        self._settings = settings
        self._counters = counters
        self._clock = clock
        self._shared = shared
        self._limits: TierLimits | None = None
        #: what the pool had kept for this identity
        self.recalled: bytes | None = None
        self._refused: KvdepotError | None = None
        self._silence_s = 0.0
        self._is_killed = False
        self._process = ChildProcess(
            command, [ref.fd for ref in shared.refs], message_bytes_max=MESSAGE_BYTES_MAX
        )
        self._channel = self._process.channel
        self.outbox = Outbox(self._channel, settings, store_bytes_max=store_bytes_max, clock=clock)

    @property
    def pid(self) -> int:
        """The child's process id."""
        return self._process.pid

    def open(self, config: PoolConfig, identity: Identity, stop: threading.Event) -> TierLimits:
        """Have the child open the pool; blocks until it has, and has reported the index.

        Raises:
            KvdepotError: as the child says.
            PoolUnavailable: it ended, said nothing in time, or `stop` was set.
        """
        level = logging.getLogger("kvdepot").getEffectiveLevel()
        give_up_at_s = self._clock.monotonic_s() + self._settings.open_timeout_s
        try:
            self._channel.send([encode(Open(PROTOCOL, config, identity, self._shared.refs, level))])
        except OSError:
            pass  # it has ended already, which `listen` finds out
        while self._limits is None:
            left_s = give_up_at_s - self._clock.monotonic_s()
            if left_s <= 0:
                raise PoolUnavailable(
                    f"the worker process did not open the pool in {self._settings.open_timeout_s} s",
                    hint="does the storage hang? raise open_timeout_s if it is only slow",
                )
            if stop.is_set():
                raise PoolUnavailable("the tier was closed while its worker started")
            self.listen(min(left_s, _TICK_S))
            if self._refused is not None:
                raise self._refused
            if self.lost:
                raise PoolUnavailable(
                    f"the worker process {self.lost} before the pool was open",
                    hint="its messages are on standard error; does "
                    "`python -m kvdepot.pool.worker_child` start in this environment?",
                )
        self.outbox.start()
        return self._limits

    def listen(self, timeout_s: float) -> None:
        """Take what the child says, waiting at most so long; sets `lost` when it serves no more."""
        began_s = self._clock.monotonic_s()
        try:
            messages = self._channel.receive(timeout_s)
            for message in messages:
                self._hear(decode_notice(message))
        except EOFError:
            self._process.wait(_END_WAIT_S)
            self.lost = self.lost or self._how_it_ended()
        except (msgspec.MsgspecError, ValueError, KeyError) as error:
            log.exception("worker process %d says what cannot be understood", self.pid)
            self.lost = f"said what cannot be understood ({error})"
        else:
            # if this process itself stood still, that is not the child's silence
            quiet_s = min(self._clock.monotonic_s() - began_s, 2 * timeout_s)
            self._silence_s = 0.0 if messages else self._silence_s + quiet_s
            self._judge()

    def fail(self) -> None:
        """Decide everything that is under way; the rows stay held until `is_gone`. Then `end` it."""
        self.outbox.fail(self._counters)
        self._channel.close()

    def end(self, timeout_s: float = 0.0) -> None:
        """Wait so long for the child to end by itself, then have it killed."""
        if not (timeout_s and self._process.wait(timeout_s)):
            self._process.kill()

    def is_gone(self, *, wait: bool = False) -> bool:
        """Whether the process has ended, with all its threads; then the rows are given back."""
        if wait:
            self._process.wait()
        if self._process.end_status is None:
            return False
        self.outbox.release()
        return True

    # below

    def _judge(self) -> None:
        """Find out that the child is gone or hangs, where it does not say so."""
        if self.lost:
            return
        if not self._silence_s:
            return
        if self._process.end_status is not None:
            # another process, forked from this one, holds the child's end of the channel open
            self.lost = self._how_it_ended()
        elif self.outbox.is_open and self._silence_s > self._settings.hang_s:
            self.lost = f"has not answered for {self._silence_s:.1f} s"

    def _how_it_ended(self) -> str:
        status = self._process.end_status
        if status is None:
            return "let go of its channel"
        return f"was ended by signal {-status}" if status < 0 else f"ended with status {status}"

    def _hear(self, notice: Notice) -> None:
        match notice:
            case Report():
                self._take_report(notice)
            case Pong(stuck_s=stuck_s):
                if stuck_s > self._settings.stuck_s:
                    self.lost = f"has been in one read or write for {stuck_s:.0f} s"
            case Drained():
                self.outbox.take_drained(notice)
            case Opened(limits=limits, recalled=recalled):
                self._limits, self.recalled = limits, recalled
            case Refused():
                self._refused = error_of(notice)
            case Closed():
                self.lost = "has closed"

    def _take_report(self, report: Report) -> None:
        for number, change in enumerate(report.changes):
            if number:
                time.sleep(_YIELD_S)
            self._take_change(change)
        for name, count in report.counters.items():
            self._counters.add(name, count)
        if report.usage is not None:
            self.usage = report.usage
        for progress in report.progress:
            self.outbox.take_progress(progress)

    def _take_change(self, change: Change) -> None:
        match change:
            case Added(segment=segment, keys=keys):
                words = np.frombuffer(keys, dtype="<u8").reshape(-1, 4)
                records = np.zeros(len(words), dtype=RECORD)
                records["key"] = words
                self.index.insert(segment, records)
            case Removed(segment=segment):
                self.index.remove_segment(segment)
            case Forgot(segment=segment, key=key):
                # where blocks lie is the child's business: all offsets here are 0
                self.index.forget(BlockKey(key), segment, 0)
