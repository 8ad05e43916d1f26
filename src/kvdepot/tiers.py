"""What a tier is: the contract between the depot, the tiers and the engines' adapters.

A tier keeps blocks at one set of costs. Its verbs never wait for I/O: `lookup` answers from memory,
`load` and `store` return a `Job` at once. Absence, damage, lateness and back-pressure are outcomes,
not exceptions; a tier raises only `KvdepotError`s about its own set-up, and only when it is opened.
`kvdepot.testing.conformance` states the contract as tests for any implementation.
"""

from __future__ import annotations

import math
import operator
import threading
from collections.abc import Callable, Sequence
from enum import Enum
from typing import NamedTuple, Protocol

from kvdepot.clock import Clock, SystemClock
from kvdepot.keys import KEY_BYTES, BlockKey

__all__ = [
    "Job",
    "Outcome",
    "Read",
    "Tier",
    "TierLimits",
    "TierUsage",
    "Turn",
    "Write",
    "check_reads",
    "check_writes",
]

_TOKENS_MAX = (1 << 32) - 1


class Outcome(Enum):
    """What became of one block of a job. Everything but `PENDING` is final."""

    PENDING = "pending"
    #: loaded and verified, or handed to the tier for good
    DONE = "done"
    #: the tier does not have the block (any more)
    MISS = "miss"
    #: bytes were found and did not verify; the tier has forgotten the block
    CORRUPT = "corrupt"
    #: the storage answered with an error
    FAILED = "failed"
    #: not there by the job's deadline; bytes may still arrive until the job is settled
    LATE = "late"
    #: not stored: a queue, the capacity, the free space or a limit was used up
    DROPPED = "dropped"
    #: the caller took the job back before this block was reached
    CANCELLED = "cancelled"


_GIVEN_UP = (Outcome.LATE, Outcome.CANCELLED)


class Read(NamedTuple):
    """One block to load. `into` is writable, C-contiguous and exactly as long as the block."""

    key: BlockKey
    into: memoryview


class Write(NamedTuple):
    """One block to store. `parent` is the key of the block before it, or the root key."""

    key: BlockKey
    parent: BlockKey
    data: memoryview
    tokens: int


class Turn(NamedTuple):
    """What a tier should know of the request behind a load, to serve requests in a good order."""

    #: loads of one request carry one number; they are served in the order in which they were asked for
    request: int
    #: what the request has still to read, with this load
    left_bytes: int
    #: 0: a request waits; 1: one will want it; 2: to find out how the storage does
    lane: int = 0


class TierLimits(NamedTuple):
    """What a tier can take; data, so that a caller can plan."""

    #: the largest block in bytes
    block_bytes_max: int
    #: bytes of stores in flight beyond which stores are dropped
    store_bytes_max: int
    #: address and length multiple at which loads and stores need no copy
    alignment_bytes: int
    #: blocks survive the end of the process
    is_persistent: bool
    #: other processes see the blocks
    is_shared: bool


class TierUsage(NamedTuple):
    """What a tier holds now. Byte counts are of stored bytes, padding and metadata included."""

    blocks: int
    used_bytes: int
    capacity_bytes: int
    memory_bytes: int


class Job:
    """The state of one `load` or `store`: one outcome per block, in the order of the call.

    *Decided* means that every outcome is final; a caller may act on them. *Settled* means in addition
    that no thread of the tier will touch the caller's buffers again; only then may a load's rows be
    used for something else and a store's data be changed. A load given up at its deadline is decided
    at the deadline and settled when the storage lets go.

    Thread-safe. The tier's threads write outcomes; any thread may read and wait.
    """

    __slots__ = (
        "_changed",
        "_clock",
        "_deadline_at",
        "_landed",
        "_outcomes",
        "_pending",
        "_users",
        "bytes_done",
        "finished_s",
        "keys",
        "started_s",
    )

    def __init__(
        self,
        keys: Sequence[BlockKey],
        *,
        deadline_s: float | None = None,
        clock: Clock | None = None,
    ) -> None:
        if deadline_s is not None and math.isnan(deadline_s):
            raise ValueError("a deadline must be a number of seconds, not NaN")
        self.keys: tuple[BlockKey, ...] = tuple(keys)
        self._clock: Clock = clock or SystemClock()
        self.started_s = self._clock.monotonic_s()
        #: monotonic seconds at which the last outcome became final; None until then
        self.finished_s: float | None = None
        #: payload bytes moved for the outcomes that are DONE
        self.bytes_done = 0
        self._deadline_at = None if deadline_s is None else self.started_s + deadline_s
        self._outcomes = [Outcome.PENDING] * len(self.keys)
        self._pending = len(self.keys)
        self._users = 0
        #: positions whose bytes came, verified, after they were late or cancelled
        self._landed: list[int] = []
        self._changed = threading.Condition()
        if not self.keys:
            self.finished_s = self.started_s

    # what a caller sees

    @property
    def outcomes(self) -> tuple[Outcome, ...]:
        """One outcome per block, in the order of the call."""
        with self._changed:
            self._expire()
            return tuple(self._outcomes)

    @property
    def is_decided(self) -> bool:
        """Every outcome is final."""
        with self._changed:
            self._expire()
            return self._pending == 0

    @property
    def is_settled(self) -> bool:
        """Every outcome is final and the caller's buffers are the caller's again."""
        with self._changed:
            self._expire()
            return self._pending == 0 and self._users == 0

    @property
    def leading_done(self) -> int:
        """How many blocks from the first on are DONE without a gap."""
        for index, outcome in enumerate(self.outcomes):
            if outcome is not Outcome.DONE:
                return index
        return len(self.keys)

    @property
    def landed(self) -> tuple[int, ...]:
        """Positions whose bytes came and verified after they had been given up; all once settled."""
        with self._changed:
            return tuple(self._landed)

    def wait(self, timeout_s: float | None = None, *, first: int | None = None) -> bool:
        """Block until the job (or its `first` blocks) is decided; say whether it is.

        Returns at the job's deadline at the latest, because all outcomes are final by then.
        """
        stop = len(self.keys) if first is None else first
        return self._wait_for(lambda: self._is_prefix_final(stop), timeout_s)

    def wait_settled(self, timeout_s: float | None = None) -> bool:
        """Block until the job is settled; say whether it is."""
        return self._wait_for(lambda: self._pending == 0 and self._users == 0, timeout_s)

    def cancel(self) -> None:
        """Give up what has not been reached. Does not wait; see `is_settled` for the buffers."""
        with self._changed:
            self._finish_pending(Outcome.CANCELLED)

    # what a tier's threads use

    @property
    def is_wanted(self) -> bool:
        """False once the job was cancelled or its deadline has passed: skip the remaining work."""
        with self._changed:
            self._expire()
            return self._pending > 0

    def hold(self) -> bool:
        """Claim the buffers for a piece of work; False when the job no longer wants it."""
        with self._changed:
            self._expire()
            if self._pending == 0:
                return False
            self._users += 1
            return True

    def release(self) -> None:
        """End of a piece of work that `hold` began."""
        with self._changed:
            self._users -= 1
            if self._users == 0:
                self._changed.notify_all()

    def resolve(self, index: int, outcome: Outcome, payload_bytes: int = 0) -> bool:
        """Make one outcome final; False when it was final before (late or cancelled)."""
        with self._changed:
            self._expire()
            if self._outcomes[index] is not Outcome.PENDING:
                self._note_landed(index, outcome)
                return False
            self._outcomes[index] = outcome
            self._pending -= 1
            if outcome is Outcome.DONE:
                self.bytes_done += payload_bytes
            if self._pending == 0:
                self.finished_s = self._clock.monotonic_s()
            self._changed.notify_all()
            return True

    def resolve_run(
        self, first: int, outcomes: Sequence[Outcome], block_bytes: Sequence[int]
    ) -> tuple[int, int]:
        """`resolve` for neighbouring blocks at once; blocks and bytes that are DONE by this call."""
        done = done_bytes = 0
        with self._changed:
            self._expire()
            for position, outcome in enumerate(outcomes, first):
                if self._outcomes[position] is not Outcome.PENDING:
                    self._note_landed(position, outcome)
                    continue
                self._outcomes[position] = outcome
                self._pending -= 1
                if outcome is Outcome.DONE:
                    done += 1
                    done_bytes += block_bytes[position - first]
            self.bytes_done += done_bytes
            if self._pending == 0 and self.finished_s is None:
                self.finished_s = self._clock.monotonic_s()
            self._changed.notify_all()
        return done, done_bytes

    def resolve_all(self, outcome: Outcome) -> None:
        """Make every outcome that is still pending final."""
        with self._changed:
            self._expire()
            self._finish_pending(outcome)

    # callers hold the lock

    def _is_prefix_final(self, stop: int) -> bool:
        return self._pending == 0 or Outcome.PENDING not in self._outcomes[:stop]

    def _note_landed(self, position: int, outcome: Outcome) -> None:
        if outcome is Outcome.DONE and self._outcomes[position] in _GIVEN_UP:
            self._landed.append(position)

    def _expire(self) -> None:
        if (
            self._pending
            and self._deadline_at is not None
            and self._clock.monotonic_s() >= self._deadline_at
        ):
            self._finish_pending(Outcome.LATE)

    def _finish_pending(self, outcome: Outcome) -> None:
        if self._pending == 0:
            return
        self._outcomes = [outcome if o is Outcome.PENDING else o for o in self._outcomes]
        self._pending = 0
        self.finished_s = self._clock.monotonic_s()
        self._changed.notify_all()

    def _wait_for(self, is_reached: Callable[[], bool], timeout_s: float | None) -> bool:
        give_up_at = None if timeout_s is None else self._clock.monotonic_s() + timeout_s
        with self._changed:
            while True:
                self._expire()
                if is_reached():
                    return True
                now_s = self._clock.monotonic_s()
                limits = [at - now_s for at in (give_up_at, self._deadline_at if self._pending else None)
                          if at is not None]  # fmt: skip
                if give_up_at is not None and now_s >= give_up_at:
                    return False
                # a wait longer than the system can count is one that comes back and looks again
                self._changed.wait(min(*limits, threading.TIMEOUT_MAX) if limits else None)


def check_reads(reads: Sequence[Read]) -> None:
    """Refuse what no tier can fill, on the caller's thread and before anything is begun.

    Raises:
        ValueError: a key of another length, or a row that is read-only or not C-contiguous.
    """
    for key, into in reads:
        if len(key) != KEY_BYTES:
            raise ValueError(f"block keys have {KEY_BYTES} bytes")
        if into.readonly or not into.c_contiguous:
            raise ValueError("a row to load into must be writable and C-contiguous")


def check_writes(writes: Sequence[Write]) -> None:
    """Refuse what no tier can store; one such block would spoil those beside it.

    Raises:
        ValueError: a key or parent of another length, data that is not C-contiguous, or a number of
            tokens out of range.
        TypeError: the number of tokens is no integer.
    """
    for key, parent, data, tokens in writes:
        if len(key) != KEY_BYTES or len(parent) != KEY_BYTES:
            raise ValueError(f"block keys and their parents have {KEY_BYTES} bytes")
        if not data.c_contiguous:
            raise ValueError("a block's data must be C-contiguous")
        if not 0 <= operator.index(tokens) <= _TOKENS_MAX:
            raise ValueError(f"a block cannot have {tokens!r} tokens")


class Tier(Protocol):
    """A place that keeps blocks at one set of costs. All verbs are thread-safe and never block on I/O."""

    #: ``host``, ``disk``, ...; the label of its metrics
    name: str
    limits: TierLimits

    def lookup(self, keys: Sequence[BlockKey]) -> int:
        """How many keys from the first on are present without a gap. Memory only, no I/O."""

    def load(
        self, reads: Sequence[Read], *, deadline_s: float | None = None, turn: Turn | None = None
    ) -> Job:
        """Begin to read blocks into the caller's rows; earlier reads are served first.

        `turn` says which request they are of; without it, a load is a request of its own.

        The rows belong to the tier until the job is settled. The content of a row whose outcome is
        not DONE is undefined.
        """

    def store(self, writes: Sequence[Write]) -> Job:
        """Begin to store blocks; the caller must leave the data unchanged until the job is settled.

        A block that is present is DONE at once. Nothing is visible to others before it is whole.
        """

    def touch(self, keys: Sequence[BlockKey]) -> None:
        """Say that the blocks were used, for the eviction order. Memory only, no I/O."""

    def drain(self, timeout_s: float) -> bool:
        """Block until all stores so far are visible to others; False when time ran out."""

    def usage(self) -> TierUsage:
        """What the tier holds now. Memory only, no I/O."""

    def close(self, timeout_s: float = 10.0) -> None:
        """Publish what was stored, stop the threads, give back the leases. Idempotent."""
