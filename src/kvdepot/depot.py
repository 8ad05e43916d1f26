"""The depot: the ordered tiers of one engine, and what an adapter calls.

    lookup   how much of a prompt's prefix is in a tier; memory only
    restore  begin to bring those blocks into host rows, first group first; the engine copies them out
             while the later groups still load
    store    cut blocks into host rows and hand them to the pool, behind the engine

The host rows are both the cache in memory and the buffer through which the pool is read and written;
they are reached without further copies. A depot holds no model and no engine.

Thread-compatible: one engine thread uses a depot and its restores; the pool's threads work behind it.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple, Self

import msgspec

from kvdepot.clock import Clock, SystemClock
from kvdepot.config import PoolConfig
from kvdepot.host import HostRows, contiguous_runs
from kvdepot.identity import Identity
from kvdepot.keys import BlockKey, group_key
from kvdepot.metrics import Counters
from kvdepot.pool.tier import PoolTier
from kvdepot.tiers import Job, Outcome, Read, Tier, Write
from kvdepot.units import MIB

__all__ = ["Cut", "Depot", "Hit", "Restore"]

log = logging.getLogger(__name__)

#: fills a host row: (group index, block index, row)
Cut = Callable[[int, int, memoryview], None]

#: stores are handed over in parts of this size, so that writing begins while later blocks are cut
_STORE_PART_BYTES = 8 * MIB
#: loads are handed over in parts, so that a host buffer smaller than a request still serves it
_LOAD_PART_BYTES = 32 * MIB


class Hit(NamedTuple):
    """The answer to a lookup."""

    #: longest prefix that is present in every group
    blocks: int
    #: per block the farthest tier that must serve it
    tiers: tuple[str, ...]


class _Chain(NamedTuple):
    """One group's keys of a prompt, and their parents."""

    group: int
    keys: Sequence[BlockKey]
    parents: Sequence[BlockKey]
    tokens: int


class Depot:
    """Tiers of one engine. Open with `Depot.open`; close it, or use it as a context manager."""

    def __init__(
        self,
        identity: Identity,
        pool: Tier | None,
        *,
        host_bytes: int,
        counters: Counters,
        clock: Clock,
    ) -> None:
        self.identity = identity
        self.pool = pool
        self._counters = counters
        self._clock = clock
        total = sum(identity.block_bytes)
        self.hosts = [
            HostRows(block_bytes, host_bytes * block_bytes // total)
            for block_bytes in identity.block_bytes
        ]
        self._unsettled: deque[tuple[int, list[int], Job]] = deque()

    @classmethod
    def open(
        cls,
        identity: Identity,
        *,
        pool: PoolConfig | None,
        host_bytes: int,
        clock: Clock | None = None,
    ) -> Depot:
        """Open the tiers. Blocks on file calls.

        Args:
            identity: what the bytes are; names the pool's namespace.
            pool: settings of the pool; None for the host tier alone.
            host_bytes: memory for the host tier, touched now.
            clock: for tests that own the time.

        Raises:
            KvdepotError: as `PoolTier.open`, or a host buffer too small for one block.
        """
        clock = clock or SystemClock()
        counters = Counters()
        identity.digest()
        tier: PoolTier | None = None
        if pool is not None:
            # what waits to be written lies in host rows anyway: a shorter queue would save nothing
            queue_bytes = max(pool.write_queue_bytes, host_bytes)
            config = msgspec.structs.replace(pool, write_queue_bytes=queue_bytes)
            tier = PoolTier.open(config, identity, clock=clock, counters=counters)
        try:
            return cls(identity, tier, host_bytes=host_bytes, counters=counters, clock=clock)
        except BaseException:
            if tier is not None:
                tier.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def lookup(self, keys: Sequence[BlockKey]) -> Hit:
        """How many blocks from the first on are present in all groups, and where. Memory only."""
        blocks = len(keys)
        group_keys = self._group_keys(keys)
        for group, host in enumerate(self.hosts):
            blocks = min(blocks, self._prefix(host, group_keys[group][:blocks]))
        tiers = tuple(
            "host"
            if all(host.holds(group_keys[g][index]) for g, host in enumerate(self.hosts))
            else "disk"
            for index in range(blocks)
        )
        return Hit(blocks, tiers)

    def restore(self, keys: Sequence[BlockKey], *, deadline_s: float | None = None) -> Restore:
        """Begin to bring blocks into host rows: all blocks of group 0, then of group 1, and so on.

        Returns at once; the caller must `release` the restore.
        """
        self._collect()
        return Restore(self, self._group_keys(keys), deadline_s)

    def store(self, keys: Sequence[BlockKey], root: BlockKey, cut: Cut, *, tokens: int) -> int:
        """Cut the blocks that are not present into host rows and hand them to the pool.

        `cut` runs on the calling thread; its row is exactly one block of its group, writable and
        page-aligned, and must be filled before it returns. Never blocks on I/O.

        Args:
            keys: a prompt's block keys from the first on; what is present is only marked as used.
            root: the parent of the first block.
            cut: fills one row.
            tokens: tokens in a block.

        Returns:
            How many blocks, over all groups, were taken; the others were present or are dropped.
        """
        self._collect()
        taken = 0
        for group, chain in enumerate(self._group_keys(keys)):
            pooled = 0
            if self.pool is not None:
                pooled = self.pool.lookup(chain)
                self.pool.touch(chain[:pooled])
            parents = [group_key(root, group), *chain[:-1]]
            step = max(_STORE_PART_BYTES // self.hosts[group].row_bytes, 1)
            for start in range(pooled, len(chain), step):
                blocks = range(start, min(start + step, len(chain)))
                got = self._store_part(_Chain(group, chain, parents, tokens), blocks, cut)
                if got is None:
                    # what follows could not be reached without it
                    self._counters.add("dropped_queue_full_total", len(chain) - start)
                    break
                taken += got
        return taken

    def drain(self, timeout_s: float) -> bool:
        """Block until all stores so far are visible to others; False when time ran out."""
        is_drained = self.pool.drain(timeout_s) if self.pool is not None else True
        self._collect()
        return is_drained

    def counters(self) -> dict[str, int]:
        """This process's counters, by the names of `kvdepot.metrics`."""
        return self._counters.snapshot()

    def close(self, timeout_s: float = 10.0) -> None:
        """Publish what was stored and stop. Idempotent."""
        if self.pool is not None:
            self.pool.close(timeout_s)
        self._collect()
        for host in self.hosts:
            host.close()

    # below

    def _group_keys(self, keys: Sequence[BlockKey]) -> list[list[BlockKey]]:
        return [[group_key(key, g) for key in keys] for g in range(len(self.hosts))]

    def _prefix(self, host: HostRows, keys: Sequence[BlockKey]) -> int:
        """Longest prefix over both tiers together."""
        found = 0
        while found < len(keys):
            step = host.prefix(keys[found:])
            if self.pool is not None:
                step += self.pool.lookup(keys[found + step :])
            if step == 0:
                break
            found += step
        return found

    def _store_part(self, chain: _Chain, blocks: range, cut: Cut) -> int | None:
        """Store some blocks of one group; how many were new here, None if there are no rows."""
        host = self.hosts[chain.group]
        # a block may be cached here and yet be missing in the pool, which had dropped it
        held = {index: host.acquire(chain.keys[index]) for index in blocks}
        missing = [index for index in blocks if held[index] is None]
        fresh = host.reserve(len(missing))
        rows = [row for row in held.values() if row is not None] + fresh
        if len(fresh) < len(missing):
            host.release(rows)
            return None
        try:
            for index, row in zip(missing, fresh, strict=True):
                cut(chain.group, index, host.row(row))
                held[index] = row
        except BaseException:
            host.release(rows)
            raise
        for index, row in zip(missing, fresh, strict=True):
            host.fill(row, chain.keys[index])
        if self.pool is None:
            host.release(rows)
            return len(missing)
        job = self.pool.store(
            [
                Write(chain.keys[index], chain.parents[index], host.row(row), chain.tokens)
                for index, row in held.items()
                if row is not None
            ]
        )
        self._unsettled.append((chain.group, rows, job))
        return len(missing)

    def _collect(self) -> None:
        """Take the rows back that the pool has written (or will not write)."""
        for _ in range(len(self._unsettled)):
            group, rows, job = self._unsettled.popleft()
            if job.is_settled:
                self.hosts[group].release(rows)
            else:
                self._unsettled.append((group, rows, job))


class _Part:
    """Some blocks of one group on their way into rows."""

    __slots__ = ("first", "job", "keys", "loaded", "rows")

    def __init__(self, first: int, keys: Sequence[BlockKey], rows: list[int]) -> None:
        self.first = first
        self.keys = keys
        self.rows = rows
        #: positions that the job fills; the others were in the host tier
        self.loaded: list[int] = []
        self.job: Job | None = None


class Restore:
    """A running restore. Read group by group, in order; release it in the end.

    Parts of the request are asked for in order as rows are to be had, so a host buffer smaller than
    the request serves it too: `runs` gives rows back as it goes.
    """

    def __init__(
        self, depot: Depot, group_keys: list[list[BlockKey]], deadline_s: float | None
    ) -> None:
        self._depot = depot
        self._keys = group_keys
        self._clock = depot._clock
        self._give_up_at_s = None if deadline_s is None else self._clock.monotonic_s() + deadline_s
        self.blocks = len(group_keys[0])
        self._is_from_disk = [False] * self.blocks
        self._parts: list[deque[_Part]] = [deque() for _ in group_keys]
        self._next = [0] * len(group_keys)
        self._is_released = False
        self.bytes_read = 0
        self._ask()

    @property
    def tiers(self) -> tuple[str, ...]:
        """Per block the farthest tier that served it so far."""
        return tuple("disk" if is_from_disk else "host" for is_from_disk in self._is_from_disk)

    def wait_group(self, group_index: int) -> int:
        """Wait for a group; return how many of its leading blocks are good.

        Where the host buffer is smaller than the request, this speaks only of what was asked for so
        far and assumes the rest; `runs` gives the last word.
        """
        good = 0
        for part in self._parts[group_index]:
            leading = self._leading(part)
            good += leading
            if leading < len(part.rows):
                return good
        return good + self.blocks - self._next[group_index]

    def runs(self, group_index: int) -> Iterator[tuple[int, int, memoryview]]:
        """The good leading blocks of a group: (first block, blocks, their rows), in order.

        Waits for the bytes. The memory holds ``blocks`` rows of the group, each a block and its
        padding to the page, and is valid until the next step of the iterator. Fewer blocks than
        asked for are good if fewer come out.
        """
        host = self._depot.hosts[group_index]
        parts = self._parts[group_index]
        while parts or self._next[group_index] < self.blocks:
            if not parts:
                self._ask()
                if not parts:
                    return  # no rows are to be had
            part = parts.popleft()
            leading = self._leading(part)
            first = part.first
            for run in contiguous_runs(part.rows[:leading]):
                yield first, run.rows, host.run(run)
                first += run.rows
            self._give_back(group_index, part)
            if leading < len(part.keys):
                return
            self._ask()

    def release(self) -> None:
        """Give all rows back; what is still loading gives its rows back when it is settled."""
        if self._is_released:
            return
        self._is_released = True
        for group, parts in enumerate(self._parts):
            for part in parts:
                if part.job is not None:
                    part.job.cancel()
                self._give_back(group, part)
            parts.clear()

    # below

    def _ask(self) -> None:
        """Ask for further parts while there are rows; the first groups first."""
        for group in range(len(self._keys)):
            while self._next[group] < self.blocks:
                if not self._ask_part(group):
                    return

    def _ask_part(self, group: int) -> bool:
        host = self._depot.hosts[group]
        first = self._next[group]
        # two parts must fit, so that one loads while the other is copied out
        step = max(min(_LOAD_PART_BYTES // host.row_bytes, host.row_count // 2), 1)
        keys = self._keys[group][first : first + step]
        held = [host.acquire(key) for key in keys]
        missing = [index for index, row in enumerate(held) if row is None]
        fresh = host.reserve(len(missing))
        if len(fresh) < len(missing):
            # keep the gapless beginning, give the rest back, and come again when rows are free
            keep = missing[len(fresh)]
            surplus = [row for row in held[keep:] if row is not None]
            host.release(surplus)
            keys, held, missing = keys[:keep], held[:keep], missing[: len(fresh)]
            if not keys:
                return False
        rows = [row if row is not None else -1 for row in held]
        for index, row in zip(missing, fresh, strict=True):
            rows[index] = row
        part = _Part(first, keys, rows)
        if missing:
            part.loaded = missing
            part.job = self._load([Read(keys[i], host.row(rows[i])) for i in missing])
        self._parts[group].append(part)
        self._next[group] += len(keys)
        return True

    def _load(self, reads: Sequence[Read]) -> Job:
        left_s = None
        if self._give_up_at_s is not None:
            left_s = max(self._give_up_at_s - self._clock.monotonic_s(), 0.0)
        pool = self._depot.pool
        if pool is None:
            job = Job([read.key for read in reads], clock=self._clock)
            job.resolve_all(Outcome.MISS)
            return job
        return pool.load(reads, deadline_s=left_s)

    def _leading(self, part: _Part) -> int:
        """Wait for a part; how many of its leading blocks are good."""
        if part.job is None:
            return len(part.rows)
        part.job.wait()
        for position, outcome in zip(part.loaded, part.job.outcomes, strict=True):
            if outcome is not Outcome.DONE:
                return position
            self._is_from_disk[part.first + position] = True
        return len(part.rows)

    def _give_back(self, group: int, part: _Part) -> None:
        """Cache what was loaded, and end our use of the rows, now or when the job is settled."""
        host = self._depot.hosts[group]
        if part.job is not None:
            for position, outcome in zip(part.loaded, part.job.outcomes, strict=True):
                if outcome is Outcome.DONE:
                    host.fill(part.rows[position], part.keys[position])
            self.bytes_read += part.job.bytes_done
            self._depot._unsettled.append((group, part.rows, part.job))
            self._depot._collect()
        else:
            host.release(part.rows)
