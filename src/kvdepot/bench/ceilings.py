"""Ceilings: the most that storage, network and the copy into the engine's memory give, measured in R0.

A load can be no faster than the least of them. They are measured with no engine running, with the sizes of
the pool at hand: reads in units as the product cuts them, copies of the model's own rows.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping
from typing import Literal
from urllib.parse import urlsplit

import msgspec

from kvdepot.bench.plan import Arm
from kvdepot.bench.scrape import Counts
from kvdepot.clock import Clock
from kvdepot.config import PoolConfig
from kvdepot.errors import ConfigError
from kvdepot.identity import decode_manifest
from kvdepot.io.buffers import ALIGNMENT
from kvdepot.io.copyrate import CopyOrder, CopyRate, CopyReport
from kvdepot.io.filesystem import NETWORK_FILE_SYSTEMS, file_system_of
from kvdepot.io.hostcounters import link_rate
from kvdepot.io.poolcontent import pool_content
from kvdepot.io.readrate import read_rates
from kvdepot.units import round_up

__all__ = [
    "Ceiling",
    "Ceilings",
    "DepthRate",
    "decode_ceilings",
    "encode_ceilings",
    "measure_ceilings",
    "unit_of",
]

_SCHEMA = "kvdepot-bench-ceilings/2"
_COPY_WAIT_S = 120.0
_LOOPBACK = ("127.0.0.1", "::1", "localhost")

#: which of them it is
Ceiling = Literal["device", "network", "host-to-device"]


class DepthRate(msgspec.Struct, frozen=True, kw_only=True):
    """Reading with so many reads at once."""

    depth: int
    #: bytes a second
    rate: float


class Ceilings(msgspec.Struct, frozen=True, kw_only=True):
    """Of one arm. Rates are bytes a second; what could not be measured is None or empty."""

    #: of a block of the pool, per group of layers; empty where its files do not say
    block_bytes: tuple[int, ...] = ()
    #: of one read
    unit_bytes: int = 0
    #: with O_DIRECT; else through the page cache, emptied of the pool's files before
    is_direct: bool = True
    #: of the pool's files, at several depths
    reads: tuple[DepthRate, ...] = ()
    #: of the fastest link, where the pool is on a network file system
    network: float | None = None
    #: where the engine's KV memory is; empty where nobody can say
    copy_device: str = ""
    #: from host memory into the engine's KV memory
    copies: tuple[CopyRate, ...] = ()

    @property
    def read_rate(self) -> float | None:
        """The most that the pool's files gave at any depth."""
        return max((each.rate for each in self.reads), default=None)

    @property
    def copy_rate(self) -> float | None:
        """The most that copies into the engine's memory gave."""
        return max((each.rate for each in self.copies), default=None)

    @property
    def least(self) -> tuple[Ceiling, float] | None:
        """The ceiling that binds: the least of those that are known."""
        every: list[tuple[Ceiling, float | None]] = [
            ("device", self.read_rate),
            ("network", self.network),
            ("host-to-device", self.copy_rate),
        ]
        known = [(name, rate) for name, rate in every if rate is not None]
        return min(known, key=lambda each: each[1], default=None)


class _Kept(msgspec.Struct, frozen=True, kw_only=True):
    schema: str = _SCHEMA
    arms: dict[str, Ceilings]


def encode_ceilings(ceilings: Mapping[str, Ceilings]) -> bytes:
    """The content of a result's file, by arm."""
    return msgspec.json.encode(_Kept(arms=dict(ceilings)))


def decode_ceilings(content: bytes | None) -> dict[str, Ceilings]:
    """The ceilings in a result's file; none where there is no file, or one that nobody can read.

    The first releases kept one number for each arm, of reads of 2 MiB one after the other.
    """
    if content is None:
        return {}
    try:
        kept = msgspec.json.decode(content, type=_Kept)
        if kept.schema == _SCHEMA:
            return kept.arms
    except msgspec.MsgspecError:
        pass
    try:
        rates = msgspec.json.decode(content, type=dict[str, float])
    except msgspec.MsgspecError:
        return {}
    return {
        arm: Ceilings(unit_bytes=2 << 20, reads=(DepthRate(depth=1, rate=rate),))
        for arm, rate in rates.items()
    }


def measure_ceilings(arm: Arm, counts: Counts, clock: Clock) -> Ceilings | None:
    """Measure an arm with a pool folder, while none of its engines runs. Blocks for some seconds.

    Args:
        arm: its pool has files.
        counts: what its engine has said last: its device, and the size of its blocks where the pool does
            not say.
        clock: of the spans.

    Returns:
        None where the pool has no files to read.
    """
    content = pool_content(arm.pool)
    blocks = _block_bytes(content.manifest)
    unit_bytes = unit_of(blocks, list(content.sizes.values()))
    found = read_rates(arm.pool, content.sizes, clock, unit_bytes=unit_bytes)
    if found is None:
        return None
    report = _copy_report(_row_bytes(blocks, counts, unit_bytes), counts) if _is_here(arm) else None
    is_remote = file_system_of(arm.pool) in NETWORK_FILE_SYSTEMS
    return Ceilings(
        block_bytes=blocks,
        unit_bytes=unit_bytes,
        is_direct=found.is_direct,
        reads=tuple(DepthRate(depth=depth, rate=rate) for depth, rate in found.rates),
        network=link_rate() if is_remote else None,
        copy_device="" if report is None else report.device,
        copies=() if report is None else report.rates,
    )


def unit_of(block_bytes: tuple[int, ...], file_bytes: list[int]) -> int:
    """Bytes of one read: as many whole blocks as the product reads at once, at least one.

    Args:
        block_bytes: of a block of each group; empty: a file is a block, as where each has its own.
        file_bytes: sizes of the pool's files.
    """
    most = _read_unit_bytes()
    if block_bytes:
        block = round_up(max(block_bytes), ALIGNMENT)
        return max(most // block, 1) * block
    middle = sorted(file_bytes)[len(file_bytes) // 2] if file_bytes else most
    return min(max(round_up(middle, ALIGNMENT), ALIGNMENT), most)


def _read_unit_bytes() -> int:
    # only its other settings are asked for
    return PoolConfig.of("/").read_unit_bytes


def _block_bytes(manifest: bytes | None) -> tuple[int, ...]:
    try:
        return () if manifest is None else decode_manifest(manifest).block_bytes
    except ConfigError:
        return ()


def _row_bytes(block_bytes: tuple[int, ...], counts: Counts, unit_bytes: int) -> int:
    """Of a row of the host tier: one block of one group."""
    if block_bytes:
        return max(block_bytes)
    return (counts.token_bytes or 0) * (counts.block_tokens or 0) or unit_bytes


def _is_here(arm: Arm) -> bool:
    """The engine runs on this host."""
    return bool(arm.command) or urlsplit(arm.url).hostname in _LOOPBACK


def _copy_report(row_bytes: int, counts: Counts) -> CopyReport | None:
    order = CopyOrder(row_bytes=row_bytes, device=counts.device or "")
    command = [sys.executable, "-P", "-m", "kvdepot.io.copyrate"]
    try:
        done = subprocess.run(  # noqa: S603 - our own interpreter and module
            [*command, msgspec.json.encode(order).decode()],
            stdout=subprocess.PIPE,
            timeout=_COPY_WAIT_S,
            check=True,
        )
        return msgspec.json.decode(done.stdout, type=CopyReport)
    except (subprocess.SubprocessError, OSError, msgspec.MsgspecError):
        # a device that refuses is no reason to lose what was measured: there is no such ceiling then
        return None
