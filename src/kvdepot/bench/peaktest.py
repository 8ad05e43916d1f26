"""The peak test: the same traffic at every load point, on every arm."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import NamedTuple

import msgspec

from kvdepot.bench.asking import Asker, block_tokens_of, edge_of
from kvdepot.bench.client import Client, Prompt
from kvdepot.bench.launch import Running
from kvdepot.bench.loads import Turn, closed_loop, gamma_arrivals, open_loop
from kvdepot.bench.oracle import Shadow
from kvdepot.bench.plan import Arm, Load, Traffic
from kvdepot.bench.prompts import units_of
from kvdepot.bench.rig import Rig
from kvdepot.bench.rows import Kind, Row
from kvdepot.bench.saturation import find_saturation, is_sustained
from kvdepot.bench.settling import settle
from kvdepot.bench.traces import read_trace_rows, spread_bins
from kvdepot.bench.traffic import Ask, session_turns, storm_turns, trace_turns
from kvdepot.bench.windows import Edge, Window, compile_lines
from kvdepot.errors import ConfigError
from kvdepot.io.results import read_whole

__all__ = ["LOAD_WARMUPS", "TRIAL_REQUESTS", "LoadPlace", "LoadRunner"]

#: discarded requests before each load point
LOAD_WARMUPS = 3
#: of each trial of a saturation rate
TRIAL_REQUESTS = 60


class LoadPlace(NamedTuple):
    """Where rows and windows of a load point belong."""

    run: int
    arm: Arm
    #: ``peak``, or the noise of the contention test
    name: str
    load: Load
    traffic: Traffic
    attempt: int

    @property
    def part(self) -> str:
        """Its name among what has been measured."""
        return f"{self.name}/{self.load.name}"

    @property
    def label(self) -> str:
        """For people."""
        name = self.load.name if self.name == "peak" else f"{self.load.name}, {self.name}"
        return f"run {self.run + 1}, {self.arm.name}, {name}"


class LoadRunner:
    """Runs load points.

    Args:
        rig: what it works with.
    """

    def __init__(self, rig: Rig) -> None:
        self._rig = rig
        self._done = 0
        self._total = 0

    def peak(self) -> None:
        """All load points of the peak test that are not measured yet; blocks."""
        peak = self._rig.session.plan.peak
        if peak is None:
            return
        arms = [arm for arm in self._rig.session.arms if arm.role in peak.roles]
        try:
            for run in range(peak.runs):
                for arm in arms if run % 2 == 0 else arms[::-1]:
                    for load in peak.loads:
                        place = LoadPlace(run, arm, "peak", load, peak.traffic, 0)
                        self.measure(place)
        finally:
            self._rig.launcher.stop()

    def is_measured(self, place: LoadPlace) -> bool:
        """It was measured before."""
        return self._rig.session.is_done(place.run, place.arm.name, round_name=place.part)

    def measure(self, place: LoadPlace) -> None:
        """One load point, unless it was measured before."""
        if self.is_measured(place):
            return
        attempt = self._rig.session.attempt(place.run, place.arm.name)
        place = place._replace(attempt=attempt)
        self._rig.tell(f"{place.label}: starting the engine", self._done, self._total)
        running = self._rig.launcher.start(place.arm, is_fresh=True)
        self._done, self._total = 0, 0
        if place.load.kind == "storm":
            self._storm(running, place)
        else:
            asyncio.run(self._plain(running, place))
        self._rig.session.mark_done(place.run, place.arm.name, place.part, attempt)

    # kinds of loads

    async def _plain(self, running: Running, place: LoadPlace) -> None:
        async with self._rig.client(running, place.arm) as client:
            if place.load.kind == "saturation":
                await self._saturation(client, running, place)
                return
            turns = self._turns(place)
            await self._warm_up(client, place, turns)
            await self._window(client, running, place, turns)

    async def _saturation(self, client: Client, running: Running, place: LoadPlace) -> None:
        """Find the rate; the last trial that was kept up with is what the report shows."""
        trial = 0
        count = place.load.requests or TRIAL_REQUESTS
        await self._warm_up(client, place, self._turns(place))

        async def keeps_up(rate: float) -> bool:
            nonlocal trial
            trial += 1
            salt = self._salt(place, f"trial {trial}")
            seed = self._rig.session.plan.seed + trial
            turns = session_turns(
                place.traffic, place.load, self._rig.material, salt=salt, seed=seed, count=count
            )
            at_rate = place._replace(load=msgspec.structs.replace(place.load, rate=rate))
            timed = _timed(turns, at_rate.load, rate, seed)
            label = msgspec.structs.replace(place.load, name=f"{place.load.name} at {rate:.3g}/s")
            rows = await self._window(client, running, at_rate._replace(load=label), timed)
            return is_sustained(rows)

        rate, _ = await find_saturation(keeps_up, start=place.load.rate or 1.0)
        self._rig.session.keep_saturation(place.arm.name, rate)

    def _storm(self, running: Running, place: LoadPlace) -> None:
        """Sessions ask once, the engine ends, and all come back to the new one at once."""
        sessions = place.load.connections
        turns = session_turns(
            msgspec.structs.replace(place.traffic, sessions=sessions, turns=2),
            place.load,
            self._rig.material,
            salt=self._salt(place, "storm"),
            seed=self._rig.session.plan.seed,
            count=2 * sessions,
        )
        firsts, returns = storm_turns(turns, sessions)

        async def begin() -> Shadow:
            async with self._rig.client(running, place.arm) as client:
                shadow = await self._shadow(client, place)
                await self._send_all(client, place, firsts, shadow, kind="warmup", connections=1)
                await settle(client, place.arm, self._rig.clock)
            return shadow

        async def come_back(again: Running, shadow: Shadow) -> None:
            async with self._rig.client(again, place.arm) as client:
                await self._warm_up(client, place, turns)
                await self._window(client, again, place, returns, shadow=shadow)

        shadow = asyncio.run(begin())
        asyncio.run(come_back(self._rig.launcher.start(place.arm, is_fresh=True), shadow))

    # what is sent

    def _turns(self, place: LoadPlace) -> list[Turn[Ask]]:
        traffic, load, seed = place.traffic, place.load, self._rig.session.plan.seed
        salt = self._salt(place, "turns")
        if load.kind == "trace":
            if not traffic.trace:
                raise ConfigError(f"load {load.name} replays a trace, and the traffic names none")
            rows = read_trace_rows(read_whole(traffic.trace), traffic.trace_format, traffic.trace)
            rows, _ = spread_bins(rows, seed=seed)
            return trace_turns(rows, traffic, salt=salt)
        turns = session_turns(traffic, load, self._rig.material, salt=salt, seed=seed + place.run)
        if load.kind != "open":
            return turns
        rate = load.rate or load.share * self._rig.session.saturation(place.arm.name)
        if rate <= 0:
            raise ConfigError(
                f"load {load.name} has neither a rate nor a saturation rate to take a share of",
                hint="give it a rate, or put a load of kind saturation before it",
            )
        return _timed(turns, load, rate, seed + place.run)

    def _salt(self, place: LoadPlace, what: str) -> str:
        return self._rig.session.salt(
            place.run, place.arm.name, place.attempt, place.name, place.load.name, what
        )

    async def _warm_up(self, client: Client, place: LoadPlace, turns: Sequence[Turn[Ask]]) -> None:
        salt = self._salt(place, "warm-up")
        shadow = await self._shadow(client, place)
        some = [
            Turn(turn.item._replace(salt=f"{salt}{index}"))
            for index, turn in enumerate(turns[:LOAD_WARMUPS])
        ]
        await self._send_all(client, place, some, shadow, kind="warmup", connections=1)

    async def _window(
        self,
        client: Client,
        running: Running,
        place: LoadPlace,
        turns: Sequence[Turn[Ask]],
        *,
        shadow: Shadow | None = None,
    ) -> list[Row]:
        """Send a load between two edges."""
        begin = await edge_of(client, running, place.arm, self._rig.probe, self._rig.clock)
        is_closed = place.load.kind == "closed"
        shadow = shadow or await self._shadow(client, place)
        rows = await self._send_all(
            client,
            place,
            turns,
            shadow,
            kind="measured",
            connections=place.load.connections if is_closed else 0,
        )
        end = await edge_of(client, running, place.arm, self._rig.probe, self._rig.clock)
        log = await asyncio.to_thread(self._rig.probe.log, running.log)
        window = self._made(place, running, begin, end, log)
        is_told = any(row.reused is not None for row in rows)
        self._rig.session.add_window(
            msgspec.structs.replace(
                window,
                planned=len(turns),
                attribution="usage" if is_told else "window" if end.counts.tokens else "none",
                engine=await client.version(),
            )
        )
        return rows

    async def _shadow(self, client: Client, place: LoadPlace) -> Shadow:
        common: list[int] = []
        if place.traffic.common_tokens:
            text = self._rig.material.text[: 4 * place.traffic.common_tokens]
            common = units_of(await client.token_ids(text), text)
        return Shadow(await block_tokens_of(client, place.arm), common=common)

    def _made(
        self, place: LoadPlace, running: Running, begin: Edge, end: Edge, log: bytes
    ) -> Window:
        return Window(
            run=place.run,
            round=place.name,
            arm=place.arm.name,
            role=place.arm.role,
            attempt=place.attempt,
            load=place.load.name,
            begin=begin,
            end=end,
            warmups=LOAD_WARMUPS,
            is_restarted=running.is_new,
            compile_lines=compile_lines(log[begin.log_bytes : end.log_bytes]),
            connections=place.load.connections if place.load.kind == "closed" else 0,
        )

    async def _send_all(
        self,
        client: Client,
        place: LoadPlace,
        turns: Sequence[Turn[Ask]],
        shadow: Shadow,
        *,
        kind: Kind,
        connections: int,
    ) -> list[Row]:
        asker = Asker(client, shadow, self._rig.session.add_row, is_alone=False)
        # asked for before the clock runs: it is the oracle's, and not part of the load
        texts = list(dict.fromkeys(turn.item.text for turn in turns))
        units = {text: units_of(await client.token_ids(text), text) for text in texts}
        self._total += len(turns)
        numbers = {id(turn.item): index for index, turn in enumerate(turns)}

        async def send(ask: Ask, due_s: float) -> Row:
            base = Row(
                run=place.run,
                round=place.name,
                arm=place.arm.name,
                seq=numbers[id(ask)],
                attempt=place.attempt,
                kind=kind,
                load=place.load.name,
                session=ask.session,
                turn=ask.turn,
            )
            prompt = Prompt(ask.text, ask.output_tokens, ask.salt)
            row = await asker.ask(prompt, units[ask.text], base, due_s=due_s)
            self._done += 1
            self._rig.tell(f"{place.label}: {kind}", self._done, self._total)
            return row

        if connections:
            return await closed_loop(turns, send, connections=connections, clock=self._rig.clock)
        return await open_loop(turns, send, clock=self._rig.clock)


def _timed(turns: Sequence[Turn[Ask]], load: Load, rate: float, seed: int) -> list[Turn[Ask]]:
    times = gamma_arrivals(rate, len(turns), variation=load.variation, seed=seed)
    return [turn._replace(at_s=at_s) for turn, at_s in zip(turns, times, strict=True)]
