"""The demo's end of an arm's process: start it, ask it, end it; its messages become values.

Used by one thread. Every wait has a limit, and a process that is not ended in good order is killed.
"""

from __future__ import annotations

import os
import select
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Self, TypeVar

import msgspec

from kvdepot.demo.messages import (
    ASK,
    END,
    Answered,
    Failed,
    Job,
    Message,
    Ready,
    Step,
    decode_message,
    encode,
)
from kvdepot.errors import KvdepotError

__all__ = ["ArmProcess", "StepSeen"]

#: told what an arm is doing
StepSeen = Callable[[Step], None]

_M = TypeVar("_M", Ready, Answered)

#: -P: a file in the working folder must not be taken for one of the libraries
_COMMAND = ("-P", "-m", "kvdepot.demo.arm")
#: nothing heard for so long means that an arm hangs; the longest silence is a slow machine's import
_SILENCE_S = 600.0
_END_S = 30.0
_READ_BYTES = 1 << 16
_LOG_TAIL_LINES = 3


class ArmProcess:
    """A running arm. Use it as a context manager, so that it never outlives the demo.

    Args:
        job: what it is to do.
        log: where its standard error goes; shown when it fails.
    """

    def __init__(self, job: Job, log: Path) -> None:
        self.job = job
        self._log = log
        self._heard = b""
        with log.open("wb") as errors:
            self._process = subprocess.Popen(  # noqa: S603 - our own interpreter and module
                [sys.executable, *_COMMAND],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
            )
        self._send(encode(job))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.end()

    @property
    def pid(self) -> int:
        """The process's id."""
        return self._process.pid

    def wait_ready(self, on_step: StepSeen) -> Ready:
        """Wait until it may be asked.

        Raises:
            KvdepotError: it cannot; the message is the arm's own.
        """
        return self._wait_for(Ready, on_step)

    def ask(self, on_step: StepSeen) -> Answered:
        """Have it answer, and wait until what it computed is visible to others.

        Raises:
            KvdepotError: it failed; the message is the arm's own.
        """
        self._send(ASK.encode() + b"\n")
        return self._wait_for(Answered, on_step)

    def end(self) -> None:
        """End it: in good order if it listens, by force if not. Idempotent."""
        if self._process.poll() is None:
            self._send(END.encode() + b"\n")
        if self._process.stdin is not None:
            try:
                self._process.stdin.close()
            except OSError:
                pass  # it is gone; there was something left to write
        try:
            self._process.wait(_END_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        if self._process.stdout is not None:
            self._process.stdout.close()

    # below

    def _send(self, line: bytes) -> None:
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(line)
            self._process.stdin.flush()
        except OSError:
            return  # it has ended; the next message says why

    def _wait_for(self, kind: type[_M], on_step: StepSeen) -> _M:
        while True:
            message = self._next()
            if isinstance(message, kind):
                return message
            if isinstance(message, Step):
                on_step(message)
            elif isinstance(message, Failed):
                raise KvdepotError(f"arm {self.job.arm}: {message.message}", hint=message.hint)
            else:
                raise KvdepotError(f"arm {self.job.arm} said {type(message).__name__} out of turn")

    def _next(self) -> Message:
        line = self._line()
        try:
            return decode_message(line)
        except msgspec.MsgspecError as error:
            raise KvdepotError(f"arm {self.job.arm} said something else: {line[:200]!r}") from error

    def _line(self) -> bytes:
        assert self._process.stdout is not None
        fd = self._process.stdout.fileno()
        while b"\n" not in self._heard:
            # past the buffered reader, which could hold a line that select does not know of
            if not select.select([fd], [], [], _SILENCE_S)[0]:
                raise KvdepotError(f"arm {self.job.arm} has been silent for {_SILENCE_S:.0f} s")
            got = os.read(fd, _READ_BYTES)
            if not got:
                raise KvdepotError(
                    f"arm {self.job.arm} ended without an answer: {self._last_words()}"
                )
            self._heard += got
        line, _, self._heard = self._heard.partition(b"\n")
        return line

    def _last_words(self) -> str:
        status = self._process.wait()
        said = self._log.read_text(errors="replace").strip().splitlines()
        # what it said last is the reason; the head of a traceback is not
        tail = " | ".join(said[-_LOG_TAIL_LINES:])
        return f"exit status {status}{': ' + tail if tail else ''}"
