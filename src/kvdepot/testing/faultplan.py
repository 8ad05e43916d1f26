"""What a `kvdepot.testing.faults.FaultDisk` does wrong, as rules that a test may change at any time.

Rules choose calls by verb, by number, by share or by a predicate, and delay them, hold them at a
barrier, answer with an errno, cut them short, flip bits of what they read, or kill the process. The
plan also counts every call, so that a test can say how much I/O a path may make.

Verbs: ``create open read_small publish remove files touch space lock`` of the disk, ``read write
truncate sync`` of its files and ``beat release`` of its locks.
"""

from __future__ import annotations

import errno
import os
import random
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal, NamedTuple

from kvdepot.errors import PoolError
from kvdepot.io.disk import translate

__all__ = ["Barrier", "Call", "FaultPlan", "Verdict"]

#: a held call is let go after this long, so that a test that forgot its barrier fails and not hangs
_HOLD_S_MAX = 60.0


class Call(NamedTuple):
    """One call that reached the disk."""

    verb: str
    name: str
    #: how many calls of this verb there were before it, plus one
    number: int
    offset: int = 0
    length_bytes: int = 0


class Barrier:
    """Calls wait here until a test lets them go. Thread-safe."""

    def __init__(self) -> None:
        self._reached = threading.Semaphore(0)
        self._open = threading.Event()

    def wait_reached(self, timeout_s: float = 60.0) -> bool:
        """Block until one more call has come to the barrier; False when none came in time."""
        return self._reached.acquire(timeout=timeout_s)

    def open(self) -> None:
        """Let go of every call that waits, and of all later ones."""
        self._open.set()

    def enter(self) -> None:
        """What a held call does."""
        self._reached.release()
        if not self._open.wait(_HOLD_S_MAX):
            raise AssertionError(f"a barrier was not opened for {_HOLD_S_MAX} s")


@dataclass(eq=False)
class _Rule:
    """Which calls, and what becomes of them."""

    verb: str
    at: int
    share: float
    when: Callable[[Call], bool] | None
    delay_s: float = 0.0
    barrier: Barrier | None = None
    code: int = 0
    is_short: bool = False
    is_flip: bool = False
    act: Callable[[Call], None] | None = None
    #: where in the call `act` runs
    phase: str = "before"
    #: calls of this verb that `when` liked so far
    seen: int = 0


class Verdict(NamedTuple):
    """What is to be done with a call that the plan has seen."""

    #: the error it ends in, if any
    error: PoolError | None
    #: only half of the bytes move
    is_short: bool
    #: one bit of every part of what was read is inverted
    is_flip: bool
    #: to be run when half of the bytes have moved, and when the call is over
    at_half: tuple[Callable[[], None], ...]
    at_end: tuple[Callable[[], None], ...]


class FaultPlan:
    """The rules and the counts of one or more `FaultDisk`s. Thread-safe.

    The arguments that every rule takes:
        verb: which calls; see the module.
        when: only calls for which it is true; called on the calling thread.
        at: of these only the n-th since the rule was made, counted from 1; 0 means all.
        share: of these only this share, drawn from the plan's seed.

    Args:
        seed: of the draws.
    """

    def __init__(self, seed: int = 0) -> None:
        self._lock = threading.Lock()
        self._random = random.Random(seed)
        self._rules: list[_Rule] = []
        self._bytes_per_s: dict[str, float] = {}
        self._busy_until_s: dict[str, float] = {}
        #: calls so far by verb
        self.counts: Counter[str] = Counter()
        self._counts_by_thread: Counter[int] = Counter()
        #: bytes that `read` and `write` moved so far
        self.bytes_moved: Counter[str] = Counter()

    # rules

    def delay(
        self,
        verb: str,
        seconds: float,
        *,
        at: int = 0,
        share: float = 1.0,
        when: Callable[[Call], bool] | None = None,
    ) -> None:
        """Calls take this long before they reach the disk."""
        self._add(_Rule(verb, at, share, when, delay_s=seconds))

    def hold(
        self, verb: str, *, at: int = 0, when: Callable[[Call], bool] | None = None
    ) -> Barrier:
        """Calls wait at the barrier that is returned."""
        barrier = Barrier()
        self._add(_Rule(verb, at, 1.0, when, barrier=barrier))
        return barrier

    def fail(
        self,
        verb: str,
        code: int = errno.EIO,
        *,
        at: int = 0,
        share: float = 1.0,
        when: Callable[[Call], bool] | None = None,
    ) -> None:
        """Calls do nothing and end in the pool error that this errno means."""
        self._add(_Rule(verb, at, share, when, code=code))

    def short(
        self,
        verb: str,
        *,
        at: int = 0,
        share: float = 1.0,
        when: Callable[[Call], bool] | None = None,
        code: int = errno.ENOSPC,
    ) -> None:
        """A ``read`` returns half of the bytes; a ``write`` writes half and ends in `code`."""
        ends_in = code if verb == "write" else 0
        self._add(_Rule(verb, at, share, when, is_short=True, code=ends_in))

    def flip(
        self,
        *,
        at: int = 0,
        share: float = 1.0,
        when: Callable[[Call], bool] | None = None,
    ) -> None:
        """One bit in every part that a ``read`` delivers is inverted; the file is untouched."""
        self._add(_Rule("read", at, share, when, is_flip=True))

    def act(
        self,
        verb: str,
        action: Callable[[Call], None],
        *,
        phase: Literal["before", "half", "after"] = "before",
        at: int = 0,
        when: Callable[[Call], bool] | None = None,
    ) -> None:
        """Run `action` on the calling thread before, half way through (``write``) or after calls."""
        self._add(_Rule(verb, at, 1.0, when, act=action, phase=phase))

    def throttle(self, verb: str, bytes_per_s: float) -> None:
        """All calls of ``read`` or ``write`` together move at most so many bytes a second."""
        with self._lock:
            self._bytes_per_s[verb] = bytes_per_s

    def clear(self) -> None:
        """Drop all rules and open their barriers; the counts go on."""
        with self._lock:
            rules, self._rules = self._rules, []
            self._bytes_per_s.clear()
        for rule in rules:
            if rule.barrier is not None:
                rule.barrier.open()

    @property
    def total(self) -> int:
        """Calls of any verb so far."""
        with self._lock:
            return self.counts.total()

    @property
    def total_here(self) -> int:
        """Calls of any verb that the calling thread has made so far."""
        with self._lock:
            return self._counts_by_thread[threading.get_ident()]

    # what a FaultDisk asks

    def meet(self, verb: str, name: str, offset: int = 0, length_bytes: int = 0) -> Verdict:
        """Count a call, wait as long as the rules say, and decide what becomes of it."""
        with self._lock:
            self.counts[verb] += 1
            self._counts_by_thread[threading.get_ident()] += 1
            call = Call(verb, name, self.counts[verb], offset, length_bytes)
            rules = [rule for rule in self._rules if rule.verb == verb]
        chosen = [rule for rule in rules if self._is_chosen(rule, call)]
        for rule in chosen:
            if rule.delay_s:
                time.sleep(rule.delay_s)
            if rule.barrier is not None:
                rule.barrier.enter()
        for action in _actions(chosen, "before", call):
            action()
        self._wait_turn(verb, length_bytes)
        code = next((rule.code for rule in chosen if rule.code), 0)
        return Verdict(
            translate(OSError(code, os.strerror(code)), verb, name) if code else None,
            any(rule.is_short for rule in chosen),
            any(rule.is_flip for rule in chosen),
            _actions(chosen, "half", call),
            _actions(chosen, "after", call),
        )

    def moved(self, verb: str, length_bytes: int) -> None:
        """Count bytes."""
        with self._lock:
            self.bytes_moved[verb] += length_bytes

    def _add(self, rule: _Rule) -> None:
        with self._lock:
            self._rules.append(rule)

    def _is_chosen(self, rule: _Rule, call: Call) -> bool:
        if rule.when is not None and not rule.when(call):
            return False
        with self._lock:
            rule.seen += 1
            if rule.at not in (0, rule.seen):
                return False
            return rule.share >= 1.0 or self._random.random() < rule.share

    def _wait_turn(self, verb: str, length_bytes: int) -> None:
        """One device serves all calls in turn, so the calls' waits add up."""
        now_s = time.monotonic()
        with self._lock:
            rate = self._bytes_per_s.get(verb)
            if rate is None or length_bytes == 0:
                return
            start_s = max(now_s, self._busy_until_s.get(verb, 0.0))
            self._busy_until_s[verb] = start_s + length_bytes / rate
            wait_s = self._busy_until_s[verb] - now_s
        time.sleep(wait_s)


def _actions(rules: Sequence[_Rule], phase: str, call: Call) -> tuple[Callable[[], None], ...]:
    return tuple(
        partial(rule.act, call) for rule in rules if rule.act is not None and rule.phase == phase
    )
