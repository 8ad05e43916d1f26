"""Sizes and spans as people write them. Bytes are powers of 1024 when written with an ``i``."""

from __future__ import annotations

import re

from kvdepot.errors import ConfigError

__all__ = ["GIB", "KIB", "MIB", "TIB", "ceil_div", "format_bytes", "parse_bytes", "round_up"]

KIB = 1 << 10
MIB = 1 << 20
GIB = 1 << 30
TIB = 1 << 40

_FACTORS = {
    "": 1,
    "b": 1,
    "kb": 10**3,
    "mb": 10**6,
    "gb": 10**9,
    "tb": 10**12,
    "kib": KIB,
    "mib": MIB,
    "gib": GIB,
    "tib": TIB,
    # one letter means the binary unit, as in dd, fio and Kubernetes' users' heads
    "k": KIB,
    "m": MIB,
    "g": GIB,
    "t": TIB,
}
# 30 digits are far beyond any storage and still safe to turn into a number
_SIZE = re.compile(r"([0-9]{1,30}(?:\.[0-9]{1,30})?)\s*([A-Za-z]*)", re.ASCII)


def parse_bytes(text: str | int) -> int:
    """Turn ``"64GiB"``, ``"1.5 TB"``, ``"4096"`` or a plain integer into a number of bytes.

    Raises:
        ConfigError: the text is not a non-negative size.
    """
    if isinstance(text, int) and not isinstance(text, bool):
        if text < 0:
            raise ConfigError(f"a size cannot be negative: {text}")
        return text
    match = _SIZE.fullmatch(str(text).strip())
    factor = _FACTORS.get(match[2].lower()) if match else None
    if match is None or factor is None:
        raise ConfigError(
            f"not a size: {text!r}", hint='write for example "64GiB", "512 MB" or "4096"'
        )
    # integers stay exact at any size; only a written fraction goes through a float
    number = match[1]
    return round(float(number) * factor) if "." in number else int(number) * factor


def format_bytes(count: float) -> str:
    """Write a number of bytes for people: three or four significant digits, binary units."""
    size = float(count)
    unit = "B"
    for larger in ("KiB", "MiB", "GiB", "TiB"):
        if abs(size) < 1024:
            break
        size, unit = size / 1024, larger
    is_whole = unit == "B" or abs(size) >= 999.5  # where three digits would need an exponent
    return f"{size:.0f} {unit}" if is_whole else f"{size:.3g} {unit}"


def ceil_div(value: int, step: int) -> int:
    """How many steps of `step` cover `value`."""
    return -(-value // step)


def round_up(value: int, step: int) -> int:
    """The smallest multiple of `step` that is at least `value`."""
    return ceil_div(value, step) * step
