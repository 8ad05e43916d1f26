"""Time, capacity and fleet: what a cache of each size, keep time and routing gets of the traffic."""

from __future__ import annotations

import numpy as np

from kvdepot.audit.blocklog import BlockLog
from kvdepot.audit.curves import belady, keep_curve, lru_curve, revisits
from kvdepot.audit.edges import EdgeLog
from kvdepot.audit.result import Capacity, Fleet, Keeping, Revisits
from kvdepot.audit.routing import fleet

__all__ = [
    "INSTANCES",
    "KEEP_S",
    "capacity_points",
    "fleet_rows",
    "keep_points",
    "keep_time_s",
    "revisit_times",
]

KEEP_S = (10.0, 60.0, 300.0, 600.0, 1800.0, 3600.0, 4 * 3600.0, 24 * 3600.0)
_POINTS = 24
_BOUND_TOUCHES = 400_000
_BOUND_EVERY = 4
_FLEET_TOUCHES = 6_000_000
INSTANCES = (2, 4, 8)
_SHARED_TIMES = 8


def capacity_points(
    edges: EdgeLog, bytes_per_token: int | None, edited: EdgeLog | None = None
) -> list[Capacity]:
    """The LRU curve up to what the traffic needs, with the bound at every fourth point.

    Args:
        edges: the traffic.
        bytes_per_token: of KV, where it is known.
        edited: the traffic after the edits, if there are any.
    """
    need = float(edges.tokens[edges.previous < 0].sum()) if edges.touches else 0.0
    if need < 1:
        return []
    at = np.unique(np.geomspace(max(16.0, need / 1000), need, _POINTS).round())
    curve = lru_curve(edges, at.tolist())
    after = lru_curve(edited, at.tolist()).reused if edited is not None else None
    has_bound = edges.touches <= _BOUND_TOUCHES
    last = len(at) - 1
    return [
        Capacity(
            capacity_tokens=int(capacity),
            capacity_bytes=None if bytes_per_token is None else int(capacity) * bytes_per_token,
            lru_tokens=reused,
            edited_lru_tokens=None if after is None else after[number],
            bound_tokens=belady(edges, capacity)
            if has_bound and (last - number) % _BOUND_EVERY == 0
            else None,
        )
        for number, (capacity, reused) in enumerate(zip(at.tolist(), curve.reused, strict=True))
    ]


def keep_points(edges: EdgeLog) -> list[Keeping]:
    """The keep-time curve at usual times."""
    curve = keep_curve(edges, KEEP_S)
    return [
        Keeping(keep_s=at, reused_tokens=reused)
        for at, reused in zip(curve.at, curve.reused, strict=True)
    ]


def revisit_times(edges: EdgeLog) -> Revisits | None:
    """Times between two uses; None where nothing is used twice."""
    found = revisits(edges)
    return Revisits(**{f"{name}_s": value for name, value in found.items()}) if found else None


def keep_time_s(edges: EdgeLog, share: float = 0.95) -> float:
    """How long to keep blocks so that this share of all reuse is had; 0 where there is none."""
    gaps = edges.gaps_s()
    is_again = np.isfinite(gaps)
    if not is_again.any():
        return 0.0
    order = np.argsort(gaps[is_again])
    running = np.cumsum(edges.tokens[is_again][order])
    return float(gaps[is_again][order][np.searchsorted(running, running[-1] * share)])


def fleet_rows(
    blocks: BlockLog, capacity_tokens: int, shared_tokens: int | None, instances: int | None
) -> list[Fleet]:
    """The fleet table; empty for traffic that is too large for it."""
    if len(blocks.blocks) > _FLEET_TOUCHES:
        return []
    shared = shared_tokens or _SHARED_TIMES * capacity_tokens
    rows = []
    for count in sorted({*INSTANCES, *([instances] if instances else [])}):
        row = fleet(blocks, count, capacity_tokens, shared)
        rows.append(
            Fleet(
                instances=count,
                capacity_tokens=capacity_tokens,
                shared_capacity_tokens=shared,
                random_private_tokens=row.random_private,
                sticky_private_tokens=row.sticky_private,
                shared_tokens=row.shared,
                sticky_load=round(row.sticky_load, 3),
            )
        )
    return rows
