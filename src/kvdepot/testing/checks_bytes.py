"""Conformance checks: the right bytes, partial hits, duplicates, damage, and whose buffers they are."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path

from kvdepot.keys import BlockKey
from kvdepot.testing.subject import (
    TierSubject,
    load_all,
    need,
    opened,
    require,
    settled,
    store_all,
)
from kvdepot.testing.toy import ToyEngine, toy_identity
from kvdepot.tiers import Outcome, Read, Tier
from kvdepot.units import KIB

__all__ = [
    "check_damage",
    "check_duplicates_in_one_call",
    "check_empty_calls",
    "check_identities_apart",
    "check_load_rows_untouched_after_settle",
    "check_partial_hits",
    "check_round_trip",
    "check_row_of_other_length",
    "check_store_buffers_not_retained",
    "check_stored_twice_does_not_grow",
]

#: block lengths per cache group: tiny, page-sized, several groups, not a multiple of the page, large
_GEOMETRIES = (
    (128,),
    (1024,),
    (4096,),
    (1024, 4096, 384),
    (12_416,),
    (64 * KIB, 1024),
    (368_640,),
)
#: distance of rows from a page boundary; 0 may go without a copy
_SKEWS_BYTES = (0, 1, 512)


def check_round_trip(subject: TierSubject, folder: Path) -> None:
    """What was stored comes back, for every geometry, alignment of rows, and order of the load."""
    for number, (block_bytes, skew) in enumerate(itertools.product(_GEOMETRIES, _SKEWS_BYTES)):
        engine = ToyEngine(block_bytes)
        with opened(subject.make_tier(folder / str(number), engine)) as tier:
            tokens = engine.prompt(number, 5)
            what = f"blocks of {block_bytes} bytes, rows {skew} bytes off the page"
            store_all(tier, engine.writes(tokens, skew_bytes=skew))
            for group in range(engine.groups):
                found = tier.lookup(engine.keys(tokens, group))
                require(found == 5, f"{what}: lookup finds {found} of 5 blocks of group {group}")
            # the order of the load is the caller's; every row gets its own block
            forward = engine.reads(tokens, skew_bytes=skew)
            load_all(tier, engine, forward, what)
            load_all(tier, engine, forward[::-1], f"{what}, in reverse")
            mixed = engine.reads(tokens, skew_bytes=skew)
            load_all(tier, engine, mixed[1::2] + mixed[::2], f"{what}, odd ones first")


def check_partial_hits(subject: TierSubject, folder: Path) -> None:
    """Lookup gives the longest prefix without a gap; absent blocks do not disturb present ones."""
    engine = ToyEngine((4096,))
    with opened(subject.make_tier(folder, engine)) as tier:
        tokens = engine.prompt(1, 6)
        keys = engine.keys(tokens)
        other = engine.prompt(2, 3)
        require(tier.lookup(keys) == 0, "an empty tier finds blocks")
        store_all(tier, engine.writes(tokens)[:4])
        branch = tokens[: 2 * engine.block_tokens] + other
        expected: Sequence[tuple[str, list[BlockKey], int]] = (
            ("4 of 6 stored", keys, 4),
            ("exactly what is stored", keys[:4], 4),
            ("a part of what is stored", keys[:3], 3),
            ("another prompt", engine.keys(other), 0),
            ("a prompt that shares two blocks", engine.keys(branch), 2),
            ("an absent key first", [keys[5], *keys[:4]], 0),
            ("an absent key between", [keys[0], keys[5], keys[1]], 1),
        )
        for what, asked, right in expected:
            found = tier.lookup(asked)
            require(found == right, f"lookup of {what} gives {found}, not {right}")
        reads = engine.reads(tokens) + engine.reads(other)
        order = [0, 4, 1, 7, 2, 5, 3, 6, 8]
        mixed = [reads[place] for place in order]
        outcomes = settled(tier.load(mixed), "a load of present and absent blocks")
        engine.check(mixed, outcomes)
        for place, outcome in zip(order, outcomes, strict=True):
            right_outcome = Outcome.DONE if place < 4 else Outcome.MISS
            require(
                outcome is right_outcome,
                f"a load of present and absent blocks gives {outcome.name}, not "
                f"{right_outcome.name}, for read {place}",
            )


def check_duplicates_in_one_call(subject: TierSubject, folder: Path) -> None:
    """A key may occur twice in one call: one copy is stored, every row is filled."""
    engine = ToyEngine((4096,))
    with opened(subject.make_tier(folder, engine)) as tier:
        tokens = engine.prompt(1, 3)
        store_all(tier, engine.writes(tokens) + engine.writes(tokens))
        require(
            tier.usage().blocks == 3,
            f"3 different blocks stored twice count as {tier.usage().blocks}",
        )
        first, second = engine.reads(tokens), engine.reads(tokens)
        load_all(tier, engine, first + second, "each block twice in one load")
        both = [read for pair in zip(first, second, strict=True) for read in pair]
        load_all(tier, engine, both, "each block twice in a row in one load")


def check_stored_twice_does_not_grow(subject: TierSubject, folder: Path) -> None:
    """Storing what is present is DONE at once and takes no room."""
    engine = ToyEngine((4096,))
    with opened(subject.make_tier(folder, engine)) as tier:
        tokens = engine.prompt(1, 4)
        store_all(tier, engine.writes(tokens))
        before = tier.usage()
        job = tier.store(engine.writes(tokens))
        require(job.is_decided, "a store of blocks that are present is not decided at once")
        require(set(settled(job, "a store")) == {Outcome.DONE}, "a present block is not DONE")
        store_all(tier, engine.writes(tokens))
        after = tier.usage()
        require(
            (after.blocks, after.used_bytes) == (before.blocks, before.used_bytes),
            f"storing what is present changed the usage from {before} to {after}",
        )


def check_store_buffers_not_retained(subject: TierSubject, folder: Path) -> None:
    """Once a store is settled its memory is the caller's again."""
    engine = ToyEngine((4096, 1024))
    with opened(subject.make_tier(folder, engine)) as tier:
        tokens = engine.prompt(1, 4)
        writes = engine.writes(tokens)
        settled(tier.store(writes), "a store")
        for write in writes:
            write.data[:] = bytes(write.data.nbytes)
        _load_all_present(tier, engine, tokens)


def _load_all_present(tier: Tier, engine: ToyEngine, tokens: Sequence[int]) -> None:
    """After a drain, load a whole prompt twice; from wherever the tier may have it."""
    require(tier.drain(60), "drain did not end")
    for _ in range(2):
        load_all(tier, engine, engine.reads(tokens), "a load after the stored memory was reused")


def check_load_rows_untouched_after_settle(subject: TierSubject, folder: Path) -> None:
    """Once a load is settled its rows are the caller's again, whatever the tier does next."""
    engine = ToyEngine((4096,))
    with opened(subject.make_tier(folder, engine)) as tier:
        tokens, other = engine.prompt(1, 4), engine.prompt(2, 4)
        store_all(tier, engine.writes(tokens))
        reads = engine.reads(tokens)
        load_all(tier, engine, reads, "a load")
        mark = b"\x55" * 4096
        for read in reads:
            read.into[:] = mark
        store_all(tier, engine.writes(other))
        load_all(tier, engine, engine.reads(other) + engine.reads(tokens), "later loads")
        require(
            all(bytes(read.into) == mark for read in reads),
            "a row was written to after its load was settled",
        )


def check_empty_calls(subject: TierSubject, folder: Path) -> None:
    """Calls without blocks are over at once and change nothing."""
    engine = ToyEngine()
    with opened(subject.make_tier(folder, engine)) as tier:
        require(tier.lookup([]) == 0, "a lookup of nothing finds something")
        for what, job in (
            ("load", tier.load([])),
            ("load with a deadline", tier.load([], deadline_s=0.0)),
            ("store", tier.store([])),
        ):
            require(job.is_decided and job.is_settled, f"an empty {what} is not over at once")
            require(job.outcomes == (), f"an empty {what} has outcomes")
        tier.touch([])
        require(tier.drain(0.0), "an idle tier has something to drain")
        require(tier.usage().blocks == 0, "an empty tier counts blocks")


def check_identities_apart(subject: TierSubject, folder: Path) -> None:
    """Another identity over the same storage sees nothing, and both keep their own bytes."""
    ours = ToyEngine()
    theirs = ToyEngine(identity=toy_identity(weights_fingerprint="fine-tuned"))
    tokens = ours.prompt(1, 4)
    with opened(subject.make_tier(folder, ours)) as tier:
        store_all(tier, ours.writes(tokens))
        with opened(subject.make_tier(folder, theirs)) as other:
            found = other.lookup(theirs.keys(tokens))
            require(found == 0, f"another identity finds {found} blocks")
            outcomes = settled(other.load(theirs.reads(tokens)), "a load")
            require(set(outcomes) == {Outcome.MISS}, "another identity loads blocks")
            store_all(other, theirs.writes(tokens))
            load_all(other, theirs, theirs.reads(tokens), "the other identity's blocks")
        load_all(tier, ours, ours.reads(tokens), "our blocks beside another identity's")


def check_row_of_other_length(subject: TierSubject, folder: Path) -> None:
    """A row of another length than the block is never DONE and harms nothing."""
    engine = ToyEngine((4096,))
    with opened(subject.make_tier(folder, engine)) as tier:
        tokens = engine.prompt(1, 3)
        store_all(tier, engine.writes(tokens))
        for length in (4095, 4097, 2048, 8192):
            reads = engine.reads(tokens)
            reads[1] = Read(reads[1].key, memoryview(bytearray(length)))
            outcomes = settled(tier.load(reads), f"a load into a row of {length} bytes")
            require(
                outcomes[1] not in (Outcome.DONE, Outcome.PENDING),
                f"a block of 4096 bytes is DONE in a row of {length}",
            )


def check_damage(subject: TierSubject, folder: Path) -> None:
    """A damaged block is CORRUPT once, is forgotten, is never served, and can be stored anew."""
    need(subject.can_damage, "the tier offers no way to damage a stored block")
    engine = ToyEngine((4096,))
    with opened(subject.make_tier(folder, engine)) as tier:
        tokens = engine.prompt(1, 5)
        store_all(tier, engine.writes(tokens))
        subject.damage(tier, engine.keys(tokens)[2])
        reads = engine.reads(tokens)
        outcomes = settled(tier.load(reads), "a load of a damaged block")
        engine.check(reads, outcomes)
        require(
            outcomes[2] is Outcome.CORRUPT,
            f"the load of a damaged block gives {outcomes[2].name}, not CORRUPT",
        )
        require(
            outcomes[:2] == (Outcome.DONE, Outcome.DONE),
            "the blocks before a damaged one are not served",
        )
        found = tier.lookup(engine.keys(tokens))
        require(found == 2, f"after the damage was seen lookup finds {found} blocks, not 2")
        again = engine.reads(tokens, first=2)[:1]
        outcome = settled(tier.load(again), "a second load of a damaged block")[0]
        require(
            outcome is Outcome.MISS,
            f"a damaged block that was seen gives {outcome.name} again, not MISS",
        )
        store_all(tier, engine.writes(tokens))
        load_all(tier, engine, engine.reads(tokens), "blocks stored anew after damage")
