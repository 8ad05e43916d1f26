"""From what a person asks for to the arguments, the environment and the JSON that vLLM gets.

Pure but for the checks, which look at the model's config, the machine and the pool. Nothing here
imports vLLM, so that what is wrong is said at once and not after its start.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import msgspec

from kvdepot.config import PoolConfig
from kvdepot.engines.vllm import CONNECTOR, CPU_SPEC, GPU_SPEC, TIER
from kvdepot.engines.vllm.arguments import VllmArguments
from kvdepot.engines.vllm.chunks import BlockChoice, choose_block
from kvdepot.engines.vllm.cpudefaults import KV_SPACE, CpuDefaults, cpu_defaults, fast_dtype
from kvdepot.engines.vllm.hostbytes import HostBytes, choose_host_bytes
from kvdepot.engines.vllm.installed import InstalledVllm
from kvdepot.engines.vllm.kvsize import KvSize, kv_element_bytes, kv_size, longest_request
from kvdepot.io.machine import Machine
from kvdepot.policy.admission import AdmissionSettings
from kvdepot.units import GIB, format_bytes
from kvdepot.urls import distinct_roots

__all__ = ["Launch", "Wishes", "connector_settings", "pool_config", "prepare"]

Device = Literal["cpu", "gpu"]

#: tokens of vLLM's own block where the user does not set it
_ENGINE_BLOCK = {"gpu": 16, "cpu": 128}
_ENGINE_BLOCK_LATENT = {"gpu": 64, "cpu": 16}


@dataclass(frozen=True, kw_only=True)
class Wishes:
    """What the user said."""

    model: str
    pools: tuple[str, ...]
    device: Device
    host_bytes: int | None = None
    #: of each root, as a size such as ``64GiB``
    capacity: str | None = None
    block_tokens: int | None = None
    #: what is written
    admission: AdmissionSettings = AdmissionSettings()
    given: VllmArguments = field(default_factory=lambda: VllmArguments(()))


class Launch(NamedTuple):
    """What vLLM is to be given, and what a person should know of it."""

    connector: dict[str, Any]
    #: arguments that were chosen besides the JSON
    chosen: list[str]
    #: the user's own
    given: tuple[str, ...]
    #: added to the environment
    environment: dict[str, str]
    #: how sizes were chosen
    notes: list[str]
    warnings: list[str]

    @property
    def json(self) -> str:
        """The value of ``--kv-transfer-config``."""
        return msgspec.json.encode(self.connector).decode()

    @property
    def arguments(self) -> list[str]:
        """All of vLLM's arguments behind the model; the user's are last, so that they win."""
        return ["--kv-transfer-config", self.json, *self.chosen, *self.given]

    @property
    def besides(self) -> str:
        """Environment and arguments that were chosen besides the JSON, as for a shell."""
        return " ".join([*self._settings(), *map(shlex.quote, self.chosen)])

    def plain_command(self, vllm: InstalledVllm, model: str) -> str:
        """The line for a shell that does the same without kvdepot serve."""
        words = [shlex.quote(word) for word in (*vllm.plain_command(model), *self.arguments)]
        return " ".join([*self._settings(), *words])

    def _settings(self) -> list[str]:
        return [f"{name}={shlex.quote(value)}" for name, value in self.environment.items()]


def pool_config(wishes: Wishes) -> PoolConfig:
    """The pool's settings as its tier will have them.

    Raises:
        PoolUrlError, ConfigError: a URL or a size is wrong.
    """
    urls = [root.url for root in distinct_roots(wishes.pools)]
    return PoolConfig.of(*urls, capacity=wishes.capacity)


def prepare(
    wishes: Wishes,
    *,
    config: Mapping[str, Any] | None,
    machine: Machine | None,
    environment: Mapping[str, str],
) -> Launch:
    """Work out everything that vLLM gets.

    Args:
        wishes: what the user said.
        config: the model's config.json; None where it cannot be had.
        machine: where vLLM will run; None where that is not known.
        environment: the variables that it will see.

    Raises:
        ConfigError: an argument contradicts the pool, or a size cannot be had.
        PoolUrlError: a pool's URL does not name one place.
    """
    wishes.given.check()
    size = _size(wishes, config, machine)
    block = choose_block(
        size, _engine_block_tokens(wishes, size), explicit_tokens=wishes.block_tokens
    )
    longest = wishes.given.number("max-model-len") or (longest_request(config) if config else 0)
    request_bytes = size.token_bytes * longest if size else 0
    is_cpu = wishes.device == "cpu"
    defaults = (
        cpu_defaults(wishes.given, environment, machine, request_bytes=request_bytes)
        if is_cpu and machine is not None
        else CpuDefaults((), {})
    )
    host = choose_host_bytes(
        explicit=wishes.host_bytes,
        machine=_without(machine, defaults),
        request_bytes=request_bytes,
        block_bytes=block.block_bytes,
        replicas=wishes.given.number("data-parallel-size") or 1,
    )
    connector = connector_settings(wishes, block, host)
    chosen = list(defaults.arguments)
    if not wishes.given.has("enable-prompt-tokens-details"):
        chosen.append("--enable-prompt-tokens-details")
    return Launch(
        connector=connector,
        chosen=chosen,
        given=wishes.given.given,
        environment=defaults.environment,
        notes=[block.describe(), host.describe()],
        warnings=_warnings(wishes, host, {**environment, **defaults.environment}, request_bytes),
    )


def connector_settings(wishes: Wishes, block: BlockChoice, host: HostBytes) -> dict[str, Any]:
    """The value of ``--kv-transfer-config``, as an object."""
    connector, connector_module = CONNECTOR
    spec, spec_module = CPU_SPEC if wishes.device == "cpu" else GPU_SPEC
    tier, tier_module = TIER
    pool = pool_config(wishes)
    return {
        "kv_connector": connector,
        "kv_connector_module_path": connector_module,
        "kv_role": "kv_both",
        # a block that cannot be loaded is computed, instead of failing its request
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {
            "spec_name": spec,
            **({"spec_module_path": spec_module} if spec_module else {}),
            "cpu_bytes_to_use": host.size_bytes,
            "blocks_per_chunk": block.engine_blocks,
            "secondary_tiers": [
                {
                    "type": tier,
                    "module_path": tier_module,
                    "urls": list(pool.urls),
                    **({"capacity": wishes.capacity} if wishes.capacity else {}),
                    **_admission(wishes.admission),
                }
            ],
        },
    }


def _admission(wished: AdmissionSettings) -> dict[str, Any]:
    """What is not as it is by default, as it stands in the tier's JSON."""
    default = msgspec.structs.asdict(AdmissionSettings())
    changed = {
        name: value
        for name, value in msgspec.structs.asdict(wished).items()
        if value != default[name]
    }
    return {"admission": changed} if changed else {}


def _size(
    wishes: Wishes, config: Mapping[str, Any] | None, machine: Machine | None
) -> KvSize | None:
    if config is None:
        return None
    is_cpu = wishes.device == "cpu"
    default = fast_dtype(machine) if is_cpu and machine is not None else "auto"
    element_bytes = kv_element_bytes(
        config,
        dtype=wishes.given.text("dtype", default),
        kv_cache_dtype=wishes.given.text("kv-cache-dtype", "auto"),
    )
    ranks = wishes.given.number("tensor-parallel-size") or 1
    return kv_size(config, element_bytes=element_bytes, tensor_parallel=ranks)


def _engine_block_tokens(wishes: Wishes, size: KvSize | None) -> int:
    usual = _ENGINE_BLOCK_LATENT if size is not None and size.is_latent else _ENGINE_BLOCK
    return wishes.given.number("block-size") or usual[wishes.device]


def _without(machine: Machine | None, defaults: CpuDefaults) -> Machine | None:
    """The machine less what vLLM's own KV cache will take of its memory."""
    if machine is None:
        return None
    taken = int(defaults.environment.get(KV_SPACE, "0")) * GIB
    return machine._replace(memory_free_bytes=max(machine.memory_free_bytes - taken, 0))


def _warnings(
    wishes: Wishes, host: HostBytes, environment: Mapping[str, str], request_bytes: int
) -> list[str]:
    found = [host.warning] if host.warning else []
    space = environment.get(KV_SPACE, "")
    if wishes.device == "cpu" and space.isdigit() and int(space) * GIB < request_bytes:
        found.append(
            f"one request of the longest length takes {format_bytes(request_bytes)} and vLLM's own KV"
            f" cache has {space} GiB: vLLM will refuse to start; limit --max-model-len, or set"
            f" {KV_SPACE}"
        )
    if wishes.given.has("config"):
        found.append("what stands in vLLM's --config file is not looked at here")
    return found
