"""Rows and jobs as the engine's process sees them, on their way through a worker."""

from __future__ import annotations

import bisect
import ctypes
from collections.abc import Callable, Iterable, Sequence

import msgspec

from kvdepot.clock import Clock
from kvdepot.errors import ConfigError
from kvdepot.io.buffers import HostBuffer, address_of
from kvdepot.keys import BlockKey
from kvdepot.pool.worker_wire import OUTCOMES, BufferRef, Load, Store
from kvdepot.tiers import Job

__all__ = ["Place", "SharedRows", "Ticket", "WorkerJob"]

#: the number of a buffer, and where in it a row begins
Place = tuple[int, int]

_addressof = ctypes.addressof
_from_buffer = ctypes.c_char.from_buffer


class SharedRows:
    """The buffers that the worker maps too, and which of them a row lies in.

    Raises:
        ConfigError: there is no buffer, or one is not shared.
    """

    def __init__(self, buffers: Sequence[HostBuffer]) -> None:
        if not buffers:
            raise ConfigError("a worker needs at least one host buffer to move bytes to and from")
        refs: list[BufferRef] = []
        for buffer in buffers:
            if buffer.fd is None:
                raise ConfigError(
                    "a worker cannot reach a host buffer that is not shared",
                    hint="make it with is_shared=True",
                )
            refs.append(
                BufferRef(buffer.fd, buffer.fd_offset, buffer.length_bytes, buffer.is_prefaulted)
            )
        self.refs = tuple(refs)
        spans = [(address_of(buffer.memory), number) for number, buffer in enumerate(buffers)]
        spans.sort()
        self._starts = [start for start, _ in spans]
        self._numbers = [number for _, number in spans]

    def places(self, rows: Iterable[memoryview]) -> list[Place]:
        """Where rows lie; by their addresses, so they may be any contiguous views of the buffers.

        On the engine's thread, for thousands of rows at once: well under half a microsecond each.

        Raises:
            ConfigError: one is not wholly inside one of the buffers.
        """
        found: list[Place] = []
        number = start = end = 0
        for row in rows:
            length = row.nbytes
            if not length:
                found.append((0, 0))
                continue
            # several times quicker than through numpy, and for writable memory only
            address = address_of(row) if row.readonly else _addressof(_from_buffer(row))
            if not (start <= address and address + length <= end):
                number, start = self._buffer_at(address)
                end = start + self.refs[number].length_bytes
                if not (start <= address and address + length <= end):
                    raise ConfigError(
                        "a row lies outside of the host buffers that the worker maps",
                        hint="use views of the buffers that the tier was opened with",
                    )
            found.append((number, address - start))
        return found

    def _buffer_at(self, address: int) -> tuple[int, int]:
        """Number and address of the last buffer that begins there or before, of any if none does."""
        index = bisect.bisect_right(self._starts, address) - 1
        return self._numbers[index], self._starts[index]


class WorkerJob(Job):
    """A job whose work is done in the worker; cancelling tells it."""

    __slots__ = ("_on_cancel", "numbers")

    def __init__(
        self, keys: Sequence[BlockKey], *, deadline_s: float | None = None, clock: Clock
    ) -> None:
        super().__init__(keys, deadline_s=deadline_s, clock=clock)
        #: its tickets
        self.numbers: list[int] = []
        self._on_cancel: Callable[[WorkerJob], None] | None = None

    def when_cancelled(self, tell: Callable[[WorkerJob], None]) -> None:
        """Have this called, on the canceller's thread, after the job was taken back."""
        self._on_cancel = tell

    def cancel(self) -> None:
        super().cancel()
        if self._on_cancel is not None:
            self._on_cancel(self)

    @property
    def left_s(self) -> float | None:
        """Seconds until the deadline; None without one."""
        if self._deadline_at is None:
            return None
        return max(float(self._deadline_at) - self._clock.monotonic_s(), 0.0)


class Ticket:
    """One message's worth of a job, which holds the job's rows from its sending until it is settled.

    Used under the link's lock, except `advance`, which is the receiving thread's.
    """

    __slots__ = ("_codes", "_command", "_lengths", "_positions", "is_sent", "job")

    def __init__(self, job: WorkerJob, command: Load | Store, positions: Sequence[int]) -> None:
        self.job = job
        self._command = command
        #: the rows' places among the job's blocks
        self._positions = positions
        self._lengths = [row.length for row in command.rows]
        #: what the worker has said of each row, in numbers of OUTCOMES
        self._codes = bytes(len(command.rows))
        self.is_sent = False

    @property
    def number(self) -> int:
        """What both sides call it."""
        return self._command.number

    @property
    def rows(self) -> int:
        """How many."""
        return len(self._codes)

    @property
    def is_store(self) -> bool:
        """It stores; otherwise it loads."""
        return isinstance(self._command, Store)

    @property
    def open_bytes(self) -> int:
        """Bytes of the rows of which the worker has not said what became of them."""
        rows = zip(self._lengths, self._codes, strict=True)
        return sum(length for length, code in rows if code == 0)

    def message(self) -> Load | Store:
        """What starts the work; to be sent now."""
        if isinstance(self._command, Load):
            return msgspec.structs.replace(self._command, deadline_s=self.job.left_s)
        return self._command

    def advance(self, codes: bytes) -> int:
        """Take in what the worker says of each row; bytes of the rows that are newly decided.

        Raises:
            ValueError: it speaks of another number of rows, or of an unknown outcome.
        """
        before = self._codes
        if len(codes) != len(before) or max(codes, default=0) >= len(OUTCOMES):
            raise ValueError(f"outcomes of {len(codes)} rows for {len(before)}")
        self._codes = codes
        news = [place for place, code in enumerate(codes) if code and not before[place]]
        decided_bytes = 0
        start = 0
        for stop in range(1, len(news) + 1):
            is_neighbour = (
                stop < len(news)
                and self._positions[news[stop]] == self._positions[news[stop - 1]] + 1
            )
            if is_neighbour:
                continue
            run = news[start:stop]
            lengths = [self._lengths[place] for place in run]
            self.job.resolve_run(
                self._positions[run[0]], [OUTCOMES[codes[place]] for place in run], lengths
            )
            decided_bytes += sum(lengths)
            start = stop
        return decided_bytes
