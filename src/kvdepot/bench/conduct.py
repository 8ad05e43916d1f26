"""The rounds: which engine is started when, what it is asked, and what is counted around it."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import NamedTuple

from kvdepot.bench.asking import Asker, block_tokens_of, edge_of
from kvdepot.bench.blocks import Block, count_of, lengths_of, requests_of, rounds_of, schedule
from kvdepot.bench.ceilings import measure_ceilings
from kvdepot.bench.client import Client, Prompt
from kvdepot.bench.launch import Running
from kvdepot.bench.oracle import Shadow
from kvdepot.bench.plan import Arm, Round
from kvdepot.bench.prompts import document_of, units_of
from kvdepot.bench.rig import Rig
from kvdepot.bench.rows import Kind, Row
from kvdepot.bench.scrape import Counts, counts_of
from kvdepot.bench.settling import settle
from kvdepot.bench.windows import Window, compile_lines
from kvdepot.errors import ConfigError
from kvdepot.io.filesystem import drop_cached_pages, free_bytes_of
from kvdepot.units import format_bytes

__all__ = ["Conductor"]


class _Place(NamedTuple):
    """Where in the plan a request is."""

    run: int
    arm: Arm
    round: Round
    length: int
    attempt: int


class Conductor:
    """Runs the rounds of a plan.

    Args:
        rig: what it works with.
    """

    def __init__(self, rig: Rig) -> None:
        self._rig = rig
        self._plan = rig.session.plan
        self._documents = rig.session.documents()
        #: warm-up requests of each length that the running process has had
        self._warm: dict[int, int] = {}
        #: what an endless cache of the running block's arm would hold
        self._shadow: Shadow | None = None
        self._done = 0
        self._total = 0

    def run(self) -> None:
        """Measure what is not measured yet. Blocks; the engines are ended in the end."""
        blocks = schedule(self._plan, self._rig.session.arms)
        self._total = sum(requests_of(self._plan, block) for block in blocks)
        try:
            for block in blocks:
                rounds = rounds_of(self._plan, block)
                if not rounds:
                    continue
                name = rounds[-1].name
                if self._rig.session.is_done(block.run, block.arm.name, round_name=name):
                    self._done += requests_of(self._plan, block)
                    continue
                attempt = self._rig.session.attempt(block.run, block.arm.name)
                self._block(block, rounds, attempt)
                self._measure_ceilings(block)
                self._rig.session.mark_done(block.run, block.arm.name, name, attempt)
        finally:
            self._rig.launcher.stop()

    def _block(self, block: Block, rounds: Sequence[Round], attempt: int) -> None:
        arm = block.arm
        self._shadow = None
        for index, each in enumerate(rounds):
            is_fresh = index == 0 or each.restarts
            if is_fresh:
                self._step(f"run {block.run + 1}, {arm.name}: starting the engine")
                self._rig.launcher.stop()
                self._warm.clear()
            running = self._rig.launcher.start(arm, is_fresh=is_fresh)
            asyncio.run(self._round(running, block, each, attempt))

    def _measure_ceilings(self, block: Block) -> None:
        """Once for each arm with a pool: the most that its storage gives, with nothing beside it."""
        arm = block.arm
        if block.run or not arm.pool:
            return
        self._rig.launcher.stop()
        self._step(f"run 1, {arm.name}: measuring the ceilings of its storage")
        said = [w.end.counts for w in self._rig.session.windows if w.arm == arm.name]
        counts = said[-1] if said else Counts()
        ceilings = measure_ceilings(arm, counts, self._rig.clock)
        if ceilings is not None:
            self._rig.session.keep_ceilings(arm.name, ceilings)

    async def _round(self, running: Running, block: Block, each: Round, attempt: int) -> None:
        arm = block.arm
        async with self._rig.client(running, arm) as client:
            lengths = lengths_of(self._plan, each)
            await self._cut_documents(client, lengths)
            for length in lengths:
                place = _Place(block.run, arm, each, length, attempt)
                await self._measure(client, running, place)

    async def _cut_documents(self, client: Client, lengths: Sequence[int]) -> None:
        missing = [length for length in lengths if length not in self._documents]
        for length in missing:
            prompts = await document_of(self._rig.material, length, client.token_ids)
            self._documents[length] = prompts
        if missing:
            self._rig.session.keep_documents(self._documents)

    async def _measure(self, client: Client, running: Running, place: _Place) -> None:
        arm, each = place.arm, place.round
        name = f"run {place.run + 1}, {arm.name}, {each.name}"
        shadow = self._shadow or Shadow(await block_tokens_of(client, arm))
        self._shadow = shadow
        asker = Asker(client, shadow, self._rig.session.add_row, is_alone=True)
        notes = await self._reset(client, running, each)
        engine = await client.version()
        for seq in range(self._warm.get(place.length, 0), self._plan.warmup_requests):
            self._step(f"{name}: warm-up", adds=1)
            await self._ask(client, asker, place, seq, kind="warmup")
            self._warm[place.length] = seq + 1
        is_settled = await settle(client, arm, self._rig.clock)
        await self._check_space(client, place)
        if each.drops_pages and arm.pool:
            await asyncio.to_thread(drop_cached_pages, arm.pool, "*")
        residency = await asyncio.to_thread(self._rig.probe.residency, arm.pool)
        await self._remember(client, shadow, place)
        begin = await edge_of(client, running, arm, self._rig.probe, self._rig.clock)
        count = count_of(self._plan, each)
        for seq in range(count):
            self._step(f"{name}: request {seq + 1} of {count}", adds=1)
            await self._ask(client, asker, place, seq, kind="measured")
        if each.salts == "fresh":
            is_settled = await settle(client, arm, self._rig.clock)
        end = await edge_of(client, running, arm, self._rig.probe, self._rig.clock)
        log = await asyncio.to_thread(self._rig.probe.log, running.log)
        self._rig.session.add_window(
            Window(
                run=place.run,
                round=each.name,
                arm=arm.name,
                role=arm.role,
                attempt=place.attempt,
                length=place.length,
                begin=begin,
                end=end,
                attribution=asker.attribution,
                planned=count,
                warmups=self._warm.get(place.length, 0),
                is_restarted=running.is_new,
                is_settled=is_settled,
                page_residency=residency,
                compile_lines=compile_lines(log[begin.log_bytes : end.log_bytes]),
                notes=tuple(notes),
                engine=engine,
            )
        )

    async def _check_space(self, client: Client, place: _Place) -> None:
        """Refuse to fill a disk: known once the engine says how large a token's KV is."""
        arm, plan = place.arm, self._plan
        width = counts_of(await client.metrics()).token_bytes
        if width is None or not arm.pool or place.round.salts != "fresh":
            return
        stored = sum(
            each.requests or plan.requests for each in plan.rounds if each.role == arm.role
        )
        needed = (plan.runs - place.run) * stored * sum(plan.document_tokens) * width
        free = await asyncio.to_thread(free_bytes_of, arm.pool)
        if needed > free:
            raise ConfigError(
                f"the plan stores up to {format_bytes(needed)} in {arm.pool}, and "
                f"{format_bytes(free)} are free there",
                hint="fewer runs or requests, shorter documents, or another folder: --pool",
            )

    async def _ask(
        self, client: Client, asker: Asker, place: _Place, seq: int, *, kind: Kind
    ) -> None:
        question = self._question_of(place.round, seq)
        text = self._documents[place.length].text(question)
        prompt = Prompt(text, self._plan.output_tokens, self._salt(place, seq, kind))
        units = units_of(await client.token_ids(text), text)
        base = Row(
            run=place.run,
            round=place.round.name,
            arm=place.arm.name,
            seq=seq,
            length=place.length,
            attempt=place.attempt,
            kind=kind,
            question=question,
        )
        await asker.ask(prompt, units, base)

    def _question_of(self, each: Round, seq: int) -> int:
        """Whoever reads what another round stored asks another question, as a follow-up does."""
        is_read_later = any(other.of == each.name for other in self._plan.rounds)
        return seq + 1 if is_read_later else seq

    def _salt(self, place: _Place, seq: int, kind: str) -> str:
        each, arm, attempt = place.round, place.arm.name, place.attempt
        if each.salts != "stored" or kind == "warmup":
            return self._rig.session.salt(
                place.run, arm, attempt, each.name, place.length, kind, seq
            )
        if place.arm.role == "reader":
            arm, attempt = self._source_of(place)
        return self._rig.session.salt(
            place.run, arm, attempt, each.of, place.length, "measured", seq
        )

    def _source_of(self, place: _Place) -> tuple[str, int]:
        """The arm that stored what a reader reads, and its attempt."""
        stored = next(each for each in self._plan.rounds if each.name == place.round.of)
        arms = self._rig.session.arms
        source = next(arm.name for arm in arms if arm.role == stored.role)
        return source, self._rig.session.done_attempt(place.run, source)

    async def _remember(self, client: Client, shadow: Shadow, place: _Place) -> None:
        """Have a reader's oracle know what another arm has stored."""
        if place.arm.role != "reader":
            return
        source = place.round.of
        for each in self._plan.rounds:
            # follow-ups of the storing arm have stored their questions as well
            if each.role == "reader" or source not in (each.name, each.of):
                continue
            for seq in range(count_of(self._plan, each)):
                text = self._documents[place.length].text(self._question_of(each, seq))
                units = units_of(await client.token_ids(text), text)
                shadow.add(self._salt(place, seq, "measured"), units)

    async def _reset(self, client: Client, running: Running, each: Round) -> list[str]:
        """Empty an engine's own caches where it could not be started anew."""
        if not each.restarts or running.is_new:
            return []
        arm_resets = next(
            (arm.resets for arm in self._rig.session.arms if arm.role == each.role), ()
        )
        if not arm_resets:
            return ["the engine was not started anew before this round"]
        return [
            f"{path} {'was accepted' if await client.post(path) else 'was REFUSED'}"
            for path in arm_resets
        ]

    def _step(self, what: str, *, adds: int = 0) -> None:
        self._done += adds
        self._rig.tell(what, self._done, self._total)
