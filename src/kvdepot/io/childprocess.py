"""A child process of our own, and the channel of whole messages between it and us.

The child is a fresh interpreter (the engine is never forked). It gets one end of a socket pair and the
descriptors that are named, nothing else; its standard input and output are closed off, its standard
error is ours, for logs. It dies with the thread that started it, so that thread must live as long as
the child is wanted.
"""

from __future__ import annotations

import ctypes
import os
import signal
import socket
import struct
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from kvdepot.errors import PoolUnavailable

__all__ = ["Channel", "ChildProcess", "become_child"]

_LENGTH = struct.Struct("<I")
_TIMEVAL = struct.Struct("@ll")
_RECEIVE_BYTES = 1 << 18
_PR_SET_PDEATHSIG = 1
#: numpy would start a thread per core for algebra that nobody does here
_THREADS = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
#: what a terminal or a service manager sends to all of a group; the engine decides, its end ends us
_PARENTS_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Channel:
    """Whole messages over a stream socket: a length of four bytes, then so many bytes.

    One thread may send while another receives.

    Args:
        end: a connected stream socket, which becomes this channel's.
        message_bytes_max: a longer message is a bug on the other side, and never allocated for.
    """

    def __init__(self, end: socket.socket, message_bytes_max: int) -> None:
        self._socket = end
        self._socket.settimeout(None)
        self._message_bytes_max = message_bytes_max
        self._received = bytearray()
        self._scratch = memoryview(bytearray(_RECEIVE_BYTES))
        self._timeout_s: float | None = None

    def send(self, messages: Sequence[bytes]) -> None:
        """Send messages in one go. Blocks while the other side does not read.

        Raises:
            OSError: the other side is gone, or `shut` was called.
        """
        parts: list[bytes] = []
        for message in messages:
            if len(message) > self._message_bytes_max:
                raise ValueError(f"a message of {len(message)} bytes is above the limit")
            parts += (_LENGTH.pack(len(message)), message)
        self._socket.sendall(b"".join(parts))

    def receive(self, timeout_s: float | None) -> list[bytes]:
        """The messages that have arrived whole; waits for bytes once, at most so long.

        One system call: each one that lets go of the interpreter lock may wait milliseconds for it.

        Raises:
            EOFError: the other side is gone, or `shut` was called.
            ValueError: what arrives is no message.
        """
        self._set_timeout(timeout_s)
        try:
            count = self._socket.recv_into(self._scratch)
        except (BlockingIOError, InterruptedError):
            return []
        except ConnectionError as error:
            raise EOFError(str(error)) from error
        if count == 0:
            raise EOFError("the channel was closed")
        self._received += self._scratch[:count]
        return list(self._whole_messages())

    def shut(self) -> None:
        """End both directions, now; callers that wait in `send` or `receive` come back. Idempotent."""
        try:
            self._socket.shutdown(socket.SHUT_RDWR)
        except OSError:
            pass  # the other side was faster

    def close(self) -> None:
        """Give the descriptor back; nobody may be in `send` or `receive`. Idempotent."""
        self._socket.close()

    def _whole_messages(self) -> Iterator[bytes]:
        start = 0
        while len(self._received) - start >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(self._received, start)
            if length > self._message_bytes_max:
                raise ValueError(f"a message of {length} bytes is announced")
            end = start + _LENGTH.size + length
            if len(self._received) < end:
                break
            yield bytes(self._received[start + _LENGTH.size : end])
            start = end
        del self._received[:start]

    def _set_timeout(self, timeout_s: float | None) -> None:
        if timeout_s == self._timeout_s:
            return
        # the kernel's own timeout: Python's would poll first, one system call more
        micros = 0 if timeout_s is None else max(round(timeout_s * 1e6), 1000)
        value = _TIMEVAL.pack(*divmod(micros, 1_000_000))
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, value)
        self._timeout_s = timeout_s


class ChildProcess:
    """A running child and our end of the channel to it.

    Args:
        command: what to run; the number of the child's socket is added as the last argument.
        fds: descriptors that the child gets under the same numbers.
        message_bytes_max: as for `Channel`.

    Raises:
        PoolUnavailable: the system starts no process.
    """

    def __init__(
        self, command: Sequence[str], fds: Sequence[int], *, message_bytes_max: int
    ) -> None:
        ours, theirs = socket.socketpair()
        try:
            with theirs, _signals_blocked():
                self._process = subprocess.Popen(  # noqa: S603
                    [*command, str(theirs.fileno())],
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    pass_fds=(theirs.fileno(), *fds),
                    env={**os.environ, **_THREADS, "PYTHONPATH": _import_path()},
                )
        except OSError as error:
            ours.close()
            raise PoolUnavailable(
                f"no worker process can be started: {error}",
                hint="check the limits on processes, memory and open files",
            ) from error
        self.channel = Channel(ours, message_bytes_max)

    @property
    def pid(self) -> int:
        """The child's process id."""
        return self._process.pid

    @property
    def end_status(self) -> int | None:
        """How the child ended (negative: by that signal); None while any thread of it exists."""
        return self._process.poll()

    def kill(self) -> None:
        """Have the kernel end the child. Returns at once; see `end_status` for when it is gone."""
        self._process.kill()

    def wait(self, timeout_s: float | None = None) -> bool:
        """Block until the child is gone; False when time ran out."""
        try:
            self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            return False
        return True


def become_child(descriptor: int, message_bytes_max: int) -> Channel:
    """In the child: take the channel, leave the parent's signals to the parent, die with it."""
    for number in _PARENTS_SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _PARENTS_SIGNALS)
    # beside the end of the channel, which a process forked from the parent may hold open
    prctl = getattr(ctypes.CDLL(None, use_errno=True), "prctl", None)
    if prctl is not None:
        prctl(_PR_SET_PDEATHSIG, ctypes.c_ulong(signal.SIGKILL), 0, 0, 0)
    return Channel(socket.socket(fileno=descriptor), message_bytes_max)


@contextmanager
def _signals_blocked() -> Iterator[None]:
    """A child inherits the mask, so that a Ctrl-C while it still starts does not end it."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _PARENTS_SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _import_path() -> str:
    """Our own import path, so that the child finds the same modules in the same order."""
    return os.pathsep.join(path for path in sys.path if path)
