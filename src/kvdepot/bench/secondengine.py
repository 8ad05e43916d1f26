"""A second engine beside the one that is measured: the same arm again, which fills and reads the same pool.

It differs in nothing, so what the measured one loses is the price of sharing: of the pool, of its path,
and where both run on one host of the processor as well.
"""

from __future__ import annotations

import asyncio
import threading
from typing import Self

from kvdepot.bench.client import Client, Prompt
from kvdepot.bench.launch import Running
from kvdepot.bench.plan import Arm, Load, Noise, Traffic
from kvdepot.bench.rig import Rig
from kvdepot.bench.scrape import counts_of
from kvdepot.bench.traffic import session_turns
from kvdepot.errors import ConfigError, KvdepotError

__all__ = ["SecondEngine"]

_END_S = 120.0
#: for its first answer; a request is given up by the client before that
_FIRST_S = 900.0


class SecondEngine:
    """Runs while the context is open and asks one request after the other: first asks, then follow-ups.

    Args:
        rig: with a launcher for a second engine.
        noise: of kind ``engine``, without commands of its own.
        arm: that is measured.
        traffic: what it asks, with salts of its own.

    Entering blocks until it has answered once, so that the load beside it is measured with it at work.

    Raises:
        ConfigError: on entering, when nobody can start a second engine of the arm.
        KvdepotError: on entering, when it does not answer.
    """

    def __init__(self, rig: Rig, noise: Noise, arm: Arm, traffic: Traffic) -> None:
        self._rig = rig
        self._noise = noise
        self._arm = arm
        self._traffic = traffic
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        #: it has answered, or has failed to
        self._has_begun = threading.Event()
        self._error = "no answer"
        #: answers so far
        self.requests = 0
        #: that its tier has loaded and stored; 0 where it does not say
        self.bytes_moved = 0

    def __enter__(self) -> Self:
        launcher = self._rig.second
        if launcher is None or not self._arm.command:
            raise ConfigError(
                f"noise {self._noise.name} needs a second engine, and arm {self._arm.name} has no "
                "command that starts one",
                hint="give the noise commands of its own: begin and end",
            )
        running = launcher.start(self._arm, is_fresh=True)
        self._thread = threading.Thread(
            target=lambda: asyncio.run(self._keep_asking(running)), name="second-engine"
        )
        self._thread.start()
        self._has_begun.wait(_FIRST_S)
        if not self.requests:
            self.__exit__()
            raise KvdepotError(
                f"noise {self._noise.name}: the second engine of arm {self._arm.name} failed: "
                f"{self._error}"
            )
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        if self._thread is not None:
            self._thread.join(_END_S)
        if self._rig.second is not None:
            self._rig.second.stop()

    async def _keep_asking(self, running: Running) -> None:
        try:
            async with self._rig.client(running, self._arm) as client:
                number = 0
                while not self._stop.is_set():
                    await self._ask_round(client, number)
                    number += 1
                # what it has stored counts once it is written
                for path in self._arm.settles:
                    await client.post(path)
                counts = counts_of(await client.metrics())
                self.bytes_moved = (counts.load_bytes or 0) + (counts.store_bytes or 0)
        finally:
            self._has_begun.set()

    async def _ask_round(self, client: Client, number: int) -> None:
        salt = self._rig.session.salt("second engine", self._arm.name, self._noise.name, number)
        load = Load(name=self._noise.name, kind="closed")
        seed = self._rig.session.plan.seed + number
        for turn in session_turns(self._traffic, load, self._rig.material, salt=salt, seed=seed):
            if self._stop.is_set():
                break
            answer = await client.ask(Prompt(turn.item.text, turn.item.output_tokens, salt))
            self.requests += not answer.error
            self._error = answer.error
            self._has_begun.set()
