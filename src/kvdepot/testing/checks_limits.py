"""Conformance checks: capacity, back-pressure, sizes, and many threads at once."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Self

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
    run_threads,
    settled,
    store_all,
    timed,
)
from kvdepot.testing.toy import ToyEngine, ToyServer
from kvdepot.tiers import Outcome, Tier, Write
from kvdepot.units import KIB, MIB

__all__ = [
    "check_back_pressure",
    "check_capacity",
    "check_concurrent_use",
    "check_too_large",
]

_THREADS = 4
_BLOCK_BYTES = 16 * KIB
_BLOCKS_PER_PROMPT = 8


def check_capacity(subject: TierSubject, folder: Path) -> None:
    """At no moment is more in use than the capacity, and a full tier makes room for what is new."""
    capacity = 2 * MIB
    engine = ToyEngine((_BLOCK_BYTES,))
    with opened(subject.make_tier(folder, engine, capacity_bytes=capacity)) as tier:
        require(
            tier.usage().capacity_bytes == capacity,
            f"a capacity of {capacity} was asked for, usage says {tier.usage().capacity_bytes}",
        )
        prompts = 4 * capacity // (_BLOCK_BYTES * _BLOCKS_PER_PROMPT * _THREADS)

        def store(thread: int) -> Callable[[], None]:
            def run() -> None:
                for number in range(prompts):
                    tokens = engine.prompt(thread * 1000 + number, _BLOCKS_PER_PROMPT)
                    settled(tier.store(engine.writes(tokens)), "a store into a full tier")

            return run

        with _Sampler(subject, tier, folder, capacity) as sampler:
            run_threads([store(thread) for thread in range(_THREADS)])
            drained(tier)
        sampler.judge()
        _require_room(tier, engine)
        sampler.look()
        sampler.judge()


def _require_room(tier: Tier, engine: ToyEngine) -> None:
    """New blocks get in although the tier is full; making room may take a while."""
    tokens = engine.prompt(99_999, 3)
    give_up_at_s = time.monotonic() + PATIENCE_S
    while tier.lookup(engine.keys(tokens)) < 3:
        require(
            time.monotonic() < give_up_at_s,
            f"a full tier made no room for a new prompt in {PATIENCE_S:.0f} s",
        )
        settled(tier.store(engine.writes(tokens)), "a store into a full tier")
        drained(tier)
        time.sleep(0.05)
    load_all(tier, engine, engine.reads(tokens), "a prompt stored into a full tier")


class _Sampler:
    """Watches the usage from a thread of its own."""

    def __init__(self, subject: TierSubject, tier: Tier, folder: Path, capacity: int) -> None:
        self._subject = subject
        self._tier = tier
        self._folder = folder
        self._capacity = capacity
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self.used_bytes_max = 0
        self.stored_bytes_max = 0
        self.samples = 0

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._stop.set()
        self._thread.join()

    def look(self) -> None:
        """Take one sample."""
        self.used_bytes_max = max(self.used_bytes_max, self._tier.usage().used_bytes)
        stored = self._subject.stored_bytes(self._folder) or 0
        self.stored_bytes_max = max(self.stored_bytes_max, stored)
        self.samples += 1

    def judge(self) -> None:
        """Require that no sample was above the capacity."""
        require(self.samples > 0, "no sample was taken")
        for what, largest in (
            ("usage() said", self.used_bytes_max),
            ("the storage held", self.stored_bytes_max),
        ):
            require(
                largest <= self._capacity,
                f"{what} {largest} bytes with a capacity of {self._capacity}",
            )

    def _run(self) -> None:
        while not self._stop.wait(0.002):
            self.look()


def check_back_pressure(subject: TierSubject, folder: Path) -> None:
    """Stores beyond the limit in flight are dropped at once; the caller never waits for room."""
    need(subject.can_slow, "the tier offers no way to slow its storage")
    limit = 8 * _BLOCK_BYTES
    engine = ToyEngine((_BLOCK_BYTES,))
    with opened(subject.make_tier(folder, engine, store_bytes_max=limit)) as tier:
        require(
            tier.limits.store_bytes_max == limit,
            f"store_bytes_max of {limit} was asked for, limits say {tier.limits.store_bytes_max}",
        )
        subject.slow(tier, SLOW_S)
        jobs = []
        waits = 0
        for number in range(6):
            writes = engine.writes(engine.prompt(number, 6))
            job, seconds = timed(lambda writes=writes: tier.store(writes))  # type: ignore[misc]
            waits += seconds > CALL_S_MAX
            require(
                waits <= STALLS_MAX,
                f"a store beyond the limit took {seconds:.2f} s on slow storage",
            )
            jobs.append(job)
            time.sleep(0.02)  # let the tier's workers get stuck in the slow storage
            pending = sum(job.outcomes.count(Outcome.PENDING) for job in jobs) * _BLOCK_BYTES
            require(
                pending <= limit, f"{pending} bytes of stores are pending, the limit is {limit}"
            )
        dropped = sum(job.outcomes.count(Outcome.DROPPED) for job in jobs)
        require(dropped > 0, "36 blocks went into a queue for 8, and none was dropped")
        subject.slow(tier, 0)
        for job in jobs:
            outcomes = settled(job, "a store under back-pressure")
            require(
                set(outcomes) <= {Outcome.DONE, Outcome.DROPPED},
                "a store under back-pressure ended in something other than DONE or DROPPED",
            )
        drained(tier)
        for number in range(6):
            tokens = engine.prompt(number, 6)
            _store_in_steps(tier, engine.writes(tokens), limit)
            load_all(tier, engine, engine.reads(tokens), "a prompt stored after back-pressure")


def _store_in_steps(tier: Tier, writes: list[Write], limit: int) -> None:
    step = max(1, limit // _BLOCK_BYTES)
    for start in range(0, len(writes), step):
        store_all(tier, writes[start : start + step])


def check_too_large(subject: TierSubject, folder: Path) -> None:
    """A block above the tier's limit is dropped; the blocks beside it are stored."""
    engine = ToyEngine((4096,))
    with opened(subject.make_tier(folder, engine, capacity_bytes=8 * MIB)) as tier:
        length = tier.limits.block_bytes_max + 1
        need(length <= 256 * MIB, f"blocks of {length} bytes are too large to try")
        writes = engine.writes(engine.prompt(1, 2))
        other = engine.writes(engine.prompt(2, 1))[0]
        large = Write(other.key, other.parent, memoryview(bytearray(length)), other.tokens)
        outcomes = settled(tier.store([writes[0], large, writes[1]]), "a store of a large block")
        require(
            outcomes == (Outcome.DONE, Outcome.DROPPED, Outcome.DONE),
            f"a block of block_bytes_max + 1 bytes between two others: {outcomes}",
        )
        drained(tier)
        require(tier.lookup([large.key]) == 0, "a dropped block is found")
        tokens = engine.prompt(1, 2)
        load_all(tier, engine, engine.reads(tokens), "the blocks beside a dropped one")


def check_concurrent_use(subject: TierSubject, folder: Path) -> None:
    """Many threads look up, load and store the same and different blocks; every byte is right."""
    engine = ToyEngine((4096, 1024))
    with opened(subject.make_tier(folder, engine)) as tier:
        shared = engine.prompt(0, 3)
        prompts = [shared + engine.prompt(number, 4) for number in range(1, 6)]

        def serve(thread: int) -> Callable[[], None]:
            def run() -> None:
                server = ToyServer(engine, tier)
                source = random.Random(thread)
                own = engine.prompt(1000 + thread, 5)
                for _ in range(15):
                    server.ask(source.choice([*prompts, own]))

            return run

        run_threads([serve(thread) for thread in range(_THREADS)])
        drained(tier)
        for tokens in [*prompts, *(engine.prompt(1000 + thread, 5) for thread in range(_THREADS))]:
            store_all(tier, engine.writes(tokens))
            load_all(tier, engine, engine.reads(tokens), "a prompt after concurrent use")
