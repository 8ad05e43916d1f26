"""What is measured when nobody says otherwise: arms over the embedded engine, over vLLM, or at URLs."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from types import MappingProxyType

import msgspec

from kvdepot.bench.budget import Costs
from kvdepot.bench.plan import Arm
from kvdepot.errors import ConfigError
from kvdepot.io.models import SMALL_MODEL_NAME

__all__ = ["TYPICAL", "embedded_arms", "read_arms", "url_arms", "vllm_arms"]

#: seen on two quiet cores with the small model, for budgets
TYPICAL = {
    "embedded": Costs(start_s=6.5, prefill_rate=640.0, output_s=0.04, edge_s=0.7),
    "vllm": Costs(start_s=22.0, prefill_rate=2100.0, output_s=0.025, edge_s=3.0),
}

_EMBEDDED_BLOCK_TOKENS = 16
#: put in when it is started, so that a plan does not name somebody's folders
_PYTHON = "{python}"
_DRAIN = ("/drain",)
#: what every vLLM arm is started with: the account of cached tokens is off by default
_VLLM_ACCOUNT = ("--enable-prompt-tokens-details",)
#: a load may take as long as it is still faster than computing: storage is what is measured
_LOAD_SHARE = 0.5


class _Arms(msgspec.Struct, forbid_unknown_fields=True):
    arms: list[Arm]


def embedded_arms(
    *, model: str, pool: str, host_bytes: int, paths: Mapping[str, str] = MappingProxyType({})
) -> list[Arm]:
    """The engine that comes with the package: without a pool, over one, and over memory alone.

    Args:
        model: a folder or hub id; empty: the small model, fetched once.
        pool: a folder; what the plan stores stays there until the pool's capacity evicts it.
        host_bytes: memory between engine and pool.
        paths: more pools, by name: folders or URLs. Each gets an arm beside that of `pool`.
    """

    def command(**settings: object) -> tuple[str, ...]:
        fields = {"model": model, "load_share": _LOAD_SHARE, **settings}
        # the port is put in when it is known
        body = msgspec.json.encode(fields).decode()[:-1] + ',"port":{port}}'
        return (_PYTHON, "-P", "-m", "kvdepot.serving", body)

    name = model or SMALL_MODEL_NAME
    return [
        Arm(name="recompute", role="recompute", command=command(), model=name, settles=_DRAIN),
        *(
            Arm(
                name=tier,
                role="tier",
                command=command(pool=[at], host_bytes=host_bytes),
                pool=_folder(at),
                model=name,
                settles=_DRAIN,
                block_tokens=_EMBEDDED_BLOCK_TOKENS,
            )
            for tier, at in _tiers(pool, paths)
        ),
        # runs only where the plan has rounds for it
        Arm(
            name="memory",
            role="dram",
            command=command(memory_only=True, host_bytes=host_bytes),
            model=name,
            settles=_DRAIN,
            block_tokens=_EMBEDDED_BLOCK_TOKENS,
        ),
    ]


def vllm_arms(
    *,
    model: str,
    serve: Sequence[str],
    pool: str,
    fs_pool: str,
    host_bytes: int,
    fs_spec: Mapping[str, object],
    arguments: Sequence[str] = (),
    environment: Mapping[str, str] = MappingProxyType({}),
    paths: Mapping[str, str] = MappingProxyType({}),
) -> list[Arm]:
    """vLLM: without a tier and without its prefix cache; over a kvdepot pool; over its own ``fs`` tier.

    Args:
        model: a folder or hub id.
        serve: the command that starts vLLM's server with the model, before its other arguments.
        pool: folder of kvdepot's pool.
        fs_pool: folder of vLLM's ``fs`` tier; empty: no such arm.
        host_bytes: memory between device and pool, for both.
        fs_spec: which offloading spec the ``fs`` tier hangs under: fields of vLLM's config.
        arguments: for vLLM, in all arms.
        environment: variables, in all arms.
        paths: more pools of kvdepot, by name: folders or URLs. Each gets an arm beside that of `pool`.
    """
    serve = tuple(_PYTHON if word == sys.executable else word for word in serve)
    common = ("--port", "{port}", *_VLLM_ACCOUNT, *arguments)
    shared = {"model": model, "environment": dict(environment)}
    arms = [
        _arm("recompute", "recompute", (*serve, *common, "--no-enable-prefix-caching"), shared),
        *(
            _arm(
                tier,
                "tier",
                (
                    *(_PYTHON, "-P", "-m", "kvdepot", "serve", model),
                    *("--pool", at, "--host-bytes", str(host_bytes)),
                    *("--", *common),
                ),
                {**shared, "pool": _folder(at)},
            )
            for tier, at in _tiers(pool, paths)
        ),
    ]
    if fs_pool:
        config = {
            "kv_connector": "OffloadingConnector",
            "kv_role": "kv_both",
            "kv_connector_extra_config": {
                **fs_spec,
                "cpu_bytes_to_use": host_bytes,
                "secondary_tiers": [{"type": "fs", "root_dir": fs_pool}],
            },
        }
        transfer = ("--kv-transfer-config", msgspec.json.encode(config).decode())
        fs = {**shared, "pool": fs_pool}
        arms.append(_arm("vllm-fs", "tier", (*serve, *common, *transfer), fs))
    return arms


def _tiers(pool: str, paths: Mapping[str, str]) -> list[tuple[str, str]]:
    """Names of kvdepot's arms, and where the pool of each is."""
    return [("kvdepot", pool), *((f"kvdepot-{name}", at) for name, at in paths.items())]


def _folder(at: str) -> str:
    """A pool's folder on this host; empty for what is none, whose device and pages nobody here can see."""
    return "" if "://" in at and not at.startswith("file://") else at.removeprefix("file://")


def _arm(name: str, role: str, command: Sequence[str], fields: Mapping[str, object]) -> Arm:
    return msgspec.convert({"name": name, "role": role, "command": command, **fields}, Arm)


def url_arms(
    *, url: str, recompute_url: str, model: str, pool: str, is_by_hand: bool, salt: str
) -> list[Arm]:
    """Endpoints that run already, or that a person starts when asked.

    Args:
        url: of the engine with the tier.
        recompute_url: of an engine without; empty: there is none, and no baseline.
        model: empty: the first that the server names.
        pool: folder under the tier, if it is on this host; empty: not known.
        is_by_hand: ask a person to restart the engine where the plan wants it.
        salt: ``field`` or ``nonce``.
    """
    if salt not in ("field", "nonce"):
        raise ConfigError(f"salt must be field or nonce, not {salt!r}")

    def arm(name: str, role: str, at: str, folder: str) -> Arm:
        fields = {
            "name": name,
            "role": role,
            "url": at.rstrip("/").removesuffix("/v1"),
            "model": model,
            "pool": folder,
            "salt": salt,
            "is_started_by_hand": is_by_hand,
        }
        return msgspec.convert(fields, Arm)

    arms = [arm("recompute", "recompute", recompute_url, "")] if recompute_url else []
    return [*arms, arm("tier", "tier", url, pool)]


def read_arms(content: bytes, source: str) -> list[Arm]:
    """Arms from a TOML file with ``[[arms]]``; ``command`` is a list of words.

    Raises:
        ConfigError: not such a file, or two arms of one name.
    """
    try:
        arms = msgspec.toml.decode(content, type=_Arms).arms
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise ConfigError(f"arms {source}: {error}") from error
    names = [arm.name for arm in arms]
    if len(set(names)) < len(names) or not names:
        raise ConfigError(f"arms {source}: no arms, or two of one name: {', '.join(names)}")
    return arms
