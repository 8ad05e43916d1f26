"""The order of a plan's rounds: which arm's turn it is, and what is asked in it. Pure.

A *block* is one run of one arm: all rounds of that arm, in the plan's order. Blocks of different arms
take turns, so that a machine that slowly changes changes for all of them.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import NamedTuple

from kvdepot.bench.plan import Arm, Plan, Round

__all__ = [
    "CALIBRATION",
    "Block",
    "count_of",
    "lengths_of",
    "requests_of",
    "rounds_of",
    "schedule",
    "warmed_lengths",
]

CALIBRATION = Round(name="R0", role="recompute", expects="computed")


class Block(NamedTuple):
    """One run of one arm."""

    run: int
    arm: Arm


def schedule(plan: Plan, arms: Sequence[Arm]) -> list[Block]:
    """The blocks in their order: A B B A, or shuffled within each run; readers behind what they read."""
    order = random.Random(plan.seed)
    blocks = []
    for run in range(plan.runs):
        turn = list(arms)
        if plan.order == "random":
            order.shuffle(turn)
        elif run % 2:
            turn.reverse()
        turn.sort(key=lambda arm: arm.role == "reader")
        blocks += [Block(run, arm) for arm in turn]
    return blocks


def rounds_of(plan: Plan, block: Block) -> list[Round]:
    """The rounds of a block; the first run of the recompute arm begins with the calibration."""
    rounds = [each for each in plan.rounds if each.role == block.arm.role]
    calibrates = block.run == 0 and block.arm.role == "recompute"
    if rounds and calibrates and plan.calibrate_tokens:
        rounds.insert(0, CALIBRATION)
    return rounds


def lengths_of(plan: Plan, each: Round) -> Sequence[int]:
    """Prompt lengths that a round is measured at, in tokens."""
    return plan.calibrate_tokens if each is CALIBRATION else plan.document_tokens


def count_of(plan: Plan, each: Round) -> int:
    """Measured requests of a round at each length."""
    return 1 if each is CALIBRATION else each.requests or plan.requests


def requests_of(plan: Plan, block: Block) -> int:
    """All requests of a block, with those that warm up."""
    return sum(
        len(lengths_of(plan, each)) * count_of(plan, each)
        + plan.warmup_requests * len(warmed_lengths(plan, block, index))
        for index, each in enumerate(rounds_of(plan, block))
    )


def warmed_lengths(plan: Plan, block: Block, index: int) -> set[int]:
    """Lengths that a block's round, by its index, has to warm up: those that its process has not had."""
    warm: set[int] = set()
    new: set[int] = set()
    for each in rounds_of(plan, block)[: index + 1]:
        warm = set() if each.restarts else warm
        new = set(lengths_of(plan, each)) - warm
        warm |= new
    return new
