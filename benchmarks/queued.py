"""A follow-up that waits in the engine's queue, with and without reading ahead for it.

The embedded engine with the small real model. A new document is computed; meanwhile another request
waits whose document is in the pool and nowhere else. Its TTFT counts from where its turn comes. Storage
as it is, and slowed down to a tenth of a GB a second. The arms take turns, forwards and backwards (ABBA).

    python benchmarks/queued.py --out benchmarks/results/queued.json
"""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import numpy as np
from common import WorkFolder, environment, interleave, parser, report, summary

from kvdepot.clock import SystemClock
from kvdepot.config import PoolConfig
from kvdepot.depot import Depot
from kvdepot.engines.transformers.engine import EmbeddedEngine
from kvdepot.engines.transformers.events import FirstToken, Result
from kvdepot.engines.transformers.lookahead import Waiting
from kvdepot.host import host_rows
from kvdepot.identity import Identity
from kvdepot.io.localdisk import LocalDisk
from kvdepot.io.models import small_model
from kvdepot.keys import RequestExtras
from kvdepot.metrics import Counters
from kvdepot.pool.tier import PoolTier
from kvdepot.testing.faults import FaultDisk, FaultPlan
from kvdepot.units import GIB

DOCUMENTS = 3
DOCUMENT_TOKENS = 2048
RUNNING_TOKENS = 512
QUESTION_TOKENS = 16
SLOW_BYTES_PER_S = 100e6
_VOCABULARY = (1000, 40_000)


class Bench:
    """One engine over a pool whose reads can be slowed down."""

    def __init__(self, folder: Path) -> None:
        self.faults = FaultPlan()
        self.folder = folder
        files = small_model()
        self.engine = EmbeddedEngine.open(files.folder, model_name=files.name, depot=self._open)
        self._seeds = itertools.count(1000)
        self.tiers: dict[str, dict[str, int]] = {}
        for document in range(DOCUMENTS):
            self.ask(prompt(document, DOCUMENT_TOKENS, next(self._seeds)))
        self.depot.drain(60)

    @property
    def depot(self) -> Depot:
        assert self.engine.depot is not None
        return self.engine.depot

    def ask(self, ids: list[int]) -> tuple[float, Result]:
        """Seconds to the first token, and the account."""
        first, *_, result = self.engine.generate(ids, max_new_tokens=2, ignore_end=True)
        assert isinstance(first, FirstToken)
        assert isinstance(result, Result)
        return first.ttft_s, result

    def queued(self, name: str, *, is_ahead: bool) -> float:
        """TTFT of a follow-up that waited while a new document was computed.

        Storage that has just become slow is not believed to be so by the first load, which is given up.
        """
        for host in self.depot.hosts:
            host.release(host.reserve(host.row_count))  # nothing but storage has the documents
        seed = next(self._seeds)
        waits = prompt(seed % DOCUMENTS, DOCUMENT_TOKENS, seed)
        waiting = [Waiting(seed, waits, RequestExtras())]
        self.engine.waiting = (lambda: waiting) if is_ahead else None
        self.ask(prompt(seed, RUNNING_TOKENS, seed))
        self.engine.waiting = None
        ttft_s, result = self.ask(waits)
        self.tiers[name] = result.reused_tokens
        return ttft_s

    def _open(self, identity: Identity) -> Depot:
        counters = Counters()
        pool = PoolTier.open(
            PoolConfig.of(str(self.folder)),
            identity,
            disks=[FaultDisk(LocalDisk(self.folder), self.faults)],
            counters=counters,
        )
        hosts = host_rows(identity.block_bytes, GIB)
        return Depot(identity, pool, hosts, counters=counters, clock=SystemClock())


def prompt(document: int, tokens: int, question: int) -> list[int]:
    """Token ids: a document that its number makes, and a question."""
    low, high = _VOCABULARY
    body = np.random.default_rng((7, document)).integers(low, high, tokens - QUESTION_TOKENS)
    tail = np.random.default_rng((11, question)).integers(low, high, QUESTION_TOKENS)
    return [*body.tolist(), *tail.tolist()]


def main() -> None:
    arguments = parser(__doc__ or "").parse_args()
    storages: dict[str, Any] = {}
    with WorkFolder(arguments.folder) as folder:
        bench = Bench(folder)
        for storage, rate in (("as it is", None), ("0.1 GB/s", SLOW_BYTES_PER_S)):
            if rate is not None:
                bench.faults.throttle("read", rate)
            for name in ("ahead", "not"):
                bench.queued(name, is_ahead=name == "ahead")  # costs are learned
            found = interleave(
                {
                    "ahead": lambda: bench.queued("ahead", is_ahead=True),
                    "not": lambda: bench.queued("not", is_ahead=False),
                },
                arguments.repeats,
            )
            medians = {name: summary(values) for name, values in found.items()}
            storages[storage] = {
                "ttft_s": medians,
                "ahead_to_not": medians["ahead"]["median"] / medians["not"]["median"],
                "reused_tokens": dict(bench.tiers),
            }
        bench.faults.clear()
        bench.engine.close()
        result = {
            "benchmark": "queued",
            "unit": "seconds from the turn to the first token",
            "storage": storages,
            "environment": environment(folder),
        }
    report(result, arguments.out)


if __name__ == "__main__":
    main()
