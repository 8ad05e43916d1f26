"""Room in vLLM's host tier for what requests bring in from the pool.

vLLM computes the whole prompt of a request that finds no room, and lets several requests each bring in
half of what they need. Here a request takes room for all that it needs, or cost decides: it waits for
others to give room back, or brings in the part that fits, or computes (`HostAdmission.choose`).

Those who wait are served in the order of their coming: who came earlier counts as holding room already.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from enum import Enum
from typing import NamedTuple, Protocol

from kvdepot.clock import Clock
from kvdepot.policy.deadline import slack_of
from kvdepot.policy.host_buffer import Claim, HostAdmission, RoomChoice, RoomMode

__all__ = ["HostRoom", "RoomCosts", "Turn"]


class Turn(Enum):
    """Whether a request may bring its chunks in."""

    #: yes, as far as is said beside it
    NOW = "now"
    #: ask again in the next step
    WAIT = "wait"


class RoomCosts(Protocol):
    """What the decision is made by; expected seconds."""

    def load_s(self, length_bytes: int) -> float:
        """To read so many bytes behind what is being read."""

    def compute_s(self, tokens: int, position: int, length_bytes: int) -> float:
        """To compute tokens whose KV takes so many bytes, behind `position` others."""


class _Need(NamedTuple):
    """What a request would bring in."""

    #: the last tokens of its chunks, in order
    ends: Sequence[int]
    start_token: int
    prompt_tokens: int
    row_bytes: int

    def whole(self, rows: int) -> int:
        """As many rows at most: chunks that end together, one in each group, come in together."""
        while 0 < rows < len(self.ends) and self.ends[rows - 1] == self.ends[rows]:
            rows -= 1
        return rows

    def end_token(self, rows: int) -> int:
        """How far so many rows reach."""
        rows = self.whole(rows)
        return self.ends[rows - 1] if rows else self.start_token

    def total_s(self, costs: RoomCosts, rows: int) -> float:
        """Seconds to the end of the prompt when so many rows are brought in first."""
        end_token = self.end_token(rows)
        tokens = max(self.prompt_tokens - end_token, 1)
        token_bytes = len(self.ends) * self.row_bytes / (self.ends[-1] - self.start_token)
        rest_s = costs.compute_s(tokens, end_token, int(tokens * token_bytes))
        return rest_s + (costs.load_s(rows * self.row_bytes) if rows else 0.0)


class _Grant(NamedTuple):
    """Room that a request holds."""

    ticket: int | None
    #: chunks that end behind it are computed; None: all may come in
    end_token: int | None


class _Waiter(NamedTuple):
    """A request that waits."""

    need: _Need
    #: when its need was looked up, in room given back
    epoch: int
    give_up_at_s: float
    #: what it is expected to hold, and until when
    claim: Claim


class HostRoom:
    """Who holds how many rows. Used by the scheduler's thread.

    Args:
        rows: of the host tier.
        row_bytes: of one chunk.
        rows_pinned: how many of them stores keep from being used for something else now.
        costs: what waiting, loading and computing are compared by.
        clock: for waiting.
    """

    def __init__(
        self,
        rows: int,
        row_bytes: int,
        *,
        rows_pinned: Callable[[], int],
        costs: RoomCosts,
        clock: Clock,
    ) -> None:
        self._rows = rows
        self._row_bytes = row_bytes
        self._rows_pinned = rows_pinned
        self._costs = costs
        self._clock = clock
        self._admission = HostAdmission(rows * row_bytes)
        self._grants: dict[str, _Grant] = {}
        #: in the order of their coming
        self._waiting: dict[str, _Waiter] = {}
        #: changes whenever somebody gives room back, and what is in the host tier may be other chunks
        self._epoch = 0
        self.waits = 0
        self.short_requests = 0
        self.short_tokens = 0

    def ask(
        self,
        request_id: str,
        start_token: int,
        prompt_tokens: int,
        missing: Callable[[], Sequence[int]],
    ) -> tuple[Turn, int | None]:
        """Whether a request may bring its chunks in, and up to which token; None for all.

        Args:
            request_id: the request's.
            start_token: what is computed or cached on the device already.
            prompt_tokens: all that it has.
            missing: the last tokens of its chunks that are in the pool and not in the host tier; asked
                for once, and again only when room was given back.
        """
        grant = self._grants.get(request_id)
        if grant is not None:
            return Turn.NOW, grant.end_token
        now_s = self._clock.monotonic_s()
        waiter = self._waiting.get(request_id)
        may_wait = waiter is None or now_s < waiter.give_up_at_s
        if waiter is not None and may_wait and next(iter(self._waiting)) != request_id:
            return Turn.WAIT, None
        if waiter is not None and (waiter.epoch, waiter.need.start_token) == (
            self._epoch,
            start_token,
        ):
            need = waiter.need
        else:
            need = _Need(sorted(missing()), start_token, prompt_tokens, self._row_bytes)
        if not need.ends:
            self._waiting.pop(request_id, None)
            return Turn.NOW, None
        claims = self._claims(request_id, now_s)
        choice = self._choose(need, now_s, claims, may_wait=may_wait)
        if choice.mode is RoomMode.WAIT:
            self.waits += waiter is None
            give_up_at_s = now_s + choice.patience_s if waiter is None else waiter.give_up_at_s
            length = choice.blocks * self._row_bytes
            until_s = now_s + choice.wait_s + self._costs.load_s(length)
            claim = Claim(length, until_s)
            self._waiting[request_id] = _Waiter(need, self._epoch, give_up_at_s, claim)
            return Turn.WAIT, None
        self._waiting.pop(request_id, None)
        grant = self._grants[request_id] = self._grant(need, choice.blocks, now_s)
        return Turn.NOW, grant.end_token

    def give_back(self, request_id: str) -> None:
        """A request's chunks are on the device, or it has ended. Idempotent."""
        self._waiting.pop(request_id, None)
        grant = self._grants.pop(request_id, None)
        if grant is not None and grant.ticket is not None:
            self._epoch += 1
            self._admission.give_back(grant.ticket)

    def advice(self) -> str:
        """What a larger host tier would have done so far; empty when nothing was lost."""
        return self._admission.advice().text()

    # below

    def _claims(self, request_id: str, now_s: float) -> list[Claim]:
        """Room that is spoken for: by stores, and by those who wait since before this request."""
        claims: list[Claim] = []
        pinned_bytes = self._rows_pinned() * self._row_bytes
        if pinned_bytes:
            # writing takes about as long as reading, and nobody knows better
            claims.append(Claim(pinned_bytes, now_s + self._costs.load_s(pinned_bytes)))
        for other, waiter in self._waiting.items():
            if other == request_id:
                break
            claims.append(waiter.claim)
        return claims

    def _choose(
        self, need: _Need, now_s: float, claims: Sequence[Claim], *, may_wait: bool
    ) -> RoomChoice:
        compute_s = need.total_s(self._costs, 0)
        return self._admission.choose(
            now_s,
            # one that is larger than the host tier can have all of it at most
            min(len(need.ends), self._rows),
            self._row_bytes,
            lambda rows: need.total_s(self._costs, rows) if rows else compute_s,
            slack_s=slack_of(compute_s),
            claims=claims,
            may_wait=may_wait,
        )

    def _grant(self, need: _Need, rows: int, now_s: float) -> _Grant:
        """Take room for so many rows, and count what comes short."""
        wanted = len(need.ends)
        end_token = need.end_token(rows)
        if rows < wanted:
            tokens = need.ends[-1] - end_token
            self.short_requests += 1
            self.short_tokens += tokens
            self._admission.fell_short(wanted * self._row_bytes, tokens)
            rows = need.whole(rows)
        length = rows * self._row_bytes
        ticket = None
        if length:
            ticket = self._admission.take(length, now_s + self._costs.load_s(length))
        return _Grant(ticket, None if rows == wanted else end_token)
