"""Folders in results: by their role or their last name.

Results are passed on, and the folders of the machine that they come from say nothing to their readers.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import TypeVar

import msgspec

__all__ = ["OUT", "without_folders"]

T = TypeVar("T")

#: what stands for the folder of the result itself
OUT = "{out}"
_ELSEWHERE = "..."
#: an absolute path of two or more names, also as a file URL; not what follows a host or a placeholder
_PATH = re.compile(r"(?:(?<=file://)|(?<![\w/.}~-]))(?:/[^\s\"'/,:;=|<>()\[\]{}]+){2,}/?")


def without_folders(value: T, out: Path | None = None) -> T:
    """A value of plain data with all absolute paths in it replaced.

    A path below the result's own folder begins with ``{out}``; of every other one the last name is left.

    Args:
        value: a string, or any structure that msgspec can take apart and put together again.
        out: absolute folder of the result; None: it is not known.
    """
    return msgspec.convert(_replaced(msgspec.to_builtins(value), out), type(value))


def _replaced(value: object, out: Path | None) -> object:
    if isinstance(value, str):
        return _PATH.sub(lambda match: _name(match[0], out), value)
    if isinstance(value, dict):
        return {key: _replaced(each, out) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_replaced(each, out) for each in value]
    return value


def _name(found: str, out: Path | None) -> str:
    path = Path(found)
    if out is not None and path.is_relative_to(out):
        return "/".join((OUT, *path.relative_to(out).parts))
    return f"{_ELSEWHERE}/{path.name}"
