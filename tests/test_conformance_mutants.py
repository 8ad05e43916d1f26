"""The kit on bad tiers: each has one fault, and the check that was made for it must find it.

A check that accepts a broken tier is worth nothing, so every check has at least one mutant here. The
checks are in kvdepot.testing.checks_bytes, checks_limits, checks_time and checks_life.
"""

from __future__ import annotations

import itertools
import threading
import time
import zlib
from collections.abc import Callable
from typing import NamedTuple

import pytest

from kvdepot.testing import conformance
from kvdepot.testing.memorytier import MemoryBank, MemoryTier, _Kept
from kvdepot.tiers import Job, Outcome
from kvdepot.units import MIB
from tests.memory_subject import MemorySubject
from tests.tries import in_some_try

# what is wrong with the bank


class ServesNeighbours(MemoryBank):
    """Right length, intact bytes, of another key: every second read."""

    def read(self, key, into):
        outcome = super().read(key, into)
        if outcome is Outcome.DONE and self._kept[key].parent in self._kept:
            into[:] = self._kept[self._kept[key].parent].data[: len(into)].ljust(len(into))
        return outcome


class ForgetsOddRows(MemoryBank):
    """Cannot copy into rows that are off the page: leaves them as they are."""

    def read(self, key, into):
        from kvdepot.io.buffers import address_of

        return Outcome.DONE if address_of(into) % 512 else super().read(key, into)


class CountsPastGaps(MemoryBank):
    """Counts hits instead of the prefix."""

    def prefix(self, keys):
        return sum(key in self._kept for key in keys)


class CountsOneMore(MemoryBank):
    def prefix(self, keys):
        found = super().prefix(keys)
        return found + 1 if 0 < found < len(keys) else found


class CountsOneLess(MemoryBank):
    def prefix(self, keys):
        found = super().prefix(keys)
        return found if found == len(keys) else max(found - 1, 0)


class CallsAbsentCorrupt(MemoryBank):
    def read(self, key, into):
        outcome = super().read(key, into)
        return Outcome.CORRUPT if outcome is Outcome.MISS else outcome


class ServesDamaged(MemoryBank):
    def read(self, key, into):
        into[:] = self._kept[key].data
        return Outcome.DONE


class RemembersDamaged(MemoryBank):
    """Says CORRUPT again and again, and lookup goes on to find the block."""

    def read(self, key, into):
        kept = self._kept.get(key)
        if kept is not None and zlib.crc32(kept.data) != kept.checksum:
            return Outcome.CORRUPT
        return super().read(key, into)


class CallsDamagedMissing(MemoryBank):
    def read(self, key, into):
        outcome = super().read(key, into)
        return Outcome.MISS if outcome is Outcome.CORRUPT else outcome


class HasNoLimit(MemoryBank):
    def take(self, key, parent, data, agree):
        capacity, self.capacity_bytes = self.capacity_bytes, 1 << 40
        try:
            return super().take(key, parent, data, agree)
        finally:
            self.capacity_bytes = capacity


class LimitsTooLate(MemoryBank):
    """Evicts after it has taken the block in, as many caches do."""

    def take(self, key, parent, data, agree):
        with self._lock:
            if not agree():
                return False
            self._kept[key] = _Kept(parent, bytearray(data), zlib.crc32(data))
            self._children[parent] += 1
            self.used_bytes += len(data)
        time.sleep(0.003)
        with self._lock:
            while self.used_bytes > self.capacity_bytes:
                self._drop(self._oldest_leaf())
        return True


class NeverEvicts(MemoryBank):
    def take(self, key, parent, data, agree):
        if self.used_bytes + len(data) > self.capacity_bytes:
            return False
        return super().take(key, parent, data, agree)


class SharesStaging(MemoryBank):
    """All readers go through one staging buffer without a lock."""

    staging = bytearray(MIB)

    def read(self, key, into):
        outcome = super().read(key, into)
        if outcome is Outcome.DONE:
            self.staging[: len(into)] = into
            time.sleep(0.0005)
            into[:] = self.staging[: len(into)]
        return outcome


# what is wrong with the tier


class GrowsOnEveryStore(MemoryTier):
    """Books every block that is offered."""

    def store(self, writes):
        self.bank.used_bytes += len(writes)
        return super().store(writes)


class KeepsReferences(MemoryTier):
    """Keeps the caller's memory instead of a copy."""

    def _keep(self, job, index, write):
        super()._keep(job, index, write)
        kept = self.bank._kept[write.key]
        self.bank._kept[write.key] = kept._replace(data=write.data)


class IgnoresRowLength(MemoryTier):
    def _load(self, job, reads):
        for index, read in enumerate(reads):
            kept = self.bank._kept.get(read.key)
            if kept is not None:
                length = min(len(kept.data), read.into.nbytes)
                read.into[:length] = kept.data[:length]
            job.resolve(index, Outcome.DONE if kept else Outcome.MISS)


class FillsFirstDuplicateOnly(MemoryTier):
    def _load(self, job, reads):
        seen = set()
        for index, read in enumerate(reads):
            outcome = Outcome.DONE if read.key in seen else self.bank.read(read.key, read.into)
            seen.add(read.key)
            job.resolve(index, outcome)


class StoresPresentSlowly(MemoryTier):
    def _accept(self, job, index, write):
        time.sleep(0)
        return write.data.nbytes <= self.limits.block_bytes_max and self._claim(write)

    def _claim(self, write):
        with self._lock:
            self._in_flight_bytes += write.data.nbytes
        return True

    def _keep(self, job, index, write):
        time.sleep(0.05)
        super()._keep(job, index, write)


class SettlesEarly(MemoryTier):
    """Touches rows without a hold on them."""

    def _load(self, job, reads):
        for index, read in enumerate(reads):
            time.sleep(self.delay_s)
            job.resolve(index, self.bank.read(read.key, read.into))


class WritesBehindTheCaller(MemoryTier):
    """Clears the rows a little after the load was over."""

    def _load(self, job, reads):
        super()._load(job, reads)
        threading.Timer(0.02, self._clear, (reads,)).start()

    @staticmethod
    def _clear(reads):
        for read in reads:
            read.into[:1] = b"\0"

    def store(self, writes):
        time.sleep(0.1)
        return super().store(writes)


class HangsOnNothing(MemoryTier):
    def load(self, reads, *, deadline_s=None, turn=None):
        job = Job([read.key for read in reads])
        job.hold()
        job._users = 1
        self._submit(self._loaders, self._load_and_release, job, tuple(reads))
        return job

    def _load_and_release(self, job, reads):
        self._load(job, reads)
        job.release()


class FailsOnNothing(MemoryTier):
    def store(self, writes):
        del writes[0]
        return super().store(writes)


class IgnoresIdentity(MemoryTier):
    """Knows blocks by how many there were: the namespace is missing from the key."""

    def lookup(self, keys):
        return min(len(keys), len(self.bank))


class BlocksWhenFull(MemoryTier):
    """Waits for room in the queue instead of dropping."""

    def store(self, writes):
        job = super().store(writes)
        if Outcome.DROPPED not in job.outcomes:
            return job
        self.drain(10)
        return super().store(writes)


class HasNoQueueLimit(MemoryTier):
    def _accept(self, job, index, write):
        limits, self.limits = self.limits, self.limits._replace(store_bytes_max=1 << 40)
        try:
            return super()._accept(job, index, write)
        finally:
            self.limits = limits


class TakesAnySize(MemoryTier):
    def __init__(self, bank, *, store_bytes_max):
        super().__init__(bank, store_bytes_max=store_bytes_max, block_bytes_max=1 << 40)
        self.limits = self.limits._replace(block_bytes_max=16_384)

    def _accept(self, job, index, write):
        limits, self.limits = self.limits, self.limits._replace(block_bytes_max=1 << 40)
        try:
            return super()._accept(job, index, write)
        finally:
            self.limits = limits


class DropsTheWholeCall(MemoryTier):
    """One block that is too large takes its neighbours with it."""

    def store(self, writes):
        job = super().store(writes)
        if Outcome.DROPPED in job.outcomes:
            job.cancel()
        return job


class IgnoresDeadlines(MemoryTier):
    def load(self, reads, *, deadline_s=None, turn=None):
        return super().load(reads)


class IgnoresCancel(MemoryTier):
    """Goes on as if nothing had happened, and publishes."""

    def _store(self, job, accepted):
        time.sleep(self.delay_s)
        for _, write in accepted:
            self.bank.take(write.key, write.parent, bytes(write.data), lambda: True)
        super()._store(job, accepted)


class ReadsAfterCancel(MemoryTier):
    """Lets the caller have the memory back, and reads it later."""

    def _keep(self, job, index, write):
        length = write.data.nbytes
        if not job.resolve(index, Outcome.DONE, length):
            return
        late = threading.Timer(0.05, self._keep_late, (write,))
        late.start()

    def _keep_late(self, write):
        self.bank.take(write.key, write.parent, bytes(write.data), lambda: True)


class WaitsInLoad(MemoryTier):
    def load(self, reads, *, deadline_s=None, turn=None):
        time.sleep(self.delay_s)
        return super().load(reads, deadline_s=deadline_s)


class WaitsInUsage(MemoryTier):
    def usage(self):
        time.sleep(self.delay_s)
        return super().usage()


class LooksUpOnDisk(MemoryTier):
    io_calls = 0

    def lookup(self, keys):
        self.io_calls += len(keys)
        return super().lookup(keys)


class LooksUpSlowly(MemoryTier):
    def lookup(self, keys):
        time.sleep(len(keys) * 1e-4)
        return super().lookup(keys)


class RaisesAfterClose(MemoryTier):
    def load(self, reads, *, deadline_s=None, turn=None):
        if self._is_closed:
            raise RuntimeError("closed")
        return super().load(reads, deadline_s=deadline_s)


class ClosesOnce(MemoryTier):
    def close(self, timeout_s=10.0):
        if self._is_closed:
            raise AssertionError("closed twice")
        super().close(timeout_s)


class StoresAfterClose(MemoryTier):
    def store(self, writes):
        job = super().store(writes)
        if not self._is_closed:
            return job
        late = Job(job.keys)
        late.resolve_all(Outcome.DONE)
        return late


class ForgetsJobsOnClose(MemoryTier):
    """Throws its queue away and leaves the callers waiting."""

    def close(self, timeout_s=10.0):
        with self._lock:
            self._is_closed = True
        for workers in (self._loaders, self._storers):
            workers.shutdown(wait=True, cancel_futures=True)


class LosesOnClose(MemoryTier):
    """Closes without publishing what was taken."""

    def close(self, timeout_s=10.0):
        super().close(timeout_s)
        while len(self.bank) > 10:
            self.bank._drop(next(reversed(self.bank._kept)))


class SeesOnlyItsOwn(MemoryTier):
    def __init__(self, bank, *, store_bytes_max):
        super().__init__(bank, store_bytes_max=store_bytes_max)
        self.own = set(bank._kept)

    def store(self, writes):
        self.own |= {write.key for write in writes}
        return super().store(writes)

    def lookup(self, keys):
        return super().lookup([key for key in keys if key in self.own])


class Mutant(NamedTuple):
    broken: type[MemoryBank | MemoryTier]
    check: str
    #: part of the sentence that the check must say
    message: str


MUTANTS = [
    Mutant(ServesNeighbours, "round_trip", "wrong bytes"),
    Mutant(ForgetsOddRows, "round_trip", "were never written"),
    Mutant(CountsPastGaps, "partial_hits", "an absent key first gives 4, not 0"),
    Mutant(CountsOneMore, "partial_hits", "4 of 6 stored gives 5, not 4"),
    Mutant(CountsOneLess, "partial_hits", "4 of 6 stored gives 3, not 4"),
    Mutant(CallsAbsentCorrupt, "partial_hits", "gives CORRUPT, not MISS"),
    Mutant(FillsFirstDuplicateOnly, "duplicates_in_one_call", "were never written"),
    Mutant(
        GrowsOnEveryStore, "stored_twice_does_not_grow", "not decided at once|changed the usage"
    ),
    Mutant(StoresPresentSlowly, "stored_twice_does_not_grow", "not decided at once"),
    Mutant(KeepsReferences, "store_buffers_not_retained", "CORRUPT|wrong bytes"),
    Mutant(WritesBehindTheCaller, "load_rows_untouched_after_settle", "after its load was settled"),
    Mutant(HangsOnNothing, "empty_calls", "an empty load is not over at once"),
    Mutant(FailsOnNothing, "empty_calls", "out of range"),
    Mutant(IgnoresIdentity, "identities_apart", "another identity finds 4 blocks"),
    Mutant(IgnoresRowLength, "row_of_other_length", "is DONE in a row of 4095"),
    Mutant(ServesDamaged, "damage", "wrong bytes"),
    Mutant(RemembersDamaged, "damage", "lookup finds 5 blocks, not 2"),
    Mutant(CallsDamagedMissing, "damage", "gives MISS, not CORRUPT"),
    Mutant(HasNoLimit, "capacity", "bytes with a capacity of"),
    Mutant(LimitsTooLate, "capacity", "bytes with a capacity of"),
    Mutant(NeverEvicts, "capacity", "made no room"),
    Mutant(BlocksWhenFull, "back_pressure", "beyond the limit took"),
    Mutant(HasNoQueueLimit, "back_pressure", "the limit is|none was dropped"),
    Mutant(TakesAnySize, "too_large", "block_bytes_max"),
    Mutant(DropsTheWholeCall, "too_large", "block_bytes_max"),
    Mutant(SharesStaging, "concurrent_use", "wrong bytes"),
    Mutant(IgnoresDeadlines, "deadline", "was decided after"),
    Mutant(SettlesEarly, "deadline", "written to after its job was settled"),
    Mutant(SettlesEarly, "cancelled_load", "written to after its job was settled"),
    Mutant(IgnoresCancel, "cancelled_store", "published although its store was taken back"),
    Mutant(WaitsInLoad, "verbs_do_not_wait", "load took"),
    Mutant(WaitsInUsage, "verbs_do_not_wait", "usage took"),
    Mutant(LooksUpOnDisk, "lookup_is_memory", "calls to storage"),
    Mutant(LooksUpSlowly, "lookup_is_memory", "a lookup of 1,000 blocks took"),
    Mutant(RaisesAfterClose, "close", "closed"),
    Mutant(ClosesOnce, "close", "closed twice"),
    Mutant(StoresAfterClose, "close", "after close"),
    Mutant(ForgetsJobsOnClose, "close_decides_all", "did not settle"),
    Mutant(LosesOnClose, "reopen", "stored blocks are found after a new start"),
    Mutant(SeesOnlyItsOwn, "shared", "are found in another instance"),
]


def subject_of(broken: type[MemoryBank | MemoryTier]) -> MemorySubject:
    class Subject(MemorySubject):
        discover_s = 0.3
        make_bank: Callable[..., MemoryBank] = (
            broken if issubclass(broken, MemoryBank) else MemoryBank
        )
        make: Callable[..., MemoryTier] = broken if issubclass(broken, MemoryTier) else MemoryTier

    return Subject()


@pytest.fixture(autouse=True)
def impatient(monkeypatch):
    """Mutants need no patience: what they never do should not take a minute to be noticed."""
    from kvdepot.testing import checks_life, checks_limits, checks_time, subject

    for module in (subject, checks_life, checks_limits, checks_time):
        for name, seconds in (("PATIENCE_S", 5.0), ("SLOW_S", 0.6), ("CALL_S_MAX", 0.3)):
            monkeypatch.setattr(module, name, seconds, raising=False)


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda m: f"{m.check}-{m.broken.__name__}")
def test_the_check_made_for_it_finds_the_mutant(mutant, tmp_path):
    check = getattr(conformance, f"check_{mutant.check}")
    folders = (tmp_path / str(number) for number in itertools.count())

    def attempt():
        # some mutants are wrong by the clock, which a stall of the machine hides
        with pytest.raises((AssertionError, LookupError, RuntimeError), match=mutant.message):
            check(subject_of(mutant.broken), next(folders))

    in_some_try(attempt)


def test_every_check_has_a_mutant():
    assert {f"check_{mutant.check}" for mutant in MUTANTS} == {
        check.__name__ for check in conformance.CHECKS
    }
