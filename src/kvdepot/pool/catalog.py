"""The catalog of one root: which segments exist, found by listing only what may have changed.

A folder is listed again when its mtime has changed, and until it has been quiet for a few seconds,
because mtimes tick coarsely; a full refresh lists every folder. Wall clocks are never compared, so a
writer whose clock is wrong is found like any other.

Names that we did not give are ignored and never touched. Used by one thread at a time (the root's
lock); all calls block on file calls.
"""

from __future__ import annotations

import re
import time
from typing import NamedTuple

from kvdepot.clock import Clock
from kvdepot.io.disk import Disk, FileInfo
from kvdepot.pool.segment import SegmentName, parse_segment_name

__all__ = [
    "NAMESPACE_FOLDER",
    "TMP_FOLDER",
    "Catalog",
    "Changes",
    "SegmentEntry",
    "TmpEntry",
    "hour_name",
    "is_namespace",
    "segment_path",
    "tmp_path",
]

NAMESPACE_FOLDER = "ns"
TMP_FOLDER = "tmp"

_NAMESPACE = re.compile(r"[0-9a-f]{64}", re.ASCII)
_HOUR = re.compile(r"[0-9]{10}(?:-[0-9]{1,4})?", re.ASCII)
_TMP = re.compile(
    r"(?P<writer>[0-9a-f]{16})-(?P<sequence>[0-9a-f]{8})-(?P<bytes>[0-9]{1,15})\.tmp", re.ASCII
)
#: a folder whose mtime is younger than this on our clock may have changed again within one tick
_QUIET_S = 3.0


class SegmentEntry(NamedTuple):
    """A published segment file."""

    namespace: str
    hour: str
    name: SegmentName
    length_bytes: int
    #: last use or publication, by the storage's clock
    mtime_ns: int
    inode: int

    @property
    def path(self) -> str:
        """The file's name below the root."""
        return segment_path(self.namespace, self.hour, self.name)


class TmpEntry(NamedTuple):
    """A segment being written, or what a dead writer left."""

    path: str
    writer: str
    #: what the file holds, or what its writer may yet put into it
    reserved_bytes: int
    #: of them, what the storage has not yet taken from its free space
    pending_bytes: int


class _Folder:
    """What we know of one hour folder."""

    __slots__ = ("changed_at_s", "entries", "is_quiet", "mtime_ns")

    def __init__(self) -> None:
        self.mtime_ns = -1
        self.changed_at_s = 0.0
        #: listed after its mtime had been the same for a while, so nothing can be missing
        self.is_quiet = False
        self.entries: dict[SegmentName, SegmentEntry] = {}


class Changes(NamedTuple):
    """What a refresh found."""

    added: list[SegmentEntry]
    removed: list[SegmentEntry]


def hour_name(wall_s: float) -> str:
    """The folder of an hour in UTC; ten digits whatever the clock says, or nobody would know it."""
    at = time.gmtime(wall_s)
    return f"{at.tm_year % 10_000:04d}{at.tm_mon:02d}{at.tm_mday:02d}{at.tm_hour:02d}"


def is_namespace(info: FileInfo) -> bool:
    """Whether an entry of the ``ns`` folder is a namespace; others are not ours."""
    return info.is_folder and _NAMESPACE.fullmatch(info.name) is not None


def segment_path(namespace: str, hour: str, name: SegmentName) -> str:
    """A segment's file name below the root."""
    return f"{NAMESPACE_FOLDER}/{namespace}/{hour}/{name}"


def tmp_path(name: SegmentName, reserve_bytes: int) -> str:
    """The name of a segment being written; it says how large the file may become."""
    return f"{TMP_FOLDER}/{name.writer}-{name.sequence:08x}-{reserve_bytes}.tmp"


class Catalog:
    """The segments of a root, in all its namespaces."""

    def __init__(self, disk: Disk, clock: Clock) -> None:
        self._disk = disk
        self._clock = clock
        self._folders: dict[tuple[str, str], _Folder] = {}
        self._used_bytes = 0

    @property
    def used_bytes(self) -> int:
        """Bytes of all known segments."""
        return self._used_bytes

    def entries(self) -> list[SegmentEntry]:
        """All known segments."""
        return [e for folder in self._folders.values() for e in folder.entries.values()]

    def by_namespace(self) -> dict[str, list[SegmentEntry]]:
        """All known segments by their namespace; one without segments is there too. Reads the folder."""
        found: dict[str, list[SegmentEntry]] = {name: [] for name in self._namespaces()}
        for entry in self.entries():
            found.setdefault(entry.namespace, []).append(entry)
        return found

    def knows(self, entry: SegmentEntry) -> bool:
        """Whether a segment is listed still."""
        folder = self._folders.get((entry.namespace, entry.hour))
        return folder is not None and entry.name in folder.entries

    def count(self, namespace: str, hour: str) -> int:
        """How many segments a folder is known to hold."""
        folder = self._folders.get((namespace, hour))
        return len(folder.entries) if folder else 0

    def refresh(self, *, is_full: bool = False, namespace: str | None = None) -> Changes:
        """List what may have changed.

        Args:
            is_full: list every folder, whatever its mtime says; the only way to see others' touches.
            namespace: look at this one only; the others' segments stay as they were known.

        Raises:
            PoolError: the storage refused; what was found before stays.
        """
        now_s = self._clock.monotonic_s()
        listed: dict[tuple[str, str], dict[SegmentName, SegmentEntry]] = {}
        present: set[tuple[str, str]] = set()
        for name in [namespace] if namespace else self._namespaces():
            for info in self._disk.files(f"{NAMESPACE_FOLDER}/{name}"):
                if not (info.is_folder and _HOUR.fullmatch(info.name)):
                    continue
                key = (name, info.name)
                present.add(key)
                if self._is_due(key, info.mtime_ns, now_s) or is_full:
                    listed[key] = self._list(key)
        # only when all listings are in: an error half-way must not lose what was found before it
        added: list[SegmentEntry] = []
        removed: list[SegmentEntry] = []
        for key, found in listed.items():
            folder = self._folders[key]
            folder.is_quiet = now_s - folder.changed_at_s >= _QUIET_S
            self._take(folder, found, added, removed)
        for key in [key for key in self._folders if key not in present]:
            if namespace is None or key[0] == namespace:
                removed += self._folders.pop(key).entries.values()
        self._used_bytes += sum(entry.length_bytes for entry in added)
        self._used_bytes -= sum(entry.length_bytes for entry in removed)
        return Changes(added, removed)

    def add(self, entry: SegmentEntry) -> None:
        """Enter a segment that this process has published."""
        folder = self._folders.setdefault((entry.namespace, entry.hour), _Folder())
        if entry.name not in folder.entries:
            folder.entries[entry.name] = entry
            self._used_bytes += entry.length_bytes

    def drop(self, entry: SegmentEntry) -> None:
        """Strike out a segment that is gone."""
        folder = self._folders.get((entry.namespace, entry.hour))
        if folder is not None and folder.entries.pop(entry.name, None) is not None:
            self._used_bytes -= entry.length_bytes

    def tmp_entries(self) -> list[TmpEntry]:
        """All segments being written, by whomever; what looks otherwise is not ours."""
        found = []
        for info in self._disk.files(TMP_FOLDER):
            match = _TMP.fullmatch(info.name)
            if match and info.is_regular:
                reserved = max(int(match["bytes"]), info.length_bytes)
                pending = max(reserved - info.allocated_bytes, 0)
                path = f"{TMP_FOLDER}/{info.name}"
                found.append(TmpEntry(path, match["writer"], reserved, pending))
        return found

    def empty_hours(self) -> list[tuple[str, str]]:
        """Hour folders that hold no segment, except each namespace's newest."""
        newest: dict[str, str] = {}
        for namespace, hour in self._folders:
            newest[namespace] = max(hour, newest.get(namespace, ""))
        return [
            (namespace, hour)
            for (namespace, hour), folder in self._folders.items()
            if not folder.entries and hour != newest[namespace]
        ]

    def _namespaces(self) -> list[str]:
        return [info.name for info in self._disk.files(NAMESPACE_FOLDER) if is_namespace(info)]

    def _is_due(self, key: tuple[str, str], mtime_ns: int, now_s: float) -> bool:
        folder = self._folders.setdefault(key, _Folder())
        if mtime_ns != folder.mtime_ns:
            folder.mtime_ns = mtime_ns
            folder.changed_at_s = now_s
            folder.is_quiet = False
        return not folder.is_quiet

    def _list(self, key: tuple[str, str]) -> dict[SegmentName, SegmentEntry]:
        namespace, hour = key
        found: dict[SegmentName, SegmentEntry] = {}
        for info in self._disk.files(f"{NAMESPACE_FOLDER}/{namespace}/{hour}"):
            name = parse_segment_name(info.name)
            if name is not None and info.is_regular:
                found[name] = SegmentEntry(
                    namespace, hour, name, info.length_bytes, info.mtime_ns, info.inode
                )
        return found

    @staticmethod
    def _take(
        folder: _Folder,
        found: dict[SegmentName, SegmentEntry],
        added: list[SegmentEntry],
        removed: list[SegmentEntry],
    ) -> None:
        for name, entry in found.items():
            known = folder.entries.get(name)
            if known is None:
                added.append(entry)
            elif known.length_bytes != entry.length_bytes or known.inode not in (0, entry.inode):
                # the name means another file now: nothing that we knew of it holds
                removed.append(known)
                added.append(entry)
        removed += [entry for name, entry in folder.entries.items() if name not in found]
        folder.entries = found
