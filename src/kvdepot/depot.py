"""The depot: the ordered tiers of one engine and the policies over them; what an adapter calls.

    plan     how much of a prompt's prefix is in a tier, and whether to load it; memory only
    restore  begin to bring blocks into host rows, first group first; the engine copies them out while
             the later groups still load
    chunks   the same, some blocks over all groups at a time, from the front or from the back
    finished how it went: what the policies learn from
    store    cut blocks into host rows and hand them to the pool, behind the engine

The host rows are both the cache in memory and the buffer through which the pool is read and written;
they are reached without further copies. A depot holds no model and no engine.

Thread-compatible: one engine thread uses a depot and its restores; the pool's threads work behind it.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Sequence
from typing import Literal, NamedTuple, Self

import msgspec

from kvdepot.chunks import ChunkRestore, Fill
from kvdepot.clock import Clock, SystemClock
from kvdepot.config import PoolConfig
from kvdepot.finding import Finder, Hit
from kvdepot.host import HostRows, host_rows
from kvdepot.identity import Identity
from kvdepot.keys import BlockKey, group_key
from kvdepot.loads import Loads
from kvdepot.metrics import Counters
from kvdepot.plans import CostKeeper, Plan, Planner
from kvdepot.policy.admission import StoreClass
from kvdepot.policy.decide import Mode
from kvdepot.policy.ordering import Lane
from kvdepot.policy.policies import Policies
from kvdepot.policy.reasons import Explanation, Reason
from kvdepot.pool.tier import PoolTier
from kvdepot.pool.worker import WorkerTier
from kvdepot.prefetching import Prefetcher
from kvdepot.restore import Restore
from kvdepot.tiers import Job, Tier, Write
from kvdepot.units import MIB

__all__ = ["Cut", "Depot", "Hit", "Plan", "Restore"]

log = logging.getLogger(__name__)

#: fills a host row: (group index, block index, row)
Cut = Callable[[int, int, memoryview], None]

#: stores are handed over in parts of this size, so that writing begins while later blocks are cut
_STORE_PART_BYTES = 8 * MIB
#: while earlier stores hold rows, this part is not given to further ones, but kept for loads
_RESTORE_SHARE = 4


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
        hosts: Sequence[HostRows],
        *,
        counters: Counters,
        clock: Clock,
        policies: Policies | None = None,
    ) -> None:
        self.identity = identity
        self.policies = policies or Policies()
        self.pool = pool
        self.hosts = hosts
        self._counters = counters
        self._clock = clock
        self._finder = Finder(hosts, pool)
        self._unsettled: deque[tuple[int, list[int], Sequence[Fill], Job]] = deque()
        self._leaves_rows = False
        self._loads = Loads(pool, self.policies, clock)
        self._planner = Planner(
            identity, self.policies, self._loads, hosts, counters=counters, clock=clock
        )
        self._costs = CostKeeper(self.policies, clock, pool)
        #: reads ahead for requests that wait in the engine's queue
        self.prefetcher = Prefetcher(
            identity,
            self.policies,
            hosts,
            find=self._finder.find,
            begin=lambda keys: self.chunks(keys, lane=Lane.PREFETCH),
            collect=self._collect,
            counters=counters,
        )

    @classmethod
    def open(
        cls,
        identity: Identity,
        *,
        pool: PoolConfig | None,
        host_bytes: int,
        io: Literal["threads", "process"] = "threads",
        clock: Clock | None = None,
        policies: Policies | None = None,
    ) -> Depot:
        """Open the tiers. Blocks on file calls.

        Args:
            identity: what the bytes are; names the pool's namespace.
            pool: settings of the pool; None for the host tier alone.
            host_bytes: memory for the host tier, touched now.
            io: threads of this process, or a child process, which a busy thread does not slow down.
            clock: for tests that own the time.
            policies: what is loaded and written; by default everything is written.

        Raises:
            KvdepotError: as `PoolTier.open` or `WorkerTier.open`, or a host buffer too small for one
                block.
        """
        clock = clock or SystemClock()
        counters = Counters()
        identity.digest()
        is_shared = io == "process" and pool is not None
        hosts = host_rows(identity.block_bytes, host_bytes, is_shared=is_shared)
        try:
            tier: Tier | None = None
            if pool is not None:
                # what waits to be written lies in host rows anyway: a shorter queue would save nothing
                queue_bytes = max(pool.write_queue_bytes, host_bytes)
                config = msgspec.structs.replace(pool, write_queue_bytes=queue_bytes)
                if io == "process":
                    buffers = [host.buffer for host in hosts]
                    tier = WorkerTier.open(
                        config, identity, buffers, clock=clock, counters=counters
                    )
                else:
                    tier = PoolTier.open(config, identity, clock=clock, counters=counters)
            return cls(identity, tier, hosts, counters=counters, clock=clock, policies=policies)
        except BaseException:
            for host in hosts:
                host.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def lookup(self, keys: Sequence[BlockKey]) -> Hit:
        """How many blocks from the first on are present in all groups, and where. Memory only."""
        hit = self._finder.find(keys)
        self._counters.add("lookup_blocks_total", len(keys))
        self._counters.add("lookup_hit_blocks_total", hit.blocks)
        return hit

    def plan(
        self,
        keys: Sequence[BlockKey],
        *,
        prompt_tokens: int,
        can_meet: bool = False,
        is_layered: bool = False,
    ) -> Plan:
        """Look a prompt up and decide how it gets its prefix. Memory only; end it with `finished`.

        Args:
            keys: of the prompt's full blocks.
            prompt_tokens: length of the prompt.
            can_meet: the engine can compute the front while the back is read.
            is_layered: the engine computes the rest while later groups load, with `restore`.
        """
        self._collect()
        plan = self._planner.plan(
            keys,
            self.lookup(keys),
            prompt_tokens=prompt_tokens,
            can_meet=can_meet,
            is_layered=is_layered,
        )
        if plan.mode is Mode.COMPUTE and plan.blocks < plan.hit.blocks:
            self._planner.begin_probe(self._finder.group_keys(keys[plan.blocks : plan.hit.blocks]))
        self._costs.remember(self.pool)
        return plan

    def finished(
        self, plan: Plan, *, reused_blocks: int, load_s: float, ended_by: Reason | None = None
    ) -> Explanation | None:
        """Say how a planned request went; why its reuse ended, None when it is complete.

        For `load_s` the engine waited for bytes and did nothing else; `ended_by` is the restore's.
        """
        self._collect()
        return self._planner.finish(
            plan, reused_blocks=reused_blocks, load_s=load_s, ended_by=ended_by
        )

    def computed(self, tokens: int, position: int, seconds: float) -> None:
        """Say how long a prefill took that was computing alone."""
        self.policies.cost.computed(tokens, position, seconds)

    def restore(self, keys: Sequence[BlockKey], *, deadline_s: float | None = None) -> Restore:
        """Begin to bring blocks into host rows: all blocks of group 0, then of group 1, and so on.

        Returns at once; the caller must `release` the restore.
        """
        self._collect()
        return Restore(
            self.hosts,
            self._loads,
            self._finder.group_keys(keys),
            self._give_back,
            deadline_s=deadline_s,
            clock=self._clock,
        )

    def chunks(
        self, keys: Sequence[BlockKey], *, is_from_back: bool = False, lane: Lane = Lane.REQUEST
    ) -> ChunkRestore:
        """As `restore`, but some blocks over all groups at a time, in either direction."""
        self._collect()
        return ChunkRestore(
            self.hosts,
            self._loads,
            self._finder.group_keys(keys),
            self._give_back,
            is_from_back=is_from_back,
            lane=lane,
        )

    @property
    def heard_s(self) -> float:
        """When the pool was last seen to deliver anything, by the depot's clock."""
        self._loads.collect()
        return self._loads.heard_s

    def store(
        self,
        keys: Sequence[BlockKey],
        root: BlockKey,
        cut: Cut,
        *,
        tokens: int,
        kind: StoreClass = StoreClass.PROMPT,
    ) -> int:
        """Cut the blocks that are not present into host rows and hand them to the pool.

        `cut` runs on the calling thread; its row is exactly one block of its group, writable and
        page-aligned, and must be filled before it returns. Never blocks on I/O.

        Args:
            keys: a prompt's block keys from the first on; what is present is only marked as used.
            root: the parent of the first block.
            cut: fills one row.
            tokens: tokens in a block.
            kind: where they come from; admission may want one kind and not the other. What it does
                not want is kept in memory only.

        Returns:
            How many blocks, over all groups, were taken; the others were present or are dropped.
        """
        self._collect()
        taken = 0
        self._leaves_rows = bool(self._unsettled)
        admitted: int | None = None
        for group, chain in enumerate(self._finder.group_keys(keys)):
            pooled = 0
            if self.pool is not None:
                pooled = self.pool.lookup(chain)
                self.pool.touch(chain[:pooled])
            if admitted is None:
                # one answer for all groups: a block is of use only with its groups all together
                admitted = self._planner.admit(
                    chain, pooled, prompt_tokens=len(keys) * tokens, kind=kind
                )
            parents = [group_key(root, group), *chain[:-1]]
            step = max(_STORE_PART_BYTES // self.hosts[group].row_bytes, 1)
            for start in range(pooled, len(chain), step):
                blocks = range(start, min(start + step, len(chain)))
                got = self._store_part(_Chain(group, chain, parents, tokens), blocks, cut, admitted)
                if got is None:
                    # what follows could not be reached without it
                    self._counters.add("dropped_queue_full_total", len(chain) - start)
                    break
                taken += got
            self.hosts[group].refresh(chain)
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
        self._costs.remember(self.pool, is_last=True)
        self.prefetcher.close()
        if self.pool is not None:
            self.pool.close(timeout_s)
        self._collect()
        for host in self.hosts:
            host.close()

    # below

    def _store_part(self, chain: _Chain, blocks: range, cut: Cut, admitted: int) -> int | None:
        """Store some blocks of one group; how many were new here, None if there are no rows."""
        host = self.hosts[chain.group]
        # a block may be cached here and yet be missing in the pool, which had dropped it
        held = {index: host.acquire(chain.keys[index]) for index in blocks}
        missing = [index for index in blocks if held[index] is None]
        leave = host.row_count // _RESTORE_SHARE if self._leaves_rows else 0
        fresh = host.reserve(len(missing), leave=leave)
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
        writes = [
            Write(chain.keys[index], chain.parents[index], host.row(row), chain.tokens)
            for index, row in held.items()
            if row is not None and index < admitted
        ]
        if self.pool is None or not writes:
            host.release(rows)
            return len(missing)
        if chain.group == 0:
            self._planner.stored(
                [write.key for write in writes], len(writes) * sum(self.identity.block_bytes)
            )
        try:
            job = self.pool.store(writes)
        except BaseException:
            host.release(rows)
            raise
        self._unsettled.append((chain.group, rows, (), job))
        return len(missing)

    def _give_back(self, group: int, rows: list[int], fills: Sequence[Fill], job: Job) -> None:
        self._unsettled.append((group, rows, fills, job))
        self._collect()

    def _collect(self) -> None:
        """Take the rows back that the pool has written (or will not write)."""
        self._loads.collect()
        for _ in range(len(self._unsettled)):
            entry = self._unsettled.popleft()
            group, rows, fills, job = entry
            if not job.is_settled:
                self._unsettled.append(entry)
                continue
            if fills:
                # what came too late for its request is there for the next one
                landed = set(job.landed)
                for row, key, position in fills:
                    if position in landed:
                        self.hosts[group].fill(row, key)
            self.hosts[group].release(rows)
        self._planner.collect_probe()
