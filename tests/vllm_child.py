"""A process that runs one vLLM engine for a test: settings in as JSON, what happened out as JSON.

Run as ``python -m tests.vllm_child SETTINGS``. The engine's connector is a subclass that also notes a
digest of every row as it is stored and as it was loaded.
"""

from __future__ import annotations

import hashlib
import importlib
import json
import os
import sys
import threading
import time
import warnings
from typing import Any

warnings.simplefilter("ignore")

import msgspec  # noqa: E402
from vllm.v1.kv_offload.tiering.base import JobResult, TransferJob  # noqa: E402

from kvdepot.engines.vllm import CPU_SPEC, extras  # noqa: E402
from kvdepot.engines.vllm.connector import KvdepotConnector  # noqa: E402
from kvdepot.engines.vllm.patience import Patience, Wait  # noqa: E402
from kvdepot.engines.vllm.tier import KvdepotTier  # noqa: E402
from kvdepot.io.localdisk import LocalDisk  # noqa: E402
from kvdepot.pool.tier import PoolTier  # noqa: E402
from kvdepot.testing.faults import FaultDisk, FaultPlan  # noqa: E402
from kvdepot.urls import distinct_roots  # noqa: E402

#: (key, digest of its row)
STORED: dict[str, str] = {}
LOADED: dict[str, str] = {}
CONNECTORS: list[NotingConnector] = []
#: what is wrong with the pool's disk, for tests that break it
PLAN: list[FaultPlan] = []


class AlwaysLoads(Patience):
    """A tiny model computes faster than anything loads; here it is the loading that is looked at."""

    def may_load(self, request):
        del request
        return True

    def compute_s(self, tokens, position, length_bytes):
        return tokens * 0.05

    def wait_for(self, request, chunks, tokens, length_bytes):
        super().wait_for(request, chunks, tokens, length_bytes)
        return Wait(self._deadline_s(length_bytes), is_probe=False)


class NotingTier(KvdepotTier):
    """Notes the rows' content at the hand-over, both ways."""

    def __init__(self, *args: Any, **settings: Any) -> None:
        super().__init__(*args, **settings)
        self.patience = AlwaysLoads(self.deadline_s, counters=self.counters, clock=self._clock)
        self.noted: dict[int, TransferJob] = {}

    def submit_store(self, job_metadata):
        STORED.update(self._digests(job_metadata))
        super().submit_store(job_metadata)

    def submit_load(self, job_metadata):
        self.noted[job_metadata.job_id] = job_metadata
        super().submit_load(job_metadata)

    def get_finished_jobs(self):
        results: list[JobResult] = list(super().get_finished_jobs())
        for result in results:
            job = self.noted.pop(result.job_id, None)
            if job is not None:
                good = job.keys if result.success else result.successful_keys or ()
                names = {key.hex() for key in good}
                LOADED.update((k, d) for k, d in self._digests(job) if k in names)
        return results

    def _digests(self, job):
        rows = self.region.rows(job.chunk_ids)
        for key, row in zip(job.keys, rows, strict=True):
            yield key.hex(), hashlib.sha256(row).hexdigest()

    def _open_pool(self, identity):
        """With reads that a test may delay or hold, where it asks for that."""
        if not PLAN:
            return super()._open_pool(identity)
        self._digest = identity.digest()
        disks = [
            FaultDisk(LocalDisk(url.path), PLAN[0])
            for url in distinct_roots(self.settings.pool.urls)
        ]
        return PoolTier.open(self.settings.pool, identity, disks=disks, counters=self.counters)


class NotingConnector(KvdepotConnector):
    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        CONNECTORS.append(self)


def transfer_config(settings: dict[str, Any]) -> dict[str, Any]:
    tier = {
        "type": "NotingTier",
        "module_path": "tests.vllm_child",
        "urls": [f"file://{settings['pool']}"],
        "capacity": "1GiB",
        "free_bytes_min": 0,
        "segment_age_s": 0.2,
        "load_deadline_s": 120.0,
        **settings.get("tier", {}),
    }
    extra = {
        "spec_name": CPU_SPEC[0],
        "spec_module_path": CPU_SPEC[1],
        "cpu_bytes_to_use": 32 << 20,
        "secondary_tiers": [tier],
        **settings.get("extra", {}),
    }
    return {
        "kv_connector": "NotingConnector",
        "kv_connector_module_path": "tests.vllm_child",
        "kv_role": "kv_both",
        "kv_connector_extra_config": extra,
    }


def prompt(seed: int, length: int) -> list[int]:
    digest = hashlib.shake_128(str(seed).encode()).digest(length)
    return list(digest)


def run(settings: dict[str, Any]) -> dict[str, Any]:
    from vllm import LLM, SamplingParams
    from vllm.config import KVTransferConfig

    if "read_s" in settings or any("abort_after_s" in ask for ask in settings["asks"]):
        PLAN.append(FaultPlan())
        PLAN[0].delay("read", settings.get("read_s", 0.0))
    began_s = time.monotonic()
    llm = LLM(
        model=settings["model"],
        dtype="float32",
        enforce_eager=True,
        disable_log_stats=False,
        kv_transfer_config=KVTransferConfig(**transfer_config(settings)),
        **{"max_model_len": 2048, "block_size": 16, **settings.get("engine", {})},
    )
    ready_s = time.monotonic() - began_s
    sampling = SamplingParams(temperature=0, max_tokens=settings.get("tokens", 6), ignore_eos=True)
    answers: list[dict[str, Any]] = []
    for ask in settings["asks"]:
        given: Any = {"prompt_token_ids": prompt(ask["seed"], ask["length"])}
        if "salt" in ask:
            given["cache_salt"] = ask["salt"]
        lora = lora_request(ask["lora"]) if "lora" in ask else None
        if "abort_after_s" in ask:
            abort(llm, given, sampling, ask["abort_after_s"])
            continue
        began_s = time.monotonic()
        prompts = [given] + [
            {"prompt_token_ids": prompt(seed, ask["length"])} for seed in ask.get("beside", ())
        ]
        answers += [
            {
                "cached": done.num_cached_tokens,
                "tokens": list(done.outputs[0].token_ids),
                "took_s": time.monotonic() - began_s,
            }
            for done in llm.generate(prompts, sampling, use_tqdm=False, lora_request=lora)
        ]
        if "pause_s" in ask:
            time.sleep(ask["pause_s"])
            wait_until_quiet()
    found: dict[str, Any] = {"answers": answers, "ready_s": ready_s}
    for connector in CONNECTORS:
        for tier in connector.tiers:
            if tier.pool is not None:
                wait_until_stored(tier)
            identity = tier._opening.identity if tier._opening is not None else None
            found["identity"] = identity and msgspec.to_builtins(identity)
            found["refusal"] = tier._opening.refusal if tier._opening is not None else None
            found["counters"] = tier.counters.snapshot()
            found["errors"] = tier.times.errors
            found["calls"] = {name: tier.times.calls(name) for name in tier.times.counts}
    found["metrics"] = metrics()
    llm.llm_engine.engine_core.shutdown()
    return {**found, "stored": STORED, "loaded": LOADED}


def wait_until_quiet() -> None:
    """Until nothing of the requests so far is still to be done beside the engine."""
    give_up_s = time.monotonic() + 60
    for connector in CONNECTORS:
        for tier in connector.tiers:
            if tier.pool is not None:
                wait_until_stored(tier)
        while (check := connector._adapters._last) is not None and not check.is_over:
            assert time.monotonic() < give_up_s, "nobody looks at an adapter's files"
            time.sleep(0.01)


def wait_until_stored(tier: KvdepotTier) -> None:
    """Until all stores are in the pool; loads may hang."""
    give_up_s = time.monotonic() + 60
    while not all(job.is_settled for job in tier.jobs._moving.values() if not job.is_load):
        assert time.monotonic() < give_up_s, "a store does not end"
        time.sleep(0.01)
    assert tier.pool is not None
    assert tier.pool.drain(60)


def abort(llm: Any, given: Any, sampling: Any, after_s: float) -> None:
    """Begin a request and take it back while its blocks are being loaded.

    What was being read then goes on a little later, beside the next request.
    """
    PLAN[0].hold("read")
    engine = llm.llm_engine
    (tier,) = CONNECTORS[-1].tiers
    engine.add_request("to be aborted", given, sampling)
    give_up_s = time.monotonic() + 60
    while not len(tier.jobs):
        assert time.monotonic() < give_up_s, "no load began"
        engine.step()
    until_s = time.monotonic() + after_s
    while time.monotonic() < until_s:
        engine.step()
    assert len(tier.jobs), "the load is over already"
    (number,) = engine.output_processor.request_states
    engine.abort_request([number], internal=True)
    threading.Timer(0.5, PLAN[0].clear).start()  # lets go of what is held


def metrics() -> dict[str, float]:
    """All metrics that vLLM shows, by name and labels."""
    found = {}
    for family in importlib.import_module("prometheus_client").REGISTRY.collect():
        for sample in family.samples:
            told = {k: v for k, v in sample.labels.items() if k not in ("model_name", "engine")}
            found[" ".join([sample.name, *told.values()])] = sample.value
    return found


def lora_request(given: dict[str, Any]) -> Any:
    from vllm.lora.request import LoRARequest

    return LoRARequest(given["name"], given["id"], given["path"])


def main() -> None:
    extras._PATIENCE_S = 60.0  # whoever is tested here is not the machine
    sys.modules["tests.vllm_child"] = sys.modules["__main__"]
    result = run(json.loads(sys.argv[1]))
    # vLLM writes to stdout as well
    with open(os.environ["KVDEPOT_TEST_RESULT"], "w") as file:
        json.dump(result, file)


if __name__ == "__main__":
    main()
