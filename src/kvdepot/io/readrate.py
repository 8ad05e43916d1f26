"""How fast a folder's files can be read past the page cache at several depths: the ceiling of cold reads."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from kvdepot.clock import Clock
from kvdepot.errors import PoolError
from kvdepot.io.buffers import ALIGNMENT, HostBuffer
from kvdepot.io.filesystem import drop_cached_pages
from kvdepot.io.localdisk import LocalDisk
from kvdepot.units import MIB, ceil_div

__all__ = ["DEPTHS", "ReadRates", "read_rates"]

#: reads at once
DEPTHS = (1, 8, 32)
#: less than this says nothing about storage
_BYTES_MIN = MIB


class ReadRates(NamedTuple):
    """What reading a folder's files gave."""

    #: the files were read with O_DIRECT; else through the page cache, which was emptied of them before
    is_direct: bool
    #: (reads at once, bytes a second)
    rates: tuple[tuple[int, float], ...]


class _Unit(NamedTuple):
    """One read."""

    name: str
    offset: int


def read_rates(
    folder: str | Path,
    sizes: Mapping[str, int],
    clock: Clock,
    *,
    unit_bytes: int,
    depths: Sequence[int] = DEPTHS,
    bytes_max: int = 512 * MIB,
    span_s: float = 4.0,
) -> ReadRates | None:
    """Read files in units as a pool does, with its own file client. Blocks; nothing is written.

    Args:
        folder: holds the files; their pages are dropped from the page cache before each depth.
        sizes: of the files in bytes, by name below the folder; read in this order.
        clock: of the spans.
        unit_bytes: of one read, a multiple of 4 KiB.
        depths: reads at once, one after the other; those with fewer units than reads are left out.
        bytes_max: at each depth.
        span_s: at each depth, after which no read is begun.

    Returns:
        None where the files are less than a MiB together, or cannot be read.
    """
    units = list(itertools.islice(_units(sizes, unit_bytes), ceil_div(bytes_max, unit_bytes)))
    if sum(min(unit_bytes, sizes[unit.name] - unit.offset) for unit in units) < _BYTES_MIN:
        return None
    try:
        disk = LocalDisk(folder, is_read_only=True)
        rates = []
        for depth in depths:
            if depth <= len(units):
                drop_cached_pages(folder, "*")
                rates.append((depth, _Reading(disk, units, clock, span_s).rate(depth, unit_bytes)))
    except PoolError:
        return None
    known = tuple((depth, rate) for depth, rate in rates if rate > 0)
    return ReadRates(disk.is_direct, known) if known else None


def _units(sizes: Mapping[str, int], unit_bytes: int) -> Iterator[_Unit]:
    for name, size in sizes.items():
        if size >= ALIGNMENT:
            yield from (_Unit(name, offset) for offset in range(0, size, unit_bytes))


class _Reading:
    """Some threads that read units, each into memory of its own."""

    def __init__(
        self, disk: LocalDisk, units: Sequence[_Unit], clock: Clock, span_s: float
    ) -> None:
        self._disk = disk
        self._left = iter(units)
        self._clock = clock
        self._span_s = span_s
        self._lock = threading.Lock()
        self._began_s = 0.0
        self._ended_s = 0.0
        self._bytes = 0
        self._error: PoolError | None = None

    def rate(self, depth: int, unit_bytes: int) -> float:
        """Bytes a second with so many reads at once.

        Raises:
            PoolError: a file cannot be read.
        """
        gate = threading.Barrier(depth, action=self._begin)
        buffers = [HostBuffer(unit_bytes, is_prefaulted=True) for _ in range(depth)]
        threads = [
            threading.Thread(target=self._read, args=(gate, buffer.memory), name="read-rate")
            for buffer in buffers
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        for buffer in buffers:
            buffer.close()
        if self._error is not None:
            raise self._error
        took_s = self._ended_s - self._began_s
        return self._bytes / took_s if took_s > 0 else 0.0

    def _begin(self) -> None:
        self._began_s = self._ended_s = self._clock.monotonic_s()

    def _read(self, gate: threading.Barrier, memory: memoryview) -> None:
        gate.wait()
        open_name, file = "", None
        try:
            while (unit := self._next()) is not None:
                if unit.name != open_name:
                    if file is not None:
                        file.close()
                    open_name, file = unit.name, self._disk.open(unit.name)
                # a file that was evicted meanwhile is no error
                self._count(0 if file is None else file.read(unit.offset, [memory]))
        except PoolError as error:
            self._error = error
        finally:
            if file is not None:
                file.close()

    def _next(self) -> _Unit | None:
        with self._lock:
            is_over = self._clock.monotonic_s() - self._began_s >= self._span_s
            return None if is_over or self._error is not None else next(self._left, None)

    def _count(self, moved: int) -> None:
        with self._lock:
            self._bytes += moved
            self._ended_s = max(self._ended_s, self._clock.monotonic_s())
