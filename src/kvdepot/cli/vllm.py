"""`kvdepot serve` and `kvdepot vllm-config`: vLLM over a pool, or the JSON for a launcher of your own."""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING, Annotated, Any, Literal

from cyclopts import Parameter

from kvdepot.cli.admission import Admit
from kvdepot.errors import ConfigError
from kvdepot.units import parse_bytes

if TYPE_CHECKING:
    from kvdepot.engines.vllm.launch import Launch, Wishes

__all__ = ["serve", "vllm_config"]

_Device = Literal["auto", "cpu", "gpu"]
_Pools = Annotated[list[str], Parameter(name="--pool", negative="")]
#: everything behind the --
_Rest = Annotated[str, Parameter(show=False)]


def serve(
    model: str,
    vllm_arguments: tuple[str, ...],
    *,
    pool: list[str],
    host_bytes: str | None,
    capacity: str | None,
    block_tokens: int | None,
    device: _Device,
    admit: Admit,
) -> int:
    """What `kvdepot.cli.serve.serve` does with vLLM: check, tell, and become its server."""
    from kvdepot.engines.vllm.installed import need_vllm
    from kvdepot.engines.vllm.launch import pool_config
    from kvdepot.engines.vllm.versions import TESTED, is_tested
    from kvdepot.pool.precheck import check_pool

    vllm = need_vllm()
    if not is_tested(vllm.version):
        _warn(
            f"vLLM {vllm.version} is not among the tested versions (from {TESTED[0]} to below"
            f" {TESTED[1]}); where its interface differs, the pool stays off"
        )
    on = device if device != "auto" else "cpu" if vllm.is_cpu else "gpu"
    wishes = _wishes(
        model,
        pool,
        vllm_arguments,
        host_bytes,
        capacity,
        block_tokens=block_tokens,
        device=on,
        admit=admit,
    )
    launch = _prepared(wishes, is_here=True)
    _tell(launch, check_pool(pool_config(wishes)))
    print(launch.plain_command(vllm, model), file=sys.stderr)
    print(_indented(launch), file=sys.stderr)
    command = [*vllm.command(model), *launch.arguments]
    sys.stdout.flush()
    sys.stderr.flush()
    os.execve(command[0], command, {**os.environ, **launch.environment})  # noqa: S606 - our Python


def vllm_config(
    model: str,
    /,
    *vllm_arguments: _Rest,
    pool: _Pools,
    host_bytes: str | None = None,
    capacity: str | None = None,
    block_tokens: int | None = None,
    device: _Device = "auto",
    admit: Admit = Admit(),
) -> int:
    """Print the JSON that vLLM takes as --kv-transfer-config, for a launcher of your own.

    Works where neither vLLM nor the pool is: the pool is not looked at. Give those arguments for vLLM
    behind a -- that change the size of the KV, such as --tensor-parallel-size, --dtype or --block-size.

    Args:
        model: A model folder or hub id.
        vllm_arguments: What vLLM will be started with.
        pool: Where the pool is: file:///path, fs:///path or a path. Several make one pool over several
            disks.
        host_bytes: Memory between device and pool, such as 16GiB; by default a tenth of what is free here
            if vLLM is installed here, and 4GiB otherwise.
        capacity: Of each root, such as 500GiB; by default what the pool was made with, which is half of
            the free space.
        block_tokens: Tokens in a block; by default chosen by the size of the model's KV.
        device: gpu or cpu; by default what the installed vLLM is for, and gpu if there is none.
        admit: What is written.
    """
    from kvdepot.engines.vllm.installed import find_vllm

    vllm = find_vllm()
    on = device if device != "auto" else "cpu" if vllm is not None and vllm.is_cpu else "gpu"
    wishes = _wishes(
        model,
        pool,
        vllm_arguments,
        host_bytes,
        capacity,
        block_tokens=block_tokens,
        device=on,
        admit=admit,
    )
    launch = _prepared(wishes, is_here=vllm is not None)
    _tell(launch, [])
    if launch.besides:
        print(f"give besides: {launch.besides}", file=sys.stderr)
    print(launch.json)
    return 0


def _wishes(
    model: str,
    pools: list[str],
    arguments: tuple[str, ...],
    host_bytes: str | None,
    capacity: str | None,
    *,
    block_tokens: int | None,
    device: Literal["cpu", "gpu"],
    admit: Admit,
) -> Wishes:
    from kvdepot.engines.vllm.arguments import VllmArguments
    from kvdepot.engines.vllm.launch import Wishes
    from kvdepot.urls import PoolUrl

    if arguments and not arguments[0].startswith("-"):
        raise ConfigError(
            f"{arguments[0]!r} is one name too many; one model is served",
            hint="what is meant for vLLM stands behind a --",
        )
    for text in pools:
        print(PoolUrl.parse(text).describe(), file=sys.stderr)
    return Wishes(
        model=model,
        pools=tuple(pools),
        device=device,
        host_bytes=None if host_bytes is None else parse_bytes(host_bytes),
        capacity=capacity,
        block_tokens=block_tokens,
        admission=admit.settings(),
        given=VllmArguments(arguments),
    )


def _prepared(wishes: Wishes, *, is_here: bool) -> Launch:
    from kvdepot.engines.vllm.launch import prepare
    from kvdepot.io.machine import this_machine

    # what is wrong with the arguments is said before a network is asked for the model
    wishes.given.check()
    return prepare(
        wishes,
        config=_model_config(wishes),
        machine=this_machine() if is_here else None,
        environment=os.environ,
    )


def _model_config(wishes: Wishes) -> dict[str, Any] | None:
    from kvdepot.io.modelconfig import read_model_config

    is_elsewhere = "://" in wishes.model or wishes.model.endswith(".gguf")
    if is_elsewhere or "VLLM_USE_MODELSCOPE" in os.environ:
        _warn(f"the config of {wishes.model} cannot be looked at from here")
        return None
    try:
        return read_model_config(
            wishes.model,
            revision=wishes.given.text("revision", "") or None,
            cache_dir=wishes.given.text("download-dir", "") or None,
        )
    except ModuleNotFoundError:
        _warn(f"the hub's client is not installed, so the config of {wishes.model} is not known")
        return None


def _tell(launch: Launch, warnings: list[str]) -> None:
    for note in launch.notes:
        print(note, file=sys.stderr)
    for warning in [*launch.warnings, *warnings]:
        _warn(warning)


def _warn(text: str) -> None:
    print(f"warning: {text}", file=sys.stderr)


def _indented(launch: Launch) -> str:
    import msgspec

    return msgspec.json.format(launch.json, indent=2)
