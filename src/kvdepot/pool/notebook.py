"""A small text per namespace, kept beside its segments: what a process has learned of its costs.

    ns/<identity digest>/costs-<8 digits>.json     the newest counts; whole or absent, never changed

A new note gets the next number; whoever publishes it removes the older ones. Two processes that write at
once keep both for a moment, and one of them is read: either is a good beginning.
"""

from __future__ import annotations

import logging
import re
import secrets
import threading

from kvdepot.errors import PoolError
from kvdepot.io.disk import Disk
from kvdepot.pool.catalog import NAMESPACE_FOLDER, tmp_path
from kvdepot.pool.segment import SegmentName

__all__ = ["NOTE_BYTES_MAX", "Notebook"]

log = logging.getLogger(__name__)

_NOTE = re.compile(r"costs-(?P<number>[0-9]{8})\.json", re.ASCII)
#: of one note
NOTE_BYTES_MAX = 64 * 1024
_ATTEMPTS = 4


class Notebook:
    """The note of one namespace on one root. `keep` may be called by any thread; the rest makes file calls.

    Args:
        disk: the root.
        namespace: digits of the identity's digest.
    """

    def __init__(self, disk: Disk, namespace: str) -> None:
        self._disk = disk
        self._folder = f"{NAMESPACE_FOLDER}/{namespace}"
        self._lock = threading.Lock()
        self._pending: bytes | None = None

    def read(self) -> bytes | None:
        """The newest note; None when there is none, or the storage refuses."""
        try:
            names = self._names()
            if not names:
                return None
            return self._disk.read_small(f"{self._folder}/{names[-1]}", NOTE_BYTES_MAX)
        except PoolError as error:
            log.warning("%s: costs that were kept cannot be read: %s", self._disk.place, error)
            return None

    def keep(self, text: bytes) -> None:
        """Have a note written by the next `write`. Memory only.

        Raises:
            ValueError: it is too long.
        """
        if len(text) > NOTE_BYTES_MAX:
            raise ValueError(f"a note of {len(text)} bytes is too long")
        with self._lock:
            self._pending = text

    def write(self) -> None:
        """Publish what was kept last, if anything. A storage that refuses loses it.

        Raises:
            PoolError: the storage refused.
        """
        with self._lock:
            text, self._pending = self._pending, None
        if text is None:
            return
        for _ in range(_ATTEMPTS):
            names = self._names()
            match = _NOTE.fullmatch(names[-1]) if names else None
            number = (int(match["number"]) + 1) % 100_000_000 if match else 1
            if self._publish(text, f"{self._folder}/costs-{number:08d}.json"):
                for name in names:
                    self._disk.remove(f"{self._folder}/{name}")
                return

    def _names(self) -> list[str]:
        found = (info.name for info in self._disk.files(self._folder) if info.is_regular)
        return sorted(name for name in found if _NOTE.fullmatch(name))

    def _publish(self, text: bytes, path: str) -> bool:
        # a name like a segment's that nobody finishes: a crash here is swept like any other
        tmp = tmp_path(SegmentName(secrets.token_hex(8), 0), len(text))
        file = self._disk.create(tmp, 0)
        try:
            try:
                file.write(0, [memoryview(text)])
            finally:
                file.close()
            is_published = self._disk.publish(tmp, path)
        except PoolError:
            self._disk.remove(tmp)
            raise
        if not is_published:
            self._disk.remove(tmp)
        return is_published
