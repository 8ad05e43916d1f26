"""Never slower than computing, with vLLM's CPU build: faults of a real mount under its own tier and ours.

Three engines stay up together: without a tier, with vLLM's fs tier, with kvdepot. Each tier is compared
with the engine without one in a run of their own, in which the two are asked the same in turn, so that the
machine's noise and a fault's own load hit both. The host tier holds half of the documents, and the device
one and a half, so that follow-ups come from storage: a FUSE mount that misbehaves on command, and needs
root. Started by ``do_no_harm.py --engine vllm``.
"""

from __future__ import annotations

import random
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from common import paired_ratio
from vllm_engine import (
    ENGINE_BLOCK_TOKENS,
    TOKEN_BYTES,
    Answer,
    Ask,
    Engine,
    calls_of,
    wait_until_stored,
)

from kvdepot.io.models import small_model
from kvdepot.testing.fusemount import FaultMount, MountFaults, why_not

DOCUMENTS = 6
TOKENS = 512
ANSWER_TOKENS = 8
HANG_S = 30.0
#: of half of the documents
_HOST_BYTES = DOCUMENTS * TOKENS * TOKEN_BYTES // 2
#: a follow-up of which so much was read came from storage
_READ_SHARE = 0.9
_RECOVERY_S_MAX = 30.0
_STORM_FILES = 32
_STORM_BYTES = 4 << 20


class Fault(NamedTuple):
    """What is wrong while an arm is measured."""

    mount: MountFaults = MountFaults()
    #: another process writes to the same mount as fast as it can
    is_storm: bool = False


FAULTS = {
    "healthy": Fault(),
    "reads at 5 MB/s": Fault(MountFaults(read_bytes_per_s=5e6)),
    "every 20th read 2 s late": Fault(MountFaults(late_every=20, late_s=2.0)),
    "hangs 30 s": Fault(MountFaults(hang_s=HANG_S)),
    "EIO on 10%": Fault(MountFaults(fail_every=10)),
    "full": Fault(MountFaults(is_full=True)),
    "writer storm": Fault(is_storm=True),
}


def run(folder: Path, rounds: int) -> dict[str, Any]:
    """All faults for both tiers; the result for one JSON. Takes about a minute a fault and tier."""
    if reason := why_not():
        raise SystemExit(f"no mount can be made here: {reason}")
    small_model()
    arms = []
    with ExitStack() as stack:
        engines = {"none": _engine("none", folder / "none", folder)}
        mounts = {}
        for arm in ("fs", "kvdepot"):
            behind, mounted = folder / f"{arm}-behind", folder / f"{arm}-mount"
            behind.mkdir()
            mounted.mkdir()
            mounts[arm] = stack.enter_context(FaultMount.start(behind, mounted))
            engines[arm] = _engine(arm, mounted / "pool", folder)
        for each in engines.values():
            stack.enter_context(each)
        for arm, mount in mounts.items():
            pair = Pair(engines["none"], engines[arm], mount)
            pair.begin(folder / f"{arm}-behind")
            for name, fault in FAULTS.items():
                # vLLM's own takes seconds for each request where reads are slow
                turns = rounds if arm == "kvdepot" else max(rounds // 4, 1)
                arms.append({"arm": arm, "fault": name} | pair.under(fault, turns))
                _say(arms[-1])
    return {
        "benchmark": "do_no_harm with vLLM",
        "unit": "seconds; ratios to the engine without a tier, with 90 % bootstrap intervals",
        "documents": DOCUMENTS,
        "prompt_tokens": TOKENS,
        "host_bytes": _HOST_BYTES,
        "arms": arms,
    }


class Pair:
    """An engine with a tier and one without, asked the same."""

    def __init__(self, none: Engine, tier: Engine, mount: FaultMount) -> None:
        self.engines = (none, tier)
        self.mount = mount
        self.asked = 0
        #: documents that nobody has asked for
        self.fresh = 1000 if tier.arm == "fs" else 2000
        self.answers_differ = 0
        self._random = random.Random(7)

    def begin(self, behind: Path) -> None:
        """Warm up, and store the documents."""
        for turn in range(3):
            self.both(-1 - turn)
        for document in range(DOCUMENTS):
            self.both(document)
        wait_until_stored(behind)

    def both(self, document: int) -> tuple[Answer, Answer]:
        """One prompt, without the tier and with it.

        Whoever was asked last is quicker, by a tenth, so who is first is drawn.
        """
        self.asked += 1
        order = self._random.choice((1, -1))
        found = [self._ask(each, document) for each in self.engines[::order]]
        without, answer = found[::order]
        self.answers_differ += without.tokens != answer.tokens
        return without, answer

    def under(self, fault: Fault, rounds: int) -> dict[str, Any]:
        """A healthy round, the fault, and the time after it."""
        for document in range(DOCUMENTS):
            self.both(document)  # costs are learned, and the last fault is over
        follow_ups: list[tuple[Answer, Answer]] = []
        first_asks: list[tuple[Answer, Answer]] = []
        before, self.answers_differ = self.engines[1].scheduler_calls(), 0
        self.mount.set(fault.mount)
        until_s = time.monotonic() + fault.mount.hang_s
        with storm(self.mount.place) if fault.is_storm else ExitStack():
            while len(follow_ups) < rounds * DOCUMENTS or time.monotonic() < until_s:
                follow_ups.append(self.both(len(follow_ups) % DOCUMENTS))
                if len(follow_ups) % 3 == 0:
                    self.fresh += 1
                    first_asks.append(self.both(self.fresh))
        calls = calls_of([_since(before, self.engines[1].scheduler_calls())])
        self.mount.set(MountFaults())
        recovery_s = self._recovery_s()
        return {
            "follow_up": _compared(follow_ups, lambda answer: [answer.ttft_s]),
            "first_ask": _compared(first_asks, lambda answer: [answer.ttft_s]),
            "token_gap": _compared(first_asks + follow_ups, lambda answer: answer.gaps_s),
            "reused_share": round(
                sum(answer.cached for _, answer in follow_ups) / (len(follow_ups) * TOKENS), 3
            ),
            "recovery_s": recovery_s,
            "scheduler_calls": calls,
            "answers_that_differ": self.answers_differ,
        }

    def _recovery_s(self) -> float | None:
        """Seconds until a follow-up comes from storage; None when it takes too long."""
        began_s = time.monotonic()
        turn = 0
        while (asked_s := time.monotonic() - began_s) < _RECOVERY_S_MAX:
            self.asked += 1
            before = self.engines[1].tokens_by_source()["disk"]
            self._ask(self.engines[1], turn % DOCUMENTS)
            # what landed late is in the host tier, and says nothing about storage
            if self.engines[1].tokens_by_source()["disk"] - before >= _READ_SHARE * TOKENS:
                return round(asked_s, 2)
            turn += 1
        return None

    def _ask(self, engine: Engine, document: int) -> Answer:
        (answer,) = engine.ask([Ask(document, self.asked, TOKENS)], answer_tokens=ANSWER_TOKENS)
        return answer


def _engine(arm: str, place: Path, folder: Path) -> Engine:
    return Engine(
        arm,
        place,
        # not on the mount, which hangs
        folder / f"{arm}.log",
        host_bytes=_HOST_BYTES,
        tokens_max=TOKENS,
        # one block is vLLM's own
        num_gpu_blocks_override=TOKENS * 3 // 2 // ENGINE_BLOCK_TOKENS + 1,
    )


def _since(before: dict[str, float], now: dict[str, float]) -> dict[str, float]:
    return {name: value - before.get(name, 0.0) for name, value in now.items()}


def _compared(
    pairs: Sequence[tuple[Answer, Answer]], values_of: Callable[[Answer], list[float]]
) -> dict[str, Any]:
    """Quantiles without the tier and with it, in seconds, and their ratios."""
    rows = [(values_of(without), values_of(with_tier)) for without, with_tier in pairs]
    return {"p50": paired_ratio(rows, 0.5), "p95": paired_ratio(rows, 0.95)}


@contextmanager
def storm(place: Path) -> Iterator[None]:
    """Another process writes files below a folder as fast as it can, some of them over and over."""
    child = subprocess.Popen([sys.executable, __file__, str(place / "storm")])
    try:
        yield
    finally:
        child.kill()
        child.wait()


def write_without_end(folder: Path) -> None:
    """The process of a storm."""
    folder.mkdir(exist_ok=True)
    data = np.random.default_rng(1).bytes(_STORM_BYTES)
    turn = 0
    while True:
        (folder / f"{turn % _STORM_FILES}").write_bytes(data)
        turn += 1


def _say(arm: dict[str, Any]) -> None:
    ratios = {
        kind: {name: arm[kind][name]["ratio"] for name in ("p50", "p95")}
        for kind in ("follow_up", "first_ask", "token_gap")
    }
    sys.stderr.write(
        f"{arm['arm']}, {arm['fault']}: {ratios}, reused {arm['reused_share']}, "
        f"back after {arm['recovery_s']} s\n"
    )


if __name__ == "__main__":
    write_without_end(Path(sys.argv[1]))
