"""Which vLLM this adapter was tested with, and whether the one at hand has what it needs."""

from __future__ import annotations

import importlib
import inspect
import logging
import re
from typing import Any

__all__ = ["TESTED", "check_interface", "interface_faults", "is_tested"]

log = logging.getLogger(__name__)

#: first tested version, and the first that was not
TESTED = ("0.32.0", "0.33.0")

#: (module, name): what must exist
_NAMES = [
    ("vllm.v1.kv_offload.base", "OffloadKey"),
    ("vllm.v1.kv_offload.base", "ReqContext.set_offload_key_position"),
    ("vllm.v1.kv_offload.base", "ReqContext.get_offload_key_position"),
    ("vllm.v1.kv_offload.base", "ReqContext.get_state"),
    ("vllm.v1.kv_offload.base", "LookupResult.HIT_PENDING"),
    ("vllm.v1.kv_offload.base", "Medium.STORAGE"),
    ("vllm.v1.kv_offload.tiering.base", "SecondaryTierManager.drain_jobs"),
    ("vllm.v1.kv_offload.tiering.manager", "TieringOffloadingManager.lookup"),
    ("vllm.v1.core.kv_cache_utils", "get_none_hash_seed"),
]
#: (module, callable, parameters that we pass or take by name)
_PARAMETERS = [
    (
        "vllm.v1.kv_offload.tiering.base",
        "SecondaryTierManager.__init__",
        ("offloading_spec", "primary_kv_view", "tier_type", "backpressure_detector"),
    ),
    ("vllm.v1.kv_offload.tiering.base", "SecondaryTierManager.lookup", ("key", "req_context")),
    ("vllm.v1.kv_offload.tiering.base", "SecondaryTierManager.submit_load", ("job_metadata",)),
    ("vllm.v1.kv_offload.tiering.base", "SecondaryTierManager.submit_store", ("job_metadata",)),
    (
        "vllm.v1.kv_offload.tiering.base",
        "JobResult.__init__",
        ("job_id", "success", "successful_keys", "transfer_time", "transfer_bytes"),
    ),
    (
        "vllm.v1.kv_offload.tiering.base",
        "TransferJob.__init__",
        ("job_id", "keys", "chunk_ids", "is_promotion", "req_context"),
    ),
    (
        "vllm.distributed.kv_transfer.kv_connector.v1.offloading_connector",
        "OffloadingConnector.__init__",
        ("vllm_config", "role", "kv_cache_config"),
    ),
    (
        "vllm.distributed.kv_transfer.kv_connector.v1.offloading.scheduler",
        "OffloadingConnectorScheduler.get_num_new_matched_tokens",
        ("request", "num_computed_tokens", "max_num_new_tokens"),
    ),
    (
        "vllm.v1.kv_offload.base",
        "GPULoadStoreSpec.__init__",
        ("block_ids", "group_sizes", "block_indices"),
    ),
    (
        "vllm.v1.core.kv_cache_utils",
        "generate_block_hash_extra_keys",
        ("request", "start_token_idx", "end_token_idx", "start_mm_idx"),
    ),
]


def is_tested(version: str) -> bool:
    """Whether a version lies in the tested range."""
    return _numbers(TESTED[0]) <= _numbers(version) < _numbers(TESTED[1])


def interface_faults() -> list[str]:
    """What this vLLM lacks of what the adapter needs; empty when it fits."""
    faults = []
    for module, name in _NAMES:
        if _find(module, name) is None:
            faults.append(f"{module} has no {name}")
    for module, name, parameters in _PARAMETERS:
        found = _find(module, name)
        if found is None:
            faults.append(f"{module} has no {name}")
            continue
        missing = set(parameters) - inspect.signature(found).parameters.keys()
        if missing:
            faults.append(f"{name} of {module} takes no {', '.join(sorted(missing))}")
    return faults


def check_interface(version: str) -> str:
    """Why the pool must stay off with this vLLM; empty when it may be used. Warns of what is untested."""
    faults = interface_faults()
    if faults:
        return f"vLLM {version} has another interface: {'; '.join(faults)}"
    if not is_tested(version):
        log.warning("kvdepot is tested with vLLM from %s to below %s; this is %s", *TESTED, version)
    return ""


def _numbers(version: str) -> tuple[int, ...]:
    match = re.match(r"(\d+)\.(\d+)(?:\.(\d+))?", version)
    return tuple(int(part or 0) for part in match.groups()) if match else (0, 0, 0)


def _find(module: str, name: str) -> Any:
    try:
        found: Any = importlib.import_module(module)
    except ImportError:
        return None
    for part in name.split("."):
        found = getattr(found, part, None)
        if found is None:
            return None
    return found
