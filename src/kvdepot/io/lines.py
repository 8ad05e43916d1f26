"""Numbered lines of logs, whatever they are packed in: plain, gzip, zstd, standard input.

A line is never longer in memory than `LINE_BYTES_MAX`: the rest of a longer one is read and dropped.
"""

from __future__ import annotations

import gzip
import importlib
import io
import sys
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, NamedTuple

from kvdepot.errors import ConfigError
from kvdepot.units import MIB

__all__ = ["LINE_BYTES_MAX", "Line", "opened", "read_lines", "read_text"]

#: a prompt of a million tokens is about 8 MiB of JSON; with tools and images in base64 perhaps ten times that
LINE_BYTES_MAX = 256 * MIB
_CHUNK = MIB
_GZIP = b"\x1f\x8b"
_ZSTD = b"\x28\xb5\x2f\xfd"


class Line(NamedTuple):
    """One line, without its end."""

    #: from 1
    number: int
    data: bytes
    #: why `data` is not the whole line; "" when it is
    fault: str = ""


@contextmanager
def opened(path: str | Path) -> Iterator[Any]:
    """The unpacked bytes of a file; ``-`` is standard input. The kind is told by content, not by name.

    Raises:
        ConfigError: the file cannot be read, or is packed in a way that needs a missing library.
    """
    try:
        raw: IO[bytes] = sys.stdin.buffer if str(path) == "-" else open(path, "rb")  # noqa: SIM115
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from error
    try:
        buffered = io.BufferedReader(_Raw(raw), _CHUNK)
        magic = buffered.peek(4)[:4]
        if magic[:2] == _GZIP:
            yield gzip.GzipFile(fileobj=buffered)
        elif magic == _ZSTD:
            yield _zstd().ZstdFile(buffered)
        else:
            yield buffered
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror or error}") from error
    finally:
        if raw is not sys.stdin.buffer:
            raw.close()


class _Raw(io.RawIOBase):
    """Any binary stream as a raw one, so that its first bytes can be looked at."""

    def __init__(self, stream: IO[bytes]) -> None:
        self._stream = stream

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]
        data = self._stream.read(len(buffer))
        buffer[: len(data)] = data
        return len(data)


def _zstd() -> Any:
    for name in ("compression.zstd", "backports.zstd"):
        try:
            return importlib.import_module(name)
        except ImportError:
            continue
    raise ConfigError(
        "this file is packed with zstd, which needs a library",
        hint="pip install 'kvdepot[audit]', or unpack it: zstd -dc FILE | kvdepot audit -",
    )


def read_lines(path: str | Path, *, line_bytes_max: int = LINE_BYTES_MAX) -> Iterator[Line]:
    """Lines of a file, with their numbers; damaged packing ends the lines with a fault.

    Raises:
        ConfigError: see `opened`.
    """
    number = 0
    with opened(path) as stream:
        while True:
            number += 1
            try:
                data = stream.readline(line_bytes_max + 1)
                if not data:
                    return
                fault = ""
                if len(data) > line_bytes_max and not data.endswith(b"\n"):
                    dropped = _skip_line(stream)
                    fault = f"longer than {line_bytes_max} bytes ({len(data) + dropped})"
                    data = data[:1024]
            except (EOFError, zlib.error, gzip.BadGzipFile, ValueError) as error:
                yield Line(number, b"", f"the packed file is damaged here: {error}")
                return
            yield Line(number, data.rstrip(b"\r\n"), fault)


def _skip_line(stream: IO[bytes]) -> int:
    skipped = 0
    while True:
        data = stream.readline(_CHUNK)
        skipped += len(data)
        if not data or data.endswith(b"\n"):
            return skipped


def read_text(path: str | Path) -> str:
    """A whole small file as UTF-8 text.

    Raises:
        ConfigError: it cannot be read or is not UTF-8.
    """
    try:
        return Path(path).read_bytes().decode()
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} is not UTF-8 text: {error}") from error
