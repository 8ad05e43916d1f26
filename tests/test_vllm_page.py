"""docs/vllm.md says of every setting and every metric what it is."""

from __future__ import annotations

import re
from pathlib import Path

import msgspec
import pytest

from kvdepot.engines.vllm.settings import TierSettings
from kvdepot.engines.vllm.versions import TESTED
from kvdepot.policy.admission import AdmissionSettings
from kvdepot.units import format_bytes

PAGE = Path(__file__).resolve().parent.parent / "docs" / "vllm.md"


def rows(start):
    """First and second cells of the rows whose first cell is a name that begins so."""
    return dict(
        re.findall(rf"^\| `({start}[a-z0-9_]+)` \| ([^|]+) \|", PAGE.read_text(), re.MULTILINE)
    )


def test_every_setting_of_the_tier_with_its_default():
    found = rows("")
    for field in msgspec.structs.fields(TierSettings):
        if field.name == "pool":
            continue
        if field.name == "admission":  # a table of its own; by default all is written
            assert field.default == AdmissionSettings()
            assert found[field.name] == "everything"
            continue
        is_bytes = "bytes" in field.name
        default = format_bytes(field.default) if is_bytes else str(field.default)
        assert found[field.name] == default


@pytest.mark.vllm
def test_every_metric_that_is_not_the_pools():
    pytest.importorskip("tests.needs_vllm")  # vLLM warns while it is imported
    from kvdepot.engines.vllm.stats import CALLS, ENGINE_COUNTERS, ENGINE_GAUGES, PREFIX

    names = (*CALLS, *ENGINE_COUNTERS, *ENGINE_GAUGES)
    assert set(rows(PREFIX)) == {PREFIX + name for name in names}


def test_the_tested_version():
    assert f"Tested with vLLM {TESTED[0]}." in PAGE.read_text()
