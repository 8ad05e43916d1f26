"""Random interleavings of everything that can happen to a pool, against a model and the oracle.

Up to three instances over one simulated disk store, look up, load, cancel, touch, keep house, close,
are killed, and lose their power; files are damaged, deleted and planted; the clock advances and
jumps. Every loaded row is held against the ToyEngine. The model is small: which keys a finished store
may have put on this disk (nothing else may ever be found), and which must be found.
"""

from __future__ import annotations

import random
import time
from types import SimpleNamespace

import hypothesis.strategies as st
import pytest
from hypothesis import event, settings
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)

from kvdepot.keys import BlockKey
from kvdepot.pool import lease, poolfile, root
from kvdepot.pool.tier import PoolTier
from kvdepot.testing.simclock import FakeClock
from kvdepot.testing.simdisk import SimDisk
from kvdepot.testing.toy import ToyEngine
from kvdepot.tiers import Outcome
from kvdepot.units import KIB
from tests.pool_rig import pool_config

DONE, MISS = Outcome.DONE, Outcome.MISS
CAPACITY = 768 * KIB  # 32 segments of five blocks
LEASE_S = 20.0
FOREIGN = ("tmp/README", "ns/notes", "lease/other.lease.bak", "stray.kvseg")

families = st.integers(0, 3)
branches = st.integers(0, 3)
lengths = st.integers(1, 7)
anyone = st.integers(0, 2)
has_live = precondition(lambda self: self.live)


class Instance:
    """One process: its handle on the disk, its tier, and the stores that it has not finished."""

    def __init__(self, disk, engine, clock):
        self.disk = disk
        config = pool_config(
            "/simulated",
            capacity_bytes=CAPACITY,
            segment_bytes=24 * KIB,
            segment_age_s=1.0,
            lease_s=LEASE_S,
        )
        self.tier = PoolTier.open(
            config, engine.identity, clock=clock, disks=[disk], has_threads=False
        )
        self.stores = []

    @property
    def evicted(self):
        return self.tier.counters.snapshot()["segments_evicted_total"]


class PoolMachine(RuleBasedStateMachine):
    """The rules are what may happen; the invariants are laws 1 and 4."""

    def __init__(self):
        super().__init__()
        self.patch = pytest.MonkeyPatch()

    @initialize(seed=st.integers(0, 1000), is_full=st.booleans())
    def begin(self, seed, is_full):
        self.engine = ToyEngine((4096, 1024))
        self.clock = FakeClock()
        self.own_the_chances(seed)
        self.disk = SimDisk(clock=self.clock, seed=seed)
        self.live: dict[str, Instance] = {}
        self.boots = 0
        #: keys that a store may have put on this disk
        self.possible: set[BlockKey] = set()
        #: keys that are published, and that nothing has endangered since
        self.certain: set[BlockKey] = set()
        self.is_damaged = False
        self.evictions_seen = 0
        #: prompts that were ever stored
        self.known: dict[tuple[int, ...], None] = {}
        self.open()
        if is_full:
            # so that every store makes something go
            for other in range(200, 228):
                self.store_tokens(0, self.engine.prompt(other, 2))
                self.flush(0)
            self.clock.advance(60.0)

    def own_the_chances(self, seed):
        """Names and pauses come from the seed, so that a failing example fails again."""
        source = random.Random(seed)
        chances = SimpleNamespace(
            token_hex=lambda count: source.randbytes(count).hex(), randbelow=source.randrange
        )
        pauses = SimpleNamespace(
            sleep=self.clock.advance,
            gmtime=time.gmtime,
            strftime=time.strftime,
        )
        for module in (lease, poolfile, root):
            self.patch.setattr(module, "secrets", chances)
        self.patch.setattr(root, "time", pauses)

    # what is asked for

    def prompt(self, family, branch, length):
        stem = self.engine.prompt(family, 3)
        leaf = self.engine.prompt(100 + 10 * family + branch, 4)
        return (stem + leaf)[: length * self.engine.block_tokens]

    def chains(self, tokens):
        return [self.engine.keys(tokens, group) for group in range(self.engine.groups)]

    # the world's book-keeping

    def settle_model(self, published=()):
        """After anything that may have evicted: what must be found is only what came since."""
        evictions = sum(instance.evicted for instance in self.live.values())
        if evictions != self.evictions_seen:
            self.certain.clear()
            self.evictions_seen = evictions
        else:
            self.certain.update(published)

    def finish_stores(self, instance, *, is_flushed):
        """Enter finished stores into the model, and give their memory to somebody else."""
        published = set()
        for job, writes, pending in instance.stores:
            if not job.is_settled:
                assert not is_flushed, "a flushed store is not settled"
                continue
            for outcome, write in zip(job.outcomes, writes, strict=True):
                if outcome is DONE:
                    self.possible.add(write.key)
                    # what was DONE at once may be a stale index's word
                    published |= {write.key} & pending
                write.data[:] = b"\xee" * write.data.nbytes
        instance.stores = [entry for entry in instance.stores if not entry[0].is_settled]
        self.settle_model(published if is_flushed else ())

    # the rules of use

    def some(self, at):
        """One of the live instances."""
        return list(self.live.values())[at % len(self.live)]

    @precondition(lambda self: len(self.live) < 3)
    @rule()
    def open(self):
        instance = Instance(self.disk.attach(), self.engine, self.clock)
        self.live[instance.tier.roots[0].writer] = instance
        self.settle_model()

    @has_live
    @rule(
        at=anyone,
        family=families,
        branch=branches,
        length=lengths,
        is_flushed=st.sampled_from([True, True, False]),
    )
    def store(self, at, family, branch, length, is_flushed):
        self.store_tokens(at, self.prompt(family, branch, length))
        if is_flushed:
            self.flush(at)

    def store_tokens(self, at, tokens):
        self.known[tuple(tokens)] = None
        writes = self.engine.writes(tokens)
        job = self.some(at).tier.store(writes)
        outcomes = zip(writes, job.outcomes, strict=True)
        pending = {write.key for write, outcome in outcomes if outcome is Outcome.PENDING}
        self.some(at).stores.append((job, writes, pending))

    @has_live
    @rule(at=anyone)
    def work(self, at):
        self.some(at).tier.run_pending()
        self.finish_stores(self.some(at), is_flushed=False)

    @has_live
    @rule(at=anyone)
    def flush(self, at):
        self.some(at).tier.run_pending(flush=True)
        self.finish_stores(self.some(at), is_flushed=True)

    @has_live
    @rule(at=anyone, which=st.integers(0, 2))
    def cancel(self, at, which):
        stores = self.some(at).stores
        if which < len(stores):
            stores[which][0].cancel()
            self.finish_stores(self.some(at), is_flushed=False)

    @has_live
    @rule(at=anyone, family=families, branch=branches, length=lengths)
    def load(self, at, family, branch, length):
        self.load_tokens(self.some(at), self.prompt(family, branch, length))

    def load_tokens(self, instance, tokens):
        # a promise of lookup that could not be kept is made again only for another copy
        copies = 5
        while self.load_once(instance, tokens):
            copies -= 1
            assert copies, "lookup goes on to promise what cannot be loaded"

    def load_once(self, instance, tokens):
        """Load a prompt, whatever lookup says; return the keys of its promises that were not kept."""
        on_their_way = {write.key for _, writes, _ in instance.stores for write in writes}
        promised = set()
        for chain in self.chains(tokens):
            promised |= set(chain[: instance.tier.lookup(chain)])
        assert promised <= self.possible | on_their_way
        reads = self.engine.reads(tokens)
        job = instance.tier.load(reads)
        instance.tier.run_pending()
        assert job.is_settled
        self.engine.check(reads, job.outcomes)
        self.finish_stores(instance, is_flushed=False)
        for read, outcome in zip(reads, job.outcomes, strict=True):
            event(f"load {outcome.value}")
            assert outcome is not DONE or read.key in self.possible
            assert outcome in (DONE, MISS) or self.is_damaged
        return promised & {
            read.key
            for read, outcome in zip(reads, job.outcomes, strict=True)
            if outcome is not DONE
        }

    @has_live
    @rule(at=anyone, family=families, branch=branches, deadline_s=st.sampled_from([0.0, 5.0]))
    def load_late(self, at, family, branch, deadline_s):
        reads = self.engine.reads(self.prompt(family, branch, 7))
        job = self.some(at).tier.load(reads, deadline_s=deadline_s)
        self.clock.advance(1.0)
        self.some(at).tier.run_pending()
        self.engine.check(reads, job.outcomes)
        assert job.is_settled
        if deadline_s == 0.0:
            assert set(job.outcomes) == {Outcome.LATE}
        self.finish_stores(self.some(at), is_flushed=False)

    @has_live
    @rule(at=anyone, family=families, branch=branches)
    def touch(self, at, family, branch):
        self.some(at).tier.touch(self.engine.keys(self.prompt(family, branch, 7)))

    # the rules of time and housekeeping

    @rule(seconds=st.sampled_from([0.1, 1.0, 5.0, 70.0]))
    def pass_time(self, seconds):
        self.clock.advance(seconds)
        for instance in self.live.values():
            instance.tier.tick()
        self.settle_model()

    @rule(seconds=st.sampled_from([-86_400.0, -5.0, 3_600.0, 1e8]))
    def jump_clock(self, seconds):
        self.clock.jump_wall(seconds)

    @has_live
    @rule()
    def what_must_be_found_is_found(self):
        # twice, because one instance's housekeeping may change what another has just seen
        for _ in range(2):
            self.pass_time(5.0)
        for family in range(4):
            for branch in range(4):
                for chain in self.chains(self.prompt(family, branch, 7)):
                    sure = next((i for i, k in enumerate(chain) if k not in self.certain), 7)
                    event("must be found" if sure else "need not be found")
                    for instance in self.live.values():
                        assert instance.tier.lookup(chain) >= sure

    # the rules of ends

    @has_live
    @rule(at=anyone, is_killed=st.booleans())
    def end(self, at, is_killed):
        if is_killed:
            self.kill(at)
        else:
            self.close(at)

    def close(self, at):
        self.flush(at)
        self.leave(at).tier.close()

    def kill(self, at):
        instance = self.leave(at)
        instance.disk.kill()
        for job, writes, _ in instance.stores:
            done = zip(job.outcomes, writes, strict=True)
            self.possible.update(write.key for outcome, write in done if outcome is DONE)

    def leave(self, at):
        """An instance goes; its evictions are counted no more."""
        self.settle_model()
        instance = self.live.pop(list(self.live)[at % len(self.live)])
        self.evictions_seen -= instance.evicted
        return instance

    def lose_power(self, seed):
        while self.live:
            self.kill(0)
        self.disk = self.disk.crash(seed)
        self.boots += 1
        boot_id = f"boot {self.boots}"
        self.patch.setattr(lease, "host_boot_id", lambda: boot_id)
        self.certain.clear()
        self.is_damaged = True

    # the rules of mishap

    def segments(self):
        return [name for name in self.disk.names() if name.endswith(".kvseg") and "/" in name]

    @rule(
        seed=st.integers(0, 1_000_000),
        how=st.sampled_from(["lose power", "flip", "cut", "zero", "delete", "plant", "plant"]),
    )
    def suffer(self, seed, how):
        """One rule for all mishaps, so that ordinary life has its share of the steps."""
        names = [name for name in self.segments() if self.disk.content(name)]
        if how == "lose power":
            self.lose_power(seed)
        elif how == "plant":
            self.disk.plant(FOREIGN[seed % len(FOREIGN)], b"not the pool's")
        elif names and how == "delete":
            self.disk.attach().remove(names[seed % len(names)])
            self.certain.clear()
        elif names:
            self.damage(names[seed % len(names)], seed, how)
        if self.live and how in ("flip", "cut", "zero", "delete"):
            # while its index still believes in what is gone
            instance = self.some(seed)
            for tokens in list(self.known)[-40:]:
                self.load_tokens(instance, tokens)

    def damage(self, name, seed, how):
        content = bytearray(self.disk.content(name))
        at = seed % len(content)
        if how == "flip":
            content[at] ^= 0xFF
        elif how == "zero":
            content[at : at + 512] = bytes(len(content[at : at + 512]))
        else:
            del content[at:]
        self.disk.plant(name, bytes(content))
        self.certain.clear()
        self.is_damaged = True

    # laws

    @invariant()
    def capacity_holds(self):
        if not hasattr(self, "disk"):
            return
        held = {
            name: len(self.disk.content(name))
            for name in self.disk.names()
            if name not in FOREIGN and name.endswith((".kvseg", ".tmp"))
        }
        assert sum(held.values()) <= CAPACITY, held
        for instance in self.live.values():
            assert instance.tier.usage().used_bytes <= CAPACITY

    def teardown(self):
        try:
            if hasattr(self, "disk"):
                self.next_run_works()
        finally:
            self.patch.undo()

    def next_run_works(self):
        """Whatever happened, the next process works, and nothing of the dead ones is left."""
        while self.live:
            self.kill(0)
        planted = [name for name in FOREIGN if name in self.disk.names()]
        self.open()
        last = self.some(0)
        for _ in range(3):
            self.pass_time(LEASE_S + 1)
        names = self.disk.names()
        assert [n for n in names if n.startswith("tmp/") and n not in FOREIGN] == []
        for family in range(4):
            for branch in range(4):
                self.load(0, family, branch, 7)
        # its prefix is the last that was used, so making room for the rest does not cost it
        self.pass_time(3.0)
        self.clock.advance(1.0)
        self.load(0, 3, 3, 7)
        self.store(0, 3, 3, 7, is_flushed=True)
        reads = self.engine.reads(self.prompt(3, 3, 7))
        job = last.tier.load(reads)
        last.tier.run_pending()
        self.engine.check(reads, job.outcomes)
        assert set(job.outcomes) == {DONE}
        assert [name for name in FOREIGN if name in self.disk.names()] == planted


PoolMachine.TestCase.settings = settings(stateful_step_count=40)
TestPoolMachine = PoolMachine.TestCase
