"""The header of a shareable audit trace: texts in it are pseudo-words (see `kvdepot.audit.export`)."""

from __future__ import annotations

from typing import Any

__all__ = ["SHARED_FORMAT", "SHARED_VERSION", "is_shared_header"]

SHARED_FORMAT = "kvdepot audit trace"
SHARED_VERSION = 1


def is_shared_header(row: dict[str, Any]) -> bool:
    """Whether a row is the first one of an audit trace."""
    return row.get("format") == SHARED_FORMAT
