"""How fast rows of host memory get into an engine's KV memory: the ceiling of every load's last step.

    python -P -m kvdepot.io.copyrate '{"row_bytes": 131072, "device": "cpu"}'

A process of its own: the memory that it works in goes with it, and so does what a device keeps for whoever
has touched it once. It measures for about a second and says what it found in one line.
"""

from __future__ import annotations

import importlib
import os
import random
import sys
import threading
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from kvdepot.clock import Clock, SystemClock
from kvdepot.io.buffers import HostBuffer
from kvdepot.units import MIB

__all__ = ["CopyOrder", "CopyRate", "CopyReport", "host_rates", "main"]

#: on each side; more than processors' caches hold
_BYTES = 256 * MIB
_ROW_BYTES_MAX = 64 * MIB
_PASSES = 3
_SEED = 1
#: device files of drivers whose devices torch calls ``cuda``
_DRIVERS = (Path("/dev/nvidiactl"), Path("/dev/kfd"))

_Rows = npt.NDArray[np.uint8]


class CopyOrder(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What to measure."""

    row_bytes: int
    #: ``cpu``; empty: what this interpreter's torch sees
    device: str = ""


class CopyRate(msgspec.Struct, frozen=True, kw_only=True):
    """Copies of one kind."""

    threads: int
    #: of one copy
    copy_bytes: int
    #: bytes a second
    rate: float


class CopyReport(msgspec.Struct, frozen=True, kw_only=True):
    """A line of output. No rates where the device cannot be used by this interpreter."""

    device: str
    rates: tuple[CopyRate, ...] = ()


def main() -> int:
    """Measure and say so."""
    order = msgspec.json.decode(sys.argv[1], type=CopyOrder)
    clock = SystemClock()
    report = _device_report(order, clock) if order.device != "cpu" else None
    if report is None:
        cores = len(os.sched_getaffinity(0))
        report = CopyReport(device="cpu", rates=host_rates(order.row_bytes, clock, cores=cores))
    sys.stdout.buffer.write(msgspec.json.encode(report) + b"\n")
    return 0


def host_rates(
    row_bytes: int, clock: Clock, *, cores: int, work_bytes: int = _BYTES
) -> tuple[CopyRate, ...]:
    """Copies within memory, by one thread and by as many as there are cores. Blocks.

    The rows land in another order than they lie in, as in a paged cache.

    Args:
        row_bytes: of one copy.
        clock: of the spans.
        cores: threads of the second measurement; 1: there is none.
        work_bytes: on each side.
    """
    row_bytes = min(row_bytes, _ROW_BYTES_MAX, work_bytes)
    count = work_bytes // row_bytes
    buffers = [HostBuffer(count * row_bytes, is_prefaulted=True) for _ in range(2)]
    source, target = (_rows(buffer, count, row_bytes) for buffer in buffers)
    places = list(range(count))
    random.Random(_SEED).shuffle(places)
    rates = tuple(
        CopyRate(
            threads=threads,
            copy_bytes=row_bytes,
            rate=count
            * row_bytes
            / min(_host_pass_s(source, target, places, threads, clock) for _ in range(_PASSES)),
        )
        for threads in sorted({1, max(cores, 1)})
        if threads <= count
    )
    del source, target
    for buffer in buffers:
        buffer.close()
    return rates


def _rows(buffer: HostBuffer, count: int, row_bytes: int) -> _Rows:
    memory = buffer.memory[: count * row_bytes]
    return np.frombuffer(memory, dtype=np.uint8).reshape(count, row_bytes)


def _host_pass_s(
    source: _Rows, target: _Rows, places: list[int], threads: int, clock: Clock
) -> float:
    began_s = 0.0

    def begin() -> None:
        nonlocal began_s
        began_s = clock.monotonic_s()

    gate = threading.Barrier(threads, action=begin)

    def copy(first: int) -> None:
        gate.wait()
        for index in range(first, len(places), threads):
            target[places[index]] = source[index]

    workers = [threading.Thread(target=copy, args=(first,)) for first in range(threads)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    return max(clock.monotonic_s() - began_s, 1e-9)


def _device_report(order: CopyOrder, clock: Clock) -> CopyReport | None:
    """Copies from pinned memory to a device; None where engines of this interpreter use none."""
    if not any(driver.exists() for driver in _DRIVERS):
        return None
    try:
        torch: Any = importlib.import_module("torch")
    except ImportError:
        # there is a device, and who knows what the engine's own interpreter does with it
        return CopyReport(device="")
    if not torch.cuda.is_available():
        return None
    row_bytes = min(order.row_bytes, _ROW_BYTES_MAX)
    count = _BYTES // row_bytes
    source = torch.zeros((count, row_bytes), dtype=torch.uint8).pin_memory()
    target = torch.zeros((count, row_bytes), dtype=torch.uint8, device="cuda")
    rates = tuple(
        CopyRate(
            threads=1,
            copy_bytes=count * row_bytes // pieces,
            rate=count
            * row_bytes
            / min(_device_pass_s(torch, source, target, pieces, clock) for _ in range(_PASSES)),
        )
        # row by row, and all in one: what batched copies can reach at most
        for pieces in sorted({count, 1}, reverse=True)
    )
    return CopyReport(device="cuda", rates=rates)


def _device_pass_s(torch: Any, source: Any, target: Any, pieces: int, clock: Clock) -> float:
    torch.cuda.synchronize()
    began_s = clock.monotonic_s()
    if pieces == 1:
        target.copy_(source, non_blocking=True)
    else:
        for index in range(pieces):
            target[index].copy_(source[index], non_blocking=True)
    torch.cuda.synchronize()
    return max(clock.monotonic_s() - began_s, 1e-9)


if __name__ == "__main__":
    sys.exit(main())
