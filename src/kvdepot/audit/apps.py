"""A mixed log falls apart into its applications: requests that share a head or a body belong together."""

from __future__ import annotations

import re
from collections import Counter, defaultdict

import numpy as np

from kvdepot.audit.render import message_text
from kvdepot.audit.result import AppRow
from kvdepot.audit.sites import Survey
from kvdepot.audit.tokenlog import Ints
from kvdepot.audit.traffic import Traffic

__all__ = ["app_rows"]

_VOLATILE = re.compile(r"[0-9a-fA-F]{6,}|\d+|\s+")
_HEAD_CHARS = 60
_MOST = 8


def app_rows(traffic: Traffic, survey: Survey, donors: Ints, *, show_values: bool) -> list[AppRow]:
    """The applications with most input tokens.

    Args:
        traffic: the requests.
        survey: what was found about them.
        donors: (requests,): the earlier request that shares most, -1 for none.
        show_values: whether an application is named by the beginning of its prompt.
    """
    parents = list(range(traffic.requests))

    def root(each: int) -> int:
        while parents[each] != each:
            parents[each] = parents[parents[each]]
            each = parents[each]
        return each

    heads: dict[str, int] = {}
    names = [_head(traffic, number) for number in range(traffic.requests)]
    for number, name in enumerate(names):
        parents[root(number)] = root(heads.setdefault(name, number))
        shares = max(int(survey.exact_tokens[number]), int(survey.copied[number]))
        if donors[number] >= 0 and shares >= 0.3 * max(int(survey.log.lengths[number]), 1):
            parents[root(number)] = root(int(donors[number]))
    groups: dict[int, list[int]] = defaultdict(list)
    for number in range(traffic.requests):
        groups[root(number)].append(number)
    lengths = survey.log.lengths
    rows = []
    for rank, group in enumerate(
        sorted(groups.values(), key=lambda each: -int(lengths[each].sum()))
    ):
        usual = Counter(names[each] for each in group).most_common(1)[0][0]
        rows.append(
            AppRow(
                name=usual if show_values else f"app {rank + 1}: {usual[:24]}\u2026",
                requests=len(group),
                input_tokens=int(lengths[group].sum()),
                reused_tokens=int(survey.hit_tokens[np.array(group)].sum()),
            )
        )
    return rows[:_MOST]


def _head(traffic: Traffic, number: int) -> str:
    messages = traffic.bodies[number]["messages"]
    text = message_text(messages[0]) if messages else ""
    return _VOLATILE.sub(" ", text[: 4 * _HEAD_CHARS]).strip()[:_HEAD_CHARS]
