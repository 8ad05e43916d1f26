"""What every measurement works with: where results go, what is asked, and who starts and reads engines."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from kvdepot.bench.client import Client, Endpoint
from kvdepot.bench.launch import Launcher, Running
from kvdepot.bench.plan import Arm
from kvdepot.bench.prompts import Material
from kvdepot.bench.session import Session
from kvdepot.bench.windows import Probe
from kvdepot.clock import Clock

__all__ = ["Rig", "Tell"]

#: told what is being done, how many requests are done, and how many there are in all
Tell = Callable[[str, int, int], None]


class Rig(NamedTuple):
    """The parts of one measurement, shared by its rounds and loads."""

    #: where results go; what it has already is not done again
    session: Session
    #: what is asked about
    material: Material
    #: starts engines
    launcher: Launcher
    #: reads the machine's counters
    probe: Probe
    #: of all times
    clock: Clock
    #: told of progress
    tell: Tell
    #: for endpoints that want one
    api_key: str = ""
    #: starts a second engine beside the first, for the contention test; None: nobody can
    second: Launcher | None = None

    def client(self, running: Running, arm: Arm) -> Client:
        """A client of an engine that runs for an arm; to be opened."""
        endpoint = Endpoint(
            url=running.url,
            model=arm.model if not arm.command else "",
            api=self.session.plan.api,
            salt=arm.salt,
            api_key=self.api_key,
        )
        return Client(endpoint, clock=self.clock)
