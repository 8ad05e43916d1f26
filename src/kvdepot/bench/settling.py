"""Waiting until what an engine has stored is where another process finds it.

An engine that is ended loses what it has not written yet. That costs it nothing but time; a round that
reads what another has stored would count it as missing.
"""

from __future__ import annotations

import asyncio

from kvdepot.bench.client import Client
from kvdepot.bench.plan import Arm
from kvdepot.clock import Clock
from kvdepot.io.filesystem import file_sizes

__all__ = ["settle", "stands_still"]

_LOOK_INTERVAL_S = 0.25
#: a pool whose files have not changed for so long is taken to be written: tiers gather what they
#: store before they publish it, ours for a second
_STILL_S = 2.0
_WAIT_MAX_S = 60.0


async def settle(client: Client, arm: Arm, clock: Clock) -> bool | None:
    """Wait for an arm's stores.

    Returns:
        Whether they are visible: the engine says so, or the pool's files have stood still for two
        seconds; None where neither can be asked.
    """
    if arm.settles:
        return all([await client.post(path) for path in arm.settles])
    return await stands_still(arm.pool, clock) if arm.pool else None


async def stands_still(pool: str, clock: Clock) -> bool:
    """Wait until the files of a folder have not changed for two seconds; False after a minute."""
    began_s = changed_s = clock.monotonic_s()
    known = await asyncio.to_thread(file_sizes, pool)
    while (now_s := clock.monotonic_s()) < changed_s + _STILL_S:
        if now_s > began_s + _WAIT_MAX_S:
            return False
        await asyncio.sleep(_LOOK_INTERVAL_S)
        seen = await asyncio.to_thread(file_sizes, pool)
        if seen != known:
            known, changed_s = seen, clock.monotonic_s()
    return True
