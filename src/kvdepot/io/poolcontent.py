"""A pool's folder as one who only looks at it sees it: its files, and what the newest of them are made of."""

from __future__ import annotations

import stat
from pathlib import Path
from typing import NamedTuple

__all__ = ["PoolContent", "pool_content"]

_SEGMENT_SUFFIX = ".kvseg"
_MANIFEST_FILE = "identity.json"
_NAMESPACES = "ns"


class PoolContent(NamedTuple):
    """What lies in a folder."""

    #: of the namespace that was written last; None where the folder is no pool of ours
    manifest: bytes | None
    #: of the namespace's segments, or of all files of a folder that is no pool of ours: bytes by name below
    #: the folder, the newest first
    sizes: dict[str, int]


def pool_content(folder: str | Path) -> PoolContent:
    """Look at a folder. What vanishes meanwhile is left out; a folder that is not there has nothing."""
    root = Path(folder)
    found = []
    for path in root.rglob("*"):
        try:
            status = path.stat(follow_symlinks=False)
        except OSError:
            continue
        if stat.S_ISREG(status.st_mode):
            found.append((status.st_mtime_ns, path.relative_to(root), status.st_size))
    found.sort(reverse=True)
    newest = next((path for _, path, _ in found if _is_segment(path)), None)
    if newest is None:
        return PoolContent(None, {str(path): size for _, path, size in found})
    namespace = Path(*newest.parts[:2])
    try:
        manifest = (root / namespace / _MANIFEST_FILE).read_bytes()
    except OSError:
        manifest = None
    return PoolContent(
        manifest,
        {
            str(path): size
            for _, path, size in found
            if _is_segment(path) and path.is_relative_to(namespace)
        },
    )


def _is_segment(path: Path) -> bool:
    return path.suffix == _SEGMENT_SUFFIX and len(path.parts) > 2 and path.parts[0] == _NAMESPACES
