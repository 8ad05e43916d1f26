"""The smallest tier that keeps every promise: blocks in memory. A template to start a tier from.

It also is what the conformance kit is tested with, so it can be slowed down and damaged. Several tiers
over one `MemoryBank` act as several processes over one store; a bank that outlives its tiers acts as
persistent storage.
"""

from __future__ import annotations

import threading
import time
import zlib
from collections import Counter, OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple, Self

from kvdepot.io.buffers import ALIGNMENT
from kvdepot.keys import BlockKey
from kvdepot.tiers import Job, Outcome, Read, TierLimits, TierUsage, Turn, Write
from kvdepot.units import MIB

__all__ = ["MemoryBank", "MemoryTier"]


class _Kept(NamedTuple):
    parent: BlockKey
    data: bytearray
    checksum: int


class MemoryBank:
    """Blocks and their limit. Thread-safe; every verb is memory only.

    Args:
        capacity_bytes: payload bytes that it holds; older leaves of the prefix tree make room.
    """

    def __init__(self, capacity_bytes: int = 256 * MIB) -> None:
        self.capacity_bytes = capacity_bytes
        self.used_bytes = 0
        self._lock = threading.RLock()
        #: least recently used first
        self._kept: OrderedDict[BlockKey, _Kept] = OrderedDict()
        self._children: Counter[BlockKey] = Counter()

    def __len__(self) -> int:
        with self._lock:
            return len(self._kept)

    def prefix(self, keys: Sequence[BlockKey]) -> int:
        """How many keys from the first on are present without a gap."""
        with self._lock:
            return next((at for at, key in enumerate(keys) if key not in self._kept), len(keys))

    def take(self, key: BlockKey, parent: BlockKey, data: bytes, agree: Callable[[], bool]) -> bool:
        """Keep a block if it fits and `agree` says yes at the last moment; say whether it is kept."""
        with self._lock:
            if key in self._kept:
                return agree()
            if len(data) > self.capacity_bytes:
                return False
            while self.used_bytes + len(data) > self.capacity_bytes:
                self._drop(self._oldest_leaf())
            if not agree():
                return False
            self._kept[key] = _Kept(parent, bytearray(data), zlib.crc32(data))
            self._children[parent] += 1
            self.used_bytes += len(data)
            return True

    def read(self, key: BlockKey, into: memoryview) -> Outcome:
        """Copy a block out after checking it; a damaged one is forgotten."""
        with self._lock:
            kept = self._kept.get(key)
            if kept is None:
                return Outcome.MISS
            if zlib.crc32(kept.data) != kept.checksum or len(kept.data) != into.nbytes:
                self._drop(key)
                return Outcome.CORRUPT
            into.cast("B")[:] = kept.data
            self._kept.move_to_end(key)
            return Outcome.DONE

    def touch(self, keys: Sequence[BlockKey]) -> None:
        """Mark blocks as used."""
        with self._lock:
            for key in keys:
                if key in self._kept:
                    self._kept.move_to_end(key)

    def damage(self, key: BlockKey) -> None:
        """Spoil a kept block, as a bad disk does."""
        with self._lock:
            self._kept[key].data[len(self._kept[key].data) // 2] ^= 0xFF

    def _oldest_leaf(self) -> BlockKey:
        # the suffix of a chain goes before its prefix: without its parent no block can be found
        return next(key for key in self._kept if not self._children[key])

    def _drop(self, key: BlockKey) -> None:
        kept = self._kept.pop(key)
        self.used_bytes -= len(kept.data)
        self._children[kept.parent] -= 1
        if not self._children[kept.parent]:
            del self._children[kept.parent]


class MemoryTier:
    """`kvdepot.tiers.Tier` over a `MemoryBank`, with worker threads as a tier over storage has.

    Args:
        bank: where the blocks are; a fresh one of its own by default.
        store_bytes_max: bytes of stores in flight beyond which stores are dropped.
        block_bytes_max: the largest block.
        threads: workers for loads, and as many for stores.
    """

    name = "memory"

    def __init__(
        self,
        bank: MemoryBank | None = None,
        *,
        store_bytes_max: int = 64 * MIB,
        block_bytes_max: int = 16 * MIB,
        threads: int = 2,
    ) -> None:
        self.bank = MemoryBank() if bank is None else bank
        self.limits = TierLimits(
            block_bytes_max=block_bytes_max,
            store_bytes_max=store_bytes_max,
            alignment_bytes=ALIGNMENT,
            is_persistent=bank is not None,
            is_shared=bank is not None,
        )
        #: seconds that a worker takes for each block; a test may change it at any time
        self.delay_s = 0.0
        self._lock = threading.Lock()
        self._idle = threading.Condition(self._lock)
        self._in_flight_bytes = 0
        self._is_closed = False
        self._loaders = ThreadPoolExecutor(threads, "memory-load")
        self._storers = ThreadPoolExecutor(threads, "memory-store")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    # the verbs

    def lookup(self, keys: Sequence[BlockKey]) -> int:
        return 0 if self._is_closed else self.bank.prefix(keys)

    def load(
        self,
        reads: Sequence[Read],
        *,
        deadline_s: float | None = None,
        turn: Turn | None = None,  # noqa: ARG002 - its loads take no time worth an order
    ) -> Job:
        job = Job([read.key for read in reads], deadline_s=deadline_s)
        if not self._submit(self._loaders, self._load, job, tuple(reads)):
            job.resolve_all(Outcome.MISS)
        return job

    def store(self, writes: Sequence[Write]) -> Job:
        job = Job([write.key for write in writes])
        accepted = [
            (index, write) for index, write in enumerate(writes) if self._accept(job, index, write)
        ]
        if not self._submit(self._storers, self._store, job, accepted):
            job.resolve_all(Outcome.DROPPED)
        return job

    def touch(self, keys: Sequence[BlockKey]) -> None:
        self.bank.touch(keys)

    def drain(self, timeout_s: float) -> bool:
        with self._idle:
            return self._idle.wait_for(lambda: self._in_flight_bytes == 0, timeout_s)

    def usage(self) -> TierUsage:
        used = self.bank.used_bytes
        return TierUsage(len(self.bank), used, self.bank.capacity_bytes, used)

    def close(self, timeout_s: float = 10.0) -> None:
        self.drain(timeout_s)
        with self._lock:
            self._is_closed = True
        for workers in (self._loaders, self._storers):
            workers.shutdown(wait=True)

    # the work

    def _submit(
        self,
        workers: ThreadPoolExecutor,
        work: Callable[..., None],
        job: Job,
        items: Sequence[object],
    ) -> bool:
        with self._lock:
            if not self._is_closed and items:
                workers.submit(work, job, items)
            return not self._is_closed

    def _load(self, job: Job, reads: Sequence[Read]) -> None:
        for index, read in enumerate(reads):
            if not job.hold():
                return
            try:
                time.sleep(self.delay_s)
                outcome = self.bank.read(read.key, read.into)
                job.resolve(index, outcome, read.into.nbytes)
            finally:
                job.release()

    def _accept(self, job: Job, index: int, write: Write) -> bool:
        """Take a write in, or resolve it here."""
        length = write.data.nbytes
        if self.bank.prefix((write.key,)):
            job.resolve(index, Outcome.DONE, length)
            return False
        with self._lock:
            fits = self._in_flight_bytes + length <= self.limits.store_bytes_max
            if self._is_closed or length > self.limits.block_bytes_max or not fits:
                job.resolve(index, Outcome.DROPPED)
                return False
            self._in_flight_bytes += length
            return True

    def _store(self, job: Job, accepted: Sequence[tuple[int, Write]]) -> None:
        for index, write in accepted:
            if job.hold():
                try:
                    time.sleep(self.delay_s)
                    self._keep(job, index, write)
                finally:
                    job.release()
            with self._idle:
                self._in_flight_bytes -= write.data.nbytes
                self._idle.notify_all()

    def _keep(self, job: Job, index: int, write: Write) -> None:
        length = write.data.nbytes
        # the outcome is decided in the same step that makes the block visible, so that a job that
        # was cancelled meanwhile publishes nothing
        is_kept = self.bank.take(
            write.key,
            write.parent,
            bytes(write.data),
            lambda: job.resolve(index, Outcome.DONE, length),
        )
        if not is_kept:
            job.resolve(index, Outcome.DROPPED)
