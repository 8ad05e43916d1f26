"""Engines under test: started from a command, asked for by hand, or there already.

One at a time: what is not under test must not run beside it.
"""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple, Protocol

from kvdepot.bench.client import Client, Endpoint
from kvdepot.bench.plan import Arm
from kvdepot.clock import Clock
from kvdepot.errors import ConfigError, KvdepotError
from kvdepot.io.results import read_whole

__all__ = ["AskPerson", "CommandLauncher", "Launcher", "Running"]

#: shows a person what to do, and returns when it is done
AskPerson = Callable[[str], None]

_END_S = 90.0
_LOOK_INTERVAL_S = 0.25
_LOG_LINES = 8


class Running(NamedTuple):
    """An engine that takes requests."""

    url: str
    #: of the process that we started; None for others
    pid: int | None
    #: what it says; empty when somebody else has it
    log: str
    #: it was started for this call
    is_new: bool


class Launcher(Protocol):
    """Starts and ends engines."""

    def start(self, arm: Arm, *, is_fresh: bool) -> Running:
        """Have an arm's engine run, as a new process if asked for; every other one is ended."""

    def stop(self) -> None:
        """End what runs. Idempotent."""


class CommandLauncher:
    """Runs arms' commands.

    Args:
        logs: folder for what they print.
        ask_person: for arms that are started by hand; None: nobody is there to be asked.
        clock: for the waits.
    """

    def __init__(self, logs: Path, *, ask_person: AskPerson | None, clock: Clock) -> None:
        self._logs = logs
        self._ask_person = ask_person
        self._clock = clock
        self._process: subprocess.Popen[bytes] | None = None
        self._running: tuple[Arm, Running] | None = None
        self._starts = 0

    def start(self, arm: Arm, *, is_fresh: bool) -> Running:
        """As `Launcher.start`. Blocks until it takes requests.

        Raises:
            KvdepotError: it ended, or took no requests in time; with the end of its log.
            ConfigError: it is to be started by hand and nobody is there, or the command is not found.
        """
        if self._running is not None and self._running[0] == arm and not is_fresh:
            return self._running[1]._replace(is_new=False)
        self.stop()
        if arm.command:
            running = self._started(arm)
        else:
            if arm.is_started_by_hand:
                self._ask(f"start the engine of arm {arm.name} anew at {arm.url}, then press Enter")
            running = Running(arm.url.rstrip("/"), None, "", arm.is_started_by_hand)
        self._wait(arm, running)
        self._running = arm, running
        return running

    def stop(self) -> None:
        process, self._process, self._running = self._process, None, None
        if process is None:
            return
        process.terminate()
        try:
            process.wait(_END_S)
        except subprocess.TimeoutExpired:
            pass
        # what it started and left behind must not run beside the next one
        try:
            os.killpg(process.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
        process.wait()

    # below

    def _started(self, arm: Arm) -> Running:
        port = _free_port()
        self._starts += 1
        log = self._logs / f"{self._starts:03d}-{arm.name}.log"
        places = {
            "{port}": str(port),
            "{python}": sys.executable,
            "{pool}": arm.pool,
            "{model}": arm.model,
            "{out}": str(self._logs.parent),
        }

        def filled(text: str) -> str:
            for name, value in places.items():
                text = text.replace(name, value)
            return text

        try:
            with log.open("wb") as output:
                self._process = subprocess.Popen(  # noqa: S603 - the user's own command
                    [filled(each) for each in arm.command],
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    env={**os.environ, **{k: filled(v) for k, v in arm.environment.items()}},
                    start_new_session=True,
                )
        except OSError as error:
            raise ConfigError(f"arm {arm.name}: {arm.command[0]}: {error.strerror}") from error
        return Running(filled(arm.url).rstrip("/"), self._process.pid, str(log), is_new=True)

    def _ask(self, text: str) -> None:
        if self._ask_person is None:
            raise ConfigError(
                "an engine has to be started by hand, and there is no terminal to ask at",
                hint="give a command that starts it, or run this in a terminal",
            )
        self._ask_person(text)

    def _wait(self, arm: Arm, running: Running) -> None:
        until_s = self._clock.monotonic_s() + arm.ready_s

        async def wait() -> bool:
            async with Client(Endpoint(url=running.url), clock=self._clock) as client:
                while not await client.is_up():
                    if self._process is not None and self._process.poll() is not None:
                        return False
                    if self._clock.monotonic_s() > until_s:
                        return False
                    await asyncio.sleep(_LOOK_INTERVAL_S)
            return True

        if asyncio.run(wait()):
            return
        status = self._process.poll() if self._process is not None else None
        what = (
            f"took no requests for {arm.ready_s:.0f} s"
            if status is None
            else f"ended with status {status}"
        )
        words = _last_words(running.log)
        self.stop()
        raise KvdepotError(f"the engine of arm {arm.name} {what}{words}")


def _last_words(log: str) -> str:
    if not log:
        return ""
    lines = read_whole(log).decode(errors="replace").strip().splitlines()
    return f": {' | '.join(lines[-_LOG_LINES:])} (all of it: {log})"


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
