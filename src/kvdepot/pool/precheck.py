"""Whether a pool can be used, asked before an engine is started over it. Blocks, for a bounded time."""

from __future__ import annotations

import logging
import threading

from kvdepot.config import PoolConfig
from kvdepot.errors import PoolFull, PoolUnavailable
from kvdepot.io.disk import Disk
from kvdepot.io.localdisk import LocalDisk
from kvdepot.pool.catalog import tmp_path
from kvdepot.pool.lease import new_writer_name
from kvdepot.pool.poolfile import open_pool_file
from kvdepot.pool.segment import SegmentName
from kvdepot.urls import distinct_roots

__all__ = ["check_pool"]

log = logging.getLogger(__name__)

#: a mounted file system that answers later than that will not make anything faster
_TIMEOUT_S = 20.0


def check_pool(config: PoolConfig, *, timeout_s: float = _TIMEOUT_S) -> list[str]:
    """Open every root, make it a pool if it is none, and write and remove a small file.

    Returns:
        Warnings: a full root still serves what it has.

    Raises:
        PoolUrlError: a URL does not name one place.
        PoolDenied, PoolUnavailable, FormatError, UnknownVersion, ConfigError: it cannot be used.
    """
    warnings: list[str] = []
    for root in distinct_roots(config.urls):
        try:
            _within(timeout_s, root.path, config)
        except PoolFull as error:
            warnings.append(f"nothing can be stored now: {error}")
    return warnings


def _within(timeout_s: float, path: str, config: PoolConfig) -> None:
    """Check one root in a thread, so that a hung mount ends in an error and not in silence."""
    failures: list[BaseException] = []

    def check() -> None:
        try:
            _check(LocalDisk(path, is_read_only=config.read_only), config)
        except BaseException as error:  # noqa: BLE001 - raised again by whoever waits
            failures.append(error)

    thread = threading.Thread(target=check, name="kvdepot-precheck", daemon=True)
    thread.start()
    thread.join(timeout_s)
    if thread.is_alive():
        raise PoolUnavailable(
            f"{path} does not answer within {timeout_s:.0f} s",
            path=path,
            hint="is it a mount whose server is away?",
        )
    for failure in failures:
        raise failure


def _check(disk: Disk, config: PoolConfig) -> None:
    try:
        open_pool_file(disk, config.capacity_bytes, is_read_only=config.read_only)
        if config.read_only:
            return
        # named as a writer would name it, so that it is swept if we are killed in between
        name = tmp_path(SegmentName(new_writer_name(), 0), 1)
        file = disk.create(name, 0)
        try:
            file.write(0, [memoryview(b"\0")])
        finally:
            file.close()
            disk.remove(name)
    finally:
        disk.close()
