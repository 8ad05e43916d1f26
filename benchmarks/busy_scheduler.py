"""The pool's I/O in threads or in a child process, beside a Python thread that is always busy.

The busy thread stands for an engine's scheduler. It spins, so it is the worst case: each call of another
thread that lets go of the interpreter lock waits up to 5 ms to get it back. Per arm and turn:

    restore    one request through a Depot whose host rows are empty, GB/s, with and without a busy thread
    calls      lookup, load and store on the busy thread itself, milliseconds
    slow-down  what the busy thread gets done while requests are read, relative to idle

Arms take turns (ABBA); rates are of payload bytes, read with O_DIRECT where the file system can.

    python benchmarks/busy_scheduler.py --out benchmarks/results/busy_scheduler.json
"""

from __future__ import annotations

import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, Literal, NamedTuple, Self

from common import WorkFolder, chain, environment, identity_for, parser, percentile, report, summary

from kvdepot.config import PoolConfig
from kvdepot.depot import Depot
from kvdepot.identity import Identity
from kvdepot.keys import BlockKey
from kvdepot.tiers import Job, Read, Write
from kvdepot.units import MIB

Mode = Literal["threads", "process"]
MODES: tuple[Mode, ...] = ("threads", "process")
#: what a scheduler does between two calls
STEP_S = 0.002
#: blocks of one load or store call
CALL_BLOCKS = 64


class Case(NamedTuple):
    """What is stored."""

    config: PoolConfig
    identity: Identity
    keys: list[BlockKey]
    root: BlockKey
    block_bytes: int
    calls: int

    @property
    def request_bytes(self) -> int:
        return len(self.keys) * self.block_bytes


class Spinner:
    """A thread that computes in Python and never sleeps; `rate` is what it gets done."""

    def __init__(self) -> None:
        self._stop = threading.Event()
        self._steps = 0
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def rate(self, work: Callable[[], object]) -> float:
        """Steps a second while `work` runs on the calling thread."""
        steps, began = self._steps, time.perf_counter()
        work()
        return (self._steps - steps) / (time.perf_counter() - began)

    def _run(self) -> None:
        while not self._stop.is_set():
            spin(50)
            self._steps += 1


def spin(rounds: int) -> int:
    total = 0
    for number in range(rounds):
        total += number * number
    return total


def main() -> None:
    options = parser(__doc__ or "")
    options.add_argument("--request-bytes", type=int, default=128 * MIB)
    options.add_argument("--block-bytes", type=int, nargs="*", default=(65_536, 368_640))
    options.add_argument("--calls", type=int, default=100, help="calls of each verb a turn")
    args = options.parse_args()
    with WorkFolder(args.folder) as folder:
        sizes = [
            measure(folder / str(size), size, args.request_bytes, args.calls, args.repeats)
            for size in args.block_bytes
        ]
        result = {
            "benchmark": "busy_scheduler",
            "unit": "GB/s of payload, milliseconds, and steps relative to idle; over repeats",
            "request_bytes": args.request_bytes,
            "blocks_per_call": CALL_BLOCKS,
            "sizes": sizes,
            "environment": environment(folder),
        }
    report(result, args.out)


def measure(
    folder: Path, block_bytes: int, request_bytes: int, calls: int, repeats: int
) -> dict[str, Any]:
    """One block size, both arms in turn."""
    folder.mkdir(parents=True)
    identity = identity_for(block_bytes)
    keys, root = chain(identity, max(request_bytes // block_bytes, CALL_BLOCKS))
    case = Case(PoolConfig.of(str(folder / "pool")), identity, keys, root, block_bytes, calls)
    with opened(case, "threads") as depot:
        pattern = bytes(range(256)) * (block_bytes // 256 + 1)
        depot.store(keys, root, lambda _, index, row: fill(row, pattern, index), tokens=16)
        if not depot.drain(120):
            raise RuntimeError("the pool did not take the blocks")
    found: dict[Mode, dict[str, list[float]]] = {mode: defaultdict(list) for mode in MODES}
    for turn in range(repeats):
        for mode in MODES if turn % 2 == 0 else reversed(MODES):
            for name, value in one_turn(case, mode, turn).items():
                found[mode][name].append(value)
    arms = {
        mode: {name: summary(values) for name, values in metrics.items()}
        for mode, metrics in found.items()
    }
    return {
        "block_bytes": block_bytes,
        "blocks": len(keys),
        "arms": arms,
        "process_to_threads": {
            name: arms["process"][name]["median"] / value["median"]
            for name, value in arms["threads"].items()
            if value["median"]
        },
    }


def one_turn(case: Case, mode: Mode, turn: int) -> dict[str, float]:
    """Everything once, for one arm."""
    found = {"restore_quiet_gb_per_s": restore_rate(case, mode)}
    with Spinner():
        found["restore_busy_gb_per_s"] = restore_rate(case, mode)
    with opened(case, mode) as depot:
        found |= busy_rates(case, depot)
    with opened(case, mode) as depot:
        found |= call_spans(case, depot, turn)
    return found


@contextmanager
def opened(case: Case, mode: Mode) -> Iterator[Depot]:
    """A depot with empty host rows for one request and more."""
    host_bytes = case.request_bytes + 4 * CALL_BLOCKS * (case.block_bytes + 4096)
    with Depot.open(case.identity, pool=case.config, host_bytes=host_bytes, io=mode) as depot:
        yield depot


def fill(row: memoryview, pattern: bytes, index: int) -> None:
    row[:] = pattern[: len(row)]
    row[:8] = index.to_bytes(8, "little")


def restore_rate(case: Case, mode: Mode) -> float:
    """From the call to the last verified block in host rows."""
    with opened(case, mode) as depot:
        began = time.perf_counter()
        restore = depot.restore(case.keys)
        good = restore.wait_group(0)
        spent = time.perf_counter() - began
        first = 0
        for start, blocks, rows in restore.runs(0):
            step = rows.nbytes // blocks
            first += blocks
            for index in range(blocks):
                if int.from_bytes(rows[index * step :][:8], "little") != start + index:
                    raise RuntimeError("wrong bytes")
        restore.release()
        if (good, first) != (len(case.keys), len(case.keys)):
            raise RuntimeError("blocks are missing")
    return case.request_bytes / spent / 1e9


def busy_rates(case: Case, depot: Depot) -> dict[str, float]:
    """What the busy thread gets done while the calling thread has a request read."""

    def read() -> None:
        for _ in range(4):
            job = tier_load(depot, case.keys)
            job.wait_settled()
            if job.leading_done != len(case.keys):
                raise RuntimeError("blocks are missing")

    with Spinner() as spinner:
        idle = spinner.rate(lambda: time.sleep(0.5))
        return {"busy_steps_to_idle": spinner.rate(read) / idle}


def call_spans(case: Case, depot: Depot, turn: int) -> dict[str, float]:
    """The calling thread is the busy one: it computes, and now and then calls a verb."""
    pool = depot.pool
    if pool is None:
        raise RuntimeError("no pool")
    spans: dict[str, list[float]] = defaultdict(list)

    def timed(verb: str, call: Callable[[], Any]) -> Any:
        began = time.perf_counter()
        result = call()
        spans[verb].append((time.perf_counter() - began) * 1e3)
        return result

    loading: Job | None = None
    storing: Job | None = None
    rows = depot.hosts[0]
    for number in range(case.calls):
        work_for(STEP_S)
        timed("lookup", lambda: pool.lookup(case.keys))
        if loading is None or loading.is_settled:
            first = number * CALL_BLOCKS % (len(case.keys) - CALL_BLOCKS + 1)
            keys = case.keys[first : first + CALL_BLOCKS]
            reads = [Read(key, rows.row(index)) for index, key in enumerate(keys)]
            loading = timed("load", partial(pool.load, reads))
        if storing is None or storing.is_settled:
            fresh, root = chain(case.identity, CALL_BLOCKS, seed=1 + turn * case.calls + number)
            writes = [
                Write(key, parent, rows.row(CALL_BLOCKS + index), 16)
                for index, (key, parent) in enumerate(zip(fresh, [root, *fresh[:-1]], strict=True))
            ]
            storing = timed("store", partial(pool.store, writes))
    for job in (loading, storing):
        if job is not None:
            job.wait_settled()
    return {
        f"{verb}_ms_{name}": percentile(values, share)
        for verb, values in spans.items()
        for name, share in (("p50", 0.5), ("p99", 0.99))
    }


def work_for(seconds: float) -> None:
    """Compute without a pause."""
    until = time.perf_counter() + seconds
    while time.perf_counter() < until:
        spin(50)


def tier_load(depot: Depot, keys: Sequence[BlockKey]) -> Job:
    """Read into the host rows past the host tier, so that every time is the first."""
    if depot.pool is None:
        raise RuntimeError("no pool")
    rows = depot.hosts[0]
    return depot.pool.load([Read(key, rows.row(index)) for index, key in enumerate(keys)])


if __name__ == "__main__":
    main()
