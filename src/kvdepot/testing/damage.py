"""The nine damages that files of a cache meet in practice, as named functions over a path.

They are the fault matrix that users' reports come down to: a file truncated to nothing, one byte
short, one byte long, one byte changed, swapped with another, zero-filled in part, unreadable,
replaced by a folder, replaced by a link to nowhere. Damages that have a place take it as an offset, so
that a test can aim at header, payload and footer.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

__all__ = [
    "DAMAGES",
    "Damage",
    "Spot",
    "add_byte",
    "flip_byte",
    "make_dangling",
    "make_folder",
    "make_unreadable",
    "remove_byte",
    "swap",
    "truncate",
    "zero_fill",
]


class Spot(NamedTuple):
    """Where a damage strikes, for those that ask."""

    #: first byte to change, from the start of the file
    offset: int
    #: bytes to zero
    length_bytes: int
    #: the file to swap with
    other: Path


class Damage(NamedTuple):
    """One way to spoil a file."""

    name: str
    apply: Callable[[Path, Spot], None]
    #: it strikes at the spot's offset; the others strike the whole file
    has_place: bool
    #: root reads on regardless; test it through a `FaultDisk` that answers EACCES instead
    spares_root: bool = False

    @property
    def is_void(self) -> bool:
        """It does nothing in this process, because the process is root."""
        return self.spares_root and os.geteuid() == 0


def truncate(path: Path, length_bytes: int = 0) -> None:
    """Cut the file to `length_bytes`."""
    os.truncate(path, length_bytes)


def remove_byte(path: Path) -> None:
    """Cut off the last byte."""
    os.truncate(path, max(0, path.stat().st_size - 1))


def add_byte(path: Path) -> None:
    """Append one byte."""
    with path.open("ab") as file:
        file.write(b"\x5a")


def flip_byte(path: Path, offset: int) -> None:
    """Invert one byte; the length stays.

    Raises:
        ValueError: the file has no such byte.
    """
    with path.open("r+b") as file:
        file.seek(offset)
        byte = file.read(1)
        if not byte:
            raise ValueError(f"{path} has no byte {offset}")
        file.seek(offset)
        file.write(bytes([byte[0] ^ 0xFF]))


def zero_fill(path: Path, offset: int, length_bytes: int) -> None:
    """Write zeros over a part of the file; the length stays.

    Raises:
        ValueError: the part is empty, not inside the file, or zero already.
    """
    with path.open("r+b") as file:
        file.seek(offset)
        before = file.read(length_bytes)
        if len(before) < max(1, length_bytes) or not any(before):
            raise ValueError(f"no bytes to zero at {offset} of {path}")
        file.seek(offset)
        file.write(bytes(length_bytes))


def swap(path: Path, other: Path) -> None:
    """Exchange the contents of two files; each keeps its name."""
    aside = path.with_name(path.name + ".aside")
    os.rename(path, aside)
    os.rename(other, path)
    os.rename(aside, other)


def make_unreadable(path: Path) -> None:
    """Take all permissions away."""
    os.chmod(path, 0)


def make_folder(path: Path) -> None:
    """Put an empty folder in the file's place."""
    os.unlink(path)
    os.mkdir(path)


def make_dangling(path: Path) -> None:
    """Put a symbolic link to nowhere in the file's place."""
    os.unlink(path)
    os.symlink(path.with_name("no-such-file"), path)


#: All nine, for parametrised tests.
DAMAGES: tuple[Damage, ...] = (
    Damage("truncate", lambda path, _: truncate(path), has_place=False),
    Damage("remove_byte", lambda path, _: remove_byte(path), has_place=False),
    Damage("add_byte", lambda path, _: add_byte(path), has_place=False),
    Damage("flip_byte", lambda path, spot: flip_byte(path, spot.offset), has_place=True),
    Damage("swap", lambda path, spot: swap(path, spot.other), has_place=False),
    Damage(
        "zero_fill",
        lambda path, spot: zero_fill(path, spot.offset, spot.length_bytes),
        has_place=True,
    ),
    Damage(
        "make_unreadable", lambda path, _: make_unreadable(path), has_place=False, spares_root=True
    ),
    Damage("make_folder", lambda path, _: make_folder(path), has_place=False),
    Damage("make_dangling", lambda path, _: make_dangling(path), has_place=False),
)
