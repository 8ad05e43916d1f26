"""Settings of a pool, with the reason beside each default. Every queue and every wait has a limit."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec

from kvdepot.errors import ConfigError
from kvdepot.units import MIB, parse_bytes

__all__ = ["PoolConfig", "WorkerConfig"]

#: longer than any process runs, and less than a wait of the system can count
_SECONDS_MAX = 1e9
_Positive = Annotated[int, msgspec.Meta(gt=0)]


class PoolConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """How one process uses a pool. Capacity and floors are per root and hold for all processes."""

    #: one URL per root; blocks are striped over the roots
    urls: tuple[str, ...]
    #: bytes of all segments of a root; None: what pool.json says, at first half of the free space
    capacity_bytes: int | None = None
    #: free space to leave to others; None: 5% of the file system, at most 10 GiB
    free_bytes_min: int | None = None
    #: free inodes to leave to others; None: 1% of the file system's, at most 1,000
    free_inodes_min: int | None = None
    #: a segment is published at this size; large enough that metadata calls vanish, small enough
    #: that eviction by whole segments stays fine-grained
    segment_bytes: _Positive = 64 * MIB
    #: ... or at this age, so that other instances see new blocks about a second later
    segment_age_s: float = 1.0
    #: stores waiting or being written; more are dropped, because a lost store is only a future miss
    write_queue_bytes: _Positive = 256 * MIB
    #: more than write at once, so that checksums and file names hide behind the others' writes
    write_threads: _Positive = 8
    #: write calls at once per root; two fill the device on the machines measured
    writes_in_flight: _Positive = 3
    #: one write call; longer than a read, because nobody waits for it
    write_unit_bytes: _Positive = 8 * MIB
    #: more than the budget lets read at once, so that checksums hide behind the others' reads
    read_threads: _Positive = 8
    #: one read call; on the machines measured, smaller units lose bandwidth, larger ones parallelism
    read_unit_bytes: _Positive = 4 * MIB
    #: bytes of reads in flight per root, over all requests, at first; tuned while running
    read_budget_bytes: _Positive = 16 * MIB
    #: one read call that takes longer counts against its root, which is left alone after a few; all
    #: units in flight together take this long at 5 MB/s
    read_stall_s: float = 5.0
    #: how often other writers' segments are looked for
    discover_interval_s: float = 0.5
    #: silence after which a writer on another host counts as dead; same-host death is seen at once
    lease_s: float = 30.0
    #: O_DIRECT: ``auto`` probes the real root and falls back to buffered I/O
    direct: Literal["auto", "on", "off"] = "auto"
    #: no writes at all: no stores, no leases, no cleaning
    read_only: bool = False

    def __post_init__(self) -> None:
        if not self.urls:
            raise ConfigError("a pool needs at least one URL")
        if len(set(self.urls)) != len(self.urls):
            raise ConfigError(f"the same root is given twice: {', '.join(self.urls)}")
        if self.capacity_bytes == 0:
            raise ConfigError("capacity_bytes must be positive: a pool of 0 bytes holds nothing")
        for name in ("capacity_bytes", "free_bytes_min", "free_inodes_min"):
            value = getattr(self, name)
            if value is not None and value < 0:
                raise ConfigError(f"{name} cannot be negative: {value}")
        for name in ("segment_age_s", "read_stall_s", "discover_interval_s", "lease_s"):
            if not 0 < getattr(self, name) <= _SECONDS_MAX:
                raise ConfigError(
                    f"{name} must be positive and at most {_SECONDS_MAX:.0f}: {getattr(self, name)}"
                )

    @classmethod
    def of(cls, *urls: str, capacity: str | int | None = None, **settings: object) -> PoolConfig:
        """Build a config from URLs, with the capacity as a size such as ``"64GiB"``.

        Raises:
            ConfigError: an unknown setting, a wrong type, or a value out of range.
        """
        fields = dict(settings, urls=urls)
        if capacity is not None:
            fields["capacity_bytes"] = parse_bytes(capacity)
        try:
            return msgspec.convert(fields, cls)
        except msgspec.ValidationError as error:
            raise ConfigError(f"pool settings: {error}") from error


class WorkerConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """How an engine's process watches the child process that does its I/O."""

    #: for a child to start and to open the pool: imports take a second, an index of many footers five
    open_timeout_s: float = 30.0
    #: how often the child is asked whether it is there
    heartbeat_s: float = 1.0
    #: silence after which it is killed and replaced; a busy machine makes a healthy one wait seconds
    hang_s: float = 10.0
    #: one read or write that takes longer means storage that hangs: only the end of the process gives
    #: the rows back, so it is killed and replaced
    stuck_s: float = 60.0
    #: wait before a replacement is started, doubled each time up to the maximum
    backoff_s: float = 0.5
    backoff_s_max: float = 30.0
    #: rows of loads and stores that wait to be sent to the child; more are failed and dropped
    queue_rows: _Positive = 65_536

    def __post_init__(self) -> None:
        for name, value in msgspec.structs.asdict(self).items():
            if not 0 < value <= _SECONDS_MAX:
                raise ConfigError(
                    f"{name} must be positive and at most {_SECONDS_MAX:.0f}: {value}"
                )
        if self.hang_s < 2 * self.heartbeat_s:
            raise ConfigError(
                f"hang_s ({self.hang_s}) must be at least twice heartbeat_s ({self.heartbeat_s})"
            )
