"""How many requests a second the simulator replays: one million by default.

A trace in Mooncake's format is repeated copy after copy; without one, a trace of the same shape is made:
one shared system block, three quarters of the blocks asked once, the rest continued by later turns.
"""

from __future__ import annotations

import argparse
import json
import random
import resource
import time
from pathlib import Path

from common import environment

from kvdepot.sim.settings import Prefill, SimSettings
from kvdepot.sim.trace import TraceRequest, read_trace, repeated
from kvdepot.sim.world import simulate


def made(count: int, seed: int = 1) -> list[TraceRequest]:
    """Conversations of a few turns each, as in the public traces."""
    source = random.Random(seed)
    found: list[TraceRequest] = []
    open_turns: list[list[int]] = []
    next_id = 1
    for number in range(count):
        if open_turns and source.random() < 0.4:
            ids = open_turns[source.randrange(len(open_turns))]
        else:
            ids = [0]
            open_turns.append(ids)
            del open_turns[:-200]
        fresh = max(int(source.expovariate(1 / 14)), 1)
        ids.extend(range(next_id, next_id + fresh))
        next_id += fresh
        found.append(TraceRequest(number * 0.3, 512 * len(ids) + 100, 300, list(ids)))
        if len(ids) > 200:
            open_turns.remove(ids)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--trace", type=Path, help="JSON lines in Mooncake's format")
    parser.add_argument("--requests", type=int, default=1_000_000)
    arguments = parser.parse_args()
    if arguments.trace is None:
        copy = made(2000)
    else:
        with arguments.trace.open("rb") as lines:
            copy = list(read_trace(lines))
    settings = SimSettings(
        prefill=Prefill(0.01, 4e-5, 1e-10),
        instances=4,
        device_bytes=64 << 30,
        host_bytes=256 << 30,
        disk_bytes=16 << 40,
        read_bytes_per_s=6e9,
        can_meet=True,
    )
    began_s, cpu_s = time.monotonic(), time.process_time()
    result = simulate(repeated(copy, arguments.requests), settings)
    cpu_s, wall_s = time.process_time() - cpu_s, time.monotonic() - began_s
    blocks = sum(len(request.block_ids) for request in copy) / len(copy)
    print(
        json.dumps(
            {
                "benchmark": "simulate_scale",
                "requests": result.requests,
                "trace": arguments.trace.name if arguments.trace else "made",
                "blocks_per_request": round(blocks, 1),
                "cpu_s": round(cpu_s, 1),
                "wall_s": round(wall_s, 1),
                "requests_per_cpu_s": round(result.requests / cpu_s),
                "peak_memory_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024,
                "token_share": round(result.token_share, 4),
                "modes": result.modes,
                "environment": environment(),
            }
        )
    )


if __name__ == "__main__":
    main()
