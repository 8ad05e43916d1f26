"""kvdepot.units: sizes as people write them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvdepot.errors import ConfigError
from kvdepot.units import GIB, KIB, MIB, TIB, ceil_div, format_bytes, parse_bytes, round_up


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("0", 0),
        ("4096", 4096),
        ("4096B", 4096),
        ("64GiB", 64 * GIB),
        ("64 gib", 64 * GIB),
        ("64G", 64 * GIB),
        ("1.5 TB", 1_500_000_000_000),
        ("1.5TiB", TIB + TIB // 2),
        ("512 MB", 512_000_000),
        (" 3k ", 3 * KIB),
        (7, 7),
        (0, 0),
    ],
)
def test_sizes_that_people_write(text, count):
    assert parse_bytes(text) == count


@pytest.mark.parametrize(
    "text",
    [
        *("", " ", "GiB", "-1", "+1", "1e9", "0x10", "1_000", "1,000", "1.", ".5", "1.2.3", "٣"),
        *("64 GiB/s", "64 GiBs", "six", "nan", "inf", "1 GiB 2", "1\n2", "9" * 5_000),
        "9" * 400 + ".0",
        *(True, None, -1, 1.0e300),
    ],
)
def test_what_is_no_size_is_refused(text):
    with pytest.raises(ConfigError):
        parse_bytes(text)


@given(st.integers(0, 10**24))
def test_a_plain_number_is_exact(count):
    assert parse_bytes(str(count)) == count


@given(st.integers(0, 2**70))
def test_format_is_short_and_near(count):
    text = format_bytes(count)
    number, unit = text.split()
    assert "e" not in number
    assert len(number) <= max(4, len(str(count // TIB)))
    back = float(number) * {"B": 1, "KiB": KIB, "MiB": MIB, "GiB": GIB, "TiB": TIB}[unit]
    assert back == pytest.approx(count, rel=0.006)


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1 KiB"),
        (1_024_000, "1000 KiB"),
        (MIB - 1, "1024 KiB"),
        (64 * MIB, "64 MiB"),
        (5 * TIB, "5 TiB"),
        (5_000 * TIB, "5000 TiB"),
    ],
)
def test_format_at_the_seams(count, text):
    assert format_bytes(count) == text


@given(st.integers(0, 10**15), st.integers(1, 10**6))
def test_round_up_is_the_smallest_multiple_not_below(value, step):
    rounded = round_up(value, step)
    assert rounded % step == 0
    assert value <= rounded < value + step
    assert ceil_div(value, step) * step == rounded
