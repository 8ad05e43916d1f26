"""Never slower than computing: faults of the storage, with and without the tier, on a fake prefill.

Each arm runs a healthy phase, the fault, and the time after it, over a pool of its own. Follow-ups come
from storage because the host buffer holds a part of the prompts only. "none" is the same engine without
a tier; the two are asked in turn, so that the machine's noise hits both. The bars are those of the laws:
follow-up p95 at most 1.10 of none, first-ask p95 at most 1.05, back within 10 s of the fault's end.
"""

from __future__ import annotations

import errno
import itertools
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

from common import WorkFolder, environment, paired_ratio, parser, percentile, report
from fake_engine import BLOCK_BYTES, Answer, FakeEngine, Prompt, prefill_s

BLOCKS = 48
PROMPTS = 12
MIB = 1 << 20
_ALL_VERBS = ("open", "read", "create", "write", "publish", "files", "touch", "truncate", "space")
_RECOVERY_S_MAX = 30.0
_HANG_S = 30.0
#: loads of 17 ms: noise of a percent needs hundreds
_POLICY_TURNS = 40


@contextmanager
def throttled(engine: FakeEngine, _folder: Path) -> Iterator[None]:
    """Reads at 5 MB/s."""
    engine.faults.throttle("read", 5e6)
    yield
    engine.faults.clear()


@contextmanager
def late(engine: FakeEngine, _folder: Path) -> Iterator[None]:
    """Every 20th read two seconds late."""
    engine.faults.delay("read", 2.0, when=lambda call: call.number % 20 == 0)
    yield
    engine.faults.clear()


@contextmanager
def hung(engine: FakeEngine, _folder: Path) -> Iterator[None]:
    """No call of the file system comes back, until it does."""
    for verb in _ALL_VERBS:
        engine.faults.hold(verb)
    yield
    engine.faults.clear()


@contextmanager
def failing(engine: FakeEngine, _folder: Path) -> Iterator[None]:
    """EIO on a tenth of the reads."""
    engine.faults.fail("read", errno.EIO, share=0.1)
    yield
    engine.faults.clear()


@contextmanager
def full(engine: FakeEngine, _folder: Path) -> Iterator[None]:
    """Nothing more can be stored."""
    for verb in ("create", "write"):
        engine.faults.fail(verb, errno.ENOSPC)
    yield
    engine.faults.clear()


@contextmanager
def storm(_engine: FakeEngine, folder: Path) -> Iterator[None]:
    """Another process stores into the same pool as fast as it can."""
    script = Path(__file__).with_name("storm_child.py")
    child = subprocess.Popen([sys.executable, str(script), str(folder)], stdout=subprocess.PIPE)
    assert child.stdout is not None
    child.stdout.readline()
    try:
        yield
    finally:
        child.kill()
        child.wait()
        child.stdout.close()


@contextmanager
def healthy(_engine: FakeEngine, _folder: Path) -> Iterator[None]:
    """Nothing is wrong."""
    yield


#: fault, and the host buffer as a part of all prompts' bytes
ARMS: dict[str, tuple[Any, float]] = {
    "healthy": (healthy, 0.25),
    "reads at 5 MB/s": (throttled, 0.25),
    "every 20th read 2 s late": (late, 0.25),
    "hangs 30 s": (hung, 0.25),
    "EIO on 10%": (failing, 0.25),
    "pool full": (full, 0.25),
    "writer storm": (storm, 0.25),
    "host buffer of half the prompts": (healthy, 0.5),
}


class Arm:
    """One fault, with the tier and without."""

    def __init__(self, name: str, folder: Path, prompts: list[Prompt], fresh: list[Prompt]) -> None:
        self.name = name
        self.fault, host_share = ARMS[name]
        self.folder = folder
        self.prompts = prompts
        self.fresh = iter(fresh)
        host_bytes = int(PROMPTS * BLOCKS * BLOCK_BYTES * host_share)
        # a storm evicts: room enough that the prompts stay
        self.tier = FakeEngine(folder, host_bytes=host_bytes, capacity_bytes=4 << 30)
        self.none = FakeEngine(folder, host_bytes=host_bytes, policies="none")
        self.first: dict[str, list[float]] = {"none": [], "tier": []}
        self.follow: dict[str, list[float]] = {"none": [], "tier": []}
        self.calls: list[float] = []
        self.answers: list[Answer] = []

    def both(self, prompt: Prompt, into: dict[str, list[float]]) -> Answer:
        """One prompt with the tier, then without."""
        answer = self.tier.ask(prompt)
        into["tier"].append(answer.ttft_s)
        into["none"].append(self.none.ask(prompt).ttft_s)
        self.calls.append(answer.call_s)
        self.answers.append(answer)
        return answer

    def run(self, rounds: int) -> dict[str, Any]:
        """Healthy, then the fault, then until follow-ups come from storage again."""
        try:
            for prompt in self.prompts:
                self.tier.ask(prompt)
            assert self.tier.depot is not None
            self.tier.depot.drain(30)
            for prompt in self.prompts:
                self.tier.ask(prompt)
            began_s = time.monotonic()
            with self.fault(self.tier, self.folder):
                for turn, prompt in enumerate(self.prompts * rounds):
                    self.both(prompt, self.follow)
                    if turn % 4 == 0:
                        self.both(next(self.fresh), self.first)
                while self.fault is hung and time.monotonic() - began_s < _HANG_S:
                    self.both(self.prompts[len(self.calls) % PROMPTS], self.follow)
            recovery_s = self._recover()
            return self._result(recovery_s)
        finally:
            self.tier.close()
            self.none.close()

    def _recover(self) -> float | None:
        """Seconds until a follow-up is served from storage again; None when it takes too long."""
        began_s = time.monotonic()
        for prompt in itertools.cycle(self.prompts):
            asked_s = time.monotonic() - began_s
            if asked_s > _RECOVERY_S_MAX:
                return None
            answer = self.tier.ask(prompt)
            if answer.mode == "load" and answer.reused_blocks == BLOCKS:
                return asked_s
        return None

    def _result(self, recovery_s: float | None) -> dict[str, Any]:
        assert self.tier.depot is not None
        policies = self.tier.depot.policies
        ratios = {
            "follow_up_p50": _ratio(self.follow, 0.5),
            "follow_up_p95": _ratio(self.follow, 0.95),
            "first_ask_p50": _ratio(self.first, 0.5),
            "first_ask_p95": _ratio(self.first, 0.95),
        }
        reasons: dict[str, int] = {}
        for answer in self.answers:
            reasons[answer.reason] = reasons.get(answer.reason, 0) + 1
        return {
            "arm": self.name,
            "follow_ups": len(self.follow["tier"]),
            "first_asks": len(self.first["tier"]),
            "none_follow_up_p50_s": round(statistics.median(self.follow["none"]), 4),
            "tier_follow_up_p50_s": round(statistics.median(self.follow["tier"]), 4),
            "tier_follow_up_p95_s": round(percentile(self.follow["tier"], 0.95), 4),
            "ratios": {name: round(value, 3) for name, value in ratios.items()},
            "recovery_s": None if recovery_s is None else round(recovery_s, 2),
            "scheduler_call_p99_ms": round(percentile(self.calls, 0.99) * 1000, 2),
            "lost_s_max": round(policies.totals().lost_s_max, 3),
            "breaker_openings": policies.breaker.openings,
            "reasons": reasons,
            "within_bars": ratios["follow_up_p95"] <= 1.10
            and ratios["first_ask_p95"] <= 1.05
            and recovery_s is not None
            and recovery_s <= 10.0,
        }


def _ratio(samples: dict[str, list[float]], share: float) -> float:
    return percentile(samples["tier"], share) / percentile(samples["none"], share)


def policies_cost(folder: Path, prompts: list[Prompt], rounds: int) -> dict[str, Any]:
    """A healthy tier with the policies against the same without: they must not cost anything."""
    samples: dict[Literal["on", "off"], list[float]] = {"on": [], "off": []}
    host_bytes = PROMPTS * BLOCKS * BLOCK_BYTES // 4
    engines: dict[Literal["on", "off"], FakeEngine] = {
        "on": FakeEngine(folder / "on", host_bytes=host_bytes),
        "off": FakeEngine(folder / "off", host_bytes=host_bytes, policies="off"),
    }
    for engine in engines.values():
        for prompt in prompts * 2:
            engine.ask(prompt)
        assert engine.depot is not None
        engine.depot.drain(30)
    for turn in range(rounds * _POLICY_TURNS):
        for prompt in prompts:
            names: list[Literal["on", "off"]] = ["on", "off"]
            for name in names if turn % 2 else names[::-1]:
                samples[name].append(engines[name].ask(prompt).ttft_s)
    for engine in engines.values():
        engine.close()
    rows = [([off], [on]) for off, on in zip(samples["off"], samples["on"], strict=True)]
    return {"p50": paired_ratio(rows, 0.5), "p95": paired_ratio(rows, 0.95)}


def partial(folder: Path, prompts: list[Prompt], rounds: int) -> dict[str, Any]:
    """At break-even: compute all, load all, or meet in the middle; real reads, slowed down."""
    tokens = BLOCKS * 16 + 8
    bandwidth = BLOCKS * BLOCK_BYTES / (prefill_s(tokens) - prefill_s(8, BLOCKS * 16))
    found: dict[str, list[float]] = {"compute": [], "load": [], "meet": []}
    modes: list[str] = []
    for name, values in found.items():
        engine = FakeEngine(
            folder / name,
            host_bytes=2 * BLOCKS * BLOCK_BYTES,
            policies={"compute": "none", "load": "off", "meet": "on"}[name],  # type: ignore[arg-type]
            can_meet=name == "meet",
            read_unit_bytes=MIB,
        )
        for prompt in prompts:
            engine.ask(prompt)
        if engine.depot is not None:
            engine.depot.drain(30)
            engine.faults.throttle("read", bandwidth)
        for prompt in prompts * rounds:
            answer = engine.ask(prompt)
            values.append(answer.ttft_s)
            modes += [answer.mode] if name == "meet" else []
        engine.close()
    medians = {name: statistics.median(values) for name, values in found.items()}
    return {
        "bandwidth_mb_per_s": round(bandwidth / 1e6, 1),
        "median_s": {name: round(value, 4) for name, value in medians.items()},
        "meet_of_best": round(medians["meet"] / min(medians["compute"], medians["load"]), 3),
        "modes": {mode: modes.count(mode) for mode in set(modes)},
    }


def main() -> None:
    options = parser(__doc__ or "")
    options.add_argument("--arm", choices=[*ARMS, "policies", "partial"], action="append")
    options.add_argument(
        "--engine",
        choices=["fake", "vllm"],
        default="fake",
        help="vllm takes about a quarter of an hour",
    )
    arguments = options.parse_args()
    wanted: list[str] = arguments.arm or [*ARMS, "policies", "partial"]
    rounds = max(arguments.repeats // 2, 1)
    if arguments.engine == "vllm":
        import do_no_harm_vllm  # noqa: PLC0415 - it needs vLLM, and a root user

        with WorkFolder(arguments.folder) as folder:
            found = do_no_harm_vllm.run(folder, arguments.repeats)
            report(found | {"environment": environment(folder)}, arguments.out)
        return
    maker = FakeEngine(Path(), host_bytes=0, policies="none")
    prompts = [maker.prompt(seed, BLOCKS) for seed in range(PROMPTS)]
    fresh = [maker.prompt(1000 + seed, BLOCKS) for seed in range(3 * rounds + 1)]
    arms: list[dict[str, Any]] = []
    result: dict[str, Any] = {"benchmark": "do_no_harm", "arms": arms}
    extras: dict[str, Callable[[Path, list[Prompt], int], dict[str, Any]]] = {
        "policies": policies_cost,
        "partial": partial,
    }
    with WorkFolder(arguments.folder) as folder:
        for number, name in enumerate(wanted):
            place = folder / str(number)
            place.mkdir()
            if name in ARMS:
                arms.append(Arm(name, place, prompts, fresh).run(rounds))
            else:
                result[name] = extras[name](place, prompts[:4], rounds)
        result["environment"] = environment(folder)
    report(result, arguments.out)


if __name__ == "__main__":
    main()
