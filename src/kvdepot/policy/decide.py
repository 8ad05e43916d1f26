"""Whether a request loads its prefix, a part of it, or computes: by cost, with the reason.

    COMPUTE   nothing is read; everything behind what is in nearer memory is computed
    LOAD      the first blocks are read, then the rest is computed
    MEET      the front of the prefix is computed while its back is read, until the two meet

Reading first and computing then costs ``load(k) + prefill(rest)``, which is lowest at the borders
between tiers, never in between: attention makes the front of a prompt the cheap part to compute. Where
an engine can do both at once (MEET), the two overlap, and a load that stands still costs nothing,
because the engine is computing anyway. `docs/policies.md` has the reasoning.

Pure. A choice carries its inputs, so that it can be recorded and compared with what came of it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from enum import Enum
from typing import NamedTuple

from kvdepot.policy.cost import CostModel
from kvdepot.policy.deadline import slack_of
from kvdepot.policy.reasons import Reason

__all__ = ["Ask", "Choice", "Mode", "Run", "decide", "near_blocks"]

#: what a load must be expected to save before it is made, as a share of computing: below that, the two
#: are the same to anybody who waits, and the read would only be in others' way
_GAIN_MIN = 0.02


class Mode(Enum):
    """How a request gets its prefix."""

    COMPUTE = "compute"
    LOAD = "load"
    MEET = "meet"


class Run(NamedTuple):
    """Neighbouring blocks of a prefix that the same tier must serve."""

    tier: str
    blocks: int
    #: bytes to read for one of them, over all groups; 0 where they are in memory already
    block_bytes: int


class Ask(NamedTuple):
    """What is known of a request before it is decided."""

    prompt_tokens: int
    block_tokens: int
    #: the prefix that was found, from the first block on
    runs: Sequence[Run]
    #: bytes asked of each tier already and served first
    ahead_bytes: int = 0
    #: the engine can compute the front while the back is read
    can_meet: bool = False
    #: the engine computes the rest while later layers are read, so blocks earn nothing before the end,
    #: and the load as a whole must fit into the slack
    is_layered: bool = False
    #: seconds before the engine would begin to compute in any case; a load is free for so long
    idle_s: float = 0.0


class Choice(NamedTuple):
    """A decision with its inputs and expectations."""

    mode: Mode
    #: blocks from the first on that are to be had without computing, memory and storage together;
    #: with MEET, the end of what the two sides work on
    blocks: int
    #: with MEET, about where they meet; 0 otherwise
    meet_block: int
    #: why not everything that was found is loaded; None when it is
    reason: Reason | None
    #: seconds to the end of the prompt, as expected
    expected_s: float
    #: of them, the load
    load_s: float
    #: seconds if nothing were read from storage
    compute_s: float
    #: how far behind the load may fall before it is given up
    slack_s: float
    read_bytes: int
    #: of the load, the wait for those who are served first
    queue_s: float = 0.0


def decide(ask: Ask, cost: CostModel) -> Choice:
    """Choose by expected time; loads are taken at the slower end of what they may take."""
    found = sum(run.blocks for run in ask.runs)
    near = near_blocks(ask.runs)
    compute_s = _rest_s(ask, near, cost)
    slack_s = slack_of(compute_s)
    read_bytes = sum(run.blocks * run.block_bytes for run in ask.runs)
    if found == near:
        return Choice(Mode.COMPUTE, near, 0, None, compute_s, 0.0, compute_s, slack_s, 0)
    if not cost.knows_prefill:
        # nothing to compare with: found out by loading, within a fixed time
        return Choice(Mode.LOAD, found, 0, None, math.inf, math.inf, compute_s, slack_s, read_bytes)
    if any(run.block_bytes and not cost.knows_reads(run.tier) for run in ask.runs):
        mode = Mode.MEET if ask.can_meet else Mode.LOAD
        return Choice(mode, found, near, None, compute_s, math.inf, compute_s, slack_s, read_bytes)
    best = _best_load(ask, cost, near, compute_s, slack_s)
    if best.mode is Mode.LOAD:
        tier = next(run.tier for run in ask.runs if run.block_bytes)
        alone_s = cost.read_s(tier, best.read_bytes)
        behind_s = cost.read_s(tier, best.read_bytes, ahead_bytes=ask.ahead_bytes)
        best = best._replace(queue_s=behind_s - alone_s)
    if ask.can_meet and (best.mode is Mode.COMPUTE or best.load_s > slack_s):
        meet = _meet(ask, cost, near, compute_s, slack_s)
        if meet.expected_s < min(best.expected_s, compute_s * (1 - _GAIN_MIN)):
            return meet
    return best


def near_blocks(runs: Sequence[Run]) -> int:
    """Leading blocks that cost no read."""
    near = 0
    for run in runs:
        if run.block_bytes:
            break
        near += run.blocks
    return near


def _rest_s(ask: Ask, blocks: int, cost: CostModel) -> float:
    """Seconds to compute what follows so many blocks; the last token is always computed."""
    have = min(blocks * ask.block_tokens, ask.prompt_tokens - 1)
    return cost.prefill_s(ask.prompt_tokens - have, have)


def _best_load(ask: Ask, cost: CostModel, near: int, compute_s: float, slack_s: float) -> Choice:
    best = Choice(Mode.COMPUTE, near, 0, Reason.REFUSED_COST, compute_s, 0.0, compute_s, slack_s, 0)
    found = sum(run.blocks for run in ask.runs)
    blocks = read_bytes = 0
    load_s = doubtful_s = 0.0
    for run in ask.runs:
        blocks += run.blocks
        if run.block_bytes:
            size = run.blocks * run.block_bytes
            read_bytes += size
            ahead = ask.ahead_bytes
            load_s += cost.read_s(run.tier, size, ahead_bytes=ahead)
            doubtful_s += cost.read_s(run.tier, size, ahead_bytes=ahead, is_doubtful=True)
        if blocks <= near:
            continue
        waited_s = max(doubtful_s - ask.idle_s, 0.0)
        if ask.is_layered and waited_s > slack_s:
            break
        rest_s = _rest_s(ask, blocks, cost)
        if waited_s + rest_s < min(best.expected_s, compute_s * (1 - _GAIN_MIN)):
            best = Choice(
                Mode.LOAD,
                blocks,
                0,
                None if blocks == found else Reason.REFUSED_COST,
                waited_s + rest_s,
                load_s,
                compute_s,
                slack_s,
                read_bytes,
            )
    return best


def _meet(ask: Ask, cost: CostModel, near: int, compute_s: float, slack_s: float) -> Choice:
    """Where computing from the front and reading from the back would meet."""
    found = sum(run.blocks for run in ask.runs)
    have = near * ask.block_tokens

    def front_s(block: int) -> float:
        return cost.prefill_s((block - near) * ask.block_tokens, have)

    def back_s(block: int) -> float:
        load_s, start = 0.0, 0
        for run in ask.runs:
            stop = start + run.blocks
            size = max(stop - max(block, start), 0) * run.block_bytes
            if size:
                load_s += cost.read_s(run.tier, size, ahead_bytes=ask.ahead_bytes, is_doubtful=True)
            start = stop
        return max(load_s - ask.idle_s, 0.0)

    low, high = near, found
    while low < high:  # the first block by which computing takes as long as reading the others
        middle = (low + high) // 2
        if front_s(middle) >= back_s(middle):
            high = middle
        else:
            low = middle + 1
    together_s = max(front_s(low), back_s(low))
    read_bytes = _bytes_behind(ask.runs, low)
    expected_s = together_s + _rest_s(ask, found, cost)
    return Choice(
        Mode.MEET, found, low, None, expected_s, together_s, compute_s, slack_s, read_bytes
    )


def _bytes_behind(runs: Sequence[Run], block: int) -> int:
    size = start = 0
    for run in runs:
        stop = start + run.blocks
        size += max(stop - max(block, start), 0) * run.block_bytes
        start = stop
    return size
