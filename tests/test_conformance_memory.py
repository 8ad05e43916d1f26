"""The kit on a good tier: the reference `MemoryTier` keeps every promise."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest import SkipTest

import pytest

from kvdepot.testing.conformance import CHECKS, TierConformance
from kvdepot.testing.subject import TierSubject
from tests.memory_subject import MemorySubject


class TestMemoryTier(MemorySubject, TierConformance):
    pass


def test_every_check_is_a_test_and_the_other_way_round():
    tests = {name.removeprefix("test_") for name in dir(TierConformance) if name.startswith("test")}
    assert tests == {check.__name__.removeprefix("check_") for check in CHECKS}


def test_what_is_not_offered_is_skipped_with_a_reason(tmp_path):
    class Poor(MemorySubject):
        can_damage = can_slow = counts_io = False
        is_shared = False

    skipped = {}
    for check in CHECKS:
        try:
            check(Poor(), tmp_path / check.__name__)
        except SkipTest as reason:
            skipped[check.__name__.removeprefix("check_")] = str(reason)
    assert set(skipped) == {
        "damage",
        "back_pressure",
        "deadline",
        "cancelled_load",
        "cancelled_store",
        "verbs_do_not_wait",
        "close_decides_all",
        "reopen",
        "shared",
    }
    assert all(len(reason.split()) > 4 for reason in skipped.values())


def test_the_hooks_without_a_default_must_be_filled_in():
    bare: Any = TierSubject()
    for call in (
        lambda: bare.make_tier(Path(), None),
        lambda: bare.damage(None, b""),
        lambda: bare.slow(None, 1),
        lambda: bare.io_calls(None),
    ):
        with pytest.raises(NotImplementedError):
            call()
