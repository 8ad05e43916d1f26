"""Sites found by making an edit on everything: where no break can be seen, or its pieces are too short."""

from __future__ import annotations

import numpy as np

from kvdepot.audit import edits
from kvdepot.audit.breaks import place_of
from kvdepot.audit.site import Site
from kvdepot.audit.tokenlog import TokenLog
from kvdepot.audit.traffic import Traffic, Workshop

__all__ = ["extra_sites", "probed_sites"]


def extra_sites(traffic: Traffic, workshop: Workshop, log: TokenLog, now: int) -> list[Site]:
    """What salts, adapters and models keep apart, each field alone."""
    sites = []
    names = {name for extra in traffic.extra_names for name, _ in extra}
    for name in sorted(names):
        values = {dict(extra).get(name) for extra in traffic.extra_names}
        if len(values) < 2:
            continue
        edit = edits.drop_extra([name])
        merged = edit.apply(traffic)
        alone = log._replace(extras=np.asarray(merged.extras, np.int64))
        gain = int(workshop.blocks(alone).hit_tokens().sum()) - now
        sites.append(
            Site(
                "extra_key",
                name,
                ("extra_key", name, ""),
                gain,
                f"{len(values)} values of {name} keep equal tokens apart",
                [],
                (-1, -1),
                0,
                [edit],
                len(values),
            )
        )
    return sites


#: causes whose pieces may be too short to be seen as copies: tried on everything
_PROBES = {
    "white_space": edits.normal_text,
    "json_form": edits.canonical_messages,
    "tool_keys": edits.canonical_tools,
}


def probed_sites(
    traffic: Traffic, workshop: Workshop, now: int, total: int, known: set[str]
) -> list[Site]:
    """Sites found by making the edit: what it gains is the estimate."""
    sites = []
    for cause, make in _PROBES.items():
        if cause in known or (cause == "tool_keys" and known & {"tool_order", "tool_set"}):
            continue
        edit = make()
        after = edit.apply(traffic)
        changed = [
            number
            for number, (one, other) in enumerate(zip(traffic.bodies, after.bodies, strict=True))
            if one != other or (cause == "tool_keys" and repr(one) != repr(other))
        ]
        if not changed:
            continue
        measure = workshop.measure(after)
        was = round(now * min(1.0, measure.input_tokens / max(total, 1)))
        first = changed[0]
        pairs = zip(traffic.bodies[first]["messages"], after.bodies[first]["messages"], strict=True)
        index = next((n for n, (one, other) in enumerate(pairs) if one != other), 0)
        roles = [str(each.get("role")) for each in traffic.bodies[first]["messages"]]
        sites.append(
            Site(
                cause,
                "tools" if cause == "tool_keys" else place_of(f"messages[{index}]", roles),
                (cause, "probe", ""),
                measure.reused_tokens - was,
                f"{len(changed)} requests are written in another way",
                changed,
                (first, -1),
                0,
                [edit],
            )
        )
    return sites
