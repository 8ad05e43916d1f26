"""What this host says about itself."""

from __future__ import annotations

import os
from functools import cache
from pathlib import Path

__all__ = ["host_boot_id", "unlink_shared_memory"]

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


@cache
def host_boot_id() -> str:
    """The kernel's id of this boot; empty where there is none, which equals no lease's boot id."""
    try:
        return _BOOT_ID.read_text(encoding="ascii").strip()
    except OSError:
        return ""


def unlink_shared_memory(path: str) -> None:
    """Remove the name of shared memory that all who need it have mapped; a missing name is fine."""
    try:
        os.unlink(path)
    except OSError:
        pass
