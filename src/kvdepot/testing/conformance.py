"""What a tier promises, as tests that the author of any tier can run against it.

Subclass `TierConformance` in a test module and fill in the hooks of `TierSubject`:

    class TestMyTier(TierConformance):
        can_damage = False

        def make_tier(self, folder, engine, *, capacity_bytes=None, store_bytes_max=None):
            return MyTier(folder, capacity_bytes or 1 << 30, store_bytes_max or 1 << 26)

        def slow(self, tier, seconds):
            tier.delay_s = seconds

pytest then finds one test per promise. Each is a plain function as well, so that any other runner can
call ``check(subject, folder)``: see `CHECKS`. The class must do without ``__init__`` (pytest's rule).
What a tier does not claim (in its `TierLimits`) or offers no hook for is skipped with the reason. A
check fails by AssertionError with a sentence.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from kvdepot.testing.checks_bytes import (
    check_damage,
    check_duplicates_in_one_call,
    check_empty_calls,
    check_identities_apart,
    check_load_rows_untouched_after_settle,
    check_partial_hits,
    check_round_trip,
    check_row_of_other_length,
    check_store_buffers_not_retained,
    check_stored_twice_does_not_grow,
)
from kvdepot.testing.checks_life import (
    check_close,
    check_close_decides_all,
    check_reopen,
    check_shared,
)
from kvdepot.testing.checks_limits import (
    check_back_pressure,
    check_capacity,
    check_concurrent_use,
    check_too_large,
)
from kvdepot.testing.checks_time import (
    check_cancelled_load,
    check_cancelled_store,
    check_deadline,
    check_lookup_is_memory,
    check_verbs_do_not_wait,
)
from kvdepot.testing.subject import TierSubject

__all__ = ["CHECKS", "TierConformance", "TierSubject"]

#: every promise, as functions of the subject and an empty folder
CHECKS: tuple[Callable[[TierSubject, Path], None], ...] = (
    check_round_trip,
    check_partial_hits,
    check_duplicates_in_one_call,
    check_stored_twice_does_not_grow,
    check_store_buffers_not_retained,
    check_load_rows_untouched_after_settle,
    check_empty_calls,
    check_identities_apart,
    check_row_of_other_length,
    check_damage,
    check_capacity,
    check_back_pressure,
    check_too_large,
    check_concurrent_use,
    check_deadline,
    check_cancelled_load,
    check_cancelled_store,
    check_verbs_do_not_wait,
    check_lookup_is_memory,
    check_close,
    check_close_decides_all,
    check_reopen,
    check_shared,
)


class TierConformance(TierSubject):
    """One test per promise; pytest collects them from subclasses named ``Test...``."""

    def test_round_trip(self, tmp_path: Path) -> None:
        check_round_trip(self, tmp_path)

    def test_partial_hits(self, tmp_path: Path) -> None:
        check_partial_hits(self, tmp_path)

    def test_duplicates_in_one_call(self, tmp_path: Path) -> None:
        check_duplicates_in_one_call(self, tmp_path)

    def test_stored_twice_does_not_grow(self, tmp_path: Path) -> None:
        check_stored_twice_does_not_grow(self, tmp_path)

    def test_store_buffers_not_retained(self, tmp_path: Path) -> None:
        check_store_buffers_not_retained(self, tmp_path)

    def test_load_rows_untouched_after_settle(self, tmp_path: Path) -> None:
        check_load_rows_untouched_after_settle(self, tmp_path)

    def test_empty_calls(self, tmp_path: Path) -> None:
        check_empty_calls(self, tmp_path)

    def test_identities_apart(self, tmp_path: Path) -> None:
        check_identities_apart(self, tmp_path)

    def test_row_of_other_length(self, tmp_path: Path) -> None:
        check_row_of_other_length(self, tmp_path)

    def test_damage(self, tmp_path: Path) -> None:
        check_damage(self, tmp_path)

    def test_capacity(self, tmp_path: Path) -> None:
        check_capacity(self, tmp_path)

    def test_back_pressure(self, tmp_path: Path) -> None:
        check_back_pressure(self, tmp_path)

    def test_too_large(self, tmp_path: Path) -> None:
        check_too_large(self, tmp_path)

    def test_concurrent_use(self, tmp_path: Path) -> None:
        check_concurrent_use(self, tmp_path)

    def test_deadline(self, tmp_path: Path) -> None:
        check_deadline(self, tmp_path)

    def test_cancelled_load(self, tmp_path: Path) -> None:
        check_cancelled_load(self, tmp_path)

    def test_cancelled_store(self, tmp_path: Path) -> None:
        check_cancelled_store(self, tmp_path)

    def test_verbs_do_not_wait(self, tmp_path: Path) -> None:
        check_verbs_do_not_wait(self, tmp_path)

    def test_lookup_is_memory(self, tmp_path: Path) -> None:
        check_lookup_is_memory(self, tmp_path)

    def test_close(self, tmp_path: Path) -> None:
        check_close(self, tmp_path)

    def test_close_decides_all(self, tmp_path: Path) -> None:
        check_close_decides_all(self, tmp_path)

    def test_reopen(self, tmp_path: Path) -> None:
        check_reopen(self, tmp_path)

    def test_shared(self, tmp_path: Path) -> None:
        check_shared(self, tmp_path)
