"""What a log says about one request, whatever wrote the log."""

from __future__ import annotations

import dataclasses
import datetime as dt
import re
from typing import Any, NamedTuple

from kvdepot.audit.tokenlog import Ids

__all__ = ["Body", "Problem", "Reading", "Record", "Trace", "parse_time"]

#: an OpenAI request body as decoded JSON
Body = dict[str, Any]


class Problem(NamedTuple):
    """Something in the input that could not be used, or not as it is."""

    #: from 1; 0 where it is about the whole input
    line: int
    what: str


class Trace(NamedTuple):
    """A prompt that is only known by ids of its pieces."""

    ids: list[int]
    #: tokens of each piece
    tokens: list[int]
    #: for content ids: (component, how many pieces), in the order of `ids`
    groups: tuple[tuple[str, int], ...] = ()
    #: tokens of the prompt, where the pieces do not cover it; -1 for the pieces' sum
    length: int = -1


@dataclasses.dataclass(slots=True)
class Record:
    """One request. Exactly one of `body`, `prompt`, `ids` and `trace` is given."""

    line: int
    time_s: float | None = None
    session: str | None = None
    user: str | None = None
    request_id: str | None = None
    #: salt, adapter and model, as far as they separate caches
    extra: tuple[tuple[str, str], ...] = ()
    body: Body | None = None
    prompt: str | None = None
    #: int32, never a list: a Python integer takes ten times as much
    ids: Ids | None = None
    trace: Trace | None = None
    #: tokens that the server counted, and how many of them it had cached
    usage_prompt: int | None = None
    usage_cached: int | None = None


@dataclasses.dataclass(slots=True)
class Reading:
    """All requests of an input, and what was wrong with it."""

    #: chat, prompts, ids, chained trace, content trace, engine log, events, audit trace
    kind: str
    records: list[Record] = dataclasses.field(default_factory=list)
    problems: list[Problem] = dataclasses.field(default_factory=list)
    lines: int = 0
    #: lines that gave no request though they should
    broken: int = 0
    #: requests whose prompt is known to be cut by the logger
    cut: int = 0
    #: for an audit trace and piece traces: ids stand for pseudo-words, one token each
    is_pseudo: bool = False


_ZONE = re.compile(r"(\.\d{1,6})\d*")


def parse_time(value: object) -> float | None:
    """Seconds since the epoch (or since any start) from a number of s, ms, us or ns, or ISO text."""
    if isinstance(value, bool) or value is None:
        return None
    if isinstance(value, int | float):
        return _scaled(float(value))
    text = str(value).strip()
    try:
        return _scaled(float(text))
    except ValueError:
        pass
    try:
        moment = dt.datetime.fromisoformat(_ZONE.sub(r"\1", text, count=1))
    except ValueError:
        return None
    if moment.tzinfo is None:
        moment = moment.replace(tzinfo=dt.UTC)
    return moment.timestamp()


def _scaled(number: float) -> float | None:
    if number != number or abs(number) > 1e20:  # noqa: PLR0124 - not a number
        return None
    for above, factor in ((1e17, 1e9), (1e14, 1e6), (1e11, 1e3)):
        if number > above:
            return number / factor
    return number
