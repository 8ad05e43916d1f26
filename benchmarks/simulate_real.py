"""The simulator against a real run: the same requests through both, TTFT p50 and p95 side by side.

The real run is a depot over a real pool whose reads are slowed to a known rate, under an engine whose prefill
is a wait of known length. The simulator is told the rate and the prefill, and nothing else.
"""

from __future__ import annotations

import random
import time
from typing import Any

from common import WorkFolder, environment, parser, percentile, report
from fake_engine import BLOCK_BYTES, BLOCK_TOKENS, FakeEngine, Prompt, prefill_terms

from kvdepot.sim.settings import Prefill, SimSettings
from kvdepot.sim.trace import TraceRequest
from kvdepot.sim.world import simulate

_BLOCKS_MAX = 160
#: conversations that are asked in turn
_FAMILIES = 6
_HOST_BLOCKS = 256


def requests(count: int, seed: int = 7) -> list[tuple[int, int]]:
    """(conversation, blocks) of each request: some grow, some come back as they were."""
    source = random.Random(seed)
    length = [source.randrange(24, 64) for _ in range(_FAMILIES)]
    found: list[tuple[int, int]] = []
    for _ in range(count):
        family = source.randrange(_FAMILIES)
        if source.random() < 0.5:
            length[family] = min(length[family] + source.randrange(4, 24), _BLOCKS_MAX)
        found.append((family, length[family]))
    return found


def main() -> None:
    options = parser(__doc__ or "")
    options.add_argument("--bandwidth", type=float, default=60e6, help="bytes a second of reads")
    options.add_argument("--meet", action="store_true", help="compute and read at once")
    arguments = options.parse_args()
    asked = requests(10 * arguments.repeats)
    with WorkFolder(arguments.folder) as folder:
        engine = FakeEngine(
            folder / "pool",
            host_bytes=_HOST_BLOCKS * BLOCK_BYTES,
            can_meet=arguments.meet,
            read_unit_bytes=1 << 20,
        )
        whole = [engine.prompt(family, _BLOCKS_MAX) for family in range(_FAMILIES)]
        engine.faults.throttle("read", arguments.bandwidth)
        real: list[float] = []
        for family, blocks in asked:
            prompt = whole[family]
            tokens = [*prompt.tokens[: blocks * BLOCK_TOKENS], *prompt.tokens[-8:]]
            part = Prompt(tokens, prompt.keys[:blocks], prompt.payload[:blocks])
            real.append(engine.ask(part).ttft_s)
            # as in the trace, nobody asks before the last one's blocks are stored
            time.sleep(0.02)
        engine.close()
        settings = SimSettings(
            prefill=Prefill(*prefill_terms()),
            block_tokens=BLOCK_TOKENS,
            token_bytes=BLOCK_BYTES // BLOCK_TOKENS,
            host_bytes=_HOST_BLOCKS * BLOCK_BYTES,
            read_bytes_per_s=arguments.bandwidth,
            read_latency_s=0.001,
            can_meet=arguments.meet,
        )
        trace = [
            TraceRequest(
                60.0 * number,
                blocks * BLOCK_TOKENS + 8,
                1,
                list(range(family * 1000, family * 1000 + blocks)),
            )
            for number, (family, blocks) in enumerate(asked)
        ]
        predicted = simulate(trace, settings)
        found = {"p50": percentile(real, 0.5), "p95": percentile(real, 0.95)}
        expected = {"p50": predicted.ttft_s.p50, "p95": predicted.ttft_s.p95}
        result: dict[str, Any] = {
            "benchmark": "simulate_real",
            "requests": len(asked),
            "bandwidth_mb_per_s": arguments.bandwidth / 1e6,
            "can_meet": arguments.meet,
            "real_s": {name: round(value, 4) for name, value in found.items()},
            "simulated_s": {name: round(value, 4) for name, value in expected.items()},
            "ratio": {name: round(expected[name] / found[name], 3) for name in found},
            "modes": predicted.modes,
            "environment": environment(folder),
        }
    report(result, arguments.out)


if __name__ == "__main__":
    main()
