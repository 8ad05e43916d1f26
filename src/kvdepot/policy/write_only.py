"""Finds a cache that is only written: much stored, next to nothing ever read back.

Such a cache looks healthy from every side: it is full, stores succeed, nothing fails. Reports exist of
hundreds of gigabytes stored over weeks and not one byte read. So both are counted per namespace, and
when nothing comes back there is a loud warning with the likely reason.

Pure. Thread-safe.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from typing import NamedTuple

from kvdepot.policy.reasons import ADVICE, Reason

__all__ = ["Verdict", "WriteOnlyDetector"]

_GIB = 1 << 30


class Verdict(NamedTuple):
    """What a namespace's bytes say."""

    stored_bytes: int
    read_bytes: int
    requests: int
    #: the warning for people; empty when all is well or it is too early to say
    warning: str


class WriteOnlyDetector:
    """Bytes stored against bytes read back, for one namespace.

    Args:
        stored_min_bytes: with less stored it is too early to say.
        requests_min: with fewer requests it is too early to say.
        read_share: less than this share read back counts as nothing.
    """

    def __init__(
        self,
        *,
        stored_min_bytes: int = 4 * _GIB,
        requests_min: int = 200,
        read_share: float = 0.001,
    ) -> None:
        self._lock = threading.Lock()
        self._stored_min = stored_min_bytes
        self._requests_min = requests_min
        self._read_share = read_share
        self._stored = 0
        self._read = 0
        self._requests = 0
        self._hits = 0
        self._warn_at_bytes = stored_min_bytes

    def stored(self, length_bytes: int) -> None:
        """Bytes went to the pool."""
        with self._lock:
            self._stored += length_bytes

    def read_back(self, length_bytes: int) -> None:
        """Bytes came back from it."""
        with self._lock:
            self._read += length_bytes

    def looked_up(self, *, is_hit: bool) -> None:
        """A request looked for its prefix."""
        with self._lock:
            self._requests += 1
            self._hits += is_hit

    def verdict(self, misses: Mapping[Reason, int]) -> Verdict:
        """What the bytes say now.

        Args:
            misses: requests by the reason that ended their reuse.
        """
        with self._lock:
            numbers = (self._stored, self._read, self._requests)
            is_write_only = (
                self._stored >= self._stored_min
                and self._requests >= self._requests_min
                and self._read <= self._read_share * self._stored
            )
            hits = self._hits
        warning = _warning(*numbers, hits, misses) if is_write_only else ""
        return Verdict(*numbers, warning)

    def due_warning(self, misses: Mapping[Reason, int]) -> str:
        """The warning when it is due: at first, and whenever twice as much was stored since."""
        found = self.verdict(misses)
        with self._lock:
            if not found.warning or found.stored_bytes < self._warn_at_bytes:
                return ""
            self._warn_at_bytes = 2 * found.stored_bytes
        return found.warning


def _warning(stored: int, read: int, requests: int, hits: int, misses: Mapping[Reason, int]) -> str:
    most = max(misses, key=lambda reason: misses[reason], default=None)
    if hits:
        likely = "prefixes are found but not loaded"
    else:
        likely = (
            "no lookup finds anything: the prompts share no prefix, or their keys differ each time"
        )
    why = f"; most often: {most.value} ({ADVICE[most]})" if most is not None else ""
    return (
        f"this cache is only written: {stored / _GIB:.2f} GiB stored, {read / _GIB:.2f} GiB read back"
        f" in {requests} requests. {likely[0].upper()}{likely[1:]}{why}"
    )
