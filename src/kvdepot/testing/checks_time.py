"""Conformance checks: deadlines, taking back, and that no verb waits for the storage."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path

from kvdepot.testing.subject import (
    CALL_S_MAX,
    PATIENCE_S,
    SLOW_S,
    STALLS_MAX,
    TierSubject,
    drained,
    load_all,
    need,
    opened,
    require,
    settled,
    store_all,
    timed,
)
from kvdepot.testing.toy import ToyEngine
from kvdepot.tiers import Job, Outcome, Read, Tier, Write

__all__ = [
    "check_cancelled_load",
    "check_cancelled_store",
    "check_deadline",
    "check_lookup_is_memory",
    "check_verbs_do_not_wait",
]

_DEADLINE_S = 0.3
#: a machine that stands still for a moment breaks a bound once, a tier that does not keep it each time
_TRIES = 3
_MARK = b"\x55" * 4096


def check_deadline(subject: TierSubject, folder: Path) -> None:
    """A load is decided at its deadline, whatever the storage does, and settled when that lets go."""
    need(subject.can_slow, "the tier offers no way to slow its storage")
    engine = ToyEngine((4096,))
    with opened(subject.make_tier(folder, engine)) as tier:
        tokens = engine.prompt(1, 4)
        store_all(tier, engine.writes(tokens))
        subject.slow(tier, SLOW_S)
        for deadline_s in (0.0, _DEADLINE_S):
            job, reads = _decided_in_time(tier, engine, tokens, deadline_s)
            require(
                Outcome.LATE in job.outcomes,
                f"storage takes {SLOW_S} s a call, the deadline was {deadline_s} s, and no block is "
                "LATE: the deadline is not kept, or `slow` slows nothing",
            )
            engine.check(reads, job.outcomes)
            _require_rows_returned(job, reads)
        subject.slow(tier, 0)
        load_all(tier, engine, engine.reads(tokens), "a load after a late one")


def _decided_in_time(
    tier: Tier, engine: ToyEngine, tokens: Sequence[int], deadline_s: float
) -> tuple[Job, list[Read]]:
    """The first of a few loads that is decided at its deadline."""
    seconds = 0.0
    for _ in range(_TRIES):
        reads = engine.reads(tokens)
        start_s = time.monotonic()
        job = tier.load(reads, deadline_s=deadline_s)
        require(job.wait(PATIENCE_S), "a load with a deadline was never decided")
        seconds = time.monotonic() - start_s
        if seconds <= deadline_s + CALL_S_MAX:
            return job, reads
    raise AssertionError(
        f"a load with a deadline of {deadline_s} s was decided after {seconds:.2f} s"
    )


def check_cancelled_load(subject: TierSubject, folder: Path) -> None:
    """A load that is taken back is decided at once; its rows come back and stay untouched."""
    need(subject.can_slow, "the tier offers no way to slow its storage")
    engine = ToyEngine((4096,))
    with opened(subject.make_tier(folder, engine)) as tier:
        tokens = engine.prompt(1, 4)
        store_all(tier, engine.writes(tokens))
        subject.slow(tier, SLOW_S)
        for left in reversed(range(_TRIES)):
            reads = engine.reads(tokens)
            job = tier.load(reads)
            time.sleep(0.05)  # let it begin: a load on its way is harder to take back
            job.cancel()
            require(job.is_decided, "a load that was taken back is not decided")
            _require_rows_returned(job, reads)
            if Outcome.CANCELLED in job.outcomes:
                break
            require(left > 0, "a load that was taken back was finished")
        subject.slow(tier, 0)
        load_all(tier, engine, engine.reads(tokens), "a load after one that was taken back")


def _require_rows_returned(job: Job, reads: Sequence[Read]) -> None:
    """The job settles; from then on nobody writes into the rows."""
    settled(job, "a load that was given up")
    for read in reads:
        read.into[:] = _MARK
    time.sleep(SLOW_S * 1.2)
    require(
        all(bytes(read.into) == _MARK for read in reads),
        "a row was written to after its job was settled",
    )


def check_cancelled_store(subject: TierSubject, folder: Path) -> None:
    """Nothing of a store that was taken back is published; its memory comes back."""
    need(subject.can_slow, "the tier offers no way to slow its storage")
    engine = ToyEngine((4096,))
    for wait_s in (0.0, 0.2):  # before it begins, and on its way
        with opened(subject.make_tier(folder / str(wait_s), engine)) as tier:
            tokens, writes, outcomes = _taken_back(subject, tier, engine, wait_s)
            drained(tier)
            for write, outcome in zip(writes, outcomes, strict=True):
                is_found = tier.lookup([write.key]) == 1
                require(
                    not (is_found and outcome is Outcome.CANCELLED),
                    "a block was published although its store was taken back",
                )
            reads = engine.reads(tokens)
            engine.check(reads, settled(tier.load(reads), "a load"))
            store_all(tier, engine.writes(tokens))
            load_all(tier, engine, engine.reads(tokens), "a prompt stored after it was taken back")


def _taken_back(
    subject: TierSubject, tier: Tier, engine: ToyEngine, wait_s: float
) -> tuple[list[int], list[Write], tuple[Outcome, ...]]:
    """The first of a few slow stores that is taken back before it is through."""
    for number in range(_TRIES):
        tokens = engine.prompt(1 + number, 6)
        writes = engine.writes(tokens)
        subject.slow(tier, SLOW_S)
        job = tier.store(writes)
        time.sleep(wait_s)
        job.cancel()
        require(job.is_decided, "a store that was taken back is not decided")
        outcomes = settled(job, "a store that was taken back")
        for write in writes:
            write.data[:] = _MARK
        subject.slow(tier, 0)
        if Outcome.CANCELLED in outcomes:
            return tokens, writes, outcomes
    raise AssertionError("a slow store was finished before it was taken back")


def check_verbs_do_not_wait(subject: TierSubject, folder: Path) -> None:
    """No verb but `drain` and `close` waits for the storage, however slow that is."""
    need(subject.can_slow, "the tier offers no way to slow its storage")
    engine = ToyEngine((4096,))
    with opened(subject.make_tier(folder, engine)) as tier:
        tokens, other = engine.prompt(1, 8), engine.prompt(2, 8)
        store_all(tier, engine.writes(tokens))
        keys = engine.keys(tokens)
        writes = engine.writes(other)
        subject.slow(tier, SLOW_S)
        verbs: dict[str, Callable[[], object]] = {
            "lookup": lambda: tier.lookup(keys),
            "load": lambda: tier.load(engine.reads(tokens)),
            "store": lambda: tier.store(writes),
            "touch": lambda: tier.touch(keys),
            "usage": tier.usage,
        }
        waits: Counter[str] = Counter()
        for _ in range(5):  # the first calls make the workers busy
            for name, verb in verbs.items():
                _, seconds = timed(verb)
                waits[name] += seconds > CALL_S_MAX
                require(waits[name] <= STALLS_MAX, f"{name} took {seconds:.2f} s on slow storage")
        subject.slow(tier, 0)


def check_lookup_is_memory(subject: TierSubject, folder: Path) -> None:
    """A lookup of 1,000 blocks makes no call to storage and is quick."""
    engine = ToyEngine((128,))
    with opened(subject.make_tier(folder, engine)) as tier:
        tokens = engine.prompt(1, 1000)
        store_all(tier, engine.writes(tokens))
        keys = engine.keys(tokens)
        absent = engine.keys(engine.prompt(2, 1000))
        before = subject.io_calls(tier) if subject.counts_io else 0
        seconds = []
        for _ in range(5):
            found, took_s = timed(lambda: tier.lookup(keys))
            seconds.append(took_s)
            require(found == 1000, f"lookup finds {found} of 1000 blocks")
            require(tier.lookup(absent) == 0, "lookup finds blocks that were never stored")
        if subject.counts_io:
            made = subject.io_calls(tier) - before
            require(made == 0, f"10 lookups made {made} calls to storage")
        # the best of five: a busy machine is not the tier's fault
        require(min(seconds) <= 0.05, f"a lookup of 1,000 blocks took {min(seconds) * 1e3:.1f} ms")
