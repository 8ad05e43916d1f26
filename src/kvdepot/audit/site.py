"""One place at which prompts break, with what is known about it."""

from __future__ import annotations

import dataclasses

from kvdepot.audit.edits import Edit

__all__ = ["Site"]


@dataclasses.dataclass(slots=True)
class Site:
    """One place at which prompts break."""

    cause: str
    #: path with the role, for people: ``messages[0] (system)``
    place: str
    #: equal for the same site in a later survey
    key: tuple[str, str, str]
    estimate: int
    evidence: str
    #: numbers of the requests that break here
    requests: list[int]
    #: a request and its donor, to be shown
    example: tuple[int, int]
    #: characters of the example's prompt before the break
    at: int
    edits: list[Edit]
    #: distinct values over all requests; 0 where there is no value
    distinct: int = 0
    #: (request, its value), a few
    values: list[tuple[int, str]] = dataclasses.field(default_factory=list)
    lead: str = ""
