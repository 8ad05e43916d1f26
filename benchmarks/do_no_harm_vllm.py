"""Never slower than computing, with vLLM's CPU build: faults of a real mount under its own tier and ours.

One engine for each arm (no tier, vLLM's fs tier, kvdepot) lives through all faults, one after the other.
The host tier holds half of the documents, and the device one and a half, so that follow-ups come from
storage, which is a FUSE mount that hangs, fails and slows down on command. It needs root.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path
from typing import Any

import msgspec
from common import percentile
from vllm_tiers import (
    ENGINE_BLOCK_TOKENS,
    TOKEN_BYTES,
    Ask,
    engine,
    make_llm,
    prompt_of,
    ttft_s,
    wait_until_stored,
)

from kvdepot.io.models import small_model
from kvdepot.testing.fusemount import FaultMount, MountFaults, why_not

ARMS = ("none", "fs", "kvdepot")
DOCUMENTS = 6
TOKENS = 512
ANSWER_TOKENS = 8
HANG_S = 30.0
#: a follow-up of which so much was reused came from storage
_REUSED_SHARE = 0.9
_RECOVERY_S_MAX = 20.0
FAULTS = {
    "healthy": MountFaults(),
    "hangs 30 s": MountFaults(hang_s=HANG_S),
    "EIO on 10%": MountFaults(fail_every=10),
    "reads at 5 MB/s": MountFaults(read_bytes_per_s=5e6),
}


def run(folder: Path, rounds: int) -> dict[str, Any]:
    """All arms; the result for one JSON."""
    if reason := why_not():
        raise SystemExit(f"no mount can be made here: {reason}")
    small_model()
    host_bytes = DOCUMENTS * TOKENS * TOKEN_BYTES // 2
    runs = {
        arm: engine(arm, folder / arm, script=__file__, host_bytes=host_bytes, rounds=rounds)
        for arm in ARMS
    }
    computed = runs["none"]["healthy"]
    arms = []
    for fault in FAULTS:
        for arm in ("fs", "kvdepot"):
            found = runs[arm][fault]
            ratios = {
                f"{kind}_p{round(100 * share)}": percentile(found[kind], share)
                / percentile(computed[kind], share)
                for kind in ("follow_up", "first_ask", "token_gap")
                for share in (0.5, 0.95)
            }
            arms.append(
                {
                    "arm": arm,
                    "fault": fault,
                    "follow_ups": len(found["follow_up"]),
                    "first_asks": len(found["first_ask"]),
                    "follow_up_p50_s": round(statistics.median(found["follow_up"]), 4),
                    "follow_up_p95_s": round(percentile(found["follow_up"], 0.95), 4),
                    "of_no_tier": {name: round(value, 3) for name, value in ratios.items()},
                    "recovery_s": found["recovery_s"],
                }
            )
    return {
        "benchmark": "do_no_harm with vLLM",
        "unit": "seconds; ratios to the same percentile of an engine without a tier",
        "no_tier": {
            kind: {"p50": statistics.median(values), "p95": percentile(values, 0.95)}
            for kind, values in computed.items()
            if isinstance(values, list)
        },
        "arms": arms,
    }


class Child:
    """One engine, asked one prompt after the other."""

    def __init__(self, arm: str, place: Path, host_bytes: int) -> None:
        from vllm import SamplingParams  # noqa: PLC0415

        self.arm = arm
        self.llm = make_llm(
            arm,
            place,
            host_bytes,
            tokens_max=TOKENS,
            # one block is vLLM's own
            num_gpu_blocks_override=TOKENS * 3 // 2 // ENGINE_BLOCK_TOKENS + 1,
        )
        self.sampling = SamplingParams(max_tokens=ANSWER_TOKENS, temperature=0, ignore_eos=True)
        self.asked = 0
        self.fresh = 1000

    def ask(self, document: int, tokens: int = TOKENS) -> tuple[float, float, int]:
        """TTFT, mean seconds between the answer's tokens, and tokens that were not computed."""
        self.asked += 1
        prompt: Any = {"prompt_token_ids": prompt_of(Ask(document, self.asked, tokens))}
        (output,) = self.llm.generate([prompt], self.sampling, use_tqdm=False)
        metrics = output.metrics
        gap_s = (metrics.last_token_ts - metrics.first_token_ts) / (ANSWER_TOKENS - 1)
        return ttft_s(output), gap_s, output.num_cached_tokens or 0

    def phase(self, rounds: int, until_s: float = 0.0) -> dict[str, Any]:
        """Follow-ups about all documents, a first ask after every third; so many rounds, and so long."""
        found: dict[str, Any] = {"follow_up": [], "first_ask": [], "token_gap": []}
        turn = 0
        while turn < rounds * DOCUMENTS or time.monotonic() < until_s:
            waited_s, gap_s, _ = self.ask(turn % DOCUMENTS)
            found["follow_up"].append(waited_s)
            found["token_gap"].append(gap_s)
            turn += 1
            if turn % 3 == 0:
                self.fresh += 1
                waited_s, gap_s, _ = self.ask(self.fresh)
                found["first_ask"].append(waited_s)
                found["token_gap"].append(gap_s)
        return found

    def recovery_s(self) -> float | None:
        """Seconds until a follow-up comes from storage again; None when it takes too long."""
        began_s = time.monotonic()
        turn = 0
        while (asked_s := time.monotonic() - began_s) < _RECOVERY_S_MAX:
            if self.ask(turn % DOCUMENTS)[2] >= _REUSED_SHARE * TOKENS:
                return round(asked_s, 2)
            turn += 1
        return None


def child(given: dict[str, Any]) -> None:
    """One engine through all faults of its mount."""
    place = Path(given["place"])
    behind, mounted = place / "behind", place / "mount"
    behind.mkdir()
    mounted.mkdir()
    with FaultMount.start(behind, mounted) as mount:
        asker = Child(given["arm"], mounted / "pool", given["host_bytes"])
        for turn in range(3):
            asker.ask(-1 - turn, 128)
        for document in range(DOCUMENTS):
            asker.ask(document)
        wait_until_stored(behind)
        result: dict[str, Any] = {}
        for name, faults in FAULTS.items():
            if given["arm"] == "none" and name != "healthy":
                continue
            asker.phase(1)  # costs are learned, and the last fault is over
            mount.set(faults)
            until_s = time.monotonic() + faults.hang_s
            found = asker.phase(given["rounds"], until_s)
            mount.set(MountFaults())
            found["recovery_s"] = asker.recovery_s() if given["arm"] != "none" else None
            result[name] = found
    Path(given["answer"]).write_bytes(msgspec.json.encode(result))


if __name__ == "__main__":
    options = argparse.ArgumentParser()
    options.add_argument("--child", required=True)
    child(json.loads(options.parse_args().child))
