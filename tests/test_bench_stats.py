"""Statistics against known answers: tables, closed forms, and samples whose truth is known."""

from __future__ import annotations

import math

import numpy as np
import pytest

from kvdepot.bench.distributions import t_sf
from kvdepot.bench.quantiles import interval_ranks, quantile
from kvdepot.bench.runstats import equivalence, holm, median, ratio, trend

#: exact binomial ranks, 95 % two-sided
RANKS = {
    16: ((4, 13), (13, None), (15, None)),
    32: ((10, 23), (28, None), (30, None)),
    100: ((40, 61), (90, 100), (97, None)),
    200: ((86, 115), (184, 197), (195, None)),
    400: ((180, 221), (371, 389), (392, 400)),
    1000: ((469, 532), (936, 964), (983, 997)),
    2000: ((956, 1045), (1880, 1920), (1971, 1989)),
}


@pytest.mark.parametrize("n", RANKS)
def test_the_ranks_are_those_of_the_exact_binomial(n):
    assert tuple(interval_ranks(n, q) for q in (0.5, 0.95, 0.99)) == RANKS[n]


@pytest.mark.parametrize(("q", "least"), [(0.95, 72), (0.99, 368)])
def test_the_sample_size_that_a_percentile_needs(q, least):
    assert interval_ranks(least, q)[1] is not None
    assert interval_ranks(least - 1, q)[1] is None


def test_a_quantile_has_its_order_statistics_as_interval():
    values = [float(value) for value in range(1, 201)]
    found = quantile(list(reversed(values)), 0.95)
    assert (found.low, found.high, found.maximum) == (184.0, 197.0, 200.0)
    assert found.value == pytest.approx(190.05)
    assert found.is_bounded


def test_a_small_sample_has_no_upper_end():
    found = quantile([3.0, 1.0, 2.0], 0.95)
    assert not found.is_bounded
    assert (found.n, found.maximum, found.low) == (3, 3.0, 2.0)
    with pytest.raises(ValueError, match="no values"):
        quantile([], 0.5)


def test_the_interval_covers_the_truth_as_often_as_it_says():
    rng = np.random.default_rng(5)
    truth = math.log(20)  # the 0.95 quantile of the exponential distribution
    samples = rng.exponential(size=(1500, 200))
    found = [quantile(list(sample), 0.95) for sample in samples]
    covered = np.mean([q.covers(truth) for q in found])
    assert 0.94 <= covered <= 0.99  # discrete, therefore a little above 95 %


@pytest.mark.parametrize(
    ("t", "freedom", "p"),
    [
        (0.0, 5, 0.5),
        (1.0, 1, 0.25),  # Cauchy: 1/2 - atan(1)/pi
        (2.015048, 5, 0.05),
        (-2.015048, 5, 0.95),
        (2.228139, 10, 0.025),
        (1.644854, 1e7, 0.05),
        (12.7062, 1, 0.025),
    ],
)
def test_student_s_t(t, freedom, p):
    assert t_sf(t, freedom) == pytest.approx(p, rel=2e-5)


def test_a_ratio_is_geometric_and_its_interval_is_over_runs():
    found = ratio([8.0, 2.0], [1.0, 1.0])
    assert found.value == pytest.approx(4.0)
    assert [found.low, found.high] == pytest.approx([2.0, 8.0])
    assert found.runs == 2
    again = ratio([8.0, 2.0], [1.0, 1.0])
    assert found == again
    assert ratio([8.0], [1.0]).low is None
    with pytest.raises(ValueError, match="positive"):
        ratio([0.0], [1.0])


def test_the_bootstrap_covers_the_truth():
    rng = np.random.default_rng(7)
    hits = 0
    for _ in range(200):
        found = ratio(
            np.exp(rng.normal(0.5, 0.1, 10)).tolist(), np.exp(rng.normal(0, 0.1, 10)).tolist()
        )
        hits += found.covers(math.exp(0.5))
    # ten runs make a percentile bootstrap a little too narrow, not more
    assert 0.85 <= hits / 200 <= 0.98


def test_equal_needs_evidence():
    rng = np.random.default_rng(1)
    tight = np.exp(rng.normal(0, 0.01, 8)).tolist()
    loose = np.exp(rng.normal(0, 0.5, 4)).tolist()
    assert equivalence(tight, tight).is_equal
    # no difference to be found, and none excluded either
    found = equivalence(loose, loose)
    assert not found.is_equal
    assert found.ratio == pytest.approx(1.0)
    assert not equivalence([1.2] * 5, [1.0, 1.01, 0.99, 1.0, 1.0]).is_equal
    assert equivalence([1.0], [1.0]).p is None
    assert equivalence([1.0, 1.0], [1.0, 1.0]).p == 0.0


def test_equivalence_keeps_its_error_rate():
    # at the margin itself, "equal" may be said in 5 % of all cases
    rng = np.random.default_rng(3)
    said = sum(
        equivalence(
            np.exp(rng.normal(math.log(1.1), 0.03, 6)).tolist(),
            np.exp(rng.normal(0, 0.03, 6)).tolist(),
        ).is_equal
        for _ in range(1000)
    )
    assert 0.02 <= said / 1000 <= 0.08


def test_holm_on_the_textbook_example():
    found = holm({"a": 0.01, "b": 0.04, "c": 0.03, "d": 0.005})
    assert found == pytest.approx({"a": 0.03, "b": 0.06, "c": 0.06, "d": 0.02})
    assert list(found) == ["a", "b", "c", "d"]


def test_a_trend_has_the_p_of_its_slope():
    flat = trend([0, 1, 2, 3, 4, 5], [1, -1, 1, -1, 1, -1])
    assert flat.p > 0.5
    rising = trend(list(range(20)), [0.5 * x + (-1) ** x for x in range(20)])
    assert rising.slope == pytest.approx(0.5, abs=0.02)
    assert rising.p < 1e-6
    assert trend([0, 1, 2], [0, 1, 2]).p == 0.0
    # known: x=1..5, y=2,4,5,4,5: slope 0.6, t = 2.1213 with 3 degrees of freedom
    assert trend([1, 2, 3, 4, 5], [2, 4, 5, 4, 5]).p == pytest.approx(t_sf(2.12132, 3), rel=1e-4)
    with pytest.raises(ValueError, match="three points"):
        trend([1, 1, 1], [1, 2, 3])


def test_a_median_needs_no_order():
    assert median([3.0, 1.0, 2.0]) == 2.0
