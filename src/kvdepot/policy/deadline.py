"""How long a load may take: each block that is there earns the prefill that it saves.

A load of which ``k`` leading blocks are there after ``t`` seconds has cost ``t`` and saved the prefill of
those blocks. It may be behind by `slack_s` at most; then it is given up and the rest is computed. So
whatever the storage does, a request takes at most `slack_s` longer than without a load. A fixed time
limit cannot do that: it is either too short for a long load that is worth it, or too long for one that
stands still.

Where others are served first, waiting for one's turn is not standing still: while the storage delivers to
anybody, and for about as long as was expected when the load was chosen, that time does not count.

Pure; time comes from outside. One deadline belongs to one load and to one thread.
"""

from __future__ import annotations

import math
from collections.abc import Callable

__all__ = ["SLACK_SHARE", "EarnedDeadline", "slack_of"]

#: a load may make a request this much slower than computing it would have been, in the worst case: the
#: law says a tenth, and the measuring of time takes the rest
SLACK_SHARE = 0.08
#: the wait for one's turn may take so many times as long as was expected
_QUEUE_DOUBT = 2.0


def slack_of(compute_s: float, *, share: float = SLACK_SHARE, unknown_s: float = 1.0) -> float:
    """Seconds that a load may lose. `unknown_s` where it is not known what computing takes."""
    return share * compute_s if math.isfinite(compute_s) else unknown_s


class EarnedDeadline:
    """When to give up one load.

    Args:
        started_s: when the load began.
        slack_s: how far behind it may be.
        saved_s: seconds of prefill that so many leading blocks save; grows with the blocks.
        queue_s: expected wait for those who are served first.
    """

    def __init__(
        self,
        started_s: float,
        slack_s: float,
        saved_s: Callable[[int], float],
        *,
        queue_s: float = 0.0,
    ) -> None:
        self._started_s = started_s
        self._slack_s = slack_s
        self._saved_s = saved_s
        self._queue_s_max = _QUEUE_DOUBT * queue_s
        self._waited_s = 0.0
        self._blocks = 0
        self._earned_s = 0.0

    def until_s(self, leading_blocks: int, heard_s: float = -math.inf) -> float:
        """When to give up if nothing further comes; later the more has come.

        Args:
            leading_blocks: that are there.
            heard_s: when the storage last delivered anything to anybody.
        """
        if not self._blocks:
            waited_s = min(heard_s - self._started_s, self._queue_s_max)
            self._waited_s = max(waited_s, self._waited_s)
        if leading_blocks != self._blocks:
            self._blocks = leading_blocks
            self._earned_s = self._saved_s(leading_blocks)
        return self._started_s + self._waited_s + self._earned_s + self._slack_s

    def is_over(self, now_s: float, leading_blocks: int, heard_s: float = -math.inf) -> bool:
        """Whether to give up now."""
        return now_s >= self.until_s(leading_blocks, heard_s)
