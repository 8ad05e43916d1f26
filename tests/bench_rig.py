"""What the bench tests share: a client against the fake server, and a spawned fake for timing."""

from __future__ import annotations

import asyncio
import contextlib
import subprocess
import sys

from kvdepot.bench.client import Client, Endpoint

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
