"""The process behind a `FaultMount`: `python -m kvdepot.testing.fuseserver FOLDER PLACE`.

It answers the kernel's requests with a few threads, each of which reads one, does it on the folder
behind, and answers. Faults come as lines of JSON on the standard input; its end unmounts.
"""

from __future__ import annotations

import ctypes
import errno
import os
import stat
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec

from kvdepot.testing import fusewire as wire
from kvdepot.testing.fusemount import MountFaults, unmount
from kvdepot.testing.fusewire import Op, Request, SetAttr

__all__ = ["FaultClock", "PassThrough", "main"]

_THREADS = 16
_ROOT = 1
_MS_NOSUID, _MS_NODEV = 2, 4
#: answers of the kernel that end a thread: it was unmounted, or the connection was cut
_OVER = (errno.ENODEV, errno.ENOTCONN)
#: need no answer
_SILENT = frozenset({Op.FORGET, Op.BATCH_FORGET, Op.INTERRUPT})
_RENAME_NOREPLACE = 1


class FaultClock:
    """Makes requests wait or fail. Thread-safe."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._faults = MountFaults()
        self._hangs_until_s = 0.0
        self._reads = 0
        self._free_at_s = 0.0

    def set(self, faults: MountFaults) -> None:
        """Other faults from now on; whoever hangs goes on if these do not hang."""
        with self._changed:
            self._faults = faults
            self._hangs_until_s = time.monotonic() + faults.hang_s
            self._reads = 0
            self._changed.notify_all()

    def wait(self) -> None:
        """Before any request: until nothing hangs."""
        with self._changed:
            while (left_s := self._hangs_until_s - time.monotonic()) > 0:
                self._changed.wait(left_s)

    def read(self, length_bytes: int) -> int:
        """Before a read: wait as long as it is to take; an errno, or 0."""
        with self._changed:
            faults, now_s = self._faults, time.monotonic()
            self._reads += 1
            until_s = now_s
            if faults.read_bytes_per_s:
                began_s = max(self._free_at_s, now_s)
                until_s = self._free_at_s = began_s + length_bytes / faults.read_bytes_per_s
            if faults.late_every and self._reads % faults.late_every == 0:
                until_s += faults.late_s
            is_failed = bool(faults.fail_every) and self._reads % faults.fail_every == 0
        time.sleep(until_s - now_s)
        return errno.EIO if is_failed else 0

    def write(self) -> None:
        """Before a write or a reservation. Raises OSError where there is no room for it."""
        with self._changed:
            is_full = self._faults.is_full
        if is_full:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


class PassThrough:
    """The file system: nodes by number and path, and what each request does.

    Nodes are never forgotten; a mount of a test sees few.

    Args:
        folder: behind the mount.
        faults: asked before everything.
    """

    def __init__(self, folder: Path, faults: FaultClock) -> None:
        self._faults = faults
        self._lock = threading.Lock()
        self._paths: dict[int, str] = {_ROOT: str(folder)}
        self._nodes: dict[str, int] = {str(folder): _ROOT}
        self._handles: dict[int, list[int]] = {}
        self._verbs: dict[int, Callable[[Request], bytes | memoryview]] = {
            Op.INIT: wire.init,
            Op.DESTROY: lambda _: b"",
            Op.LOOKUP: self._lookup,
            Op.GETATTR: self._getattr,
            Op.SETATTR: self._setattr,
            Op.MKDIR: self._mkdir,
            Op.UNLINK: lambda request: self._remove(request, os.unlink),
            Op.RMDIR: lambda request: self._remove(request, os.rmdir),
            Op.RENAME: lambda request: self._rename(request, 8, 0),
            Op.RENAME2: lambda request: self._rename(request, 16, request.numbers("QI")[1]),
            Op.LINK: self._link,
            Op.CREATE: self._create,
            Op.OPEN: self._open,
            Op.READ: self._read,
            Op.WRITE: self._write,
            Op.STATFS: lambda request: wire.space(os.statvfs(self._path(request.node))),
            Op.RELEASE: self._release,
            Op.FSYNC: self._fsync,
            Op.FLUSH: lambda _: b"",
            Op.FALLOCATE: self._fallocate,
            Op.OPENDIR: lambda _: wire.opened(0),
            Op.READDIR: self._readdir,
            Op.RELEASEDIR: lambda _: b"",
            Op.FSYNCDIR: lambda _: b"",
        }

    def serve(self, device: int) -> None:
        """Answer requests until the mount is gone."""
        buffer = memoryview(bytearray(wire.REQUEST_BYTES_MAX))
        while True:
            try:
                length = os.readv(device, [buffer])
            except OSError as error:
                if error.errno in _OVER:
                    return
                if error.errno in (errno.EINTR, errno.EAGAIN, errno.ENOENT):
                    continue
                raise
            request = wire.request_of(buffer[:length])
            if request.op in _SILENT:
                continue
            code, body = self._done(request)
            try:
                os.writev(device, [wire.answer(request.unique, code, len(body)), body])
            except OSError as error:
                # whoever asked was killed meanwhile, or all is over
                if error.errno not in (errno.ENOENT, *_OVER):
                    raise

    def _done(self, request: Request) -> tuple[int, bytes | memoryview]:
        verb = self._verbs.get(request.op)
        if verb is None:
            return errno.ENOSYS, b""
        self._faults.wait()
        try:
            return 0, verb(request)
        except OSError as error:
            return error.errno or errno.EIO, b""

    # names

    def _path(self, node: int) -> str:
        with self._lock:
            return self._paths[node]

    def _child(self, node: int, name: str) -> str:
        return f"{self._path(node)}/{name}"

    def _entry(self, path: str) -> bytes:
        status = os.lstat(path)
        with self._lock:
            node = self._nodes.get(path)
            if node is None:
                node = self._nodes[path] = len(self._paths) + 1
                self._paths[node] = path
        return wire.entry(node, status)

    def _lookup(self, request: Request) -> bytes:
        return self._entry(self._child(request.node, request.names(0)[0]))

    def _mkdir(self, request: Request) -> bytes:
        path = self._child(request.node, request.names(8)[0])
        os.mkdir(path, request.numbers("I")[0])
        return self._entry(path)

    def _remove(self, request: Request, remove: Callable[[str], None]) -> bytes:
        path = self._child(request.node, request.names(0)[0])
        remove(path)
        with self._lock:
            # a new file of this name is another node
            self._nodes.pop(path, None)
        return b""

    def _rename(self, request: Request, head: int, flags: int) -> bytes:
        old_name, new_name = request.names(head)
        old = self._child(request.node, old_name)
        new = self._child(request.numbers("Q")[0], new_name)
        if flags & ~_RENAME_NOREPLACE:
            raise OSError(errno.EINVAL, "only a plain rename")
        if flags and os.path.lexists(new):
            raise OSError(errno.EEXIST, new)
        os.rename(old, new)
        with self._lock:
            self._nodes.pop(new, None)
            for node, path in self._paths.items():
                if path == old or path.startswith(f"{old}/"):
                    moved = new + path[len(old) :]
                    if self._nodes.pop(path, None) is not None:
                        self._nodes[moved] = node
                    self._paths[node] = moved
        return b""

    def _link(self, request: Request) -> bytes:
        path = self._child(request.node, request.names(8)[0])
        os.link(self._path(request.numbers("Q")[0]), path)
        return self._entry(path)

    def _getattr(self, request: Request) -> bytes:
        try:
            return wire.attr(os.lstat(self._path(request.node)))
        except FileNotFoundError:
            # an open file may have no name any more
            with self._lock:
                handles = self._handles.get(request.node)
            if not handles:
                raise
            return wire.attr(os.fstat(handles[-1]))

    def _setattr(self, request: Request) -> bytes:
        wanted = SetAttr.of(request)
        what = self._path(request.node) if wanted.handle is None else wanted.handle
        if wanted.size is not None:
            os.truncate(what, wanted.size)
        if wanted.mode is not None:
            os.chmod(what, stat.S_IMODE(wanted.mode))
        if wanted.times is not None:
            now_ns = time.time_ns()
            os.utime(what, ns=(wanted.times[0] or now_ns, wanted.times[1] or now_ns))
        return wire.attr(os.stat(what))

    def _readdir(self, request: Request) -> bytes:
        _, offset, size = request.numbers("QQI")
        with os.scandir(self._path(request.node)) as found:
            entries = [
                (each.name, each.inode(), stat.S_IFDIR if each.is_dir() else stat.S_IFREG)
                for each in found
            ]
        # by name, so that an offset means the same at the next call
        return wire.directory(sorted(entries), offset, size)

    # files

    def _create(self, request: Request) -> bytes:
        flags, mode = request.numbers("II")
        path = self._child(request.node, request.names(16)[0])
        handle = os.open(path, _plain(flags) | os.O_CREAT, mode)
        found = self._entry(path)
        with self._lock:
            self._handles.setdefault(self._nodes[path], []).append(handle)
        return found + wire.opened(handle)

    def _open(self, request: Request) -> bytes:
        flags = request.numbers("I")[0] & ~(os.O_CREAT | os.O_EXCL)
        handle = os.open(self._path(request.node), _plain(flags))
        with self._lock:
            self._handles.setdefault(request.node, []).append(handle)
        return wire.opened(handle)

    def _read(self, request: Request) -> bytes:
        handle, offset, size = request.numbers("QQI")
        code = self._faults.read(size)
        if code:
            raise OSError(code, os.strerror(code))
        return os.pread(handle, size, offset)

    def _write(self, request: Request) -> bytes:
        self._faults.write()
        handle, offset, size = request.numbers("QQI")
        written = os.pwrite(handle, request.body[40 : 40 + size], offset)
        return written.to_bytes(8, "little")

    def _release(self, request: Request) -> bytes:
        handle = request.numbers("Q")[0]
        with self._lock:
            self._handles[request.node].remove(handle)
        os.close(handle)
        return b""

    def _fsync(self, request: Request) -> bytes:
        os.fdatasync(request.numbers("Q")[0])
        return b""

    def _fallocate(self, request: Request) -> bytes:
        self._faults.write()
        handle, offset, length, mode = request.numbers("QQQI")
        if mode:
            raise OSError(errno.EOPNOTSUPP, "only to reserve")
        os.posix_fallocate(handle, offset, length)
        return b""


def _plain(flags: int) -> int:
    # the folder's own page cache is used whatever was asked: what is slow is decided here
    return (flags & ~(os.O_DIRECT | os.O_APPEND)) | os.O_CLOEXEC


def _mount(place: Path) -> int:
    device = os.open("/dev/fuse", os.O_RDWR | os.O_CLOEXEC)
    options = (
        f"fd={device},rootmode=40000,user_id=0,group_id=0,allow_other,max_read={wire.IO_BYTES_MAX}"
    )
    libc = ctypes.CDLL(None, use_errno=True)
    done = libc.mount(
        b"kvdepot-faults",
        os.fsencode(place),
        b"fuse.kvdepot",
        ctypes.c_ulong(_MS_NOSUID | _MS_NODEV),
        options.encode(),
    )
    if done != 0:
        code = ctypes.get_errno()
        raise OSError(code, f"mount at {place}: {os.strerror(code)}")
    return device


def main(arguments: Sequence[str] = ()) -> int:
    """Mount, and obey the lines of the standard input until it ends."""
    folder, place = (Path(each) for each in arguments or sys.argv[1:3])
    faults = FaultClock()
    served = PassThrough(folder.resolve(), faults)
    device = _mount(place)
    for _ in range(_THREADS):
        threading.Thread(target=served.serve, args=(device,), daemon=True).start()
    try:
        # the first call is answered when the kernel and this process have agreed
        os.stat(place)
        _say_ok()
        for line in sys.stdin.buffer:
            faults.set(msgspec.json.decode(line, type=MountFaults))
            _say_ok()
    finally:
        unmount(place)
    return 0


def _say_ok() -> None:
    sys.stdout.write("ok\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
