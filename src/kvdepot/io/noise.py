"""Foreign work for the contention test: reads, writes or network traffic at a share of what goes alone.

    python -P -m kvdepot.io.noise '{"kind": "read", "folder": "/srv/noise", "share": 0.5}'

A process of its own. It works only in the folder, or towards the address, that it is given. First it
measures for a second how fast it can go alone and says so in one line; then it works at the share of
that until its standard input is closed, and says how many bytes it has moved.
"""

from __future__ import annotations

import os
import select
import socket
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import msgspec

from kvdepot.clock import SystemClock
from kvdepot.io.buffers import HostBuffer
from kvdepot.io.localfile import O_DIRECT

__all__ = ["NoiseOrder", "NoiseReport", "main"]

_CALIBRATION_S = 1.0
_FILE_BYTES = 256 << 20
_FILE = "kvdepot-noise.tmp"


class NoiseOrder(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What to do."""

    kind: str
    share: float
    folder: str = ""
    #: host:port that takes bytes; empty: a sink of our own on the loopback interface
    address: str = ""
    block_bytes: int = 1 << 20


class NoiseReport(msgspec.Struct, frozen=True):
    """A line of output."""

    #: bytes a second when it went alone
    alone: float
    bytes_moved: int


def main() -> int:
    """Work until standard input is closed."""
    order = msgspec.json.decode(sys.argv[1], type=NoiseOrder)
    clock = SystemClock()
    buffer = HostBuffer(order.block_bytes, is_prefaulted=True)
    path = Path(order.folder) / _FILE
    step, finish = _steps(order, path, buffer.memory)
    try:
        began_s, moved = clock.monotonic_s(), 0
        while clock.monotonic_s() - began_s < _CALIBRATION_S:
            moved += step()
        alone = moved / (clock.monotonic_s() - began_s)
        _say(NoiseReport(alone, 0))
        began_s, moved = clock.monotonic_s(), 0
        while True:
            behind = order.share * alone * (clock.monotonic_s() - began_s) - moved
            wait_s = 0.0 if behind > 0 else -behind / (order.share * alone or 1.0)
            if select.select([0], [], [], min(wait_s, 1.0))[0]:
                break  # closed: nothing is ever written to it
            if behind > 0:
                moved += step()
        _say(NoiseReport(alone, moved))
    finally:
        finish()
    return 0


def _say(report: NoiseReport) -> None:
    sys.stdout.buffer.write(msgspec.json.encode(report) + b"\n")
    sys.stdout.buffer.flush()


def _steps(
    order: NoiseOrder, path: Path, memory: memoryview
) -> tuple[Callable[[], int], Callable[[], None]]:
    """A call that moves some bytes, and what is to be done in the end."""
    if order.kind == "network":
        return _network(order, memory)
    flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC
    try:
        fd = os.open(path, flags | O_DIRECT, 0o600)
    except OSError:
        fd = os.open(path, flags, 0o600)
    place = 0
    if order.kind == "read":
        for offset in range(0, _FILE_BYTES, len(memory)):
            os.pwritev(fd, [memory], offset)

    def step() -> int:
        nonlocal place
        call = os.preadv if order.kind == "read" else os.pwritev
        moved = int(call(fd, [memory], place))
        place = (place + moved) % (_FILE_BYTES - len(memory) + 1) // len(memory) * len(memory)
        return moved

    def finish() -> None:
        os.close(fd)
        path.unlink(missing_ok=True)

    return step, finish


def _network(order: NoiseOrder, memory: memoryview) -> tuple[Callable[[], int], Callable[[], None]]:
    address = order.address
    if not address:
        sink = socket.create_server(("127.0.0.1", 0))
        address = f"127.0.0.1:{sink.getsockname()[1]}"
        threading.Thread(target=_swallow, args=(sink,), daemon=True).start()
    host, _, port = address.rpartition(":")
    connection = socket.create_connection((host, int(port)), timeout=10)

    def step() -> int:
        connection.sendall(memory)
        return len(memory)

    return step, connection.close


def _swallow(sink: socket.socket) -> None:
    connection, _ = sink.accept()
    with connection:
        while connection.recv(1 << 20):
            pass


if __name__ == "__main__":
    sys.exit(main())
