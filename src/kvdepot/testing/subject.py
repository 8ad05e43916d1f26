"""What the conformance checks need from the author of a tier, and small helpers that they share.

The checks raise AssertionError with a sentence of what was promised and what happened. They use no
pytest, so any runner can call them.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar
from unittest import SkipTest

from kvdepot.keys import BlockKey
from kvdepot.testing.toy import ToyEngine
from kvdepot.tiers import Job, Outcome, Read, Tier, Write

__all__ = [
    "CALL_S_MAX",
    "PATIENCE_S",
    "SLOW_S",
    "STALLS_MAX",
    "TierSubject",
    "drained",
    "load_all",
    "need",
    "opened",
    "require",
    "run_threads",
    "settled",
    "store_all",
    "timed",
]

_T = TypeVar("_T")

#: no verb takes longer, whatever the storage does; generous, because test machines are busy
CALL_S_MAX = 0.5
#: so many calls of one kind may take longer: a busy machine may stand still in any of them, a verb that
#: waits for the storage does it each time
STALLS_MAX = 2
#: how long the storage takes for each call where a check needs it slow; well above CALL_S_MAX
SLOW_S = 1.0
#: what is not over after this has failed
PATIENCE_S = 60.0


class TierSubject:
    """A tier under test: how to make it, and what may be done to it. Subclass and fill in.

    A check gets a folder of its own, empty or not made yet, and closes the tiers that it made.
    """

    #: `damage` works
    can_damage = True
    #: `slow` works
    can_slow = True
    #: `io_calls` works
    counts_io = False
    #: seconds within which another instance sees what one has stored and drained, if it is shared
    discover_s = 5.0

    def make_tier(
        self,
        folder: Path,
        engine: ToyEngine,
        *,
        capacity_bytes: int | None = None,
        store_bytes_max: int | None = None,
    ) -> Tier:
        """Open a tier.

        Args:
            folder: where to keep things; equal folders mean the same storage.
            engine: whose blocks are stored; `engine.identity` has the geometry.
            capacity_bytes: if given, exactly this capacity; the checks ask for 1 MiB and more.
            store_bytes_max: if given, exactly this limit on the stores in flight.
        """
        raise NotImplementedError

    def reopen(self, folder: Path, engine: ToyEngine) -> Tier:
        """Open the same storage once more, as a process that starts later does."""
        return self.make_tier(folder, engine)

    def damage(self, tier: Tier, key: BlockKey) -> None:
        """Change stored bytes of a block that is stored and visible, past the tier."""
        raise NotImplementedError

    def slow(self, tier: Tier, seconds: float) -> None:
        """From now on each call to storage takes at least so long; 0 ends it."""
        raise NotImplementedError

    def io_calls(self, tier: Tier) -> int:
        """Calls to storage that the calling thread has made so far."""
        raise NotImplementedError

    def stored_bytes(self, folder: Path) -> int | None:
        """What the storage holds by an independent count (``du``), or None if there is no such way."""
        del folder
        return None


def require(condition: bool, message: str) -> None:
    """Fail the check with this message unless the condition holds.

    Raises:
        AssertionError: it does not.
    """
    if not condition:
        raise AssertionError(message)


def need(condition: bool, reason: str) -> None:
    """Skip the check, with this reason, unless the condition holds.

    Raises:
        SkipTest: it does not; pytest and unittest both understand it.
    """
    if not condition:
        raise SkipTest(reason)


@contextmanager
def opened(tier: Tier) -> Iterator[Tier]:
    """Close the tier in the end, whatever happens."""
    try:
        yield tier
    finally:
        tier.close()


def settled(job: Job, what: str) -> tuple[Outcome, ...]:
    """The outcomes of a job, once it is settled."""
    require(job.wait_settled(PATIENCE_S), f"{what} did not settle in {PATIENCE_S:.0f} s")
    outcomes = job.outcomes
    require(Outcome.PENDING not in outcomes, f"{what} is settled with outcomes still pending")
    return outcomes


def drained(tier: Tier) -> None:
    """Wait until all stores so far are visible."""
    require(tier.drain(PATIENCE_S), f"drain did not end in {PATIENCE_S:.0f} s")


def store_all(tier: Tier, writes: Sequence[Write]) -> None:
    """Store blocks, and require that all of them are stored and visible."""
    outcomes = settled(tier.store(writes), "a store")
    require(
        set(outcomes) <= {Outcome.DONE},
        f"an idle tier with room did not store everything: {_tally(outcomes)}",
    )
    drained(tier)


def load_all(tier: Tier, engine: ToyEngine, reads: Sequence[Read], what: str) -> None:
    """Load blocks, and require that all of them are there and right."""
    outcomes = settled(tier.load(reads), what)
    engine.check(reads, outcomes)
    require(set(outcomes) <= {Outcome.DONE}, f"{what}: not everything is there: {_tally(outcomes)}")


def timed(call: Callable[[], _T]) -> tuple[_T, float]:
    """The result of a call and the seconds that it took."""
    start_s = time.monotonic()
    result = call()
    return result, time.monotonic() - start_s


def run_threads(works: Sequence[Callable[[], None]]) -> None:
    """Run each on a thread of its own; the first exception is raised here."""
    errors: list[BaseException] = []

    def run(work: Callable[[], None]) -> None:
        try:
            work()
        except BaseException as error:  # noqa: BLE001
            errors.append(error)

    threads = [threading.Thread(target=run, args=(work,), daemon=True) for work in works]
    for thread in threads:
        thread.start()
    give_up_at_s = time.monotonic() + PATIENCE_S
    for thread in threads:
        thread.join(max(0.0, give_up_at_s - time.monotonic()))
    if errors:
        raise errors[0]
    require(not any(thread.is_alive() for thread in threads), "a thread did not come back")


def _tally(outcomes: Sequence[Outcome]) -> str:
    counts = {outcome: outcomes.count(outcome) for outcome in dict.fromkeys(outcomes)}
    return ", ".join(f"{count} {outcome.name}" for outcome, count in counts.items())
