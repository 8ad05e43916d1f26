"""What the disk can do without us: fio where it is installed, and plain threads over preadv/pwritev."""

from __future__ import annotations

import json
import os
import queue
import shutil
import subprocess
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from kvdepot.io.buffers import HostBuffer


def fio_path() -> str | None:
    """fio's program, if there is one."""
    return shutil.which("fio")


def fio_rate(file: Path, length_bytes: int, block_bytes: int, *, mode: str, depth: int) -> float:
    """Bytes a second of fio with O_DIRECT and libaio. `mode` is ``read`` or ``write``."""
    done = subprocess.run(
        [
            fio_path() or "fio",
            "--name=raw",
            f"--filename={file}",
            f"--rw={mode}",
            f"--bs={block_bytes}",
            f"--size={length_bytes // block_bytes * block_bytes}",
            "--direct=1",
            "--ioengine=libaio",
            f"--iodepth={depth}",
            "--output-format=json",
        ],
        capture_output=True,
        text=True,
        check=True,
    )
    return float(json.loads(done.stdout)["jobs"][0][mode]["bw_bytes"])


def threaded_rate(pieces: Sequence[Callable[[], None]], length_bytes: int, threads: int) -> float:
    """Bytes a second of so many threads that take the pieces in order."""
    work: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
    for piece in pieces:
        work.put(piece)
    for _ in range(threads):
        work.put(None)

    def run() -> None:
        while (piece := work.get()) is not None:
            piece()

    workers = [threading.Thread(target=run) for _ in range(threads)]
    began = time.perf_counter()
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    return length_bytes / (time.perf_counter() - began)


def raw_read_pieces(
    fd: int, target: HostBuffer, length_bytes: int, unit_bytes: int
) -> list[Callable[[], None]]:
    """preadv calls over one big file, as plain as can be."""

    def piece(offset: int) -> Callable[[], None]:
        part = target.memory[offset : min(offset + unit_bytes, length_bytes)]

        def read() -> None:
            if os.preadv(fd, [part], offset) != part.nbytes:
                raise OSError("short read")

        return read

    return [piece(offset) for offset in range(0, length_bytes, unit_bytes)]


def raw_write_pieces(
    fd: int, source: HostBuffer, length_bytes: int, unit_bytes: int
) -> list[Callable[[], None]]:
    """pwritev calls into one big file."""

    def piece(offset: int) -> Callable[[], None]:
        part = source.memory[offset : min(offset + unit_bytes, length_bytes)]

        def write() -> None:
            if os.pwritev(fd, [part], offset) != part.nbytes:
                raise OSError("short write")

        return write

    return [piece(offset) for offset in range(0, length_bytes, unit_bytes)]


def file_per_block_pieces(
    folder: Path, target: HostBuffer, block_bytes: int, blocks: int
) -> list[Callable[[], None]]:
    """open, one read, close: one small file per block, as most tiers keep them."""

    def piece(index: int) -> Callable[[], None]:
        part = target.memory[index * block_bytes : (index + 1) * block_bytes]
        path = folder / f"{index:06d}.bin"

        def read() -> None:
            fd = os.open(path, os.O_RDONLY | os.O_DIRECT)
            try:
                if os.preadv(fd, [part], 0) != part.nbytes:
                    raise OSError("short read")
            finally:
                os.close(fd)

        return read

    return [piece(index) for index in range(blocks)]
