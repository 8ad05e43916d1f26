"""What lies behind simulated disks: files with live and durable bytes, and names that settle late."""

from __future__ import annotations

import random
import threading
from collections.abc import Iterable

from kvdepot.clock import Clock
from kvdepot.io.buffers import ALIGNMENT
from kvdepot.units import round_up

__all__ = ["Media", "Node", "folder_of", "parents_of"]

#: one name change in so many settles its folder
_SETTLE_ONE_IN = 4
#: odds of (new, old, zero) for an unsynced sector. One set holds for a file: images in which all
#: sectors arrived, none did, or few are missing are as likely as wild mixtures.
_ODDS = ((1, 0, 0), (0, 1, 0), (1, 1, 1), (12, 1, 1))


class Node:
    """Bytes and times of a file, apart from its names. Callers hold the media's lock."""

    def __init__(self, number: int, sector_bytes: int, mtime_ns: int) -> None:
        self.number = number
        self.mtime_ns = mtime_ns
        self.live = bytearray()
        #: who has the lock on this file
        self.holder: object | None = None
        self._durable = bytearray()
        self._sector_bytes = sector_bytes
        #: sectors in which live and durable bytes may differ
        self._dirty: set[int] = set()

    def write(self, offset: int, data: bytes | memoryview) -> None:
        """Change live bytes; a gap before `offset` reads as zeros."""
        end = offset + len(data)
        if end > len(self.live):
            self.resize(end)
        self.live[offset:end] = data
        self._mark(offset, end)

    def resize(self, length_bytes: int) -> None:
        """Set the live length."""
        before = len(self.live)
        if length_bytes < before:
            del self.live[length_bytes:]
        else:
            self.live.extend(bytes(length_bytes - before))
        self._mark(min(before, length_bytes), max(before, length_bytes))

    def settle(self) -> None:
        """All live bytes become durable."""
        del self._durable[len(self.live) :]
        self._durable.extend(bytes(len(self.live) - len(self._durable)))
        for sector in self._dirty:
            start, end = self._span(sector)
            self._durable[start : min(end, len(self.live))] = self.live[start:end]
        self._dirty.clear()

    def assign(self, content: bytearray, mtime_ns: int) -> None:
        """Replace everything, durably: small texts reach the disk in one sector."""
        self.live = content
        self._durable = bytearray(content)
        self._dirty.clear()
        self.mtime_ns = mtime_ns

    def survivor(self, source: random.Random) -> bytearray:
        """The bytes that a power loss now may leave."""
        old, new = len(self._durable), len(self.live)
        between = source.randint(min(old, new), max(old, new))
        length = source.choice((old, new, between))
        image = bytearray(self.live[:length]) + bytes(max(0, length - new))
        odds = source.choice(_ODDS)
        for sector in sorted(self._dirty):
            start, end = self._span(sector)
            end = min(end, length)
            if start >= end:
                continue
            (what,) = source.choices(("new", "old", "zero"), odds)
            if what == "old":
                kept = self._durable[start:end]
                image[start:end] = kept + bytes(end - start - len(kept))
            elif what == "zero":
                image[start:end] = bytes(end - start)
        return image

    def _span(self, sector: int) -> tuple[int, int]:
        return sector * self._sector_bytes, (sector + 1) * self._sector_bytes

    def _mark(self, start: int, end: int) -> None:
        if start < end:
            first, last = start // self._sector_bytes, (end - 1) // self._sector_bytes
            self._dirty.update(range(first, last + 1))


class Media:
    """What several handles share: names, folders, bytes, limits. All access under `lock`."""

    def __init__(
        self, capacity_bytes: int, inodes_max: int, sector_bytes: int, seed: int, clock: Clock
    ) -> None:
        self.lock = threading.RLock()
        self.capacity_bytes = capacity_bytes
        self.inodes_max = inodes_max
        self.sector_bytes = sector_bytes
        # text seeds are hashed: the first draws of small integer seeds resemble each other
        self.random = random.Random(f"media {seed}")
        self.clock = clock
        self.names: dict[str, Node] = {}
        self.durable_names: dict[str, Node] = {}
        #: folder -> when an entry of it was last added or removed
        self.folders: dict[str, int] = {}
        self.handles = 0
        self._numbers = 0

    def now_ns(self) -> int:
        """The time that files get, by the storage's clock."""
        return int(self.clock.wall_s() * 1e9)

    def new_node(self) -> Node:
        """An empty file without a name."""
        self._numbers += 1
        return Node(self._numbers, self.sector_bytes, self.now_ns())

    def used_bytes(self) -> int:
        """Bytes of all named files, in whole pages."""
        return sum(round_up(len(node.live), ALIGNMENT) for node in set(self.names.values()))

    def used_inodes(self) -> int:
        """Named files and folders."""
        return len(set(self.names.values())) + len(self.folders)

    def add_folders(self, folders: Iterable[str]) -> None:
        """Make folders that are missing."""
        for folder in folders:
            if folder not in self.folders:
                self.folders[folder] = self.now_ns()
                self.stamp(folder)

    def remove_folder(self, folder: str) -> None:
        """Remove a folder that is known to be empty."""
        del self.folders[folder]
        self.stamp(folder)

    def stamp(self, name: str) -> None:
        """An entry of the folder that `name` lies in was added or removed."""
        if folder_of(name) in self.folders:
            self.folders[folder_of(name)] = self.now_ns()

    def name_changed(self, *names: str) -> None:
        """File names came or went; now and then their folders reach the disk."""
        for name in names:
            self.stamp(name)
        for folder in dict.fromkeys(folder_of(name) for name in names):
            if self.random.randrange(_SETTLE_ONE_IN) == 0:
                self.settle_folder(folder)

    def settle_folder(self, folder: str) -> None:
        """Make the names in a folder durable as they are."""
        for name in [name for name in self.durable_names if folder_of(name) == folder]:
            del self.durable_names[name]
        for name, node in self.names.items():
            if folder_of(name) == folder:
                self.durable_names[name] = node

    def survivor(self, seed: int) -> Media:
        """A plausible image after a power loss, on media of its own."""
        source = random.Random(f"image {seed}")
        image = Media(self.capacity_bytes, self.inodes_max, self.sector_bytes, seed, self.clock)
        copies: dict[Node, Node] = {}
        for name in sorted(self.names.keys() | self.durable_names.keys()):
            choices = (self.durable_names.get(name), self.names.get(name))
            node = source.choice(choices)
            if node is None:
                continue
            if node not in copies:
                copies[node] = image.new_node()
                copies[node].assign(node.survivor(source), node.mtime_ns)
            image.names[name] = copies[node]
            image.add_folders(parents_of(name))
        for folder in sorted(self.folders):
            if source.random() < 0.5:
                image.add_folders([*parents_of(folder), folder])
        image.durable_names = dict(image.names)
        return image


def folder_of(name: str) -> str:
    """The folder that a name lies in; ``.`` is the root."""
    return name.rpartition("/")[0] or "."


def parents_of(name: str) -> list[str]:
    """Folders on the way to a name, outermost first, without the root."""
    parts = name.split("/")[:-1]
    return ["/".join(parts[: index + 1]) for index in range(len(parts))]
