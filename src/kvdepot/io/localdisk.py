"""A root in a mounted file system: local NVMe, NFS, Lustre, FUSE, tmpfs.

O_DIRECT is used when a probe on the real root has written and read an aligned block with it; a file
system that accepts the flag at open and refuses the call (EINVAL at read or write) is served buffered
from then on, with one warning. Every file has a direct and a buffered descriptor; a call takes the
direct one when address, length and offset are aligned. The page cache is not asked first: a read with
RWF_NOWAIT starts read-ahead on current kernels, so cold data would be read twice (docs/adr/0007).
"""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import stat
from pathlib import Path
from typing import Literal

from kvdepot.errors import ConfigError, PoolDenied, PoolError
from kvdepot.io.buffers import ALIGNMENT, aligned_bytes
from kvdepot.io.disk import DiskLock, FileInfo, Space, translate, translated
from kvdepot.io.localfile import O_DIRECT, LocalFile, reserve

__all__ = ["LocalDisk"]

log = logging.getLogger(__name__)

_ABSENT = {errno.ENOENT, errno.ESTALE}


class LocalDisk:
    """`Disk` over a folder. The folder is made if its parent exists.

    Args:
        root: absolute path of the root folder.
        direct: ``auto`` probes, ``on`` demands O_DIRECT, ``off`` never uses it.
        is_read_only: never create, change or remove anything; O_DIRECT is then probed by reading.

    Raises:
        PoolDenied: the path is a file, or may not be entered or written.
        PoolUnavailable: the storage does not answer.
        ConfigError: `direct` is ``on`` and the file system cannot.
    """

    def __init__(
        self,
        root: str | Path,
        *,
        direct: Literal["auto", "on", "off"] = "auto",
        is_read_only: bool = False,
    ) -> None:
        self.root = Path(root)
        self.place = str(root)
        self._is_read_only = is_read_only
        self.is_direct = False
        with translated("open pool root", self.place):
            if self.root.exists() and not self.root.is_dir():
                raise PoolDenied(
                    f"pool root {self.place} is a file, not a folder",
                    path=self.place,
                    hint="name a folder, or a path that does not exist yet",
                )
            if not is_read_only:
                self.root.mkdir(exist_ok=True)
        #: why O_DIRECT is or is not used, for people
        self.direct_reason = "switched off"
        if direct != "off":
            self.is_direct, self.direct_reason = self._probe()
            if direct == "on" and not self.is_direct:
                raise ConfigError(
                    f"O_DIRECT is demanded for {self.place} but does not work: {self.direct_reason}",
                    hint="use direct=auto",
                )
            if not self.is_direct and not is_read_only:
                log.warning("%s: buffered I/O, because %s", self.place, self.direct_reason)

    # the verbs

    def create(self, name: str, reserve_bytes: int) -> LocalFile:
        self._refuse_if_read_only("create")
        path = self._at(name)
        flags = os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_CLOEXEC
        try:
            fd = os.open(path, flags, 0o644)
        except FileNotFoundError:
            # folders are made only when missing: metadata calls are slow on network file systems
            with translated("make folder", str(path.parent)):
                path.parent.mkdir(parents=True, exist_ok=True)
            with translated("create", str(path)):
                fd = os.open(path, flags, 0o644)
        except OSError as error:
            raise translate(error, "create", str(path)) from error
        file = LocalFile(self, path, fd, 0)
        try:
            if reserve_bytes:
                reserve(fd, reserve_bytes)
                file.length_bytes = reserve_bytes
        except OSError as error:
            file.close()
            self._unlink(path)
            raise translate(error, "reserve", str(path)) from error
        return file

    def open(self, name: str) -> LocalFile | None:
        path = self._at(name)
        try:
            # a link is no file of ours: it could lead out of the root, or make a read block
            fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOFOLLOW)
        except OSError as error:
            if error.errno in _ABSENT | {errno.ELOOP}:
                return None
            raise translate(error, "open", str(path)) from error
        try:
            status = os.fstat(fd)
        except OSError as error:
            os.close(fd)
            raise translate(error, "stat", str(path)) from error
        if not stat.S_ISREG(status.st_mode):
            os.close(fd)
            return None
        return LocalFile(self, path, fd, status.st_size)

    def read_small(self, name: str, limit_bytes: int = 1 << 20) -> bytes | None:
        file = self.open(name)
        if file is None:
            return None
        try:
            if file.length_bytes > limit_bytes:
                raise PoolDenied(f"{self._at(name)} is larger than {limit_bytes} bytes")
            buffer = memoryview(bytearray(file.length_bytes))
            return bytes(buffer[: file.read(0, [buffer])])
        finally:
            file.close()

    def publish(self, source: str, target: str) -> bool:
        self._refuse_if_read_only("publish")
        old, new = self._at(source), self._at(target)
        for attempt in (1, 2):
            try:
                self._link(old, new)
            except FileExistsError:
                if not _are_one_file(old, new):
                    return False
                # an NFS server that lost its answer links and then says that the name is taken
                self._forget_source(old)
                return True
            except FileNotFoundError as error:
                if attempt == 2 or not os.path.exists(old):
                    raise translate(error, "publish", str(new)) from error
                with translated("make folder", str(new.parent)):
                    new.parent.mkdir(parents=True, exist_ok=True)
            except OSError as error:
                if error.errno not in (errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK):
                    raise translate(error, "publish", str(new)) from error
                # no hard links here (FAT, some FUSE): names are unique by writer, so a plain rename
                # after a look is as good as the file system gets
                with translated("publish", str(new)):
                    if new.exists():
                        return False
                    os.rename(old, new)
                return True
            else:
                self._forget_source(old)
                return True
        raise AssertionError("unreachable")

    def remove(self, name: str) -> bool:
        self._refuse_if_read_only("remove")
        path = self._at(name)
        try:
            self._unlink(path)
        except IsADirectoryError:
            pass
        except PermissionError as error:
            # some systems answer EPERM for unlink of a folder
            if not path.is_dir():
                raise translate(error, "remove", str(path)) from error
        except OSError as error:
            if error.errno in _ABSENT or error.errno == errno.ENOTDIR:
                return False
            raise translate(error, "remove", str(path)) from error
        else:
            return True
        try:
            os.rmdir(path)
        except OSError as error:
            if error.errno in _ABSENT | {errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR}:
                return False
            raise translate(error, "remove", str(path)) from error
        return True

    def files(self, folder: str) -> list[FileInfo]:
        path = self._at(folder)
        found: list[FileInfo] = []
        try:
            with os.scandir(path) as entries:
                for entry in entries:
                    try:
                        status = entry.stat(follow_symlinks=False)
                    except OSError as error:
                        if error.errno in _ABSENT:
                            continue
                        raise
                    found.append(
                        FileInfo(
                            entry.name,
                            status.st_size,
                            status.st_mtime_ns,
                            stat.S_ISDIR(status.st_mode),
                            stat.S_ISREG(status.st_mode),
                            status.st_ino,
                            status.st_blocks * 512,
                        )
                    )
        except OSError as error:
            if error.errno in _ABSENT or error.errno == errno.ENOTDIR:
                return []
            raise translate(error, "list", str(path)) from error
        return found

    def touch(self, name: str) -> bool:
        if self._is_read_only:
            return False
        path = self._at(name)
        try:
            os.utime(path, follow_symlinks=False)
        except OSError as error:
            if error.errno in _ABSENT | {errno.EPERM, errno.EACCES, errno.EROFS}:
                # another user's segment: its age is then only its writer's to change
                return False
            raise translate(error, "touch", str(path)) from error
        return True

    def space(self) -> Space:
        with translated("statvfs", self.place):
            status = os.statvfs(self.root)
        has_inodes = status.f_files > 0
        return Space(
            status.f_bavail * status.f_frsize,
            status.f_blocks * status.f_frsize,
            status.f_favail if has_inodes else None,
            status.f_files if has_inodes else None,
        )

    def lock(self, name: str, text: bytes) -> DiskLock | None:
        self._refuse_if_read_only("lock")
        path = self._at(name)
        with translated("lock", str(path)):
            path.parent.mkdir(parents=True, exist_ok=True)
            fd = os.open(path, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW, 0o644)
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                os.close(fd)
                return None
            except OSError:
                os.close(fd)
                raise
            # the name may have been removed between open and flock: then the lock is on nothing
            try:
                same = os.fstat(fd).st_ino == os.stat(path).st_ino
            except FileNotFoundError:
                same = False
            if not same:
                os.close(fd)
                return None
        lock = _LocalLock(path, fd)
        try:
            lock.beat(text)
        except PoolError:
            lock.release()
            raise
        return lock

    def close(self) -> None:
        """Nothing is held between calls."""

    # parts that tests replace to crash between two system calls

    def _link(self, old: Path, new: Path) -> None:
        os.link(old, new)

    def _unlink(self, path: Path) -> None:
        os.unlink(path)

    def _forget_source(self, path: Path) -> None:
        """Remove the old name of a published file; the file is published whether that works or not."""
        try:
            self._unlink(path)
        except OSError as error:
            # left to the sweeper of dead writers' files, which may also have been faster than we
            log.info("%s is published and its old name could not be removed: %s", path, error)

    def _at(self, name: str) -> Path:
        """The path of a name. Names come from our own code; one that leaves the root is refused."""
        if name.startswith("/") or "\0" in name or ".." in name.split("/"):
            raise PoolDenied(f"{name!r} is not a name below {self.place}", path=self.place)
        return self.root / name

    def _refuse_if_read_only(self, operation: str) -> None:
        if self._is_read_only:
            raise PoolDenied(f"{operation}: the pool {self.place} is opened read-only")

    def give_up_direct(self, reason: str) -> None:
        """From now on use buffered I/O on this root; warn once."""
        if self.is_direct:
            self.is_direct = False
            self.direct_reason = reason
            log.warning("%s: buffered I/O from now on, because %s", self.place, reason)

    def _probe(self) -> tuple[bool, str]:
        """Write and read one aligned block with O_DIRECT on the real root."""
        if not O_DIRECT:
            return False, "this system has no O_DIRECT"
        if self._is_read_only:
            return True, "read-only: used until a read is refused"
        path = self.root / f".probe-{os.getpid()}-{os.urandom(8).hex()}"
        block = aligned_bytes(ALIGNMENT)
        block[:] = os.urandom(ALIGNMENT)
        back = aligned_bytes(ALIGNMENT)
        step = "open"
        try:
            fd = os.open(path, os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_CLOEXEC | O_DIRECT, 0o644)
            try:
                step = "an aligned write"
                if os.pwritev(fd, [block], 0) != ALIGNMENT:
                    return False, "an aligned write with O_DIRECT was short"
                step = "an aligned read"
                if os.preadv(fd, [back], 0) != ALIGNMENT or back != block:
                    return False, "an aligned read with O_DIRECT gave other bytes"
            finally:
                os.close(fd)
        except OSError as error:
            code = errno.errorcode.get(error.errno or 0, "unknown errno")
            if error.errno in (errno.EINVAL, errno.EOPNOTSUPP, errno.ENOTSUP, errno.ENOSYS):
                return False, f"{step} with O_DIRECT gave {code}"
            return self._probe_buffered(path, f"{step} with O_DIRECT gave {code}")
        finally:
            try:
                os.unlink(path)
            except OSError:
                pass
        return True, "an aligned write and read worked"

    def _probe_buffered(self, path: Path, reason: str) -> tuple[bool, str]:
        """The probe failed for another reason than O_DIRECT: say so now, or go on buffered."""
        try:
            fd = os.open(path, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o644)
            os.close(fd)
        except OSError as error:
            if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
                return False, reason  # full now; reading still works, and space may come back
            raise translate(error, "write to pool root", self.place) from error
        return False, reason


class _LocalLock:
    """`flock` on a file that holds a text; the kernel lets go when the process ends."""

    def __init__(self, path: Path, fd: int) -> None:
        self._path = path
        self._fd = fd

    def beat(self, text: bytes) -> None:
        with translated("beat", str(self._path)):
            os.pwrite(self._fd, text, 0)
            os.ftruncate(self._fd, len(text))
            os.utime(self._fd)

    def release(self) -> None:
        if self._fd < 0:
            return
        try:
            # only while we hold it: after the close another may have made the file anew
            os.unlink(self._path)
        except OSError:
            pass
        os.close(self._fd)
        self._fd = -1


def _are_one_file(old: Path, new: Path) -> bool:
    try:
        return os.path.samestat(os.lstat(old), os.lstat(new))
    except OSError:
        return False
