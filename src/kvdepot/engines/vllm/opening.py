"""Opening a pool behind an engine's start, and again until it is there.

Reading the model's files takes seconds, and a mount may hang; neither may keep a server from serving.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

from kvdepot.errors import ConfigError, KvdepotError, PoolError
from kvdepot.identity import Identity
from kvdepot.tiers import Tier

__all__ = ["PoolOpening"]

log = logging.getLogger(__name__)

_RETRY_S = 5.0
_RETRY_S_MAX = 60.0


class PoolOpening:
    """A thread that finds the identity, opens the pool with it, and ends.

    Args:
        find_identity: blocks on files.
        open_pool: blocks on files.
    """

    def __init__(
        self, find_identity: Callable[[], Identity], open_pool: Callable[[Identity], Tier]
    ) -> None:
        self._find_identity = find_identity
        self._open_pool = open_pool
        self._is_decided = threading.Event()
        self._stop = threading.Event()
        self._changing = threading.Lock()
        #: None until it is open, and again once it was closed
        self.pool: Tier | None = None
        self.identity: Identity | None = None
        #: why there will be no pool; empty while there may be one
        self.refusal = ""
        self._error: Exception | None = None
        self._thread = threading.Thread(target=self._run, name="kvdepot-open", daemon=True)

    def start(self, wait_s: float) -> None:
        """Begin, and wait so long for a first result.

        Raises:
            ConfigError: a setting is wrong, which whoever starts the engine can mend.
        """
        self._thread.start()
        if not self._is_decided.wait(wait_s):
            log.warning("the pool is not open after %.0f s; it is opened while serving", wait_s)
        if isinstance(self._error, ConfigError):
            raise self._error

    def refuse(self, reason: str, timeout_s: float) -> None:
        """From now on there is no pool, for a reason that only a new start of the engine ends."""
        self.refusal = reason
        log.error("the pool is not used any more: %s", reason)
        self.close(timeout_s)

    def close(self, timeout_s: float) -> None:
        """Close the pool, or have it closed as soon as it turns up."""
        self._stop.set()
        with self._changing:
            pool, self.pool = self.pool, None
        if pool is not None:
            pool.close(timeout_s)

    def _run(self) -> None:
        wait_s = _RETRY_S
        while not self._stop.is_set():
            try:
                self._open()
            except PoolError as error:
                log.warning("no pool; the next try is in %.0f s: %s", wait_s, error)
            except KvdepotError as error:
                self._refuse(error)
                hint = f" (hint: {error.hint})" if error.hint else ""
                log.error("the pool is not used: %s%s", error, hint)  # noqa: TRY400 (said in full)
            except Exception as error:
                self._refuse(error)
                log.exception("the pool is not used")
            self._is_decided.set()
            if self.pool is not None or self.refusal:
                return
            self._stop.wait(wait_s)
            wait_s = min(2 * wait_s, _RETRY_S_MAX)

    def _refuse(self, error: Exception) -> None:
        self._error = error
        self.refusal = str(error)

    def _open(self) -> None:
        self.identity = self._find_identity()
        pool = self._open_pool(self.identity)
        with self._changing:
            if not self._stop.is_set():
                self.pool = pool
                return
        pool.close(0.0)
