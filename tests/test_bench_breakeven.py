"""How fast R2 read, beside what its storage can give: known answers."""

from __future__ import annotations

import pytest

pytest.importorskip("aiohttp")

from kvdepot.bench.breakeven import BreakEven, Curve
from kvdepot.bench.guard_rounds import Result
from kvdepot.bench.headlines import break_even_of
from kvdepot.bench.page import _read_rate_text
from kvdepot.bench.rows import Row
from kvdepot.bench.scrape import Counts
from kvdepot.bench.windows import Edge, Window
from kvdepot.bench.words import Words
from kvdepot.io.hostcounters import HostCounters

#: a millisecond a token
CURVE = Curve(a=0.0, b=0.001, c=0.0, points=((100, 0.1), (1000, 1.0)))


def result(name, ttft_s, reused):
    rows = [
        Row(
            run=0, round=name, arm="a", seq=i, length=1000, status=200, first_s=ttft_s, last_s=ttft_s,
            prompt_tokens=1000, cached_tokens=reused, reused={"disk": reused},
        )
        for i in range(3)
    ]  # fmt: skip
    edge = Edge(at_s=0.0, wall_s=0.0, counts=Counts(token_bytes=100), host=HostCounters())
    window = Window(run=0, round=name, arm="a", role="tier", attempt=0, begin=edge, end=edge)
    return Result(name, "a", "any", rows, [window])


def found(ttft_s, curve=CURVE):
    results = [result("R1a", 1.0, 0), result("R2", ttft_s, 900)]
    (only,) = break_even_of(results, curve, {"a": 1e6})
    return only


def test_what_the_tail_leaves_is_reading():
    # 100 tokens are computed in 0.1 s, 90,000 bytes read in the other 0.2 s
    each = found(0.3)
    assert each.read_rate == pytest.approx(450_000)
    assert not each.is_least_rate
    assert each.measured_speed_up == pytest.approx(1 / 0.3)
    assert _read_rate_text(each, Words("en")) == "450 kB/s (45 %)"


def test_reading_that_computing_hides_has_a_least_rate_only():
    for ttft_s in (0.08, 0.11):
        each = found(ttft_s)
        assert each.is_least_rate
        assert each.read_rate == pytest.approx(90_000 / ttft_s)
    assert _read_rate_text(found(0.09), Words("en")) == "at least 1 MB/s (100 %)"


def test_without_a_curve_it_is_the_least_too():
    each = found(0.3, None)
    assert each.is_least_rate
    assert each.read_rate == pytest.approx(300_000)


def test_a_rate_that_nobody_knows_is_a_dash():
    unknown = BreakEven(
        arm="a", length=1, token_bytes=None, stored_token_bytes=None, compute_rate=1.0,
        read_ceiling=None, least_bandwidth=None, predicted_speed_up=None, measured_speed_up=1.0,
        read_rate=None,
    )  # fmt: skip
    assert _read_rate_text(unknown, Words("en")) == "-"
