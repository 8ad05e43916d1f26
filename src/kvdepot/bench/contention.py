"""The contention test: the same load with foreign work of several kinds on the same path.

Quiet arms come first and last, the others between them in random order. Noise goes only into folders
and to addresses that the plan names; the network's is the loopback interface when it names none.
"""

from __future__ import annotations

import random
import subprocess
import sys
from collections.abc import Sequence
from typing import Self

import msgspec

from kvdepot.bench.loadfigures import LoadFigures
from kvdepot.bench.peaktest import LoadPlace, LoadRunner
from kvdepot.bench.plan import Arm, Noise, Traffic
from kvdepot.bench.rig import Rig
from kvdepot.bench.secondengine import SecondEngine
from kvdepot.errors import ConfigError, KvdepotError
from kvdepot.io.noise import NoiseOrder, NoiseReport

__all__ = ["NoiseMaker", "contend", "degradation", "noise_order"]

_END_S = 30.0


class NoiseMaker:
    """One kind of noise, running while the context is open."""

    def __init__(self, noise: Noise, arm: Arm) -> None:
        self._noise = noise
        self._arm = arm
        self._process: subprocess.Popen[bytes] | None = None
        self.bytes_moved = 0

    def __enter__(self) -> Self:
        noise = self._noise
        if noise.kind in ("read", "write", "network"):
            self._start()
        elif noise.begin:
            _run(noise.begin, self._arm)
        return self

    def __exit__(self, *_: object) -> None:
        if self._process is not None:
            self._finish(self._process)
        elif self._noise.end:
            _run(self._noise.end, self._arm)

    def _start(self) -> None:
        noise = self._noise
        if noise.kind != "network" and not noise.folder:
            raise ConfigError(
                f"noise {noise.name} needs a folder",
                hint="name one on the path under test; it gets a file of 256 MiB",
            )
        order = NoiseOrder(noise.kind, noise.share, noise.folder, noise.address, noise.block_bytes)
        self._process = subprocess.Popen(  # noqa: S603 - our own interpreter and module
            [
                sys.executable,
                "-P",
                "-m",
                "kvdepot.io.noise",
                msgspec.json.encode(order).decode(),
            ],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        self._heard(self._process)

    def _heard(self, process: subprocess.Popen[bytes]) -> NoiseReport:
        assert process.stdout is not None
        line = process.stdout.readline()
        try:
            return msgspec.json.decode(line, type=NoiseReport)
        except msgspec.MsgspecError as error:
            self._process = None
            _end(process)
            raise KvdepotError(f"noise {self._noise.name} failed; see above") from error

    def _finish(self, process: subprocess.Popen[bytes]) -> None:
        assert process.stdin is not None
        process.stdin.close()
        self.bytes_moved = self._heard(process).bytes_moved
        _end(process)


def _end(process: subprocess.Popen[bytes]) -> None:
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            pipe.close()
    try:
        process.wait(_END_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def noise_order(noises: Sequence[Noise], *, seed: int) -> list[Noise]:
    """Quiet first and last; the noisy ones shuffled."""
    noisy = [each for each in noises if each.kind != "none"]
    random.Random(seed).shuffle(noisy)
    return [
        Noise(name="C0 first", kind="none"),
        *noisy,
        Noise(name="C0 last", kind="none"),
    ]


def contend(rig: Rig) -> None:
    """Run what is not measured yet. Blocks."""
    contention = rig.session.plan.contention
    if contention is None:
        return
    runner = LoadRunner(rig)
    try:
        for arm in (each for each in rig.session.arms if each.role in contention.roles):
            for noise in noise_order(contention.noises, seed=rig.session.plan.seed):
                place = LoadPlace(0, arm, noise.name, contention.load, contention.traffic, 0)
                if runner.is_measured(place):
                    continue
                with _maker(rig, noise, arm, contention.traffic) as maker:
                    runner.measure(place)
                rig.session.keep_noise(arm.name, noise.name, maker.bytes_moved)
    finally:
        rig.launcher.stop()


def _maker(rig: Rig, noise: Noise, arm: Arm, traffic: Traffic) -> NoiseMaker | SecondEngine:
    if noise.kind == "engine" and not noise.begin:
        return SecondEngine(rig, noise, arm, traffic)
    return NoiseMaker(noise, arm)


def degradation(each: LoadFigures, loads: Sequence[LoadFigures]) -> float | None:
    """Throughput lost against the quiet arms; None where there is nothing to compare with."""
    quiet = [
        other.throughput
        for other in loads
        if other.noise.startswith("C0") and (other.arm, other.load) == (each.arm, each.load)
    ]
    if not quiet or each.noise.startswith("C0"):
        return None
    return 1 - each.throughput / (sum(quiet) / len(quiet))


def _run(command: Sequence[str], arm: Arm) -> None:
    words = [word.replace("{pool}", arm.pool) for word in command]
    try:
        subprocess.run(words, check=True)  # noqa: S603 - the user's own command
    except (OSError, subprocess.CalledProcessError) as error:
        raise KvdepotError(f"the command of a noise failed: {error}") from error
