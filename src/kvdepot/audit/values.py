"""What a changing value is, from how it looks and when it changes, over all requests that have it."""

from __future__ import annotations

import datetime as dt
import itertools
import re
from collections import Counter, defaultdict
from collections.abc import Sequence
from typing import NamedTuple

from kvdepot.audit.records import parse_time

__all__ = ["Pattern", "Seen", "pattern", "time_around"]

_MONTHS = (
    "jan(?:uary)?|feb(?:ruary)?|mar(?:ch)?|apr(?:il)?|may|june?|july?|aug(?:ust)?|sep(?:t(?:ember)?)?"
    "|oct(?:ober)?|nov(?:ember)?|dec(?:ember)?"
)
_ISO = re.compile(r"\d{4}-\d\d-\d\d(?:[T ]\d\d:\d\d(?::\d\d(?:\.\d+)?)?(?:Z|[+-]\d\d:?\d\d)?)?")
_CLOCK = re.compile(r"(?<!\d)(?:[01]?\d|2[0-3]):[0-5]\d(?::[0-5]\d)?(?:\s?[AaPp]\.?[Mm])?(?!\d)")
_DATES = [
    re.compile(rf"(?i)\b(?:{_MONTHS})\.? \d{{1,2}}(?:st|nd|rd|th)?,? \d{{4}}\b"),
    re.compile(rf"(?i)\b\d{{1,2}}(?:st|nd|rd|th)? (?:of )?(?:{_MONTHS})\.?,? \d{{4}}\b"),
    re.compile(r"(?<!\d)\d{1,2}[./]\d{1,2}[./]\d{2,4}(?!\d)"),
    re.compile(r"(?<!\d)\d{4}[./]\d{1,2}[./]\d{1,2}(?!\d)"),
    re.compile(r"\d{4}\u5e74\d{1,2}\u6708\d{1,2}\u65e5"),
    re.compile(r"(?<!\d)20\d\d[01]\d[0-3]\d(?:[T_-]?[0-2]\d[0-5]\d(?:[0-5]\d)?)?(?!\d)"),
]
_WEEKDAY = re.compile(r"(?i)\b(?:mon|tues|wednes|thurs|fri|satur|sun)day\b")
_EPOCH = re.compile(r"(?<!\d)1[0-9]{9}(?:\.\d+|\d{3}|\d{6}|\d{9})?(?!\d)")
_UUID = re.compile(r"[0-9a-fA-F]{8}-(?:[0-9a-fA-F]{4}-){3}[0-9a-fA-F]{12}")
_TOKEN = re.compile(r"^[\w.:+/=#-]{4,}$")
_PATH = re.compile(
    r"(?:^|[\s=\"'(:])(?:~|\.{1,2})?/[\w.+-]+(?:/[\w.+ -]*)*|[A-Za-z]:\\[\w\\ .-]+|\w+://\S+"
)
_HOST = re.compile(r"^(?:[a-z0-9-]+\.)+[a-z]{2,}(?::\d+)?$|^\d{1,3}(?:\.\d{1,3}){3}$|^[a-z]+-\d+$")
_LOCALE = re.compile(r"^[a-z]{2,3}[-_][A-Z]{2}(?:\.\S+)?$|^[A-Z][A-Za-z]+/[A-Z][A-Za-z_]+$")
_FLAG = re.compile(r"(?i)^(?:true|false|on|off|yes|no|enabled|disabled|none|null|\d)$")
#: a pseudo-word of an audit trace
_PSEUDO = re.compile(r"~[0-9a-f]+~(\d+)")
_MOST = 0.9
#: smaller times are no dates
_EPOCH_FROM_S = 5e8


class Seen(NamedTuple):
    """A value in one request; requests in the order of time."""

    value: str
    time_s: float
    user: str | None
    session: int


class Pattern(NamedTuple):
    """What the values are."""

    #: slug of the cause
    cause: str
    #: how that was told, for people
    evidence: str
    distinct: int


def pattern(seen: Sequence[Seen]) -> Pattern:
    """Name the cause of a changing value.

    Args:
        seen: the value in every request that has the site, not only in those that broke there.
    """
    counts = Counter(each.value.strip() for each in seen)
    distinct, total = len(counts), len(seen)
    values = list(counts)
    share = distinct / max(total, 1)
    of_all = f"{distinct} values in {total} requests"
    moment = _moment(seen, values)
    if moment:
        return Pattern("time", f"{moment}; {of_all}", distinct)
    if _most(values, _is_id) and distinct > 1:
        if share >= 0.8:
            return Pattern("request_id", f"another one in each request: {of_all}", distinct)
        if (
            _constant_within([each for each in seen if each.session >= 0], "session")
            and share > 0.05
        ):
            users = _constant_within([each for each in seen if each.user], "user")
            if not users:
                return Pattern("request_id", f"one for each session: {of_all}", distinct)
    owners = _owners(seen)
    if owners and distinct > 2:
        return Pattern("per_user", f"one for each user: {of_all}, {owners} users", distinct)
    if _most(values, _is_environment) and share < 0.8:
        return Pattern("environment", f"a place or a setting: {of_all}", distinct)
    if 2 <= distinct <= 5 and total >= 2 * distinct:
        return _versions(seen, distinct, of_all)
    if share >= 0.5:
        if _most(values, _is_prose):
            return Pattern("question_first", f"free text ahead of the body: {of_all}", distinct)
        return Pattern("request_id", f"another one in each request: {of_all}", distinct)
    if _constant_within([each for each in seen if each.session >= 0], "session"):
        return Pattern("per_user", f"one for each session: {of_all}", distinct)
    if _most(values, _is_prose) and distinct > total / 4:
        return Pattern("question_first", f"free text ahead of the body: {of_all}", distinct)
    return Pattern("environment", f"few values, interleaved: {of_all}", distinct)


def _most(values: Sequence[str], test: object) -> bool:
    assert callable(test)
    return bool(values) and sum(map(bool, map(test, values))) >= _MOST * len(values)


def _moment(seen: Sequence[Seen], values: Sequence[str]) -> str:
    """How the values are times of the requests, for people; "" if they are not."""
    if len(values) < 2 or not _most(values, _has_time):
        return ""
    if not _most(values, _is_only_time):
        return ""
    known = [(at, each.time_s) for each in seen if (at := _seconds(each.value)) is not None]
    if len(known) >= _MOST * len(seen):
        steps = list(itertools.pairwise(known))
        rising = sum(later[0] >= earlier[0] for earlier, later in steps)
        if rising < 0.8 * max(len(steps), 1):
            return ""
        kinds = "date" if all(at % 86400 == 0 for at, _ in known) else "time"
        return f"a {kinds} that goes with the request's time"
    # no year, or only a clock: each value must have a period of its own
    runs = 1 + sum(a.value != b.value for a, b in itertools.pairwise(seen))
    return "a time that changes with the request's" if runs <= 1.5 * len(values) else ""


def time_around(line: str, start: int, end: int) -> tuple[int, int]:
    """The characters of a line's time of day or date, if the value at [start, end) is part of one."""
    first, last = start, end
    for each in (_ISO, *_DATES, _EPOCH, _CLOCK):
        for match in each.finditer(line):
            if match.start() <= end and start <= match.end():
                first, last = min(first, match.start()), max(last, match.end())
    return first, last


def _has_time(value: str) -> bool:
    return any(each.search(value) for each in (_ISO, _CLOCK, _EPOCH, _WEEKDAY, *_DATES))


def _is_only_time(value: str) -> bool:
    """Little is left once times are taken out: not prose that holds a date."""
    rest = value
    for each in (_ISO, *_DATES, _EPOCH, _CLOCK, _WEEKDAY):
        rest = each.sub("", rest)
    return len(re.sub(r"[\W_]+", "", rest)) <= max(16, len(value) // 3)


def _seconds(value: str) -> float | None:
    found = _ISO.search(value)
    if found:
        return parse_time(found[0].replace(" ", "T", 1))
    found = _EPOCH.search(value)
    if found:
        return parse_time(float(found[0]))
    for form, shape in (("%B %d %Y", _DATES[0]), ("%d %B %Y", _DATES[1])):
        found = shape.search(value)
        if found is None:
            continue
        text = re.sub(r"(?<=\d)(?:st|nd|rd|th)|\bof\b|[,.]", "", found[0])
        for each in (form, form.replace("%B", "%b")):
            try:
                day = dt.datetime.strptime(" ".join(text.split()), each)  # noqa: DTZ007 - UTC below
            except ValueError:
                continue
            return day.replace(tzinfo=dt.UTC).timestamp() + _clock_s(value)
    return None


def _clock_s(value: str) -> float:
    found = _CLOCK.search(value)
    if found is None:
        return 0.0
    numbers = [int(each) for each in re.findall(r"\d+", found[0])]
    hours = numbers[0] % 12 if found[0][-1] in "mM." else numbers[0]
    if re.search(r"[Pp]\.?[Mm]", found[0]):
        hours += 12
    return hours * 3600 + numbers[1] * 60 + (numbers[2] if len(numbers) > 2 else 0)


def _is_id(value: str) -> bool:
    value = value.strip("[](){}<>\"',;.")
    if _UUID.search(value) and len(value) < 80:
        return True
    has_digit = any(each.isdigit() for each in value)
    return has_digit and _TOKEN.match(value) is not None and not value.startswith(("/", "./"))


def _is_environment(value: str) -> bool:
    value = value.strip().strip("\"'`.,;")
    return any(each.search(value) for each in (_PATH, _HOST, _LOCALE, _FLAG))


def _is_prose(value: str) -> bool:
    hidden = _PSEUDO.findall(value)
    if hidden:  # in an audit trace a pseudo-word says how many tokens it stands for
        return sum(map(int, hidden)) >= 3
    return len(value.split()) >= 3 or len(re.findall(r"[\u2e80-\uffff]", value)) >= 5


def _constant_within(seen: Sequence[Seen], what: str) -> bool:
    """Whether each session (or user) has one value, and there are several of both."""
    groups: dict[object, set[str]] = defaultdict(set)
    for each in seen:
        groups[getattr(each, what)].add(each.value)
    values = {each.value for each in seen}
    if len(groups) < 3 or len(seen) < 1.3 * len(groups):
        return False
    return sum(len(group) == 1 for group in groups.values()) >= _MOST * len(groups) and len(
        values
    ) >= 0.5 * len(groups)


def _owners(seen: Sequence[Seen]) -> int:
    """How many users there are, if each has a value of their own; 0 if not."""
    known = [each for each in seen if each.user]
    if len(known) < _MOST * len(seen):
        return 0
    return len({each.user for each in known}) if _constant_within(known, "user") else 0


def _versions(seen: Sequence[Seen], distinct: int, of_all: str) -> Pattern:
    """Rolled out once, or several versions at the same time."""
    runs = 1 + sum(a.value != b.value for a, b in itertools.pairwise(seen))
    if runs <= distinct + 1:
        since = next((each.time_s for each in seen if each.value == seen[-1].value), seen[0].time_s)
        when = f"{since:.0f} s"
        if since > _EPOCH_FROM_S:  # else the log counts from its own start
            when = dt.datetime.fromtimestamp(since, dt.UTC).isoformat(timespec="seconds")
        return Pattern("rollout", f"rolled out once at {when}: {of_all}, {runs} runs", distinct)
    return Pattern("ab_test", f"versions at the same time: {of_all}, {runs} runs", distinct)
