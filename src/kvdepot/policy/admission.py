"""What is worth writing: everything, what was seen before, or some classes, within a budget of wear.

In a public trace of conversations three quarters of the blocks are never asked for again, and drives
have a bounded number of writes in them. What is admitted is always a run from the front of what is
offered, because a block is of no use without the blocks before it.

Pure; time comes from outside. Thread-safe.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from enum import Enum
from typing import Literal, NamedTuple, Self

import msgspec

from kvdepot.errors import ConfigError
from kvdepot.units import parse_bytes

__all__ = ["Admission", "AdmissionSettings", "Admitted", "SeenBefore", "StoreClass", "WriteBudget"]

_DAY_S = 86_400.0


class StoreClass(Enum):
    """Where the blocks come from."""

    PROMPT = "prompt"
    #: the answer's own tokens
    GENERATED = "generated"


class AdmissionSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What is admitted; the same for every engine."""

    #: ``always``; or ``second_sight``: a block is written when it is computed for the second time
    when: Literal["always", "second_sight"] = "always"
    #: shorter prompts are not written; they are quick to compute
    prompt_tokens_min: int = 0
    #: the answers' own tokens are written as well, where the engine offers them
    generated: bool = True
    #: bytes a day; 0 is no limit
    bytes_per_day: int = 0
    #: keys that second sight remembers, two bytes each, twice over
    seen_keys_max: int = 1 << 20

    def __post_init__(self) -> None:
        if self.when not in ("always", "second_sight"):
            raise ConfigError(f"admission is 'always' or 'second_sight', not {self.when!r}")
        if self.bytes_per_day < 0 or self.prompt_tokens_min < 0:
            raise ConfigError("limits of admission cannot be negative")
        if self.seen_keys_max < 1:
            raise ConfigError(
                f"second sight must remember at least one key, not {self.seen_keys_max}"
            )

    @classmethod
    def of(cls, *, bytes_per_day: str | int = 0, **settings: object) -> Self:
        """Build settings with the budget as a size such as ``"500GB"``.

        Raises:
            ConfigError: an unknown setting, a wrong type, or a value out of range.
        """
        fields = dict(settings, bytes_per_day=parse_bytes(bytes_per_day))
        try:
            return msgspec.convert(fields, cls)
        except msgspec.ValidationError as error:
            raise ConfigError(f"admission settings: {error}") from error


class Admitted(NamedTuple):
    """How many of the offered blocks are to be written, and why not all."""

    blocks: int
    #: ``""``, ``class``, ``first_sight`` or ``budget``
    refusal: str


class SeenBefore:
    """Which keys were seen, in little memory: sometimes says yes to a key that was not.

    Two generations of bits; when the young one is full it becomes the old one. A wrong yes writes a
    block once too early, and a forgotten key writes it once too late.

    Args:
        keys_max: remembered at least; up to twice as many are.
    """

    #: bits a key: one wrong yes in about 400
    _BITS_PER_KEY = 16
    _PROBES = 3

    def __init__(self, keys_max: int) -> None:
        self._keys_max = keys_max
        self._bits = max(keys_max * self._BITS_PER_KEY, 64)
        self._young = bytearray(self._bits // 8 + 1)
        self._old = bytearray(len(self._young))
        self._count = 0

    def see(self, key: bytes) -> bool:
        """Remember a key of at least 16 bytes; whether it was seen before."""
        places = self._places(key)
        in_young = all(self._young[place >> 3] >> (place & 7) & 1 for place in places)
        is_known = in_young or all(self._old[place >> 3] >> (place & 7) & 1 for place in places)
        if not in_young:
            for place in places:
                self._young[place >> 3] |= 1 << (place & 7)
            self._count += 1
            if self._count >= self._keys_max:
                self._old, self._young = self._young, bytearray(len(self._young))
                self._count = 0
        return is_known

    def knows(self, key: bytes) -> bool:
        """Whether a key was seen; remembers nothing."""
        places = self._places(key)
        return any(
            all(bits[place >> 3] >> (place & 7) & 1 for place in places)
            for bits in (self._young, self._old)
        )

    def _places(self, key: bytes) -> list[int]:
        # two independent words of a hash make as many independent places as are wanted
        first = int.from_bytes(key[:8], "little")
        step = int.from_bytes(key[8:16], "little") | 1
        return [(first + n * step) % self._bits for n in range(self._PROBES)]


class WriteBudget:
    """Bytes a day as a bucket that leaks: bursts of up to an hour's worth go through.

    Args:
        bytes_per_day: 0 is no limit.
    """

    def __init__(self, bytes_per_day: int) -> None:
        self._rate = bytes_per_day / _DAY_S
        self._burst = bytes_per_day / 24
        self._left = self._burst
        self._at_s: float | None = None

    @property
    def is_limited(self) -> bool:
        """There is a limit at all."""
        return self._rate > 0

    def take(self, now_s: float, block_bytes: Sequence[int]) -> int:
        """How many of these blocks, from the first on, may be written now; takes their bytes."""
        if not self.is_limited:
            return len(block_bytes)
        if self._at_s is not None:
            self._left = min(self._left + (now_s - self._at_s) * self._rate, self._burst)
        self._at_s = now_s
        for index, size in enumerate(block_bytes):
            if size > self._left:
                return index
            self._left -= size
        return len(block_bytes)


class Admission:
    """Decides for each store how many of its blocks are written.

    Args:
        settings: what is admitted.
    """

    def __init__(self, settings: AdmissionSettings = AdmissionSettings()) -> None:
        self._settings = settings
        self._lock = threading.Lock()
        self._seen = SeenBefore(settings.seen_keys_max) if settings.when == "second_sight" else None
        self._budget = WriteBudget(settings.bytes_per_day)

    @property
    def is_always(self) -> bool:
        """Everything is admitted, so nobody needs to ask."""
        return (
            self._seen is None
            and self._settings.generated
            and not self._settings.prompt_tokens_min
            and not self._budget.is_limited
        )

    def admit(
        self,
        now_s: float,
        keys: Sequence[bytes],
        block_bytes: int,
        *,
        prompt_tokens: int,
        kind: StoreClass = StoreClass.PROMPT,
        is_reachable: bool = True,
    ) -> Admitted:
        """How many of the blocks, from the first on, are to be written.

        Args:
            now_s: now.
            keys: of blocks that the tier does not have, in prefix order.
            block_bytes: of one block over all groups.
            prompt_tokens: length of the prompt that they belong to.
            kind: where they come from. Generated tokens are seen for the first time by nature.
            is_reachable: False when an earlier block of the prompt was not admitted: then these are
                only remembered.
        """
        if kind is StoreClass.PROMPT:
            is_of_class = prompt_tokens >= self._settings.prompt_tokens_min
        else:
            is_of_class = self._settings.generated
        if not is_of_class:
            return Admitted(0, "class")
        with self._lock:
            wanted = len(keys)
            refusal = ""
            if self._seen is not None:
                # every key is remembered, also behind the first unknown one
                seen = [self._seen.see(key) for key in keys]
                wanted = seen.index(False) if False in seen else wanted
                refusal = "first_sight" if wanted < len(keys) else ""
            if not is_reachable:
                return Admitted(0, refusal)
            taken = self._budget.take(now_s, [block_bytes] * wanted)
            if taken < wanted:
                refusal = "budget"
            return Admitted(taken, refusal)
