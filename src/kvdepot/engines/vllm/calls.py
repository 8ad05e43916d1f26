"""How long a tier keeps the engine's scheduler, call by call, and a fence around what goes wrong there."""

from __future__ import annotations

import functools
import logging
from bisect import bisect_left
from collections.abc import Callable
from typing import Any, Concatenate, ParamSpec, Protocol, TypeVar, cast

from kvdepot.clock import Clock

__all__ = ["BOUNDS_S", "CallTimes", "HasCallTimes", "fenced", "timed"]

log = logging.getLogger(__name__)

#: upper bounds of the histogram's buckets, in seconds; calls beyond the last are counted behind it
BOUNDS_S = (1e-5, 2e-5, 5e-5, 1e-4, 2e-4, 5e-4, 1e-3, 2e-3, 5e-3, 1e-2, 0.1, 1.0)
_SLOW_S = 1e-3

_P = ParamSpec("_P")
_R = TypeVar("_R")


class CallTimes:
    """Histograms of the calls of one tier, one per method. Used by the scheduler's thread alone."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        #: method -> calls per bucket of `BOUNDS_S`, and those beyond
        self.counts: dict[str, list[int]] = {}
        #: method -> seconds of all calls
        self.seconds: dict[str, float] = {}
        #: calls that raised an error of ours
        self.errors: dict[str, int] = {}

    def now_s(self) -> float:
        """The clock that calls are measured with."""
        return self._clock.monotonic_s()

    def note(self, method: str, took_s: float) -> None:
        """Count one call."""
        counts = self.counts.get(method)
        if counts is None:
            counts = self.counts[method] = [0] * (len(BOUNDS_S) + 1)
            self.seconds[method] = 0.0
        counts[bisect_left(BOUNDS_S, took_s)] += 1
        self.seconds[method] += took_s

    def failed(self, method: str) -> int:
        """Count a call that a bug of ours has ended; how many there were by now."""
        count = self.errors[method] = self.errors.get(method, 0) + 1
        return count

    def calls(self, method: str) -> int:
        """How many there were."""
        return sum(self.counts.get(method, ()))

    def slow_calls(self, method: str) -> int:
        """How many of them took more than a millisecond."""
        return sum(self.counts.get(method, ())[bisect_left(BOUNDS_S, _SLOW_S) + 1 :])


class HasCallTimes(Protocol):
    """What the decorators below need of a tier."""

    times: CallTimes


_T = TypeVar("_T", bound=HasCallTimes)


def timed(
    call: Callable[Concatenate[_T, _P], _R],
) -> Callable[Concatenate[_T, _P], _R]:
    """Count a method's calls by their duration."""
    name = call.__name__

    @functools.wraps(call)
    def measured(self: _T, *args: _P.args, **named: _P.kwargs) -> _R:
        began_s = self.times.now_s()
        try:
            return call(self, *args, **named)
        finally:
            self.times.note(name, self.times.now_s() - began_s)

    return cast("Callable[Concatenate[_T, _P], _R]", measured)


def fenced(
    instead: Callable[[], Any],
) -> Callable[[Callable[Concatenate[_T, _P], _R]], Callable[Concatenate[_T, _P], _R]]:
    """Answer with `instead()` where a method raises: a bug of ours must not end the engine."""

    def decorate(call: Callable[Concatenate[_T, _P], _R]) -> Callable[Concatenate[_T, _P], _R]:
        name = call.__name__

        @functools.wraps(call)
        def safe(self: _T, *args: _P.args, **named: _P.kwargs) -> _R:
            try:
                return call(self, *args, **named)
            except Exception:
                if self.times.failed(name) == 1:
                    log.exception("%s failed; further failures are only counted", name)
                return instead()

        return cast("Callable[Concatenate[_T, _P], _R]", safe)

    return decorate
