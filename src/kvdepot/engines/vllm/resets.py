"""What a tier does about resets of vLLM's caches: nothing, until the model's files are found unchanged.

vLLM resets its caches before weights are exchanged in place. If they come from the model's own files, the
engine is another one then, and neither may read what the other stored.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

from kvdepot.errors import PoolError

__all__ = ["Resets"]

log = logging.getLogger(__name__)


class Resets:
    """Whether the engine is known to be the one whose KV the pool holds.

    Args:
        is_same: looks at the model's files; blocks on file calls, and may raise `PoolError`.
        refuse: ends the use of the pool, for a reason; blocks.
    """

    def __init__(self, is_same: Callable[[], bool], refuse: Callable[[str], None]) -> None:
        self._is_same = is_same
        self._refuse = refuse
        #: resets so far, and the last one after which the files were the same
        self._count = self._checked = 0
        self.is_looking = False

    @property
    def counts(self) -> dict[str, int]:
        """By the names of `kvdepot.engines.vllm.stats.ENGINE_COUNTERS`."""
        return {"resets_total": self._count, "resets_checked_total": self._checked}

    @property
    def is_open(self) -> bool:
        """A reset has happened, and nobody knows yet what came after it."""
        return self._count != self._checked

    def note(self, *, for_good: bool = False) -> None:
        """A reset; one that no look ends if it is for good."""
        self._count += 1
        self.is_looking |= for_good

    def look(self) -> None:
        """Look at the files, on a thread, if a reset is open and nobody is looking."""
        if self.is_open and not self.is_looking:
            self.is_looking = True
            thread = threading.Thread(
                target=self._run, args=(self._count,), name="kvdepot-files", daemon=True
            )
            thread.start()

    def _run(self, reset: int) -> None:
        try:
            if self._is_same():
                self._checked = reset  # a later reset stays open
            else:
                self._refuse("the model's files have changed since the engine started")
            self.is_looking = False
        except PoolError as error:
            log.warning("no pool until the model's files can be looked at: %s", error)
            self.is_looking = False
        except Exception:
            log.exception("no pool any more: looking at the model's files failed")
