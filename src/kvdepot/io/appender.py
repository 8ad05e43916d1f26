"""Appends whole lines to a file from a thread of its own, so that an event loop never waits for a disk.

`put` belongs to the loop (or to any thread); the file belongs to the writer's thread. What was put is
written, in its order, before `close` returns; when the disk is too slow for `bytes_max` of lines, `put`
says so and the caller waits, because a line is not lost.
"""

from __future__ import annotations

import logging
import os
import threading
from collections import deque
from pathlib import Path

from kvdepot.errors import ConfigError
from kvdepot.units import MIB

__all__ = ["LineAppender"]

log = logging.getLogger(__name__)


class LineAppender:
    """Opens a file for appending; made if it is not there, readable by its owner alone.

    Args:
        path: the file.
        bytes_max: lines that may wait in memory.

    Raises:
        ConfigError: the file cannot be opened.
    """

    def __init__(self, path: Path, *, bytes_max: int = 256 * MIB) -> None:
        self.path = path
        self.lines_written = 0
        #: lines that the system refused, for example on a full disk
        self.lines_failed = 0
        self._bytes_max = bytes_max
        self._bytes = 0
        self._waiting: deque[bytes] = deque()
        self._is_closing = False
        self._changed = threading.Condition()
        try:
            self._fd = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise ConfigError(f"cannot write {path}: {error.strerror}") from error
        self._thread = threading.Thread(target=self._run, name="kvdepot-appender", daemon=True)
        self._thread.start()

    def put(self, line: bytes) -> bool:
        """Take a line with its end; False, and nothing is taken, while too much is waiting."""
        with self._changed:
            if self._waiting and self._bytes + len(line) > self._bytes_max:
                return False
            self._waiting.append(line)
            self._bytes += len(line)
            self._changed.notify_all()
        return True

    def close(self) -> None:
        """Write what is waiting and close the file. Blocks. Calling it again does nothing."""
        with self._changed:
            self._is_closing = True
            self._changed.notify_all()
        self._thread.join()

    def _run(self) -> None:
        while True:
            with self._changed:
                while not self._waiting and not self._is_closing:
                    self._changed.wait()
                if not self._waiting:
                    break
                line = self._waiting.popleft()
            self._write(line)
            with self._changed:
                self._bytes -= len(line)
        os.close(self._fd)

    def _write(self, line: bytes) -> None:
        view = memoryview(line)
        try:
            while view:
                view = view[os.write(self._fd, view) :]
        except OSError as error:
            self.lines_failed += 1
            if self.lines_failed == 1:
                log.exception("cannot append to %s: %s", self.path, error.strerror)
            return
        self.lines_written += 1
