"""What the bench tests share: a client against the fake server, and a spawned fake for timing."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import subprocess
import sys
from unittest import mock

from kvdepot.bench.client import Client, Endpoint
from kvdepot.bench.conduct import Conductor
from kvdepot.bench.launch import Running
from kvdepot.bench.plan import Arm, Plan, preset
from kvdepot.bench.prompts import shipped_material
from kvdepot.bench.rig import Rig
from kvdepot.bench.session import open_session
from kvdepot.bench.summary import summarise
from kvdepot.clock import SystemClock
from kvdepot.io.hostcounters import HostCounters
from kvdepot.io.results import ResultFolder
from kvdepot.testing.fakeserver import FakeBehaviour

#: a fake in a process of its own, so that it does not share an interpreter lock with the client
_CHILD = """
import sys, threading
from kvdepot.testing.fakeserver import FakeBehaviour, FakeServer
with FakeServer(FakeBehaviour(**eval(sys.argv[1], {}))) as server:
    print(server.url, flush=True)
    sys.stdin.read()
"""


@contextlib.contextmanager
def spawned_fake(**behaviour):
    process = subprocess.Popen(
        [sys.executable, "-c", _CHILD, repr(behaviour)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        yield process.stdout.readline().strip()
    finally:
        process.stdin.close()
        process.wait(10)
        process.stdout.close()


def with_client(url, scenario, **settings):
    async def main():
        async with Client(Endpoint(url=url, **settings)) as client:
            return await scenario(client)

    return asyncio.run(main())


class FakeLauncher:
    """Starts the fake instead of an engine; each arm has its behaviour."""

    def __init__(self, server, behaviours, *, restarts=True):
        self._server = server
        self._behaviours = behaviours
        self._restarts = restarts
        self.starts = []

    def start(self, arm, *, is_fresh):
        if is_fresh:
            self.starts.append(arm.name)
            behaviour = self._behaviours[arm.name]
            if self._restarts:
                self._server.restart(behaviour)
            else:
                self._server.behaviour = behaviour
        return Running(self._server.url, 1, "", is_new=is_fresh and self._restarts)

    def stop(self):
        pass


class FakeProbe:
    """Counters of the fake's devices."""

    def __init__(self, server, *, residency=0.0):
        self._server = server
        self._residency = residency

    def host(self, pool):
        moved = self._server.device_bytes
        return HostCounters(device_read_bytes=moved["read"], device_written_bytes=moved["written"])

    def process(self, pid):
        moved = self._server.device_bytes
        return moved["read"], moved["written"]

    def own(self):
        return None

    def residency(self, pool):
        return self._residency if pool else None

    def log(self, path):
        return b""


#: a plan of milliseconds
PLAN = Plan(
    name="test",
    runs=2,
    document_tokens=(512,),
    output_tokens=4,
    requests=3,
    calibrate_tokens=(256, 512),
    rounds=preset("quick").rounds,
)


def behaviours(**tier_changes):
    """What an honest engine without and with a tier does."""
    computing = FakeBehaviour(base_s=0.002, token_s=0.0001)
    reading = {"disk": 0.000005, "host": 0.000001}
    changes = {"keeps": ("host", "disk"), "read_s": reading, **tier_changes}
    tier = dataclasses.replace(computing, **changes)
    return {"recompute": computing, "kvdepot": tier}


def measured(
    folder,
    server,
    launcher,
    probe,
    *,
    plan=PLAN,
    pool="",
    arms=None,
    tell=lambda what, done, total: None,
):
    """Run the rounds of a plan and summarise them."""
    arms = arms or [
        Arm(name="recompute", role="recompute", settles=("/drain",)),
        Arm(name="kvdepot", role="tier", settles=("/drain",), pool=pool),
    ]
    material = shipped_material()
    with ResultFolder(folder) as results:
        session = open_session(results, plan, arms, material, version="1", wall_s=0.0)
        clock = SystemClock()
        # the fake counts at once
        with mock.patch("kvdepot.bench.asking._COUNT_INTERVAL_S", 0.0):
            Conductor(Rig(session, material, launcher, probe, clock, tell)).run()
        return summarise(session)
