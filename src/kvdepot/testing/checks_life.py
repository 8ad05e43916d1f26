"""Conformance checks: closing, opening again, and several instances over one storage."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

from kvdepot.testing.subject import (
    PATIENCE_S,
    SLOW_S,
    TierSubject,
    drained,
    load_all,
    need,
    opened,
    require,
    settled,
    store_all,
)
from kvdepot.testing.toy import ToyEngine
from kvdepot.tiers import Outcome, Tier

__all__ = [
    "check_close",
    "check_close_decides_all",
    "check_reopen",
    "check_shared",
]


def check_close(subject: TierSubject, folder: Path) -> None:
    """Closing twice is harmless; afterwards every verb answers and none raises."""
    engine = ToyEngine((4096,))
    tier = subject.make_tier(folder, engine)
    tokens = engine.prompt(1, 3)
    try:
        store_all(tier, engine.writes(tokens))
    finally:
        tier.close()
    tier.close()
    tier.close(timeout_s=0.1)
    outcomes = settled(tier.load(engine.reads(tokens)), "a load after close")
    require(
        set(outcomes) <= {Outcome.MISS, Outcome.FAILED},
        f"a load after close gives {outcomes[0].name}, not MISS or FAILED",
    )
    fresh = engine.writes(engine.prompt(2, 3))
    outcomes = settled(tier.store(fresh), "a store after close")
    require(
        set(outcomes) == {Outcome.DROPPED},
        f"a store after close gives {outcomes[0].name}, not DROPPED",
    )
    tier.lookup(engine.keys(tokens))
    tier.touch(engine.keys(tokens))
    tier.usage()
    tier.drain(0.1)
    require(tier.load([]).is_settled, "an empty load after close is not over")


def check_close_decides_all(subject: TierSubject, folder: Path) -> None:
    """Closing in the middle of loads and stores leaves no job undecided."""
    need(subject.can_slow, "the tier offers no way to slow its storage")
    engine = ToyEngine((4096,))
    tier = subject.make_tier(folder, engine)
    try:
        tokens = engine.prompt(1, 4)
        store_all(tier, engine.writes(tokens))
        subject.slow(tier, SLOW_S / 3)
        reads = [engine.reads(tokens) for _ in range(4)]
        loads = [tier.load(rows) for rows in reads]
        stores = [tier.store(engine.writes(engine.prompt(number, 4))) for number in range(2, 6)]
    finally:
        tier.close(timeout_s=SLOW_S)
    for job in (*loads, *stores):
        settled(job, "a job that was running when its tier was closed")
    for rows, job in zip(reads, loads, strict=True):
        engine.check(rows, job.outcomes)


def check_reopen(subject: TierSubject, folder: Path) -> None:
    """A persistent tier has everything again after close and a new start, even without a drain."""
    engine = ToyEngine((4096, 1024))
    tokens, other = engine.prompt(1, 5), engine.prompt(2, 3)
    with opened(subject.make_tier(folder, engine)) as tier:
        need(tier.limits.is_persistent, "the tier does not claim to be persistent")
        store_all(tier, engine.writes(tokens))
        outcomes = settled(tier.store(engine.writes(other)), "a store")
        require(set(outcomes) == {Outcome.DONE}, "an idle tier with room did not store everything")
    with opened(subject.reopen(folder, engine)) as tier:
        for prompt in (tokens, other):
            _wait_visible(subject, tier, engine, prompt, "after a new start")
            load_all(tier, engine, engine.reads(prompt), "a load after a new start")
        store_all(tier, engine.writes(engine.prompt(3, 2)))


def check_shared(subject: TierSubject, folder: Path) -> None:
    """What one instance of a shared tier has stored, another finds within the stated time."""
    engine = ToyEngine((4096,))
    with opened(subject.make_tier(folder, engine)) as first:
        need(first.limits.is_shared, "the tier does not claim to be shared")
        with opened(subject.reopen(folder, engine)) as second:
            for number, (writer, reader) in enumerate(((first, second), (second, first))):
                tokens = engine.prompt(number, 4)
                store_all(writer, engine.writes(tokens))
                _wait_visible(subject, reader, engine, tokens, "in another instance")
                load_all(reader, engine, engine.reads(tokens), "a load in another instance")
        both = engine.prompt(0, 4)
        load_all(first, engine, engine.reads(both), "a load after the other instance has closed")
        drained(first)


def _wait_visible(
    subject: TierSubject, tier: Tier, engine: ToyEngine, tokens: Sequence[int], where: str
) -> None:
    give_up_at_s = time.monotonic() + min(subject.discover_s, PATIENCE_S)
    blocks = len(engine.keys(tokens))
    while True:
        found = min(tier.lookup(engine.keys(tokens, group)) for group in range(engine.groups))
        if found == blocks:
            return
        require(
            time.monotonic() < give_up_at_s,
            f"{found} of {blocks} stored blocks are found {where} within {subject.discover_s} s",
        )
        time.sleep(0.02)
