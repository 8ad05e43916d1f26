"""One request from prompt to row: the client's times, the server's account, the oracle's expectation."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from itertools import pairwise

import msgspec

from kvdepot.bench.client import Answer, Client, Prompt
from kvdepot.bench.launch import Running
from kvdepot.bench.oracle import Shadow, class_of
from kvdepot.bench.plan import Arm
from kvdepot.bench.rows import Row, digest_of
from kvdepot.bench.scrape import Counts, counts_of, difference
from kvdepot.bench.windows import Attribution, Edge, Probe
from kvdepot.clock import Clock

__all__ = ["Asker", "block_tokens_of", "edge_of", "settled_counts"]

_OUTPUT_CHARACTERS = 400
_GAP_DIGITS = 5
#: engines count in steps of their own: vLLM tells what our tier did every quarter of a second
_COUNT_INTERVAL_S = 0.3
_COUNT_TRIES = 8


class Asker:
    """Sends prompts and makes rows. Used on one event loop.

    Args:
        client: open.
        shadow: of the arm's prompts; learns every prompt that is sent.
        append: takes each row as it is done.
        is_alone: requests go one at a time, so that what the engine counts around a request is its own.
    """

    def __init__(
        self,
        client: Client,
        shadow: Shadow,
        append: Callable[[Row], None],
        *,
        is_alone: bool,
    ) -> None:
        self._client = client
        self._shadow = shadow
        self._append = append
        self._is_alone = is_alone
        self.attribution: Attribution = "none"

    async def ask(
        self, prompt: Prompt, units: Sequence[int], base: Row, *, due_s: float | None = None
    ) -> Row:
        """Send one prompt.

        Args:
            prompt: what is asked.
            units: its tokens, for the oracle.
            base: the row as far as it is known.
            due_s: when it was meant to go; None: now.
        """
        expected = self._shadow.expect(prompt.salt, units)
        # known from the moment it is sent: a twin that comes meanwhile could share its work
        self._shadow.add(prompt.salt, units)
        before = await self._counts_before()
        answer = await self._client.ask(prompt)
        row = _filled(base, prompt, answer, due_s)
        tokens = row.prompt_tokens or len(units)
        row = msgspec.structs.replace(
            row,
            oracle_tokens=min(expected.tokens, max(0, tokens - 1)),
            common_tokens=expected.common,
            ask_class=class_of(turn=row.turn, prompt_tokens=tokens, expected=expected),
        )
        if row.reused is not None:
            self.attribution = "usage"
        elif before is not None:
            row = await self._attributed(row, before)
        self._append(row)
        return row

    async def _counts_before(self) -> Counts | None:
        if not self._is_alone or self.attribution == "usage":
            return None
        counts = counts_of(await self._client.metrics())
        return counts if counts.tokens else None

    async def _attributed(self, row: Row, before: Counts) -> Row:
        """Split the tokens by what the engine counted meanwhile, if that is this request exactly."""
        for _ in range(_COUNT_TRIES):
            change = difference(counts_of(await self._client.metrics()), before)
            if change is not None and change.prompt_tokens == row.prompt_tokens:
                self.attribution = "metrics"
                reused = {k: v for k, v in change.tokens.items() if k != "computed"}
                return msgspec.structs.replace(row, reused=reused)
            await asyncio.sleep(_COUNT_INTERVAL_S)
        return row


def _filled(base: Row, prompt: Prompt, answer: Answer, due_s: float | None) -> Row:
    stream = answer.stream
    times = stream.times_s
    usage = stream.usage
    error = answer.error
    if not error and not times:
        error = "no output"
    return msgspec.structs.replace(
        base,
        salt=digest_of(prompt.salt) if prompt.salt else "",
        scheduled_s=answer.sent_s if due_s is None else due_s,
        sent_s=answer.sent_s,
        first_s=times[0] if times else None,
        last_s=times[-1] if times else None,
        ended_s=answer.ended_s,
        status=answer.status,
        error=error,
        finish=stream.finish,
        prompt_tokens=usage.prompt_tokens if usage else None,
        output_tokens=usage.output_tokens if usage else None,
        cached_tokens=usage.cached_tokens if usage else None,
        reused=usage.reused if usage else None,
        output_digest=digest_of(stream.text),
        output=stream.text[:_OUTPUT_CHARACTERS],
        gaps_s=[round(b - a, _GAP_DIGITS) for a, b in pairwise(times)],
        events=len(times),
    )


async def block_tokens_of(client: Client, arm: Arm) -> int:
    """Tokens of the blocks that the engine reuses: what it says, or what the arm says if that is more."""
    told = counts_of(await client.metrics()).block_tokens
    return max(arm.block_tokens, told or 1)


async def settled_counts(client: Client) -> Counts:
    """The engine's counts once they stand still."""
    counts = counts_of(await client.metrics())
    if not counts.tokens:
        return counts
    for _ in range(_COUNT_TRIES):
        await asyncio.sleep(_COUNT_INTERVAL_S)
        again = counts_of(await client.metrics())
        if again == counts:
            break
        counts = again
    return counts


async def edge_of(client: Client, running: Running, arm: Arm, probe: Probe, clock: Clock) -> Edge:
    """Everything that is counted, now."""
    counts = await settled_counts(client)
    log = await asyncio.to_thread(probe.log, running.log)
    return Edge(
        at_s=clock.monotonic_s(),
        wall_s=clock.wall_s(),
        counts=counts,
        host=probe.host(arm.pool),
        process_bytes=probe.process(running.pid),
        own=probe.own(),
        log_bytes=len(log),
    )
