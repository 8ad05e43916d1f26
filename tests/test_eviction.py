"""The order of eviction: by last use, along a chain the suffix before its prefix, the bad ones first.

Head-first eviction fills a cache with blocks that nobody can reach. A prefix therefore counts as used
as late as what continues it, also when it was stored by an earlier call.
"""

from __future__ import annotations

from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from kvdepot.pool.catalog import SegmentEntry
from kvdepot.pool.cleaner import eviction_order
from kvdepot.pool.segment import SegmentName, empty_segment_bytes
from kvdepot.pool.tier import PoolTier
from kvdepot.testing.toy import ToyEngine
from tests.pool_rig import pool_config


def entry(number: int, mtime_ns: int) -> SegmentEntry:
    return SegmentEntry("n", "2026010100", SegmentName("w", number), 100, mtime_ns, number)


def test_the_least_recently_used_goes_first() -> None:
    entries = [entry(1, 30), entry(2, 10), entry(3, 20)]
    assert [e.name.sequence for e in eviction_order(entries, parents={})] == [2, 3, 1]


def test_bad_segments_go_before_all_others() -> None:
    entries = [entry(1, 10), entry(2, 99)]
    order = eviction_order(entries, bad=[entries[1]], parents={})
    assert [e.name.sequence for e in order] == [2, 1]


@given(
    st.lists(st.integers(0, 20), min_size=2, max_size=12),
    st.data(),
)
def test_no_parent_goes_before_its_child(mtimes: list[int], data: st.DataObject) -> None:
    entries = [entry(number, mtime) for number, mtime in enumerate(mtimes)]
    # parents have smaller numbers: they were stored first
    parents = {
        child: [entries[data.draw(st.integers(0, number - 1))]]
        for number, child in enumerate(entries)
        if number and data.draw(st.booleans())
    }
    order = eviction_order(entries, parents=parents)
    assert sorted(order) == sorted(entries)
    place = {e: i for i, e in enumerate(order)}
    for child, of in parents.items():
        for parent in of:
            # with equal times of storing nothing tells which is which
            assert place[child] < place[parent] or child.mtime_ns < parent.mtime_ns


def test_a_prompt_stored_in_three_calls_loses_its_end_first(tmp_path: Path) -> None:
    """Six blocks in three calls, then six of another prompt, where eight fit (one to a segment)."""
    engine = ToyEngine((4096,))
    one = empty_segment_bytes(1) + 4096
    config = pool_config(tmp_path / "p", capacity_bytes=8 * one, segment_bytes=one)
    first, second = engine.prompt(1, 6), engine.prompt(2, 6)
    with PoolTier.open(config, engine.identity) as tier:
        for start in (0, 2, 4):
            tier.store(engine.writes(first)[start : start + 2])
            assert tier.drain(10)
        for start in (0, 2, 4):
            tier.store(engine.writes(second)[start : start + 2])
            assert tier.drain(10)
        assert tier.lookup(engine.keys(second)) == 6
        assert tier.lookup(engine.keys(first)) == 2
        assert tier.usage().used_bytes <= config.capacity_bytes  # type: ignore[operator]
