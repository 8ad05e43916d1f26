"""Host rows against a model: rows are conserved, users are never negative, used rows are never evicted."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvdepot.errors import ConfigError
from kvdepot.host import HostRows, RowRun, contiguous_runs
from kvdepot.io.buffers import ALIGNMENT, address_of
from kvdepot.keys import BlockKey

ROWS = 6


def key_of(number: int) -> BlockKey:
    return BlockKey(bytes([number]) * 32)


@given(
    st.lists(
        st.tuples(st.sampled_from(["reserve", "fill", "acquire", "release"]), st.integers(0, 7)),
        max_size=60,
    )
)
def test_rows_are_conserved(steps: list[tuple[str, int]]) -> None:
    host = HostRows(1000, ROWS * ALIGNMENT)
    users: dict[int, int] = {}
    content: dict[int, BlockKey] = {}
    for step, number in steps:
        if step == "reserve":
            before = sum(host.counts()[:2])
            rows = host.reserve(number)
            assert len(rows) == min(number, before)
            for row in rows:
                assert row not in users
                users[row] = 1
                content.pop(row, None)
        elif step == "fill":
            unfilled = [row for row in users if row not in content]
            if unfilled and not host.holds([key_of(number)])[0]:
                host.fill(unfilled[0], key_of(number))
                content[unfilled[0]] = key_of(number)
        elif step == "acquire":
            held = host.acquire(key_of(number))
            assert (held is not None) == (key_of(number) in content.values())
            if held is not None:
                assert content[held] == key_of(number)
                users[held] = users.get(held, 0) + 1
        elif users:
            row = sorted(users)[number % len(users)]
            host.release([row])
            users[row] -= 1
            if users[row] == 0:
                del users[row]
        free, clean, used = host.counts()
        assert free + clean + used == ROWS
        assert used == len(users)
        for row, key in list(content.items()):
            if row not in users and not host.holds([key])[0]:
                del content[row]
    host.close()


def test_the_least_recently_used_block_goes_first() -> None:
    host = HostRows(4096, 3 * 4096)
    for number in range(3):
        (row,) = host.reserve(1)
        host.fill(row, key_of(number))
        host.release([row])
    used = host.acquire(key_of(0))
    assert used is not None
    host.release([used])
    host.reserve(1)
    assert host.holds([key_of(n) for n in range(3)]) == [True, False, True]


def test_rows_are_aligned_and_exactly_a_block() -> None:
    host = HostRows(5000, 4 * 8192)
    assert host.row_count == 4
    for row in range(4):
        view = host.row(row)
        assert view.nbytes == 5000
        assert not view.readonly
        assert address_of(view) % ALIGNMENT == 0
    assert host.run(RowRun(1, 2)).nbytes == 2 * 8192


def test_a_buffer_too_small_for_a_block_is_refused() -> None:
    with pytest.raises(ConfigError, match="does not hold one block"):
        HostRows(8192, 4096)


@given(st.lists(st.integers(0, 20)))
def test_runs_cover_the_rows_in_order(rows: list[int]) -> None:
    runs = contiguous_runs(rows)
    assert [run.first_row + i for run in runs for i in range(run.rows)] == rows
    for left, right in itertools.pairwise(runs):
        assert left.first_row + left.rows != right.first_row


def test_a_prefix_outlives_what_continues_it():
    """Rows of a prompt are given back from the front, so its head was once the first to go."""
    host = HostRows(4096, 8 * 4096)
    keys = [BlockKey(bytes([number]) * 32) for number in range(6)]
    rows = host.reserve(6)
    for row, key in zip(rows, keys, strict=True):
        host.fill(row, key)
    host.release(rows)
    host.refresh([*keys, BlockKey(bytes(32))])
    host.release(host.reserve(4))
    assert host.holds(keys) == [True] * 4 + [False] * 2
