"""`kvdepot serve`: vLLM over a pool, or the embedded engine behind the same API."""

from __future__ import annotations

import sys
from typing import Annotated, Any, Literal

from cyclopts import Parameter

from kvdepot.cli.admission import Admit
from kvdepot.errors import ConfigError
from kvdepot.units import GIB, parse_bytes

__all__ = ["serve"]

_Pools = Annotated[list[str] | None, Parameter(name="--pool", negative="")]
#: everything behind the --
_Rest = Annotated[str, Parameter(show=False)]


def serve(
    model: str = "",
    /,
    *vllm_arguments: _Rest,
    pool: _Pools = None,
    engine: Literal["vllm", "embedded"] = "vllm",
    host_bytes: str | None = None,
    capacity: str | None = None,
    block_tokens: int | None = None,
    device: Literal["auto", "cpu", "gpu"] = "auto",
    admit: Admit = Admit(),
    store_generated: bool = False,
    host: str = "127.0.0.1",
    port: int = 8000,
) -> int:
    """Serve a model over a pool: kvdepot serve MODEL --pool URL [-- arguments for vLLM].

    With vLLM, what can be wrong is checked before its start, which takes a minute; the plain command that
    does the same is printed, and this becomes it: signals and the exit status are vLLM's. The embedded
    engine answers one request after the other, on the CPU; it is for trying things out and for tests.

    Args:
        model: A model folder or hub id; the embedded engine has a small model of its own.
        vllm_arguments: Passed on to vLLM as they are; they win over what is chosen here.
        pool: Where the pool is: file:///path, fs:///path or a path. Several make one pool over several
            disks. The embedded engine keeps nothing without one.
        engine: vllm or embedded.
        host_bytes: Memory between device and pool, such as 16GiB; by default a tenth of what is free, and
            1GiB for the embedded engine.
        capacity: Of each root, such as 500GiB; by default what the pool was made with, which is half of
            the free space.
        block_tokens: Tokens in a block; by default chosen by the size of the model's KV.
        device: gpu or cpu; by default what the installed vLLM is for.
        admit: What is written.
        store_generated: Write the KV of answers too.
        host: Address that the embedded engine listens on; it asks for no key, so keep it local.
        port: Port of the embedded engine; vLLM takes its own behind the --.
    """
    if engine == "embedded":
        if vllm_arguments:
            raise ConfigError("arguments behind -- are for vLLM, and the engine is embedded")
        return _embedded(
            model,
            pool or [],
            host_bytes,
            capacity,
            admit,
            store_generated=store_generated,
            block_tokens=block_tokens,
            host=host,
            port=port,
        )
    from kvdepot.cli.vllm import serve as serve_vllm

    _check_for_vllm(
        model,
        pool,
        is_addressed=(host, port) != ("127.0.0.1", 8000),
        has_answers=store_generated,
    )
    return serve_vllm(
        model,
        vllm_arguments,
        pool=pool or [],
        host_bytes=host_bytes,
        capacity=capacity,
        block_tokens=block_tokens,
        device=device,
        admit=admit,
    )


def _check_for_vllm(
    model: str, pool: list[str] | None, *, is_addressed: bool, has_answers: bool
) -> None:
    if not model:
        raise ConfigError("no model is named", hint="kvdepot serve MODEL --pool URL")
    if not pool:
        raise ConfigError("no pool is named", hint="add --pool URL, for example --pool /srv/kv")
    if is_addressed:
        raise ConfigError(
            "--host and --port are the embedded engine's",
            hint="give vLLM's behind a --, for example: -- --port 8001",
        )
    if has_answers:
        raise ConfigError(
            "--store-generated is the embedded engine's",
            hint='vLLM stores answers with "offload_prompt_only": false in its JSON, which'
            " kvdepot vllm-config prints",
        )


def _embedded(
    model: str,
    pool: list[str],
    host_bytes: str | None,
    capacity: str | None,
    admit: Admit,
    **options: Any,
) -> int:
    from kvdepot.serving.running import serve_embedded
    from kvdepot.serving.settings import ServerSettings
    from kvdepot.urls import PoolUrl

    for text in pool:
        print(PoolUrl.parse(text).describe(), file=sys.stderr)
    settings = ServerSettings(
        model=model,
        pool=tuple(pool),
        host_bytes=GIB if host_bytes is None else parse_bytes(host_bytes),
        capacity_bytes=None if capacity is None else parse_bytes(capacity),
        admission=admit.settings(),
        **options,
    )
    serve_embedded(settings, on_ready=lambda url: print(f"serving at {url}", file=sys.stderr))
    return 0
