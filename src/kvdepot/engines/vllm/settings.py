"""A tier's settings, as they stand in vLLM's JSON: the pool's, and a few of the tier's own."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import msgspec

from kvdepot.config import PoolConfig
from kvdepot.errors import ConfigError
from kvdepot.policy.admission import AdmissionSettings
from kvdepot.units import MIB, parse_bytes
from kvdepot.urls import distinct_roots

__all__ = ["TierSettings", "parse_settings"]


class TierSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """How one engine uses a pool."""

    pool: PoolConfig
    #: where the I/O runs: a child process, threads of the engine's, or the former where it can
    io: Literal["auto", "process", "threads"] = "auto"
    #: a load is given up after so long, and ...
    load_deadline_s: float = 2.0
    #: ... so long as its bytes take at this rate; slower storage than that hardly beats computing
    load_bytes_per_s_min: int = 100 * MIB
    #: how long the engine's start waits for the pool; what is left is done while serving
    open_wait_s: float = 60.0
    #: how long the engine's end waits for stores to become visible; vLLM kills an engine after 5 s
    close_s: float = 3.0
    #: what is written
    admission: AdmissionSettings = AdmissionSettings()
    #: whether the storage is near; None says nothing
    locality: Literal["LOCAL", "REMOTE"] | None = None
    #: tell vLLM's event stream of blocks that were stored
    enable_kv_events: bool = False

    def __post_init__(self) -> None:
        for name in ("load_deadline_s", "load_bytes_per_s_min", "open_wait_s", "close_s"):
            if not 0 < getattr(self, name) <= 1e12:
                raise ConfigError(f"{name} must be positive: {getattr(self, name)}")


_OWN = frozenset(TierSettings.__struct_fields__) - {"pool"}


def parse_settings(given: Mapping[str, Any], *, region_bytes: int, row_bytes: int) -> TierSettings:
    """Check a tier's settings.

    Args:
        given: as in the JSON, without ``type`` and ``module_path``; sizes may be text such as ``64GiB``.
        region_bytes: the host region, in which what waits to be written lies.
        row_bytes: one row of it.

    Raises:
        ConfigError: an unknown setting, a wrong type, or a value out of range.
        PoolUrlError: a URL that does not name one place.
    """
    own = {name: value for name, value in given.items() if name in _OWN}
    pool = {name: value for name, value in given.items() if name not in _OWN}
    urls = pool.pop("urls", ())
    urls = (urls,) if isinstance(urls, str) else tuple(urls)
    # half of the host region at most: the other half stays for loads, however slow the storage is
    pool.setdefault("write_queue_bytes", max(region_bytes // 2, row_bytes))
    for name, value in pool.items():
        if name.endswith("_bytes") and isinstance(value, str):
            pool[name] = parse_bytes(value)
    if isinstance(own.get("load_bytes_per_s_min"), str):
        own["load_bytes_per_s_min"] = parse_bytes(own["load_bytes_per_s_min"])
    if isinstance(own.get("admission"), dict):
        own["admission"] = AdmissionSettings.of(**own["admission"])
    config = PoolConfig.of(*urls, **pool)
    distinct_roots(config.urls)
    try:
        return msgspec.convert({**own, "pool": config}, TierSettings)
    except msgspec.ValidationError as error:
        raise ConfigError(f"tier settings: {error}") from error
