"""For tests on a busy machine: wait for what must come, and try again what a stall breaks.

A runner stands still for a second now and then, its disk is slow at times, and a thread may wait for its
turn. None of that is a fault of ours.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from typing import TypeVar

import pytest

T = TypeVar("T")

#: a hang guard: no stall of a machine is so long
PATIENCE_S = 60.0


def eventually(is_so: Callable[[], object], timeout_s: float = PATIENCE_S) -> bool:
    """Look again and again until it is so, or time is out."""
    give_up_at_s = time.monotonic() + timeout_s
    while not is_so():
        if time.monotonic() > give_up_at_s:
            return False
        time.sleep(0.01)
    return True


def in_some_try(attempt: Callable[[], T], *, tries: int = 5) -> T:
    """What `attempt` gives, in the first of a few tries in which no assertion fails.

    For what a stall of the machine breaks now and then, and a fault of ours in every try. `attempt` begins
    anew each time: nothing of an earlier try may help a later one.
    """
    for left in reversed(range(tries)):
        try:
            return attempt()
        except (AssertionError, pytest.fail.Exception):
            if not left:
                raise
    raise AssertionError("no try was made")


def in_one_try_of(tries: int) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Makes a test one that passes when it passes in one of a few tries; see `in_some_try`.

    Each try has a `tmp_path` of its own. Other fixtures are made once.
    """

    def decorate(test: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(test)
        def tried(**fixtures: object) -> None:
            numbers = iter(range(tries))

            def attempt() -> None:
                folder = fixtures.get("tmp_path")
                if folder is None:
                    test(**fixtures)
                    return
                own = folder / f"try-{next(numbers)}"  # type: ignore[operator]
                own.mkdir()
                test(**{**fixtures, "tmp_path": own})

            in_some_try(attempt, tries=tries)

        return tried

    return decorate
