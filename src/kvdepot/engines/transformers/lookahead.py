"""Who waits for this engine, and for how long: what the depot reads ahead by.

One request runs at a time, so those in the queue are known before they begin. The engine's thread looks
at them now and then while it computes: between layers and between tokens.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

from kvdepot.clock import Clock
from kvdepot.depot import Depot
from kvdepot.keys import BlockKey, RequestExtras
from kvdepot.prefetching import Wanted

__all__ = ["LookAhead", "Waiting"]

#: a look costs about a millisecond, and storage needs longer than this for anything worth reading ahead
_LOOK_S = 0.05
#: weight of the newest token in the mean of what one takes
_NEWEST = 0.2


class Waiting(NamedTuple):
    """A request in the queue before the engine."""

    #: its own, for as long as the engine lives
    number: int
    ids: Sequence[int]
    extras: RequestExtras


class LookAhead:
    """Tells a depot who waits. Used by the engine's thread.

    Args:
        depot: reads ahead.
        keys: of a prompt's full blocks.
        clock: of the looks.
    """

    def __init__(
        self,
        depot: Depot,
        keys: Callable[[Sequence[int], RequestExtras], list[BlockKey]],
        clock: Clock,
    ) -> None:
        self._depot = depot
        self._make_keys = keys
        self._clock = clock
        self._keys: dict[int, list[BlockKey]] = {}
        self._look_at_s = -math.inf
        self._computed_at_s = 0.0
        self._tokens_left = 0
        self._token_s = 0.0

    def begin(self, prefill_s: float, answer_tokens: int) -> None:
        """A request begins, whose prompt takes about so long (infinite where nobody knows)."""
        self._look_at_s = -math.inf
        self._computed_at_s = self._clock.monotonic_s() + (
            prefill_s if prefill_s < math.inf else 0.0
        )
        self._tokens_left = answer_tokens

    def decoded(self, seconds: float) -> None:
        """A token of its answer was computed."""
        self._tokens_left -= 1
        self._token_s += (seconds - self._token_s) * (_NEWEST if self._token_s else 1.0)

    def look(self, waiting: Callable[[], Sequence[Waiting]]) -> None:
        """Have the queue read ahead for, if the last look is some time ago."""
        now_s = self._clock.monotonic_s()
        if now_s < self._look_at_s:
            return
        self._look_at_s = now_s + _LOOK_S
        wanted = [Wanted(each.number, self._keys_of(each), len(each.ids)) for each in waiting()]
        numbers = {each.number for each in wanted}
        self._keys = {number: keys for number, keys in self._keys.items() if number in numbers}
        busy_s = max(self._computed_at_s - now_s, 0.0) + max(self._tokens_left, 0) * self._token_s
        self._depot.prefetcher.look_ahead(wanted, busy_s=busy_s)

    def _keys_of(self, each: Waiting) -> list[BlockKey]:
        found = self._keys.get(each.number)
        if found is None:
            # none at first: what cannot be keyed is not tried again at every look
            self._keys[each.number] = []
            found = self._keys[each.number] = self._make_keys(each.ids, each.extras)
        return found
