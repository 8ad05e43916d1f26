"""Planted faults: traffic with one known fault (or none), and the same after the right edit.

`planted` gives a scenario by name; those in `BLIND` were not looked at while the classifiers were made.
"""

from __future__ import annotations

import datetime as dt
import importlib
import random
from collections.abc import Callable
from typing import Any, NamedTuple

from tests.audit_traffic import Row, last_user


class Planted(NamedTuple):
    """Traffic and the truth about it."""

    rows: list[Row]
    #: slug of the cause that must come first, or "none"
    cause: str
    #: how the finding's place must begin; "" where there is no place in a prompt
    place: str
    #: the same traffic after the right edit; None where no edit of the prompt is the answer
    fixed: list[Row] | None = None
    #: further arguments of the audit
    options: dict[str, Any] = {}  # noqa: RUF012


Maker = Callable[[random.Random], Planted]
SCENARIOS: dict[str, Maker] = {}
BLIND: set[str] = set()


def scenario(*, blind: bool = False) -> Callable[[Maker], Maker]:
    def register(maker: Maker) -> Maker:
        SCENARIOS[maker.__name__] = maker
        if blind:
            BLIND.add(maker.__name__)
        return maker

    return register


def planted(name: str) -> Planted:
    """The scenario of this name; the same at every call."""
    for module in ("tests.audit_scenarios", "tests.audit_scenarios_chats"):
        importlib.import_module(module)
    return SCENARIOS[name](random.Random(f"planted {name}"))


def in_front(row: Row, text: str, message: int = 0) -> Row:
    row["messages"][message]["content"] = text + row["messages"][message]["content"]
    return row


def behind(row: Row, text: str) -> Row:
    last_user(row)["content"] += text
    return row


def clock(row: Row) -> dt.datetime:
    return dt.datetime.fromtimestamp(row["timestamp"], dt.UTC)
