"""A folder of results: lines that are appended as they come, and whole files that are replaced at once."""

from __future__ import annotations

import os
from pathlib import Path
from types import TracebackType
from typing import BinaryIO, Self

from kvdepot.errors import ConfigError

__all__ = ["ResultFolder", "make_writable", "read_whole"]


def make_writable(path: Path) -> None:
    """Make a folder for results and try it: found out now, and not after minutes.

    Raises:
        ConfigError: it cannot be made or written.
    """
    try:
        path.mkdir(parents=True, exist_ok=True)
        probe = path / ".kvdepot-probe"
        probe.write_bytes(b"")
        probe.unlink()
    except OSError as error:
        raise ConfigError(
            f"cannot write into {path}: {error.strerror}", hint="name another folder: --out FOLDER"
        ) from error


class ResultFolder:
    """A folder that one process writes. Use as a context manager, or close it. Blocks on file calls.

    Args:
        path: made if it is not there.

    Raises:
        ConfigError: it cannot be written.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self._open: dict[str, BinaryIO] = {}
        make_writable(self.path)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def append(self, name: str, line: bytes) -> None:
        """Add one line to a file; it is with the operating system when this returns."""
        file = self._open.get(name)
        if file is None:
            file = self._open[name] = (self.path / name).open("ab")
            if file.tell() and not self._ends_with_newline(name):
                file.write(b"\n")  # a crash has cut the last line off
        file.write(line + b"\n")
        file.flush()

    def write(self, name: str, content: bytes) -> None:
        """Replace a file by new content, whole or not at all."""
        making = self.path / f".{name}.new"
        making.write_bytes(content)
        os.replace(making, self.path / name)

    def lines(self, name: str) -> list[bytes]:
        """Lines of a file; none where there is no file."""
        try:
            return (self.path / name).read_bytes().splitlines()
        except FileNotFoundError:
            return []

    def read(self, name: str) -> bytes | None:
        """Content of a file; None where there is none."""
        try:
            return (self.path / name).read_bytes()
        except FileNotFoundError:
            return None

    def sub_folder(self, name: str) -> Path:
        """A folder in the folder, made if it is not there."""
        folder = self.path / name
        folder.mkdir(exist_ok=True)
        return folder

    def close(self) -> None:
        """Close what is open. Idempotent."""
        for file in self._open.values():
            file.close()
        self._open.clear()

    def _ends_with_newline(self, name: str) -> bool:
        with (self.path / name).open("rb") as file:
            file.seek(-1, os.SEEK_END)
            return file.read(1) == b"\n"


def read_whole(path: str | Path) -> bytes:
    """A file that the user named.

    Raises:
        ConfigError: it cannot be read.
    """
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}") from error
