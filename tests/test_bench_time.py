"""What a time to the first token is made of, by the engine's counters."""

from __future__ import annotations

import pytest

pytest.importorskip("aiohttp")

from kvdepot.bench.figures import parts_of
from kvdepot.bench.guard_rounds import Result
from kvdepot.bench.guard_time import check_parts
from kvdepot.bench.rows import Row
from kvdepot.bench.scrape import Counts, counts_of, difference
from kvdepot.bench.windows import Edge, Window
from kvdepot.io.hostcounters import HostCounters

OURS = """
kvdepot_engine_queue_seconds_total 1.0
kvdepot_engine_load_seconds_total 2.0
kvdepot_engine_ttft_seconds_total 7.0
"""
VLLM = """
vllm:request_queue_time_seconds_sum{engine="0",model_name="m"} 3.0
vllm:request_queue_time_seconds_count{engine="0",model_name="m"} 9.0
vllm:request_prefill_time_seconds_sum{engine="0",model_name="m"} 6.0
"""


def rows(*ttfts, **changes):
    return [
        Row(run=0, round="R2", arm="a", seq=i, first_s=ttft, last_s=ttft, status=200, **changes)
        for i, ttft in enumerate(ttfts)
    ]


def test_engines_tell_seconds_in_their_own_words():
    ours, vllm = counts_of(OURS), counts_of(VLLM)
    assert (ours.queue_s, ours.load_s, ours.compute_s) == (1.0, 2.0, 5.0)
    # its load is in the queue
    assert (vllm.queue_s, vllm.load_s, vllm.compute_s) == (3.0, None, 6.0)
    assert counts_of("other_total 1.0").compute_s is None
    window = difference(ours, Counts(queue_s=0.5, load_s=0.5, compute_s=1.0))
    assert window is not None
    assert (window.queue_s, window.load_s, window.compute_s) == (0.5, 1.5, 4.0)


def test_parts_are_means_and_make_up_the_whole():
    found = parts_of(
        rows(2.0, 2.5), [counts_of(OURS), Counts(queue_s=-0.2, load_s=0, compute_s=-4)]
    )
    assert found is not None
    assert found.queue_s == pytest.approx(0.4)
    assert (found.load_s, found.compute_s) == (1.0, 0.5)
    assert found.rest_s == pytest.approx(0.35)
    assert found.total_s == pytest.approx(2.25)
    foreign = parts_of(rows(10.0), [counts_of(VLLM)])
    assert foreign is not None
    assert (foreign.queue_s, foreign.load_s, foreign.compute_s) == (None, 3.0, 6.0)
    assert foreign.total_s == pytest.approx(10.0)


def test_parts_that_nobody_can_know_are_not_made_up():
    assert parts_of(rows(1.0), [Counts()]) is None
    assert parts_of(rows(1.0), [counts_of(OURS), Counts()]) is None
    assert parts_of([], [counts_of(OURS)]) is None
    assert parts_of([*rows(1.0), *rows(1.0, error="500")], [counts_of(OURS)]) is None


def result(ttft_s):
    def edge(at_s, page):
        return Edge(at_s=at_s, wall_s=at_s, counts=counts_of(page), host=HostCounters())

    window = Window(
        run=0, round="R2", arm="a", role="tier", attempt=0, begin=edge(0.0, ""), end=edge(9.0, OURS)
    )
    return Result("R2", "a", "storage", rows(ttft_s), [window])


def test_time_that_is_in_no_part_is_a_note():
    assert list(check_parts(result(8.1))) == []
    (found,) = check_parts(result(9.0))
    assert (found.guard, found.level, found.where) == ("G5", "note", "R2")
    assert "1000 of 9000 ms" in found.reason
