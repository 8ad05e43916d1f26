"""Where a model's files are: a folder, or the local snapshot of a hub's model."""

from __future__ import annotations

import os
from pathlib import Path

from kvdepot.io.disk import translated

__all__ = ["file_states", "local_model_folder", "plain_model_name"]


def local_model_folder(name: str, *, revision: str | None, cache_dir: str | None) -> Path | None:
    """The folder of a model that is on this host, without asking any network.

    Args:
        name: a path, or a hub's id such as ``org/model``.
        revision: a branch, tag or commit of the hub.
        cache_dir: where the hub's client keeps its files, if not in its usual place.

    Returns:
        None where there is no such folder.
    """
    path = Path(os.path.expanduser(name))
    if path.is_dir():
        return path
    try:
        from huggingface_hub import snapshot_download  # noqa: PLC0415 (only engines have it)

        return Path(
            snapshot_download(name, revision=revision, cache_dir=cache_dir, local_files_only=True)
        )
    except Exception:  # noqa: BLE001 (its error types differ between versions, all mean: not here)
        return None


def plain_model_name(name: str) -> str:
    """A model's name without the place of its files: the hub's id, or the name of the folder."""
    path = Path(os.path.expanduser(name))
    if not path.is_dir():
        return name
    parts = path.resolve().parts
    for part in reversed(parts):
        if part.startswith("models--"):  # a snapshot in the hub's cache
            return part.removeprefix("models--").replace("--", "/")
    return parts[-1]


def file_states(folder: Path) -> tuple[tuple[str, int, int, int], ...]:
    """Name, inode, size and time of change of a folder's files: equal as long as nobody changes one.

    Raises:
        PoolError: the folder cannot be listed.
    """
    with translated("list the model's folder", str(folder)):
        found = []
        with os.scandir(folder) as entries:
            for entry in entries:
                if entry.is_file():
                    state = entry.stat()
                    found.append((entry.name, state.st_ino, state.st_size, state.st_mtime_ns))
        return tuple(sorted(found))
