"""A thread for the work of the tier's calls that grows with their chunks.

vLLM calls a tier on its scheduler's thread, which must not be kept for a millisecond; making a key, a
row and a record of a thousand chunks takes several. So a call hands its job over with one put, and this
thread does the rest.

While it computes it holds the interpreter lock, and the scheduler would stand still all the same. So
work comes in steps of well under a millisecond, and the thread lets go of the lock between two of them.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections import deque
from collections.abc import Callable

__all__ = ["Handover", "Step"]

log = logging.getLogger(__name__)

#: does a little, and says whether there is more to do; must not wait
Step = Callable[[], bool]

#: between two steps, so that a scheduler that waits for the interpreter lock goes first
_YIELD_S = 0.0001


class Handover:
    """Takes work from one thread, and does it on another: what is urgent first, then as it came.

    `put` and `offer` only append to a queue. What is put is bounded by whoever puts it: a job holds
    rows of the host tier. What is offered is dropped where the queue is long.

    Args:
        offers_max: entries beyond which nothing more is taken of what is offered.
    """

    def __init__(self, *, offers_max: int = 1024) -> None:
        self._offers_max = offers_max
        # both are appended to by the caller, and read and shortened by the thread alone
        self._urgent: deque[Step] = deque()
        self._others: deque[Step] = deque()
        #: True for each entry, False for the end
        self._signals: queue.SimpleQueue[bool] = queue.SimpleQueue()
        self._is_closed = False
        self._thread: threading.Thread | None = None

    def put(self, step: Step, *, is_urgent: bool = False) -> bool:
        """Have a step repeated until nothing is left to do; False, and nothing done, once closed."""
        if self._is_closed:
            return False
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="kvdepot-jobs", daemon=True)
            self._thread.start()
        (self._urgent if is_urgent else self._others).append(step)
        self._signals.put(True)  # noqa: FBT003
        return True

    def offer(self, step: Step) -> bool:
        """`put` for what may be left undone; False where it is."""
        return len(self._others) < self._offers_max and self.put(step)

    def close(self, timeout_s: float) -> bool:
        """Take nothing more, do what is queued, and stop; False where that takes longer."""
        self._is_closed = True
        if self._thread is None:
            return True
        self._signals.put(False)  # noqa: FBT003
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _run(self) -> None:
        while self._signals.get():
            self._end_one()

    def _end_one(self) -> None:
        """Go on until one entry is done; what is urgent goes between two steps of what is not."""
        while True:
            entries = self._urgent or self._others
            if _is_done(entries[0]):
                entries.popleft()
                return
            time.sleep(_YIELD_S)


def _is_done(step: Step) -> bool:
    try:
        return not step()
    except Exception:
        log.exception("work that was handed over failed")
        return True
