"""Arguments for vLLM, as far as kvdepot must know them: which are given, and the values of a few.

vLLM's own parser takes most of a minute to import, so it is not asked. What is not recognised here is
passed on as it is. Pure.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from kvdepot.errors import ConfigError

__all__ = ["VllmArguments"]

_SHORT = {
    "-tp": "tensor-parallel-size",
    "-pp": "pipeline-parallel-size",
    "-dp": "data-parallel-size",
    "-q": "quantization",
}
#: what `kvdepot serve` sets itself, and what to do instead
_CONFLICTS = {
    "kv-transfer-config": "kvdepot serve sets it; to combine connectors, take the JSON that"
    " kvdepot vllm-config prints into one of your own, and start vllm serve with that",
    "kv-offloading-size": "use --host-bytes of kvdepot serve",
    "kv-offloading-backend": "kvdepot serve sets what replaces it",
    "model": "give the model before the --",
    "model-tag": "give the model before the --",
    "nnodes": "the host tier is shared memory of one host; start one server per host on one pool",
    "node-rank": "the host tier is shared memory of one host; start one server per host on one pool",
}
_FACTORS = {"k": 10**3, "m": 10**6, "g": 10**9, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30}
_COUNT = re.compile(r"(\d+(?:\.\d+)?)([kmgKMG]?)")


class VllmArguments:
    """What was written behind the ``--``, by name.

    Args:
        given: the arguments as vLLM is to get them.
    """

    def __init__(self, given: Sequence[str]) -> None:
        self.given = tuple(given)
        #: name without dashes in front, dashes inside -> the last value; True for a mere flag
        self._values: dict[str, str | bool] = {}
        for index, word in enumerate(self.given):
            if not word.startswith("-") or re.fullmatch(r"-\d+(\.\d+)?", word):
                continue
            name, equals, value = word.partition("=")
            following = next(iter(self.given[index + 1 : index + 2]), "--")
            if equals:
                self._values[_plain(name)] = value
            else:
                self._values[_plain(name)] = True if following.startswith("--") else following

    def has(self, *names: str) -> bool:
        """Whether one of these was given, also as its negation."""
        return any(name in self._values or f"no-{name}" in self._values for name in names)

    def text(self, name: str, default: str) -> str:
        """The value of an option."""
        value = self._values.get(name, default)
        return value if isinstance(value, str) else default

    def number(self, name: str) -> int | None:
        """The value of an option that counts, as vLLM reads it (``8k``, ``1M``); None if not given.

        None too for what is no such number: vLLM will say so.
        """
        match = _COUNT.fullmatch(self.text(name, ""))
        if match is None:
            return None
        return int(float(match[1]) * _FACTORS.get(match[2], 1)) or None

    def check(self) -> None:
        """Refuse what would contradict what is set for the pool.

        Raises:
            ConfigError: names the argument and says what to do instead.
        """
        for name, instead in _CONFLICTS.items():
            if any(each == name or each.startswith(f"{name}.") for each in self._values):
                raise ConfigError(f"--{name} cannot be given here", hint=instead)


def _plain(name: str) -> str:
    """vLLM takes underscores for dashes, and short forms."""
    if name in _SHORT:
        return _SHORT[name]
    head, dot, rest = name.lstrip("-").partition(".")
    return head.replace("_", "-") + dot + rest
