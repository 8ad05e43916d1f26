"""A model's config.json: of a folder, or of a hub's model after fetching that one file."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import msgspec

from kvdepot.errors import ConfigError

__all__ = ["read_model_config"]

_CONFIG = "config.json"


def read_model_config(
    model: str, *, revision: str | None = None, cache_dir: str | None = None
) -> dict[str, Any]:
    """Read a model's config.json. Blocks on a file, or on a network.

    Args:
        model: a folder, or a hub's id such as ``org/model``.
        revision: a branch, tag or commit of the hub.
        cache_dir: where the hub's client keeps its files, if not in its usual place.

    Raises:
        ConfigError: there is no such model, or its config cannot be read.
        ModuleNotFoundError: it is a hub's id, and the hub's client is not installed.
    """
    folder = Path(os.path.expanduser(model))
    if folder.is_dir():
        path = folder / _CONFIG
        if not path.is_file():
            raise ConfigError(
                f"{model} is no model's folder: it has no {_CONFIG}",
                hint="name the folder that holds config.json and the weights",
            )
    elif folder.exists() or model.count("/") > 1 or model.startswith((".", "/", "~")):
        raise ConfigError(
            f"no such model folder: {model}", hint='give a folder, or a hub id such as "org/name"'
        )
    else:
        path = _of_hub(model, revision, cache_dir)
    try:
        return msgspec.json.decode(path.read_bytes(), type=dict[str, Any])
    except (OSError, msgspec.MsgspecError) as error:
        raise ConfigError(f"cannot read {path}: {error}") from error


def _of_hub(model: str, revision: str | None, cache_dir: str | None) -> Path:
    from huggingface_hub import hf_hub_download  # noqa: PLC0415 - it draws in an HTTP client

    try:
        return Path(hf_hub_download(model, _CONFIG, revision=revision, cache_dir=cache_dir))
    except Exception as error:
        # the hub client raises a tree of its own, over its HTTP library's and the system's
        at = f" at revision {revision!r}" if revision else ""
        reason = next((line.strip() for line in str(error).splitlines() if line.strip()), "")
        raise ConfigError(
            f"model {model!r}{at} is no folder here, and could not be had from the hub: {reason}",
            hint="check the id and the network, or give a folder that holds the model",
        ) from error
