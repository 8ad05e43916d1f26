"""The in-memory index: block key -> where its bytes are. Lookups touch no file system.

Columns of numpy arrays instead of Python objects: about 56 bytes of columns and 7 to 14 bytes of hash
table per block. The hash table is open addressing with linear probing over the keys' first word, which
is uniform because keys are SHA-256.

Ownership: any thread may look up; changes are serialised by `_changing`. Readers and the changes that
are made in place hold `_view`, for well under a millisecond each (changes go in slices); growing copies
outside of it and swaps.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from kvdepot.io.buffers import ALIGNMENT
from kvdepot.keys import BlockKey
from kvdepot.pool.segment import Records, key_table

__all__ = ["BlockIndex", "Locations"]

_EMPTY = np.uint32(0xFFFFFFFF)
_GONE = np.uint32(0xFFFFFFFE)
_LOAD_MAX = 0.65
_SLICE = 1024
#: so few keys are looked up one by one
_SCALAR_MAX = 4
#: so many keys are looked up in one go, so that nobody waits long for the view
_LOOK_MAX = 2048
#: lookups probe in growing steps, so that a miss at the first block costs one small step
_LOOKUP_STEPS = (1, 31, 480, 3584)

_Words = npt.NDArray[np.uint64]
_Ids = npt.NDArray[np.int64]


class Locations(NamedTuple):
    """Where blocks are, and what their bytes must hash to; one entry per key asked for.

    Where `is_present` is False the other columns mean nothing.
    """

    is_present: npt.NDArray[np.bool_]
    segment_ids: npt.NDArray[np.int64]
    offsets: npt.NDArray[np.int64]
    lengths: npt.NDArray[np.int64]
    checksums: npt.NDArray[np.uint64]


class _Columns:
    """One row per indexed block; rows are reused through `BlockIndex._free`."""

    __slots__ = ("checksum", "key", "length", "offset", "segment")

    def __init__(self, rows: int) -> None:
        self.key: _Words = np.zeros((rows, 4), dtype=np.uint64)
        self.checksum = np.zeros(rows, dtype=np.uint64)
        self.segment = np.zeros(rows, dtype=np.uint32)
        #: in units of ALIGNMENT, so that 32 bits reach 16 TiB into a segment
        self.offset = np.zeros(rows, dtype=np.uint32)
        self.length = np.zeros(rows, dtype=np.uint32)

    def __len__(self) -> int:
        return len(self.checksum)

    @property
    def memory_bytes(self) -> int:
        return sum(getattr(self, name).nbytes for name in self.__slots__)

    def grown(self, rows: int) -> _Columns:
        larger = _Columns(rows)
        for name in self.__slots__:
            getattr(larger, name)[: len(self)] = getattr(self, name)
        return larger


class BlockIndex:
    """Block key -> place, for the segments of one namespace. Thread-safe."""

    def __init__(self) -> None:
        self._changing = threading.RLock()
        self._view = threading.Lock()
        self._columns = _Columns(1024)
        self._table = np.full(2048, _EMPTY, dtype=np.uint32)
        self._used = 0  # table entries that are not empty, the gone ones included
        self._next_row = 0
        self._free: list[_Ids] = []
        self._rows_of: dict[int, _Ids] = {}
        self._live = 0
        #: rows whose key is indexed through another segment; they step in when that one goes
        self._spare: dict[bytes, list[int]] = {}

    def __len__(self) -> int:
        return self._live

    @property
    def memory_bytes(self) -> int:
        """Bytes of all arrays, the segments' row lists included. Takes no lock."""
        return self._columns.memory_bytes + self._table.nbytes + self._next_row * 8

    # looking up

    def prefix(self, keys: Sequence[BlockKey]) -> int:
        """How many keys from the first on are present without a gap."""
        start = 0
        step_index = 0
        while start < len(keys):
            step = _LOOKUP_STEPS[min(step_index, len(_LOOKUP_STEPS) - 1)]
            step_index += 1
            chunk = keys[start : start + step]
            words = key_table(chunk)
            with self._view:
                rows = self._find(words)[0]
            absent = np.flatnonzero(rows < 0)
            if absent.size:
                return start + int(absent[0])
            start += len(chunk)
        return start

    def locate(self, keys: Sequence[BlockKey]) -> Locations:
        """Where each block is. A look at a few thousand keys at a time, each consistent."""
        if len(keys) <= _LOOK_MAX:
            return self._locate(keys)
        parts = [self._locate(keys[n : n + _LOOK_MAX]) for n in range(0, len(keys), _LOOK_MAX)]
        return Locations(*map(np.concatenate, zip(*parts, strict=True)))

    def _locate(self, keys: Sequence[BlockKey]) -> Locations:
        words = key_table(keys)
        with self._view:
            rows = self._find(words)[0]
            columns = self._columns
            found = np.maximum(rows, 0)
            return Locations(
                rows >= 0,
                columns.segment[found].astype(np.int64),
                columns.offset[found].astype(np.int64) * ALIGNMENT,
                columns.length[found].astype(np.int64),
                columns.checksum[found],
            )

    def contains(self, keys: Sequence[BlockKey]) -> list[bool]:
        """Which of the keys are present, gaps or not."""
        if len(keys) <= _SCALAR_MAX:
            with self._view:
                return [self._holds(key) for key in keys]
        is_present: list[bool] = self.locate(keys).is_present.tolist()
        return is_present

    # changing

    def insert(self, segment_id: int, records: Records) -> None:
        """Take a segment's blocks in. A key that another segment holds too is kept as its spare."""
        with self._changing:
            rows = self._allocate(len(records))
            for start in range(0, len(records), _SLICE):
                part = records[start : start + _SLICE]
                self._insert_slice(segment_id, rows[start : start + _SLICE], part)
            known = self._rows_of.get(segment_id)
            self._rows_of[segment_id] = rows if known is None else np.concatenate((known, rows))

    def remove_segment(self, segment_id: int) -> int:
        """Forget a segment's blocks; return how many keys are present no more."""
        with self._changing:
            rows = self._rows_of.pop(segment_id, None)
            if rows is None:
                return 0
            before = self._live
            for start in range(0, len(rows), _SLICE):
                self._remove_rows(rows[start : start + _SLICE])
            self._free.append(rows)
            return before - self._live

    def forget(self, key: BlockKey, segment_id: int, offset: int) -> bool:
        """Forget one block if it is still at that place; False if it has moved or gone."""
        with self._changing:
            at = self.locate((key,))
            if not at.is_present[0] or (at.segment_ids[0], at.offsets[0]) != (segment_id, offset):
                return False
            with self._view:
                row = self._find(key_table((key,)))[0]
            # the row stays its segment's, out of the table, until the segment goes
            self._remove_rows(row)
            return True

    # below: callers hold `_changing`

    def _allocate(self, count: int) -> _Ids:
        """Rows for so many blocks; grows columns and table first if needed."""
        taken: list[_Ids] = []
        missing = count
        while missing and self._free:
            rows = self._free.pop()
            if len(rows) > missing:
                self._free.append(rows[missing:])
                rows = rows[:missing]
            taken.append(rows)
            missing -= len(rows)
        if missing:
            if self._next_row + missing > len(self._columns):
                # a quarter more at a time: memory stays near the need, copies stay rare
                wanted = max(self._next_row + missing, len(self._columns) * 5 // 4)
                larger = self._columns.grown(wanted)
                with self._view:
                    self._columns = larger
            taken.append(np.arange(self._next_row, self._next_row + missing, dtype=np.int64))
            self._next_row += missing
        if self._used + count > len(self._table) * _LOAD_MAX:
            self._rebuild(self._live + count)
        return np.concatenate(taken) if taken else np.empty(0, dtype=np.int64)

    def _rebuild(self, wanted: int) -> None:
        """A table with room for `wanted` keys and without gone entries, swapped in when ready."""
        size = len(self._table)
        while wanted > size * _LOAD_MAX * 0.75:
            size *= 2
        table = np.full(size, _EMPTY, dtype=np.uint32)
        rows = self._table[self._table < _GONE].astype(np.int64)
        for start in range(0, len(rows), 1 << 16):
            part = rows[start : start + (1 << 16)]
            _place(table, self._columns.key[part, 0], part)
        with self._view:
            self._table = table
        self._used = len(rows)

    def _insert_slice(self, segment_id: int, rows: _Ids, records: Records) -> None:
        words = np.ascontiguousarray(records["key"])
        columns = self._columns
        with self._view:
            columns.key[rows] = words
            columns.checksum[rows] = records["checksum"]
            columns.segment[rows] = segment_id
            columns.offset[rows] = records["offset"] // ALIGNMENT
            columns.length[rows] = records["length"]
            present = self._find(words)[0] >= 0
            _, first = np.unique(words.view("V32").reshape(-1), return_index=True)
            is_first = np.zeros(len(rows), dtype=bool)
            is_first[first] = True
            fresh = is_first & ~present
            _place(self._table, words[fresh, 0], rows[fresh])
        placed = int(fresh.sum())
        self._used += placed
        self._live += placed
        for index in np.flatnonzero(~fresh).tolist():
            self._spare.setdefault(words[index].tobytes(), []).append(int(rows[index]))

    def _remove_rows(self, rows: _Ids) -> None:
        words = self._columns.key[rows]
        with self._view:
            found, slots = self._find(words)
            is_indexed = found == rows
            self._table[slots[is_indexed]] = _GONE
        self._live -= int(is_indexed.sum())
        if not self._spare:
            return
        leaving = set(rows.tolist())
        for position, key in enumerate(words.view("V32").reshape(-1).tolist()):
            spares = self._spare.get(key)
            if spares is None:
                continue
            # a footer may name a key twice: a row that leaves as well cannot step in
            spares[:] = [row for row in spares if row not in leaving]
            if spares and is_indexed[position]:
                self._promote(words[position : position + 1], spares.pop())
            if not spares:
                del self._spare[key]

    def _promote(self, words: _Words, row: int) -> None:
        with self._view:
            _place(self._table, words[:, 0], np.array([row], dtype=np.int64))
        self._live += 1
        # at most one more: a gone entry may have been taken again, which this over-counts safely
        self._used += 1

    # callers hold `_view`

    def _holds(self, key: BlockKey) -> bool:
        """`_find` for one key; for a few keys this is quicker than a dozen calls on arrays."""
        table, keys = self._table, self._columns.key
        mask = len(table) - 1
        slot = int.from_bytes(key[:8], "little") & mask
        while (entry := table[slot]) != _EMPTY:
            if entry != _GONE and keys[entry].tobytes() == key:
                return True
            slot = (slot + 1) & mask
        return False

    def _find(self, words: _Words) -> tuple[_Ids, _Ids]:
        """Row (or -1) and table slot of each key."""
        table, keys = self._table, self._columns.key
        mask = len(table) - 1
        slots = (words[:, 0] & np.uint64(mask)).astype(np.int64)
        rows = np.full(len(words), -1, dtype=np.int64)
        active = np.arange(len(words))
        while active.size:
            entries = table[slots[active]]
            held = entries < _GONE
            candidates = np.where(held, entries, 0).astype(np.int64)
            equal = held & (keys[candidates] == words[active]).all(axis=1)
            rows[active[equal]] = candidates[equal]
            active = active[~equal & (entries != _EMPTY)]
            slots[active] = (slots[active] + 1) & mask
        return rows, slots


def _place(table: npt.NDArray[np.uint32], first_words: npt.NDArray[np.uint64], rows: _Ids) -> None:
    """Enter rows whose keys are absent into free slots of the table."""
    mask = len(table) - 1
    slots = (first_words & np.uint64(mask)).astype(np.int64)
    pending = np.arange(len(rows))
    while pending.size:
        is_free = table[slots[pending]] >= _GONE
        candidates = pending[is_free]
        _, first = np.unique(slots[candidates], return_index=True)
        winners = candidates[first]
        table[slots[winners]] = rows[winners]
        is_left = np.ones(len(rows), dtype=bool)
        is_left[winners] = False
        pending = pending[is_left[pending]]
        slots[pending] = (slots[pending] + 1) & mask
