"""Windows: what engines, devices and the machine counted from the first to the last request of a round."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Literal, Protocol

import msgspec

from kvdepot.bench.places import without_folders
from kvdepot.bench.scrape import Counts, difference
from kvdepot.errors import ConfigError
from kvdepot.io.hostcounters import (
    HostCounters,
    ProcessUse,
    host_counters,
    own_use,
    page_residency,
    process_bytes,
)
from kvdepot.io.results import read_whole

__all__ = ["Attribution", "Edge", "HostProbe", "Probe", "Window", "compile_lines", "decode_windows"]

#: how exact the split of one request's tokens by tier is: the engine's own word for each request;
#: difference of the engine's counters around each request; a sum over the window; nothing
Attribution = Literal["usage", "metrics", "window", "none"]

_COMPILING = re.compile(
    r"torch\.compile|autotun|cuda ?graph|Capturing|compil(?:e|ing|ation)", re.IGNORECASE
)


class Edge(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that is counted, at one moment."""

    at_s: float
    wall_s: float
    counts: Counts
    host: HostCounters
    #: read and written by the engine's processes, as storage saw it
    process_bytes: tuple[int, int] | None = None
    #: of the bench and all that it has started, engines and noises too
    own: ProcessUse | None = None
    log_bytes: int = 0


class Window(msgspec.Struct, frozen=True, kw_only=True):
    """One round of one run, or one load point."""

    run: int
    round: str
    arm: str
    role: str
    attempt: int
    length: int = 0
    load: str = ""
    begin: Edge
    end: Edge
    attribution: Attribution = "none"
    #: requests that the plan has for it
    planned: int = 0
    warmups: int = 0
    #: a new process was started for it
    is_restarted: bool = False
    #: what was stored became visible to others afterwards; None where nobody can say
    is_settled: bool | None = None
    #: of the pool's files before the first request; None without a pool folder
    page_residency: float | None = None
    #: lines of the engine's log within the window that speak of compiling
    compile_lines: tuple[str, ...] = ()
    connections: int = 1
    notes: tuple[str, ...] = ()
    #: what the engine says that it is; empty where it does not say
    engine: str = ""

    @property
    def span_s(self) -> float:
        """From edge to edge."""
        return self.end.at_s - self.begin.at_s

    def counts(self) -> Counts | None:
        """What the engine counted in it; None when it was restarted within."""
        return difference(self.end.counts, self.begin.counts)

    def device_read_bytes(self) -> int | None:
        """What storage gave the engine: by its processes, else by the pool's device."""
        if self.begin.process_bytes is not None and self.end.process_bytes is not None:
            return self.end.process_bytes[0] - self.begin.process_bytes[0]
        before, after = self.begin.host.device_read_bytes, self.end.host.device_read_bytes
        return None if before is None or after is None else after - before

    def foreign_bytes(self) -> tuple[int, int] | None:
        """What others had the pool's device read and write meanwhile; None where nobody can tell.

        Others are neither the engine nor anything else that the bench has started.
        """
        device = _change(_device_bytes(self.begin), _device_bytes(self.end))
        engine = _change(self.begin.process_bytes, self.end.process_bytes)
        if device is None or engine is None:
            return None
        # windows of earlier releases know the engine alone
        ours = _change(_own_bytes(self.begin), _own_bytes(self.end)) or engine
        return max(0, device[0] - ours[0]), max(0, device[1] - ours[1])

    def foreign_cpu_share(self) -> float | None:
        """Of all processors' time, what others had; None where nobody can tell."""
        begin, end = self.begin, self.end
        if begin.own is None or end.own is None or self.begin.process_bytes is None:
            return None
        busy = _change((begin.host.cpu_busy_s,), (end.host.cpu_busy_s,))
        if busy is None or not end.host.processors or self.span_s <= 0:
            return None
        stolen = (end.host.cpu_stolen_s or 0.0) - (begin.host.cpu_stolen_s or 0.0)
        foreign_s: float = busy[0] + stolen - (end.own.cpu_s - begin.own.cpu_s)
        return max(0.0, foreign_s) / (self.span_s * end.host.processors)


def _device_bytes(edge: Edge) -> tuple[int | None, int | None]:
    return edge.host.device_read_bytes, edge.host.device_written_bytes


def _own_bytes(edge: Edge) -> tuple[int, int] | None:
    return None if edge.own is None else (edge.own.read_bytes, edge.own.written_bytes)


def _change(
    before: Sequence[float | None] | None, after: Sequence[float | None] | None
) -> list[Any] | None:
    """What was added, place by place; None where a number is missing or went back."""
    if before is None or after is None:
        return None
    changes = []
    for then, now in zip(before, after, strict=True):
        if then is None or now is None or now < then:
            return None
        changes.append(now - then)
    return changes


class Probe(Protocol):
    """Reads what is not the engine's own word."""

    def host(self, pool: str) -> HostCounters:
        """Of the machine, with the device under a pool."""

    def process(self, pid: int | None) -> tuple[int, int] | None:
        """Bytes that storage moved for a process and its children."""

    def own(self) -> ProcessUse | None:
        """What this process and all that it has started have used."""

    def residency(self, pool: str) -> float | None:
        """Share of a pool's pages in the page cache."""

    def log(self, path: str) -> bytes:
        """What an engine has said so far."""


class HostProbe:
    """Reads this host."""

    def host(self, pool: str) -> HostCounters:
        return host_counters(pool or None)

    def process(self, pid: int | None) -> tuple[int, int] | None:
        return None if pid is None else process_bytes(pid)

    def own(self) -> ProcessUse | None:
        return own_use()

    def residency(self, pool: str) -> float | None:
        return page_residency(pool) if pool else None

    def log(self, path: str) -> bytes:
        return read_whole(path) if path else b""


def compile_lines(log: bytes) -> tuple[str, ...]:
    """Lines that speak of compiling or tuning; a few are enough."""
    lines = log.decode(errors="replace").splitlines()
    found = [line[:200] for line in lines if _COMPILING.search(line)][:5]
    return tuple(without_folders(line) for line in found)


_DECODER = msgspec.json.Decoder(Window)


def decode_windows(lines: Iterable[bytes]) -> Iterator[Window]:
    """Windows of a file; a last line that was cut off is left out.

    Raises:
        ConfigError: another line is not a window.
    """
    broken = 0
    for number, line in enumerate(lines, start=1):
        if broken:
            raise ConfigError(f"line {broken} of the windows is not a window")
        if line.strip():
            try:
                yield _DECODER.decode(line)
            except msgspec.MsgspecError:
                broken = number
