"""Why a prompt's reuse ended where it did: one reason per request, counted and explained.

Every block that is computed although the prompt has a key for it has a reason. The first such block of
a request decides, because nothing behind it can be used.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Mapping
from enum import Enum
from types import MappingProxyType
from typing import NamedTuple

__all__ = ["ADVICE", "Explanation", "MissLog", "Reason"]


class Reason(Enum):
    """Why a block was computed."""

    #: the prompt has no full block
    TOO_SHORT = "too_short"
    #: no tier has it, and nothing says that one ever had
    NEVER_STORED = "never_stored"
    #: a tier had it and gave it up for others
    EVICTED = "evicted"
    #: it is there under another identity
    OTHER_IDENTITY = "other_identity"
    #: it is there under another salt
    SALT = "salt"
    #: the request cannot be keyed, or sharing is off
    NOT_KEYED = "not_keyed"
    #: write admission did not take it
    NOT_ADMITTED = "not_admitted"
    #: computing was expected to be quicker
    REFUSED_COST = "refused_cost"
    #: the host buffer had no room for it
    HOST_FULL = "host_full"
    #: the storage is left alone because it failed
    BREAKER = "breaker"
    #: it was not there in time
    DEADLINE = "deadline"
    #: its bytes did not verify
    CORRUPT = "corrupt"
    #: the storage gave an error
    FAILED = "failed"
    #: it went between lookup and load
    VANISHED = "vanished"


#: what a person can do about it
ADVICE: Mapping[Reason, str] = MappingProxyType(
    {
        Reason.TOO_SHORT: "a prompt shorter than one block has nothing to reuse; smaller blocks would",
        Reason.NEVER_STORED: "nobody has computed this prefix here yet, or its store was dropped",
        Reason.EVICTED: "the pool is too small to keep prefixes until they come back",
        Reason.OTHER_IDENTITY: "see `kvdepot pool explain` for the field that differs",
        Reason.SALT: "the salt keeps tenants apart; equal prompts of two tenants share nothing",
        Reason.NOT_KEYED: "a warning in the log says which request or identity field it is",
        Reason.NOT_ADMITTED: "admission keeps it out of the pool; see the store settings",
        Reason.REFUSED_COST: "computing is quicker than this storage; nothing is lost by it",
        Reason.HOST_FULL: "a larger host buffer would have served it",
        Reason.BREAKER: "the storage failed or hung; it is tried again by itself",
        Reason.DEADLINE: "the storage was slower than expected",
        Reason.CORRUPT: "the storage loses bytes; run `kvdepot pool verify`",
        Reason.FAILED: "the storage gives errors; see the log",
        Reason.VANISHED: "another process made room between the lookup and the load",
    }
)


class Explanation(NamedTuple):
    """Where and why the reuse of one request ended."""

    reason: Reason
    #: the block that ended it
    block: int
    #: full blocks of the prompt
    blocks: int
    #: anything that helps to believe it
    detail: str = ""

    def text(self) -> str:
        """For the log."""
        detail = f" ({self.detail})" if self.detail else ""
        return (
            f"reuse ended at block {self.block} of {self.blocks}: {self.reason.value}{detail};"
            f" {ADVICE[self.reason]}"
        )


class MissLog:
    """Counts by reason, of requests and of blocks that were computed for it. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._requests: Counter[Reason] = Counter()
        self._blocks: Counter[Reason] = Counter()
        #: requests whose full blocks were all reused
        self.complete = 0

    def note(self, explanation: Explanation | None) -> None:
        """One request; None when every full block was reused."""
        with self._lock:
            if explanation is None:
                self.complete += 1
                return
            self._requests[explanation.reason] += 1
            self._blocks[explanation.reason] += explanation.blocks - explanation.block

    def requests(self) -> dict[Reason, int]:
        """Requests by the reason that ended their reuse."""
        with self._lock:
            return dict(self._requests)

    def blocks(self) -> dict[Reason, int]:
        """Blocks computed, by that reason."""
        with self._lock:
            return dict(self._blocks)
