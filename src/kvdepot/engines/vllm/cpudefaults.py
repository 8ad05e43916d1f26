"""What vLLM's CPU build should be told where the user does not say: type, threads, memory. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from kvdepot.engines.vllm.arguments import VllmArguments
from kvdepot.io.machine import Machine
from kvdepot.units import GIB, ceil_div

__all__ = ["KV_SPACE", "CpuDefaults", "cpu_defaults", "equal_cores", "fast_dtype"]

#: whole GiB of vLLM's own KV cache on a CPU
KV_SPACE = "VLLM_CPU_KVCACHE_SPACE"
_BINDING = "VLLM_CPU_OMP_THREADS_BIND"
_THREADS = "OMP_NUM_THREADS"
_RESERVED = "VLLM_CPU_NUM_OF_RESERVED_CPU"


class CpuDefaults(NamedTuple):
    """Additions for vLLM; nothing that the user has set is among them."""

    arguments: tuple[str, ...]
    environment: dict[str, str]


def fast_dtype(machine: Machine) -> str:
    """The type that this processor computes fast with.

    Without instructions for bfloat16 there are no fast kernels for 16 bits: five times slower was seen.
    """
    has_bf16 = machine.cpu_flags & {"avx512_bf16", "amx_bf16", "bf16"}
    return "auto" if has_bf16 else "float32"


def cpu_defaults(
    given: VllmArguments, environment: Mapping[str, str], machine: Machine, *, request_bytes: int
) -> CpuDefaults:
    """What to add.

    Args:
        given: the user's arguments for vLLM.
        environment: the user's environment variables.
        machine: where vLLM will run.
        request_bytes: KV of the longest request; 0 where it is not known.
    """
    arguments: list[str] = []
    added: dict[str, str] = {}
    dtype = fast_dtype(machine)
    if not given.has("dtype") and dtype != "auto":
        arguments += ["--dtype", dtype]
    if not given.has("enforce-eager", "compilation-config", "optimization-level"):
        # compiling takes minutes at each start, and gains little on a CPU
        arguments.append("--enforce-eager")
    if KV_SPACE not in environment and not given.has("kv-cache-memory-bytes"):
        # two of the longest requests, as far as a quarter of the memory goes
        wanted = min(2 * request_bytes, machine.memory_free_bytes // 4)
        added[KV_SPACE] = str(max(ceil_div(wanted, GIB), 1))
    workers = _workers(given)
    if workers > machine.numa_nodes and _BINDING not in environment:
        # vLLM's own binding wants a NUMA node for each worker, and fails without
        added[_BINDING] = "nobind"
        if _THREADS not in environment:
            added[_THREADS] = str(max(machine.cores // workers, 1))
    return CpuDefaults(tuple(arguments), added)


def equal_cores(given: VllmArguments, environment: Mapping[str, str]) -> dict[str, str]:
    """What makes engines with and without a KV connector compute on as many cores.

    By itself vLLM keeps a core for each worker free, and a second one where there is a connector; when
    the machine has no more than that, it keeps none. On two cores an engine without a tier would then
    compute on one, and one with a tier on both. Nothing that the user has set is among it.

    Args:
        given: arguments of all engines that are compared.
        environment: the user's environment variables.
    """
    if _RESERVED in environment or _BINDING in environment:
        return {}
    return {_RESERVED: str(2 * _workers(given))}


def _workers(given: VllmArguments) -> int:
    return (given.number("tensor-parallel-size") or 1) * (
        given.number("pipeline-parallel-size") or 1
    )
