"""How large things may be: a root's limits, its segments, its blocks."""

from __future__ import annotations

import logging
from typing import NamedTuple

from kvdepot.errors import ConfigError
from kvdepot.io.buffers import ALIGNMENT
from kvdepot.io.disk import Space
from kvdepot.pool.segment import empty_segment_bytes
from kvdepot.units import GIB, format_bytes, round_up

__all__ = ["Limits", "block_bytes_max", "configured_capacity", "segment_bytes_within"]

log = logging.getLogger(__name__)


class Limits(NamedTuple):
    """What must hold of a root at every moment."""

    capacity_bytes: int
    free_bytes_min: int
    free_inodes_min: int

    @classmethod
    def of(
        cls, space: Space, capacity_bytes: int, free_bytes: int | None, free_inodes: int | None
    ) -> Limits:
        """Fill in the defaults: 5% of the space (at most 10 GiB), 1% of the inodes (at most 1,000)."""
        if free_bytes is None:
            free_bytes = min(space.total_bytes // 20, 10 * GIB)
        if free_inodes is None:
            free_inodes = min((space.total_inodes or 0) // 100 + 1, 1000)
        return cls(capacity_bytes, free_bytes, free_inodes)


def configured_capacity(place: str, configured: int | None, stored: int) -> int:
    """The capacity that this process keeps to: its own setting, else what pool.json says."""
    if configured is None:
        return stored
    if configured != stored:
        log.warning(
            "%s: capacity %s is set here, pool.json says %s; this process keeps to its own",
            place,
            format_bytes(configured),
            format_bytes(stored),
        )
    return configured


def segment_bytes_within(capacity: int, wanted: int, block_bytes: int, *, place: str) -> int:
    """A segment's size: as wanted, but one block must fit into it, and 32 of it into the capacity.

    Each writer claims one segment at a time; larger ones would leave no room for the data.

    Raises:
        ConfigError: the capacity does not hold one block.
    """
    least = empty_segment_bytes(1) + round_up(block_bytes, ALIGNMENT)
    if least > capacity:
        raise ConfigError(
            f"{place}: a capacity of {format_bytes(capacity)} cannot hold one block of "
            f"{format_bytes(block_bytes)} ({format_bytes(least)} with its frame)"
        )
    return max(min(wanted, capacity // 32), least) // ALIGNMENT * ALIGNMENT


def block_bytes_max(segment_bytes: int) -> int:
    """The largest block that fits into a segment of that size."""
    return segment_bytes - empty_segment_bytes(1)
