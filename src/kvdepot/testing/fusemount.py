"""A mount that misbehaves on command: a FUSE pass-through to a folder, in a process of its own.

    with FaultMount.start(folder, place) as mount:
        mount.set(MountFaults(hang_s=30.0))

While it hangs, every call on it waits in the kernel, as on a network file system whose server is gone.
It speaks to ``/dev/fuse`` itself, so it needs root, and no library.
"""

from __future__ import annotations

import ctypes
import errno
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Self

import msgspec

__all__ = ["FaultMount", "MountFaults", "unmount", "why_not"]

_START_S = 30.0
_STOP_S = 10.0
_DEVICE = "/dev/fuse"
_MNT_DETACH = 2


class MountFaults(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What is wrong with a mount; by default nothing."""

    #: every call waits for so long from now on; then all of them go on
    hang_s: float = 0.0
    #: all reads together
    read_bytes_per_s: float = 0.0
    #: every so many-th read ...
    late_every: int = 0
    #: ... takes so much longer
    late_s: float = 0.0
    #: every so many-th read gives EIO
    fail_every: int = 0
    #: no byte more can be written: ENOSPC
    is_full: bool = False


def why_not() -> str:
    """Why no such mount can be made here; empty when one can."""
    if os.geteuid() != 0:
        return "mounting needs root"
    try:
        os.close(os.open(_DEVICE, os.O_RDWR))
    except OSError as error:
        return f"{_DEVICE}: {os.strerror(error.errno or 0)}"
    return ""


class FaultMount:
    """A mounted pass-through. Make it with `start`; close it, or use it as a context manager."""

    def __init__(self, process: subprocess.Popen[bytes], place: Path) -> None:
        self._process = process
        self.place = place

    @classmethod
    def start(cls, folder: Path, place: Path) -> Self:
        """Mount `folder` at the empty folder `place`. Blocks for about half a second.

        Raises:
            OSError: it cannot be mounted.
        """
        process = subprocess.Popen(  # noqa: S603 - our Python
            [sys.executable, "-P", "-m", "kvdepot.testing.fuseserver", str(folder), str(place)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            # a signal of the terminal must not take the mount away from under those who use it
            start_new_session=True,
        )
        mount = cls(process, place)
        if mount._heard() != b"ok\n":
            mount.close()
            raise OSError(errno.EIO, f"cannot mount {folder} at {place}")
        return mount

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def set(self, faults: MountFaults) -> None:
        """From now on these faults, in place of the last ones. Blocks until it is so."""
        assert self._process.stdin is not None
        self._process.stdin.write(msgspec.json.encode(faults) + b"\n")
        self._process.stdin.flush()
        if self._heard() != b"ok\n":
            raise OSError(errno.EIO, "the process behind the mount has ended")

    def close(self) -> None:
        """Unmount; whoever still waits on it gets an error. Idempotent."""
        unmount(self.place)
        for stream in (self._process.stdin, self._process.stdout):
            if stream is not None:
                stream.close()
        try:
            self._process.wait(_STOP_S)
        except subprocess.TimeoutExpired:
            self._process.send_signal(signal.SIGKILL)
            self._process.wait()

    def _heard(self) -> bytes:
        assert self._process.stdout is not None
        return self._process.stdout.readline()


def unmount(place: Path) -> None:
    """Take a mount away, whoever uses it; nothing happens where none is."""
    ctypes.CDLL(None, use_errno=True).umount2(os.fsencode(place), _MNT_DETACH)
