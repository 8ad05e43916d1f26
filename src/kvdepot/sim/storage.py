"""The simulated storage: one device that all instances read from, in the order that the policy gives."""

from __future__ import annotations

import bisect
from collections.abc import Sequence
from typing import Any

from kvdepot.policy.ordering import ReadOrder

__all__ = ["Loading", "Storage"]

_DONE_BYTES = 0.5


class Loading:
    """A load under way."""

    __slots__ = ("began_s", "done_bytes", "number", "owner", "total_bytes")

    def __init__(self, owner: Any, total_bytes: int, began_s: float) -> None:
        self.owner = owner
        self.total_bytes = total_bytes
        self.done_bytes = 0.0
        self.began_s = began_s
        self.number = -1


class Storage:
    """Bandwidth that is shared one load after the other, or in equal shares.

    Args:
        bytes_per_s: when nothing is wrong.
        factors: ``(from second, factor)``, in order: what of the bandwidth is there from then on; 0 hangs.
        is_ordered: in the order of `ReadOrder`; otherwise all loads at once, in equal shares.
        ageing: as for `ReadOrder`.
    """

    def __init__(
        self,
        bytes_per_s: float,
        *,
        factors: Sequence[tuple[float, float]] = (),
        is_ordered: bool = True,
        ageing: float,
    ) -> None:
        self._rate = bytes_per_s
        self._from_s = [at_s for at_s, _ in factors]
        self._factors = [factor for _, factor in factors]
        self._is_ordered = is_ordered
        self._order: ReadOrder[Loading] = ReadOrder(ageing)
        self._now_s = 0.0
        self._done: list[Loading] = []
        self.read_bytes = 0.0
        self.busy_s = 0.0
        #: when bytes last moved
        self.heard_s = float("-inf")

    @property
    def waiting(self) -> int:
        """Loads that are not done."""
        return len(self._order)

    def begin(self, loading: Loading, now_s: float) -> None:
        """Ask for a load."""
        self.advance(now_s)
        loading.number = self._order.add(loading, loading.total_bytes, now_s)

    def stop(self, loading: Loading, now_s: float) -> None:
        """It is not wanted any more. Idempotent."""
        self.advance(now_s)
        self._order.remove(loading.number)

    def take_done(self) -> list[Loading]:
        """Loads that came to their end since this was last asked, the first one first."""
        done, self._done = self._done, []
        return done

    def advance(self, now_s: float) -> None:
        """Let time pass."""
        while self._now_s < now_s:
            served = self._served()
            if not served:
                break
            rate = self._rate_now() / len(served)
            step_s = min(now_s, self._next_change()) - self._now_s
            if rate > 0:
                step_s = min(step_s, min(self._left(each) for each in served) / rate)
                self.busy_s += step_s
                self.heard_s = self._now_s + step_s
            for each in served:
                moved = min(rate * step_s, self._left(each))
                each.done_bytes += moved
                self.read_bytes += moved
                if self._is_ordered:
                    self._order.grow(each.number, -moved)
            self._now_s += step_s
            for each in [each for each in served if self._left(each) <= _DONE_BYTES]:
                self._order.remove(each.number)
                self._done.append(each)
        self._now_s = max(self._now_s, now_s)

    def next_event_s(self) -> float:
        """When a load ends or the bandwidth changes, if nobody comes or goes; infinite if nothing does."""
        served = self._served()
        if not served:
            return float("inf")
        change_s = self._next_change()
        rate = self._rate_now() / len(served)
        if rate <= 0:
            return change_s
        return min(change_s, self._now_s + min(self._left(each) for each in served) / rate)

    def rate_of(self, loading: Loading) -> float:
        """Bytes a second that a load gets now."""
        served = self._served()
        return self._rate_now() / len(served) if loading in served else 0.0

    # below

    def _served(self) -> list[Loading]:
        if not self._is_ordered:
            return [loading for _, loading in self._order.in_order()]
        first = self._order.first()
        return [] if first is None else [first[1]]

    @staticmethod
    def _left(loading: Loading) -> float:
        return loading.total_bytes - loading.done_bytes

    def _rate_now(self) -> float:
        index = bisect.bisect_right(self._from_s, self._now_s) - 1
        return self._rate * (self._factors[index] if index >= 0 else 1.0)

    def _next_change(self) -> float:
        index = bisect.bisect_right(self._from_s, self._now_s)
        return self._from_s[index] if index < len(self._from_s) else float("inf")
