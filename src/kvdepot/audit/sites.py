"""Pass 3: breaks put together to sites, and each site's cause with its evidence and the edits to try."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from kvdepot.audit import edits, edits_history
from kvdepot.audit.breaks import VALUE, Break, find_break, place_of
from kvdepot.audit.copies import Bodies
from kvdepot.audit.copies import bodies as shared_bodies
from kvdepot.audit.edits import Edit
from kvdepot.audit.history import Event, event
from kvdepot.audit.prefix import exact_hits
from kvdepot.audit.probes import extra_sites, probed_sites
from kvdepot.audit.render import Prompt
from kvdepot.audit.site import Site
from kvdepot.audit.spans import Span, Variants, learn_span, learn_variants
from kvdepot.audit.tokenlog import Ints, TokenLog
from kvdepot.audit.traffic import Traffic, Workshop
from kvdepot.audit.values import Pattern, Seen, pattern

__all__ = ["NOTHING_TOKENS", "Survey", "survey"]

#: fewer copied tokens than this are no reason to look
NOTHING_TOKENS = 64
#: pairs that are looked at in one survey; more are sampled
_PAIRS_MAX = 1500
#: a cause whose copies already make up this share of the input needs no probe
_PROBE_BELOW = 0.01
#: share of the requests that must break at pieces which nothing but line ends marks
_UNMARKED_SHARE = 0.25


class Survey(NamedTuple):
    """What a look at some traffic found."""

    sites: list[Site]
    prompts: list[Prompt]
    log: TokenLog
    hit_tokens: Ints
    exact_tokens: Ints
    copied: Ints
    #: (requests,): the earlier request that shares most, -1 for none
    donors: Ints


def survey(traffic: Traffic, workshop: Workshop) -> Survey:
    """Find the sites, the one with most to win first."""
    prompts = workshop.prompts(traffic)
    log = workshop.token_log(traffic, prompts)
    blocks = workshop.blocks(log)
    hits = blocks.hit_tokens()
    exact, prefix_donors = exact_hits(log, blocks)
    shared = shared_bodies(log, exact)
    looker = _Looker(traffic, prompts, log, hits=hits, prefix_donors=prefix_donors, shared=shared)
    now = int(hits.sum())
    sites = [*extra_sites(traffic, workshop, log, now), *looker.sites()]
    found = Counter({site.cause: 0 for site in sites})
    for site in sites:
        found[site.cause] += site.estimate
    known = {cause for cause, estimate in found.items() if estimate >= _PROBE_BELOW * log.total}
    sites += probed_sites(traffic, workshop, now, log.total, known)
    sites.sort(key=lambda site: -site.estimate)
    donors = np.where(shared.copied > exact, shared.donors, prefix_donors)
    return Survey(sites, prompts, log, hits, exact, shared.copied, donors)


class _Looker:
    def __init__(
        self,
        traffic: Traffic,
        prompts: list[Prompt],
        log: TokenLog,
        *,
        hits: Ints,
        prefix_donors: Ints,
        shared: Bodies,
    ) -> None:
        self._traffic = traffic
        self._prompts = prompts
        self._log = log
        self._hits = hits
        self._prefix_donors = prefix_donors
        self._copied = shared.copied
        self._donors = shared.donors

    def sites(self) -> list[Site]:
        events, left = self._events()
        breaks: list[Break] = []
        scale = 1.0
        if len(left) > _PAIRS_MAX:
            scale = len(left) / _PAIRS_MAX
            chosen = np.random.default_rng(0).choice(len(left), _PAIRS_MAX, replace=False)
            left = [left[each] for each in sorted(chosen)]
        for request in left:
            donor = int(self._donors[request])
            found = find_break(
                request,
                donor,
                (self._traffic.bodies[request], self._traffic.bodies[donor]),
                (self._prompts[request], self._prompts[donor]),
                round(scale * int(self._copied[request])),
            )
            if found is not None:
                breaks.append(found)
        return [*self._event_sites(events), *self._break_sites(breaks)]

    # --- conversations

    def _events(self) -> tuple[list[tuple[int, int, Event]], list[int]]:
        """What became of histories, and the requests that are left to be compared with their donors."""
        last_of: dict[int, int] = {}
        events, left = [], []
        for request in range(self._traffic.requests):
            session = self._traffic.sessions[request]
            before = last_of.get(session, -1) if session >= 0 else -1
            if before < 0:
                before = self._resembling(request)
            if session >= 0:
                last_of[session] = request
            bodies = self._traffic.bodies
            found = event(bodies[request], bodies[before]) if before >= 0 else None
            if found is not None:
                events.append((request, before, found))
            elif self._copied[request] >= NOTHING_TOKENS:
                left.append(request)
        return events, left

    def _resembling(self, request: int) -> int:
        """Without session ids: the prefix donor, if it is an earlier turn by its first messages."""
        donor = int(self._prefix_donors[request])
        if donor < 0 or self._traffic.sessions[request] >= 0:
            return -1
        ours, theirs = (self._traffic.bodies[each]["messages"] for each in (request, donor))
        is_turn = 3 <= len(theirs) <= len(ours) + 8 and ours[:2] == theirs[:2]
        return donor if is_turn and len(ours) > 2 else -1

    def _event_sites(self, events: list[tuple[int, int, Event]]) -> list[Site]:
        groups: dict[str, list[tuple[int, int, Event]]] = defaultdict(list)
        for each in events:
            groups[each[2].cause].append(each)
        return [self._event_site(cause, group) for cause, group in groups.items()]

    def _event_site(self, cause: str, group: list[tuple[int, int, Event]]) -> Site:
        from_end = cause in ("reasoning", "answer_rewritten", "edited_later")
        indices: Counter[int] = Counter()
        estimate = 0
        for request, before, found in group:
            count = len(self._traffic.bodies[request]["messages"])
            indices[found.at - count if from_end else found.at] += 1
            copied = int(self._copied[request])
            if cause == "compaction":
                # little is left to copy: the price is what the turn computes
                copied = int(self._log.lengths[request] - self._hits[request])
            elif cause != "window":
                # the turn before would have been reused whole; its pieces may be too short to be seen
                shorter = min(self._log.lengths[request], self._log.lengths[before])
                copied = max(copied, int(shorter - self._hits[request]))
            estimate += copied
        index = indices.most_common(1)[0][0]
        request, before, found = group[0]
        roles = [str(each.get("role")) for each in self._traffic.bodies[request]["messages"]]
        evidence = f"{len(group)} requests; in most at message {index}"
        if cause == "window":
            dropped = Counter(each[2].dropped for each in group).most_common(1)[0][0]
            evidence = f"{dropped} messages dropped in {len(group)} requests"
        return Site(
            cause,
            place_of(f"messages[{index}]", roles),
            (cause, "messages", ""),
            estimate,
            evidence,
            [each[0] for each in group],
            (request, before),
            self._char_of(request, before),
            [edits_history.wide_window(index)] if cause == "window" else _EVENT_EDITS[cause](),
        )

    def _char_of(self, request: int, donor: int) -> int:
        found = find_break(
            request,
            donor,
            (self._traffic.bodies[request], self._traffic.bodies[donor]),
            (self._prompts[request], self._prompts[donor]),
            0,
        )
        return found.at if found else 0

    # --- pairs

    def _break_sites(self, breaks: list[Break]) -> list[Site]:
        groups: dict[tuple[str, str, str], list[Break]] = defaultdict(list)
        for each in breaks:
            groups[each.site].append(each)
        return [
            self._structural(group) if key[0] != VALUE else self._value(group)
            for key, whole in groups.items()
            for group in (_lines(whole) if key[0] == VALUE else [whole])
        ]

    def _structural(self, group: list[Break]) -> Site:
        first = group[0]
        details = Counter(each.detail for each in group)
        detail = details.most_common(1)[0][0]
        return Site(
            first.kind,
            self._place(first),
            first.site,
            sum(each.estimate for each in group),
            f"{len(group)} requests" + (f"; {detail}" if detail else ""),
            [each.request for each in group],
            (first.request, first.donor),
            first.at,
            self._structural_edits(first, detail, len(group)),
        )

    def _place(self, each: Break) -> str:
        messages = self._traffic.bodies[each.request]["messages"]
        return place_of(each.path, [str(message.get("role")) for message in messages])

    def _structural_edits(self, first: Break, detail: str, breaks: int) -> list[Edit]:
        if first.kind == "piece_order":
            is_marked = not set(detail.split()) <= {"lines", "paragraphs"}
            if not is_marked and breaks < _UNMARKED_SHARE * self._traffic.requests:
                return []  # prose with lines in common is no list that may be sorted
            if detail == "messages":
                return [edits.sort_messages(int(first.path[9:-1]))]
            number = int(first.path[first.path.index("[") + 1 : -1])
            role = str(self._traffic.bodies[first.request]["messages"][number].get("role"))
            return [
                edits.sort_pieces(split, role, by_popularity=popular)
                for split in detail.split()[:3]
                for popular in (True, False)
            ]
        return _STRUCTURAL_EDITS[first.kind]()

    def _value(self, group: list[Break]) -> Site:
        first = group[0]
        lead = min((each.lead for each in group), key=len)
        span = learn_span(group, self._traffic.bodies)
        variants = learn_variants(group, self._traffic.bodies)
        seen = self._seen(span, variants, group)
        told = pattern([each for _, each in seen])
        return Site(
            told.cause,
            self._place(first),
            (VALUE, first.path, f"{first.site[2]}\n{lead}"),
            sum(each.estimate for each in group),
            told.evidence,
            [each.request for each in group],
            (first.request, first.donor),
            first.at,
            _value_edits(told, span, variants, seen),
            told.distinct,
            [(number, each.value) for number, each in _few(seen)],
            lead,
        )

    def _seen(
        self, span: Span | None, variants: Variants | None, group: Sequence[Break]
    ) -> list[tuple[int, Seen]]:
        """The value in all requests, by the template; from the breaks alone where there is none."""
        bodies = self._traffic.bodies
        found: dict[int, str] = {}
        if variants is not None:
            found = {n: v for n, body in enumerate(bodies) if (v := variants.of(body)) is not None}
            if len(set(found.values())) < 2:
                found = {}
        if not found and span is not None:
            found = {n: v for n, body in enumerate(bodies) if (v := span.value(body)) is not None}
        if len(set(found.values())) < 2:
            found = {each.donor: each.donor_gap for each in group}
            found |= {each.request: each.gap for each in group}
        traffic = self._traffic
        return [
            (
                number,
                Seen(
                    value,
                    traffic.times_s[number],
                    traffic.records[number].user,
                    traffic.sessions[number],
                ),
            )
            for number, value in sorted(found.items())
        ]


def _few(seen: list[tuple[int, Seen]]) -> list[tuple[int, Seen]]:
    """The first requests with values that differ."""
    kept: dict[str, tuple[int, Seen]] = {}
    for each in seen:
        kept.setdefault(each[1].value, each)
        if len(kept) == 4:
            break
    return list(kept.values())


def _lines(breaks: list[Break]) -> list[list[Break]]:
    """Breaks of one context, by line: one that begins where another's lead ends belongs to it."""
    groups: dict[str, list[Break]] = {}
    for each in sorted(breaks, key=lambda one: (len(one.lead), one.request)):
        home = next((lead for lead in groups if each.lead.startswith(lead) and lead), None)
        if home is None and "" in groups:
            home = ""
        groups.setdefault(each.lead if home is None else home, []).append(each)
    return [sorted(group, key=lambda one: one.request) for group in groups.values()]


def _value_edits(
    told: Pattern,
    span: Span | None,
    variants: Variants | None,
    seen: list[tuple[int, Seen]],
) -> list[Edit]:
    chosen = []
    if told.cause in ("rollout", "ab_test") and variants is not None and seen:
        # the latest version first; which one fills blocks best is by chance
        targets = dict.fromkeys(each.value for _, each in reversed(seen))
        chosen += [edits.align(variants, each) for each in targets if each in variants.texts]
    if span is not None:
        chosen.append(edits.move(span))
    return chosen


_EVENT_EDITS: dict[str, Callable[[], list[Edit]]] = {
    "reasoning": lambda: [edits_history.no_reasoning()],
    "answer_rewritten": lambda: [edits_history.final_form()],
    "edited_later": lambda: [edits_history.final_form()],
    "media": lambda: [edits_history.first_image()],
    "compaction": list,
}
_STRUCTURAL_EDITS: dict[str, Callable[[], list[Edit]]] = {
    "tool_order": lambda: [edits.sort_tools()],
    "tool_keys": lambda: [edits.canonical_tools()],
    "tool_set": lambda: [edits.every_tool()],
    "template": lambda: [edits.one_template()],
    "white_space": lambda: [edits.normal_text()],
    "json_form": lambda: [edits.sorted_messages_json(), edits.canonical_messages()],
    "media": lambda: [edits_history.first_image()],
}
