"""What kind of storage a path is on, and how to read from it and not from the page cache."""

from __future__ import annotations

import os
import re
import stat
from pathlib import Path

from kvdepot.io.disk import translated

__all__ = [
    "MEMORY_FILE_SYSTEMS",
    "NETWORK_FILE_SYSTEMS",
    "drop_cached_pages",
    "file_sizes",
    "file_system_of",
    "free_bytes_of",
]

#: file systems whose files are memory: reading them says nothing about storage
MEMORY_FILE_SYSTEMS = frozenset({"ramfs", "tmpfs"})
#: file systems whose bytes come over a network
NETWORK_FILE_SYSTEMS = frozenset(
    ("9p", "afs", "beegfs", "ceph", "cifs", "glusterfs", "gpfs", "lustre", "nfs", "nfs4", "smb3")
)

_MOUNTS = Path("/proc/self/mountinfo")


def file_system_of(path: str | Path) -> str:
    """The type of the file system that a path is, or would be, on; empty when it is not known."""
    wanted = Path(path).resolve()
    try:
        lines = _MOUNTS.read_text(encoding="utf-8", errors="surrogateescape").splitlines()
    except OSError:
        return ""
    found, depth = "", -1
    for line in lines:
        # id parent major:minor root MOUNT POINT options ... - TYPE source options
        before, _, after = line.partition(" - ")
        point = Path(_unescaped(before.split(" ")[4]))
        # a later mount on the same point hides an earlier one
        if wanted.is_relative_to(point) and len(point.parts) >= depth:
            found, depth = after.split(" ")[0], len(point.parts)
    return found


def _unescaped(text: str) -> str:
    """Mount points have spaces and the like as octal numbers."""
    return re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), text)


def free_bytes_of(path: str | Path) -> int:
    """Bytes that an ordinary user may still write where a path is, or would be.

    Raises:
        PoolError: the file system does not say.
    """
    place = Path(path).resolve()
    while not place.exists() and place != place.parent:
        place = place.parent
    with translated("look at the free space of", str(place)):
        status = os.statvfs(place)
    return status.f_bavail * status.f_frsize


def file_sizes(folder: str | Path) -> dict[str, int]:
    """Bytes of each file of a folder and its sub-folders, by path; what vanishes meanwhile is left out."""
    sizes = {}
    for path in Path(folder).rglob("*"):
        try:
            status = path.stat(follow_symlinks=False)
        except FileNotFoundError:
            continue
        if stat.S_ISREG(status.st_mode):
            sizes[str(path)] = status.st_size
    return sizes


def drop_cached_pages(folder: str | Path, pattern: str) -> int:
    """Ask the kernel to forget the cached pages of files; what is still dirty is written first.

    Args:
        folder: searched with its sub-folders.
        pattern: of the files' names.

    Returns:
        How many files were asked for; the kernel may keep pages that others map.

    Raises:
        PoolError: a file cannot be opened or written out.
    """
    count = 0
    for path in sorted(Path(folder).rglob(pattern)):
        with translated("drop cached pages of", str(path)):
            fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            try:
                os.fdatasync(fd)
                os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            finally:
                os.close(fd)
        count += 1
    return count
