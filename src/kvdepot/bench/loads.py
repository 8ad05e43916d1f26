"""How requests are sent: closed loop, open loop, all at once; and the schedules of arrivals.

A turn of a session waits for the turn before it, as a person does. In an open loop everything else goes
out at its time, whether or not the server keeps up: latency counts from the time at which a request was
meant to go (no coordinated omission).
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable, Sequence
from typing import Generic, NamedTuple, TypeVar

from kvdepot.clock import Clock

__all__ = ["Send", "Turn", "closed_loop", "gamma_arrivals", "in_flight_series", "open_loop"]

T = TypeVar("T")
R = TypeVar("R")

#: send an item that was meant to go at a monotonic time
Send = Callable[[T, float], Awaitable[R]]


class Turn(NamedTuple, Generic[T]):
    """One request of a load."""

    item: T
    #: in an open loop: seconds behind the start
    at_s: float = 0.0
    #: index of the turn before it in the same session; None for a session's first
    after: int | None = None
    #: seconds that a person needs between an answer and the next question
    think_s: float = 0.0


async def closed_loop(
    turns: Sequence[Turn[T]], send: Send[T, R], *, connections: int, clock: Clock
) -> list[R]:
    """Have a number of connections take one turn after the other; results in the order of the turns."""
    results: list[R | None] = [None] * len(turns)
    ended = [asyncio.Event() for _ in turns]
    waiting = iter(range(len(turns)))

    async def connection() -> None:
        for index in waiting:
            turn = turns[index]
            if turn.after is not None:
                await ended[turn.after].wait()
                await asyncio.sleep(turn.think_s)
            results[index] = await send(turn.item, clock.monotonic_s())
            ended[index].set()

    async with asyncio.TaskGroup() as group:
        for _ in range(min(connections, len(turns))):
            group.create_task(connection())
    return [result for result in results if result is not None]


async def open_loop(turns: Sequence[Turn[T]], send: Send[T, R], *, clock: Clock) -> list[R]:
    """Send every turn at its time; results in the order of the turns."""
    start_s = clock.monotonic_s()
    results: list[R | None] = [None] * len(turns)
    ended = [asyncio.Event() for _ in turns]
    ended_s = [0.0] * len(turns)

    async def one(index: int) -> None:
        turn = turns[index]
        due_s = start_s + turn.at_s
        await _until(due_s, clock)
        if turn.after is not None:
            await ended[turn.after].wait()
            due_s = max(due_s, ended_s[turn.after] + turn.think_s)
            await _until(due_s, clock)
        results[index] = await send(turn.item, due_s)
        ended_s[index] = clock.monotonic_s()
        ended[index].set()

    async with asyncio.TaskGroup() as group:
        for index in range(len(turns)):
            group.create_task(one(index))
    return [result for result in results if result is not None]


async def _until(due_s: float, clock: Clock) -> None:
    left_s = due_s - clock.monotonic_s()
    if left_s > 0:
        await asyncio.sleep(left_s)


def gamma_arrivals(rate: float, count: int, *, variation: float = 1.0, seed: int) -> list[float]:
    """Times of arrivals with gamma-distributed gaps, seconds from the start.

    Args:
        rate: arrivals a second.
        count: of arrivals.
        variation: coefficient of variation of the gaps: 0 is a metronome, 1 is Poisson, 2 is bursty.
        seed: of the gaps.
    """
    random_gaps = random.Random(seed)
    times: list[float] = []
    now_s = 0.0
    for _ in range(count):
        if variation == 0:
            gap_s = 1 / rate
        else:
            shape = 1 / variation**2
            gap_s = random_gaps.gammavariate(shape, 1 / (rate * shape))
        now_s += gap_s
        times.append(now_s)
    return times


def in_flight_series(
    spans: Sequence[tuple[float, float]], *, steps: int
) -> tuple[list[float], list[float]]:
    """Mean number of requests in flight in equal stretches of time.

    Args:
        spans: begin and end of each request.
        steps: how many stretches.

    Returns:
        The middles of the stretches, and the means.
    """
    begin_s, end_s = min(begin for begin, _ in spans), max(end for _, end in spans)
    width_s = (end_s - begin_s) / steps or 1.0
    means = []
    for step in range(steps):
        low_s, high_s = begin_s + step * width_s, begin_s + (step + 1) * width_s
        busy_s = sum(max(0.0, min(end, high_s) - max(begin, low_s)) for begin, end in spans)
        means.append(busy_s / width_s)
    return [begin_s + (step + 0.5) * width_s for step in range(steps)], means
