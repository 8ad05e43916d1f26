"""Law 3 for long prompts: no call keeps vLLM's scheduler for a millisecond.

Measured as processor time of the calling thread, which other processes on the machine do not lengthen;
and as the better of a few tries, because the first ones fill caches.
"""

from __future__ import annotations

import gc
import itertools
import time

import numpy as np
import pytest

import tests.needs_vllm  # noqa: F401  # isort: skip

from vllm.v1.kv_offload.base import LookupResult, ScheduleEndContext
from vllm.v1.kv_offload.tiering.base import TransferJob

from kvdepot.engines.vllm.missing import GroupChunks, missing_ends
from tests.vllm_rig import CHUNK_TOKENS, Ask, TierRig

pytestmark = pytest.mark.vllm

CHUNKS = 1000
TRIES = 4
LIMIT_S = 1e-3


class Stopwatch:
    """The longest call of each method in each try, by processor time of this thread."""

    def __init__(self) -> None:
        self.took_s: dict[str, list[float]] = {}

    def next_try(self) -> None:
        for tries in self.took_s.values():
            tries.append(0.0)

    def __call__(self, name, call, *args):
        tries = self.took_s.setdefault(name, [0.0])
        began_s = time.thread_time()
        result = call(*args)
        tries[-1] = max(tries[-1], time.thread_time() - began_s)
        return result

    def slow(self):
        least = {name: min(tries) for name, tries in self.took_s.items()}
        return {name: took_s for name, took_s in least.items() if took_s > LIMIT_S}


@pytest.fixture
def no_collections():
    # vLLM freezes what it has loaded; here a collection would look through all of it in any call
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.mark.usefixtures("no_collections")
@pytest.mark.parametrize("io", ["threads", "process"])
def test_no_call_for_a_thousand_chunks_takes_a_millisecond(tmp_path, io):
    watch = Stopwatch()
    numbers = itertools.count()
    with TierRig(tmp_path / "pool", rows=2 * CHUNKS, io=io) as rig:
        tier = rig.tier

        def finish():
            give_up_s = time.monotonic() + 60
            while not (results := watch("ended", lambda: list(tier.get_finished_jobs()))):
                assert time.monotonic() < give_up_s
                time.sleep(0.005)
            assert all(result.success for result in results)

        def job(ask, *, is_load):
            keys = ask.keys if is_load else set(ask.keys)
            rows = np.arange(CHUNKS, dtype=np.int32)
            return TransferJob(next(numbers), keys, rows, is_load, ask.context)

        def in_pool(ask):
            groups = [GroupChunks(CHUNK_TOKENS, ask.keys)]

            def is_absent(key):
                return rig.primary.lookup(key, ask.context) is LookupResult.MISS

            return len(
                missing_ends(groups, 0, is_absent, lambda keys: tier.held(keys, ask.context))
            )

        for number in range(TRIES):
            watch.next_try()
            ask = Ask(f"prompt {number}", CHUNKS)
            watch("new", tier.on_new_request, ask.context)
            watch("miss", tier.lookup, ask.keys[0], ask.context)
            watch("store", tier.submit_store, job(ask, is_load=False))
            watch("step", tier.on_schedule_end, ScheduleEndContext((), ()))
            finish()
            watch("finished", tier.on_request_finished, ask.context)
            assert tier.pool.drain(60)
            again = Ask(f"prompt {number}", CHUNKS)
            watch("touch", tier.touch, again.keys, again.context)
            again = Ask(f"prompt {number}", CHUNKS)
            assert watch("room", in_pool, again) == CHUNKS
            again = Ask(f"prompt {number}", CHUNKS)
            for key in again.keys:
                assert watch("lookup", tier.lookup, key, again.context) is LookupResult.HIT
            watch("load", tier.submit_load, job(again, is_load=True))
            finish()
            watch("stats", tier.get_stats)
    assert watch.slow() == {}
