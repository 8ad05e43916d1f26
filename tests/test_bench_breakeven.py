"""How fast R2 read, beside what its storage can give: known answers."""

from __future__ import annotations

import msgspec
import pytest

pytest.importorskip("aiohttp")

from kvdepot.bench.breakeven import BreakEven, Curve
from kvdepot.bench.ceilings import Ceilings, DepthRate
from kvdepot.bench.guard_rounds import Result
from kvdepot.bench.headlines import break_even_of
from kvdepot.bench.pagebreakeven import read_rate_text
from kvdepot.bench.rows import Row
from kvdepot.bench.scrape import Counts
from kvdepot.bench.windows import Edge, Window
from kvdepot.bench.words import Words
from kvdepot.io.copyrate import CopyRate
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


DEVICE = Ceilings(reads=(DepthRate(depth=1, rate=4e5), DepthRate(depth=8, rate=1e6)))
ROWS = (
    CopyRate(threads=1, copy_bytes=100, rate=3e5),
    CopyRate(threads=2, copy_bytes=100, rate=5e5),
)


def found(ttft_s, curve=CURVE, ceilings=DEVICE):
    results = [result("R1a", 1.0, 0), result("R2", ttft_s, 900)]
    (only,) = break_even_of(results, curve, {"a": ceilings})
    return only


def test_what_the_tail_leaves_is_reading():
    # 100 tokens are computed in 0.1 s, 90,000 bytes read in the other 0.2 s
    each = found(0.3)
    assert each.read_rate == pytest.approx(450_000)
    assert not each.is_least_rate
    assert each.measured_speed_up == pytest.approx(1 / 0.3)
    assert (each.read_ceiling, each.least_ceiling, each.least_ceiling_rate) == (1e6, "device", 1e6)
    assert each.ceiling_share == pytest.approx(0.45)
    assert read_rate_text(each, Words("en")) == "450 kB/s (45 %)"
    # 90,000 bytes at the ceiling and the tail: 0.19 s
    assert each.predicted_speed_up == pytest.approx(1 / 0.19)


def test_the_least_ceiling_is_the_one_that_counts():
    copied = msgspec.structs.replace(DEVICE, copies=ROWS, copy_device="cpu")
    each = found(0.3, ceilings=copied)
    assert (each.read_ceiling, each.least_ceiling, each.least_ceiling_rate) == (
        1e6, "host-to-device", 5e5,
    )  # fmt: skip
    assert each.ceiling_share == pytest.approx(0.9)
    assert each.predicted_speed_up == pytest.approx(1 / 0.28)
    far = found(0.3, ceilings=msgspec.structs.replace(copied, network=4.5e5))
    assert (far.least_ceiling, far.ceiling_share) == ("network", pytest.approx(1.0))
    nothing = found(0.3, ceilings=Ceilings())
    assert (nothing.least_ceiling, nothing.ceiling_share, nothing.predicted_speed_up) == (None,) * 3
    assert read_rate_text(nothing, Words("en")) == "450 kB/s"


def test_reading_that_computing_hides_has_a_least_rate_only():
    for ttft_s in (0.08, 0.11):
        each = found(ttft_s)
        assert each.is_least_rate
        assert each.read_rate == pytest.approx(90_000 / ttft_s)
    assert read_rate_text(found(0.09), Words("en")) == "at least 1 MB/s (100 %)"


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
    assert read_rate_text(unknown, Words("en")) == "-"
