"""Pass 4: prove it. Make the edit on all requests, run the traffic again, keep what pays, look again.

Breaks mask each other: behind a request id a shuffled list is invisible, and moving the id alone may
bring nothing. So an edit that does not pay yet is kept for a few rounds, and counts if the next one
makes up for it.
"""

from __future__ import annotations

import dataclasses

import numpy as np

from kvdepot.audit.edits import Edit
from kvdepot.audit.site import Site
from kvdepot.audit.sites import Survey, survey
from kvdepot.audit.traffic import Measure, Traffic, Workshop

__all__ = ["THRESHOLD", "Peeling", "Step", "peel", "peel_sampled", "proved_tokens"]

#: share of the input tokens that an edit must prove to be kept
THRESHOLD = 0.01
_ROUNDS = 12
_TENTATIVE = 3
#: edits that write the same in another way; shorter prompts are then no loss of reuse
_REWRITINGS = ("canonical_json", "canonical_tools", "normal_text")
#: edits that make prompts longer: what they add counts against what they bring
_ADDING = ("wide_window", "every_tool")


def proved_tokens(before: Measure, after: Measure, what: str) -> int:
    """What an edit brings: reused tokens more than before.

    Input tokens that the edit adds are taken off where it adds content. Where it only writes the same
    in fewer tokens, reuse is compared at the new length.
    """
    added = after.input_tokens - before.input_tokens
    gain = after.reused_tokens - before.reused_tokens
    if what in _REWRITINGS and added < 0:
        return after.reused_tokens - round(
            before.reused_tokens * after.input_tokens / before.input_tokens
        )
    return gain - max(0, added) if what in _ADDING else gain


@dataclasses.dataclass(slots=True)
class Step:
    """One edit of the waterfall."""

    site: Site
    edit: Edit
    before: Measure
    after: Measure
    #: tokens that this edit alone brings
    alone: int = 0

    @property
    def proved(self) -> int:
        """Tokens that the edit brings behind those before it; see `proved_tokens`."""
        return proved_tokens(self.before, self.after, self.edit.what)


def _net(step: Step) -> int:
    """By what edits of one site are compared: a longer version for all is no gain in itself."""
    return step.proved - max(0, step.after.input_tokens - step.before.input_tokens)


@dataclasses.dataclass(slots=True)
class Peeling:
    """What was found and proved."""

    base: Survey
    now: Measure
    steps: list[Step]
    #: sites that no edit repairs, or whose edits bring less than the threshold
    unproved: list[Site]
    edited: Traffic


def peel(traffic: Traffic, workshop: Workshop, *, threshold: float = THRESHOLD) -> Peeling:
    """Find the edits that pay, in the order in which they unmask each other."""
    base = survey(traffic, workshop)
    now = Measure(base.log.total, int(base.hit_tokens.sum()))
    peeler = _Peeler(workshop, traffic, now, max(1, round(threshold * now.input_tokens)))
    peeler.run(base)
    for step in peeler.steps:
        if len(peeler.steps) == 1:
            step.alone = step.proved
        else:
            alone = workshop.measure(step.edit.apply(traffic))
            step.alone = Step(step.site, step.edit, now, alone).proved
    return Peeling(base, now, peeler.steps, peeler.unproved(), peeler.kept)


def peel_sampled(
    traffic: Traffic, workshop: Workshop, *, threshold: float = THRESHOLD, requests: int
) -> Peeling:
    """Search in whole sessions of about so many requests, and prove on all.

    The edits that the sample found are made on the whole traffic one after the other, and measured.
    """
    chosen = _sample(traffic, requests)
    found = peel(traffic.selected(chosen), workshop, threshold=threshold)
    base = survey(traffic, workshop)
    now = Measure(base.log.total, int(base.hit_tokens.sum()))
    work, before = traffic, now
    steps = []
    for step in found.steps:
        work = step.edit.apply(work)
        after = workshop.measure(work)
        site = _in_whole(step.site, base, chosen)
        alone = workshop.measure(step.edit.apply(traffic)) if len(found.steps) > 1 else after
        steps.append(
            Step(site, step.edit, before, after, proved_tokens(now, alone, step.edit.what))
        )
        before = after
    done = {step.site.key for step in steps}
    left = [site for site in base.sites if site.key not in done and not site.edits]
    left += [_in_whole(site, base, chosen) for site in found.unproved if site.edits]
    return Peeling(base, now, steps, left, work)


def _sample(traffic: Traffic, requests: int) -> list[int]:
    """Requests of whole sessions, chosen evenly; the same at every call."""
    groups: dict[int, list[int]] = {}
    for number, session in enumerate(traffic.sessions):
        groups.setdefault(session if session >= 0 else -2 - number, []).append(number)
    order = np.random.default_rng(0).permutation(len(groups))
    ordered = list(groups.values())
    chosen: list[int] = []
    for each in order:
        chosen += ordered[each]
        if len(chosen) >= requests:
            break
    return sorted(chosen)


def _in_whole(site: Site, base: Survey, chosen: list[int]) -> Site:
    """A site of the sample as one of the whole: its own numbers where the whole has the same site."""
    same = next((each for each in base.sites if each.key == site.key), None)
    if same is not None and same.cause == site.cause:
        return same
    return dataclasses.replace(
        site,
        requests=[chosen[each] for each in site.requests],
        example=(
            chosen[site.example[0]] if site.example[0] >= 0 else -1,
            chosen[site.example[1]] if site.example[1] >= 0 else -1,
        ),
    )


class _Peeler:
    def __init__(self, workshop: Workshop, traffic: Traffic, now: Measure, least: int) -> None:
        self._workshop = workshop
        self._least = least
        self.kept = traffic
        self._measure = now
        self.steps: list[Step] = []
        self._tentative: list[Step] = []
        self._tried: set[tuple[str, str, str]] = set()
        self._seen: dict[tuple[str, str, str], Site] = {}

    def run(self, first: Survey) -> None:
        """Go on until no site is left that may pay."""
        work, measure, found = self.kept, self._measure, first
        for _ in range(_ROUNDS):
            site = self._next(found)
            if site is None or len(self._tentative) > _TENTATIVE:
                if not self._tentative:
                    return
                # what was tried did not pay: go on without it
                self._tentative = []
                work, measure = self.kept, self._measure
                found = survey(work, self._workshop)
                continue
            self._tried.add(site.key)
            step, after = self._best(site, work, measure)
            if step is None:
                continue
            work, measure = after, step.after
            self._tentative.append(step)
            if sum(each.proved for each in self._tentative) >= self._least:
                self.steps += self._tentative
                self._tentative = []
                self.kept, self._measure = work, measure
            found = survey(work, self._workshop)

    def _next(self, found: Survey) -> Site | None:
        for site in found.sites:
            if site.estimate >= self._least:
                self._seen.setdefault(site.key, site)
        return next(
            (
                site
                for site in found.sites
                if site.estimate >= self._least and site.edits and site.key not in self._tried
            ),
            None,
        )

    def _best(self, site: Site, work: Traffic, measure: Measure) -> tuple[Step | None, Traffic]:
        """The edit of a site that brings most; None if each makes it worse."""
        best: Step | None = None
        kept = work
        for edit in site.edits:
            after = edit.apply(work)
            step = Step(site, edit, measure, self._workshop.measure(after))
            if best is None or _net(step) > _net(best):
                best, kept = step, after
        if best is None or best.proved < -self._least:
            return None, work
        return best, kept

    def unproved(self) -> list[Site]:
        """Sites with enough to win that are in no step, those without an edit first."""
        done = {step.site.key for step in self.steps}
        left = [site for key, site in self._seen.items() if key not in done]
        return sorted(left, key=lambda site: (bool(site.edits), -site.estimate))
