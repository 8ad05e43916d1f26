"""Room in vLLM's host tier for what requests bring in from the pool.

vLLM computes the whole prompt of a request that finds no room, and lets several requests each bring in
half of what they need. Here a request takes room for all that it needs or waits for its turn; one that
is larger than the host tier brings in the part that fits.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from enum import Enum
from typing import NamedTuple

from kvdepot.clock import Clock
from kvdepot.policy.host_buffer import HostAdmission

__all__ = ["HostRoom", "Turn"]


class Turn(Enum):
    """Whether a request may bring its chunks in."""

    #: yes, as far as `Grant.end_token` says
    NOW = "now"
    #: ask again in the next step
    WAIT = "wait"


class _Grant(NamedTuple):
    """Room that a request holds."""

    ticket: int | None
    #: chunks that end behind it are computed; None: all may come in
    end_token: int | None


class HostRoom:
    """Who holds how many rows. Used by the scheduler's thread.

    Args:
        rows: of the host tier.
        row_bytes: of one chunk.
        rows_pinned: how many of them stores keep from being used for something else now.
        patience_s: how long to wait for so many bytes of others.
        clock: for waiting.
    """

    def __init__(
        self,
        rows: int,
        row_bytes: int,
        *,
        rows_pinned: Callable[[], int],
        patience_s: Callable[[int], float],
        clock: Clock,
    ) -> None:
        self._rows = rows
        self._row_bytes = row_bytes
        self._rows_pinned = rows_pinned
        self._patience_s = patience_s
        self._clock = clock
        self._admission = HostAdmission(rows * row_bytes)
        self._grants: dict[str, _Grant] = {}
        #: since when, in the order of their coming
        self._waiting: dict[str, float] = {}
        self.waits = 0
        self.short_requests = 0
        self.short_tokens = 0

    def ask(
        self, request_id: str, start_token: int, missing: Callable[[], Sequence[int]]
    ) -> tuple[Turn, int | None]:
        """Whether a request may bring its chunks in, and up to which token; None for all.

        Args:
            request_id: the request's.
            start_token: what is computed or cached on the device already.
            missing: the last tokens of its chunks that are in the pool and not in the host tier.
        """
        grant = self._grants.get(request_id)
        if grant is not None:
            return Turn.NOW, grant.end_token
        now_s = self._clock.monotonic_s()
        since_s = self._waiting.get(request_id, now_s)
        is_first = not self._waiting or next(iter(self._waiting)) == request_id
        can_wait = now_s - since_s < self._patience_s(self._admission.in_use_bytes)
        if request_id in self._waiting and can_wait and not is_first:
            return Turn.WAIT, None
        ends = sorted(missing())
        if not ends:
            self._waiting.pop(request_id, None)
            return Turn.NOW, None
        grant = self._take(ends, start_token, can_wait=can_wait, is_first=is_first)
        if grant is None:
            self.waits += request_id not in self._waiting
            self._waiting.setdefault(request_id, now_s)
            return Turn.WAIT, None
        self._waiting.pop(request_id, None)
        self._grants[request_id] = grant
        return Turn.NOW, grant.end_token

    def give_back(self, request_id: str) -> None:
        """A request's chunks are on the device, or it has ended. Idempotent."""
        self._waiting.pop(request_id, None)
        grant = self._grants.pop(request_id, None)
        if grant is not None and grant.ticket is not None:
            self._admission.give_back(grant.ticket)

    def advice(self) -> str:
        """What a larger host tier would have done so far; empty when nothing was lost."""
        return self._admission.advice().text()

    # below

    def _take(
        self, ends: Sequence[int], start_token: int, *, can_wait: bool, is_first: bool
    ) -> _Grant | None:
        """Room for all; for a part where waiting would not help or takes too long; None to wait."""
        usable = max(self._rows - self._rows_pinned(), 0)
        self._admission.resize(usable * self._row_bytes)
        in_use = self._admission.in_use_bytes // self._row_bytes
        if is_first:
            ticket = self._claim(len(ends))
            if ticket is not None:
                return _Grant(ticket, None)
        is_busy = in_use > 0 or usable < min(len(ends), self._rows)
        if can_wait and (is_busy or not is_first):
            return None
        fits = min(max(usable - in_use, 0), len(ends))
        # chunks that end together, one in each group, come in together
        while 0 < fits < len(ends) and ends[fits - 1] == ends[fits]:
            fits -= 1
        end_token = ends[fits - 1] if fits else start_token
        self.short_requests += 1
        self.short_tokens += ends[-1] - end_token
        self._admission.fell_short(len(ends) * self._row_bytes, ends[-1] - end_token)
        return _Grant(self._claim(fits), None if fits == len(ends) else end_token)

    def _claim(self, rows: int) -> int | None:
        length = rows * self._row_bytes
        until_s = self._clock.monotonic_s() + self._patience_s(length)
        return self._admission.take(length, until_s)
