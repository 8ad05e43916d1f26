"""The host tier: blocks in this process's memory, and the buffer through which others are reached.

One arena of page-aligned rows per KV-cache group. A row is *free*, *busy* (its owner fills or reads
it, or a store still needs its bytes) or *clean* (a cached block, evictable, least recently used first).
Rows are handed out in runs that are as contiguous as possible, so that one long read fills many and
one strided copy empties them.

Thread-safe. Nothing here blocks on I/O.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from kvdepot.errors import ConfigError
from kvdepot.io.buffers import ALIGNMENT, HostBuffer
from kvdepot.keys import BlockKey
from kvdepot.units import format_bytes, round_up

__all__ = ["HostRows", "RowRun", "contiguous_runs", "host_rows"]


class RowRun(NamedTuple):
    """Neighbouring rows."""

    first_row: int
    rows: int


class HostRows:
    """The rows of one KV-cache group.

    Args:
        block_bytes: bytes of one block; a row is as long, rounded up to the page.
        capacity_bytes: at most so much memory.
        is_shared: memory that a child process can map.

    Raises:
        ConfigError: the capacity does not hold one row.
    """

    def __init__(self, block_bytes: int, capacity_bytes: int, *, is_shared: bool = False) -> None:
        self.block_bytes = block_bytes
        self.row_bytes = round_up(block_bytes, ALIGNMENT)
        self.row_count = capacity_bytes // self.row_bytes
        if self.row_count < 1:
            raise ConfigError(
                f"a host buffer of {format_bytes(capacity_bytes)} does not hold one block of "
                f"{format_bytes(self.row_bytes)}"
            )
        # touched now, so that no restore pays for page faults
        self.buffer = HostBuffer(
            self.row_count * self.row_bytes, is_shared=is_shared, is_prefaulted=True
        )
        self._lock = threading.Lock()
        self._free = set(range(self.row_count))
        #: rows that are cached and unused, least recently used first
        self._clean: OrderedDict[int, BlockKey] = OrderedDict()
        self._row_of: dict[BlockKey, int] = {}
        #: row -> how many owners; rows in neither this nor `_clean` nor `_free` do not exist
        self._users: dict[int, int] = {}
        self._key_of: dict[int, BlockKey] = {}

    def row(self, index: int) -> memoryview:
        """The block's bytes of a row; exactly `block_bytes`, writable, page-aligned."""
        start = index * self.row_bytes
        return self.buffer.memory[start : start + self.block_bytes]

    def run(self, run: RowRun) -> memoryview:
        """The bytes of neighbouring rows, padding between them included."""
        start = run.first_row * self.row_bytes
        return self.buffer.memory[start : start + run.rows * self.row_bytes]

    def prefix(self, keys: Sequence[BlockKey]) -> int:
        """How many keys from the first on are cached without a gap."""
        with self._lock:
            for index, key in enumerate(keys):
                if key not in self._row_of:
                    return index
        return len(keys)

    def holds(self, keys: Sequence[BlockKey]) -> list[bool]:
        """Which of the blocks are cached."""
        with self._lock:
            return [key in self._row_of for key in keys]

    def acquire(self, key: BlockKey) -> int | None:
        """Use a cached block's row; None if it is not cached. Pair with `release`."""
        with self._lock:
            row = self._row_of.get(key)
            if row is not None:
                self._clean.pop(row, None)
                self._users[row] = self._users.get(row, 0) + 1
            return row

    def refresh(self, keys: Sequence[BlockKey]) -> None:
        """Mark cached blocks as used now, the last one first: a prefix outlives what continues it."""
        with self._lock:
            for key in reversed(keys):
                row = self._row_of.get(key)
                if row is not None and row in self._clean:
                    self._clean.move_to_end(row)

    def reserve(self, count: int, *, leave: int = 0) -> list[int]:
        """Take up to `count` rows to fill, evicting unused ones; lowest first, to be contiguous.

        Args:
            count: wanted.
            leave: so many rows must stay free or evictable, for others who matter more.
        """
        with self._lock:
            if leave:
                count = max(min(count, len(self._free) + len(self._clean) - leave), 0)
            while len(self._free) < count and self._clean:
                row, key = self._clean.popitem(last=False)
                del self._row_of[key], self._key_of[row]
                self._free.add(row)
            rows = sorted(self._free)[:count]
            self._free.difference_update(rows)
            for row in rows:
                self._users[row] = 1
            return rows

    def fill(self, row: int, key: BlockKey) -> None:
        """Say that a reserved row now holds a block; others may use it from here on."""
        with self._lock:
            if key not in self._row_of:
                self._row_of[key] = row
                self._key_of[row] = key

    def release(self, rows: Iterable[int]) -> None:
        """End of a use. A row that holds a block stays cached; another becomes free."""
        with self._lock:
            for row in rows:
                self._users[row] -= 1
                if self._users[row]:
                    continue
                del self._users[row]
                key = self._key_of.get(row)
                if key is None:
                    self._free.add(row)
                else:
                    self._clean[row] = key

    def counts(self) -> tuple[int, int, int]:
        """Rows that are free, cached and unused, and in use."""
        with self._lock:
            return len(self._free), len(self._clean), len(self._users)

    def close(self) -> None:
        """Give the memory back, as far as nothing uses it."""
        self.buffer.close()


def host_rows(
    block_bytes: Sequence[int], host_bytes: int, *, is_shared: bool = False
) -> list[HostRows]:
    """The rows of all groups, within so many bytes; raises as `HostRows`."""
    # as many rows in each group: a block is of use only with its groups all together
    row_bytes = [round_up(length, ALIGNMENT) for length in block_bytes]
    rows = host_bytes // sum(row_bytes)
    return [
        HostRows(length, rows * row, is_shared=is_shared)
        for length, row in zip(block_bytes, row_bytes, strict=True)
    ]


def contiguous_runs(rows: Sequence[int]) -> list[RowRun]:
    """Cut a list of rows, in order, into runs of neighbours."""
    runs: list[RowRun] = []
    for row in rows:
        if runs and row == runs[-1].first_row + runs[-1].rows:
            runs[-1] = RowRun(runs[-1].first_row, runs[-1].rows + 1)
        else:
            runs.append(RowRun(row, 1))
    return runs
