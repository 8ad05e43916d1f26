"""Windows: what engines, devices and the machine counted from the first to the last request of a round."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from typing import Literal, Protocol

import msgspec

from kvdepot.bench.places import without_folders
from kvdepot.bench.scrape import Counts, difference
from kvdepot.errors import ConfigError
from kvdepot.io.hostcounters import HostCounters, host_counters, page_residency, process_bytes
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

    def foreign_read_bytes(self) -> int | None:
        """What others had the pool's device read meanwhile; None where that cannot be told apart."""
        before, after = self.begin.host.device_read_bytes, self.end.host.device_read_bytes
        if (
            before is None
            or after is None
            or self.begin.process_bytes is None
            or self.end.process_bytes is None
        ):
            return None
        ours = self.end.process_bytes[0] - self.begin.process_bytes[0]
        return max(0, after - before - ours)


class Probe(Protocol):
    """Reads what is not the engine's own word."""

    def host(self, pool: str) -> HostCounters:
        """Of the machine, with the device under a pool."""

    def process(self, pid: int | None) -> tuple[int, int] | None:
        """Bytes that storage moved for a process and its children."""

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
