"""What to read ahead for requests that still wait in the engine's queue.

The queue says what will be wanted, and about when. A request that will be served soon and has blocks in
slow storage is read into host memory meanwhile, if there is room that nobody in front of it needs.

Pure; everything comes from outside.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Generic, NamedTuple, TypeVar

__all__ = ["Waiting", "plan_prefetch"]

_T = TypeVar("_T")


class Waiting(NamedTuple, Generic[_T]):
    """A request in the engine's queue."""

    request: _T
    #: what it has in storage and not in memory
    read_bytes: int
    #: about when the engine begins it
    starts_in_s: float
    #: whether the load is worth making at all, by cost
    is_worth_it: bool


def plan_prefetch(
    waiting: Sequence[Waiting[_T]],
    *,
    free_bytes: int,
    bytes_per_s: float,
    loading_bytes: int,
) -> list[_T]:
    """Whom to read ahead for, in that order.

    In the order of the queue, as long as there is room. One for whom there is no room ends the list: the
    room that comes free next is for it, and not for somebody behind it. One that would be served
    before its bytes could be there is left to the load that it will make itself.

    Args:
        waiting: in the order in which the engine will serve them.
        free_bytes: room in host memory that no restore in flight needs.
        bytes_per_s: of the storage.
        loading_bytes: asked of the storage already.
    """
    chosen: list[_T] = []
    ahead = loading_bytes
    for each in waiting:
        if not each.read_bytes or not each.is_worth_it:
            continue
        if each.read_bytes > free_bytes:
            break
        if each.starts_in_s * bytes_per_s <= ahead:
            continue
        chosen.append(each.request)
        free_bytes -= each.read_bytes
        ahead += each.read_bytes
    return chosen
