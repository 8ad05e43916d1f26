"""What a server is started with: from the command line, or as one JSON argument."""

from __future__ import annotations

from typing import Annotated

import msgspec

from kvdepot.errors import ConfigError
from kvdepot.policy.admission import AdmissionSettings
from kvdepot.units import GIB, MIB

__all__ = ["ServerSettings", "decode_settings"]

_Positive = Annotated[int, msgspec.Meta(ge=1)]


class ServerSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Settings of one embedded server."""

    #: a model folder or hub id; empty: a small model, fetched once
    model: str = ""
    #: where the pool is; none: every prompt is computed, and nothing is kept
    pool: tuple[str, ...] = ()
    #: keep blocks in memory although there is no pool
    memory_only: bool = False
    #: memory between engine and pool
    host_bytes: _Positive = GIB
    #: of the pool; None: what it was made with
    capacity_bytes: int | None = None
    #: left free on the file system of the pool; None: the pool's own default
    free_bytes_min: int | None = None
    #: no more than the loopback interface unless it is asked for: there is no authentication
    host: str = "127.0.0.1"
    port: Annotated[int, msgspec.Meta(ge=0, le=65535)] = 8000
    #: requests that may wait; more are refused with 429 instead of waiting for minutes unseen
    queue_requests: _Positive = 256
    #: what is written to the pool
    admission: AdmissionSettings = AdmissionSettings()
    #: offer the answers' own tokens too
    store_generated: bool = False
    #: load whatever is found, and give it up after this share of the time that computing its tokens
    #: would take; None: the depot's policies decide
    load_share: float | None = None
    block_tokens: int | None = None
    dtype: str = "float32"
    #: bodies that are larger are refused; 16 MiB is more text than any context takes
    body_bytes_max: _Positive = 16 * MIB

    def __post_init__(self) -> None:
        if self.memory_only and self.pool:
            raise ConfigError("memory_only is without a pool, and a pool is named")
        if self.store_generated and not self.admission.generated:
            raise ConfigError("answers are to be stored, and admission does not want them")


def decode_settings(text: str | bytes) -> ServerSettings:
    """Settings from JSON.

    Raises:
        ConfigError: an unknown setting, or a wrong value.
    """
    try:
        return msgspec.json.decode(text, type=ServerSettings)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise ConfigError(f"server settings: {error}") from error
