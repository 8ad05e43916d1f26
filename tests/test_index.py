"""The index against a plain dict, and that it stays small and never loses a duplicate.

A key may stand in several segments (two processes stored it at the same time). When the one that the
index uses is evicted, another must step in; and a forgotten block must not come back by itself.
"""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvdepot.keys import BlockKey
from kvdepot.pool.index import BlockIndex
from kvdepot.pool.segment import RECORD, Records, key_table


def key_of(number: int) -> BlockKey:
    """Keys that collide in the table on purpose: only four first words among them."""
    return BlockKey((number % 4).to_bytes(8, "little") + number.to_bytes(24, "little"))


def records_of(numbers: list[int]) -> Records:
    records = np.zeros(len(numbers), dtype=RECORD)
    records["key"] = key_table([key_of(number) for number in numbers])
    records["offset"] = (np.arange(len(numbers)) + 1) * 4096
    records["length"] = 4096
    records["checksum"] = numbers
    return records


class Model:
    """segment -> {number: offset}; what is forgotten is taken out."""

    def __init__(self) -> None:
        self.segments: dict[int, dict[int, int]] = {}

    def places(self, number: int) -> set[tuple[int, int]]:
        return {
            (segment, blocks[number])
            for segment, blocks in self.segments.items()
            if number in blocks
        }

    def keys(self) -> set[int]:
        return {number for blocks in self.segments.values() for number in blocks}


def agree(index: BlockIndex, model: Model, numbers: range) -> None:
    keys = [key_of(number) for number in numbers]
    at = index.locate(keys)
    for position, number in enumerate(numbers):
        places = model.places(number)
        assert bool(at.is_present[position]) == bool(places)
        if places:
            found = (int(at.segment_ids[position]), int(at.offsets[position]))
            assert found in places
            assert int(at.checksums[position]) == number
    assert index.contains(keys) == [bool(model.places(number)) for number in numbers]
    assert [index.contains([key])[0] for key in keys] == index.contains(keys)
    assert len(index) == len(model.keys())
    expected = next((i for i, n in enumerate(numbers) if not model.places(n)), len(numbers))
    assert index.prefix(keys) == expected


STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("insert"), st.lists(st.integers(0, 40), max_size=30, unique=True)),
        st.tuples(st.just("remove"), st.integers(0, 30)),
        st.tuples(st.just("forget"), st.integers(0, 40)),
    ),
    max_size=30,
)


@given(STEPS)
def test_it_agrees_with_a_dict(steps: list[tuple[str, object]]) -> None:
    index, model = BlockIndex(), Model()
    next_segment = 0
    for step, value in steps:
        if step == "insert":
            assert isinstance(value, list)
            index.insert(next_segment, records_of(value))
            model.segments[next_segment] = {n: (i + 1) * 4096 for i, n in enumerate(value)}
            next_segment += 1
        elif step == "remove":
            assert isinstance(value, int)
            before = len(model.keys())
            model.segments.pop(value, None)
            assert index.remove_segment(value) == before - len(model.keys())
        else:
            assert isinstance(value, int)
            at = index.locate([key_of(value)])
            if at.is_present[0]:
                segment, offset = int(at.segment_ids[0]), int(at.offsets[0])
                assert index.forget(key_of(value), segment, offset)
                assert not index.forget(key_of(value), segment, offset)
                del model.segments[segment][value]
        agree(index, model, range(41))


def test_a_hostile_footer_that_names_a_key_twice_counts_it_once() -> None:
    index = BlockIndex()
    index.insert(1, records_of([7, 7, 8]))
    assert len(index) == 2
    assert index.remove_segment(1) == 2
    assert index.prefix([key_of(7)]) == 0


@pytest.mark.parametrize("rounds", [3])
def test_rows_are_used_again_and_memory_stays_bounded(rounds: int) -> None:
    index = BlockIndex()
    blocks = 20_000
    sizes = []
    for turn in range(rounds):
        for segment in range(blocks // 100):
            numbers = range(segment * 100, segment * 100 + 100)
            records = np.zeros(100, dtype=RECORD)
            records["key"] = key_table(
                [BlockKey(np.uint64(n * 0x9E3779B97F4A7C15 % 2**64).tobytes() * 4) for n in numbers]
            )
            records["offset"] = 4096
            index.insert(turn * 1000 + segment, records)
        sizes.append(index.memory_bytes)
        assert len(index) == blocks
        for segment in range(blocks // 100):
            index.remove_segment(turn * 1000 + segment)
        assert len(index) == 0
    assert sizes[-1] <= sizes[0] * 1.05
    assert sizes[0] / blocks <= 100


def test_an_empty_question_has_an_empty_answer() -> None:
    index = BlockIndex()
    assert index.prefix([]) == 0
    assert index.contains([]) == []
    assert index.locate([]).is_present.size == 0
