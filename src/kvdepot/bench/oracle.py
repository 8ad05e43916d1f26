"""The oracle: how much of a prompt an endless cache would have, and the class that follows from it.

Classes go by what could have been reused, never by what was: a slow system cannot move its failures
into the other class.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Literal, NamedTuple

__all__ = ["AskClass", "Expected", "Shadow", "class_of"]

AskClass = Literal["F", "U", "M"]

_FIRST_ASK_SHARE = 0.20
_FOLLOW_UP_SHARE = 0.50


class Expected(NamedTuple):
    """What an endless cache would reuse of one prompt."""

    tokens: int
    #: of them, those of the prefix that all requests of the test have in common
    common: int


class Shadow:
    """An index of block hashes of all prompts so far, kept by the client.

    Args:
        block_tokens: whole blocks are reused only.
        common: units that all prompts begin with.
    """

    def __init__(self, block_tokens: int, *, common: Sequence[int] = ()) -> None:
        self._width = block_tokens
        self._seen: set[bytes] = set()
        self._common = list(common)

    def expect(self, salt: str, units: Sequence[int]) -> Expected:
        """What is known of a prompt of these tokens; nothing is added."""
        known = 0
        for key in self._keys(salt, units):
            if key not in self._seen:
                break
            known += 1
        # the last token is always computed, for its logits
        tokens = min(known * self._width, len(units) - 1)
        common = 0
        for ours, theirs in zip(units, self._common, strict=False):
            if ours != theirs:
                break
            common += 1
        return Expected(tokens, min(tokens, common // self._width * self._width))

    def add(self, salt: str, units: Sequence[int]) -> None:
        """A prompt was sent and is known from now on."""
        self._seen.update(self._keys(salt, units))

    def _keys(self, salt: str, units: Sequence[int]) -> list[bytes]:
        digest = hashlib.sha256(salt.encode() + b"\0")
        keys = []
        for start in range(0, len(units) - self._width + 1, self._width):
            block = units[start : start + self._width]
            digest.update(b"".join(unit.to_bytes(8, "little") for unit in block))
            keys.append(digest.digest())
        return keys


def class_of(*, turn: int, prompt_tokens: int, expected: Expected) -> AskClass:
    """First ask, follow-up, or the rest.

    Args:
        turn: of the session, from 0.
        prompt_tokens: of the whole prompt.
        expected: by the shadow.
    """
    own = (expected.tokens - expected.common) / prompt_tokens
    if own < _FIRST_ASK_SHARE:
        return "F"
    if turn >= 1 and expected.tokens / prompt_tokens >= _FOLLOW_UP_SHARE:
        return "U"
    return "M"
