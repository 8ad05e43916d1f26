"""Planning: every read gets one place in one unit or is missing, in order, within the unit's size."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from kvdepot.keys import BlockKey
from kvdepot.pool.index import Locations
from kvdepot.pool.plan import plan_units
from kvdepot.tiers import Job, Outcome, Read

UNIT_BYTES = 64 * 1024


def a_segment(number: int) -> Any:
    return SimpleNamespace(id=number) if number != 3 else None  # segment 3 has gone


PLACES = st.lists(
    st.tuples(
        st.booleans(),
        st.integers(0, 3),
        st.integers(1, 12),
        st.sampled_from([512, 4096, 5000, 8192, 100_000]),
    ),
    min_size=1,
    max_size=60,
)


@given(PLACES)
def test_each_read_is_in_one_unit_or_missing(places: list[tuple[bool, int, int, int]]) -> None:
    job = Job([BlockKey(bytes([i]) * 32) for i in range(len(places))])
    reads = [
        Read(key, memoryview(bytearray(length)))
        for key, (_, _, _, length) in zip(job.keys, places, strict=True)
    ]
    at = Locations(
        np.array([present for present, *_ in places]),
        np.array([segment for _, segment, *_ in places]),
        np.array([page * 4096 for _, _, page, _ in places]),
        np.array([length for *_, length in places]),
        np.arange(len(places), dtype=np.uint64),
    )
    units = plan_units(job, reads, 0, at, a_segment, unit_bytes=UNIT_BYTES)
    planned = []
    for unit in units:
        assert unit.length_bytes <= UNIT_BYTES or len(unit.reads) == 1
        end = unit.offset
        for index, read in enumerate(unit.reads):
            position = unit.first + index
            planned.append(position)
            present, segment, page, length = places[position]
            assert present
            assert segment == unit.segment.id != 3
            assert read is reads[position]
            # neighbours in the segment, padding included: one call reads them all
            assert unit.offset + unit.offsets[index] == page * 4096 == end
            assert unit.lengths[index] == length
            assert unit.checksums[index] == position
            end += -(-length // 4096) * 4096
        assert unit.length_bytes == end - unit.offset
    assert planned == sorted(planned)
    for position, (present, segment, _, _) in enumerate(places):
        is_planned = position in planned
        assert is_planned == (present and segment != 3)
        assert (job.outcomes[position] is Outcome.MISS) == (not is_planned)


def test_a_row_of_another_length_is_a_miss() -> None:
    job = Job([BlockKey(b"k" * 32)])
    reads = [Read(job.keys[0], memoryview(bytearray(4096)))]
    at = Locations(
        np.array([True]),
        np.array([0]),
        np.array([4096]),
        np.array([8192]),
        np.array([0], dtype=np.uint64),
    )
    assert plan_units(job, reads, 0, at, a_segment, unit_bytes=UNIT_BYTES) == []
    assert job.outcomes == (Outcome.MISS,)
