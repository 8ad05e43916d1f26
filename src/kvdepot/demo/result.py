"""What the demo found out; written to ``demo.json``. Raise the version when a field changes."""

from __future__ import annotations

from typing import Literal

import msgspec

__all__ = [
    "ArmResult",
    "DemoResult",
    "DocumentFacts",
    "ModelFacts",
    "PoolResult",
    "decode_result",
    "encode_result",
]


class ArmResult(msgspec.Struct, frozen=True, kw_only=True):
    """One arm. ``computed_tokens`` and the sum of ``reused_tokens`` make ``prompt_tokens``."""

    name: str
    what: str
    question: str
    #: seconds from the question to the first token
    ttft_s: float
    prompt_tokens: int
    computed_tokens: int
    #: by the tier that they came from
    reused_tokens: dict[str, int]
    #: payload bytes read from the pool and verified
    bytes_read: int
    #: payload bytes written to the pool
    bytes_written: int
    answer: str
    answer_tokens: int
    #: seconds from the question to the end of the answer
    total_s: float
    #: seconds that the process took to start; not part of any other number
    start_s: float
    #: seconds that another process's blocks were waited for before the clock started
    awaited_s: float
    #: recompute's time to first token over this one's
    speedup: float
    #: null where recompute answered another question
    same_answer_as_recompute: bool | None
    #: blocks that were not stored, by the reason
    dropped_blocks: dict[str, int]

    @property
    def reused_total(self) -> int:
        """Prompt tokens that were not computed."""
        return sum(self.reused_tokens.values())


class ModelFacts(msgspec.Struct, frozen=True, kw_only=True):
    """The model that answered."""

    name: str
    dtype: str
    attention: str
    context_tokens: int


class DocumentFacts(msgspec.Struct, frozen=True, kw_only=True):
    """The document that was asked about."""

    name: str
    source: str
    sha256: str


class PoolResult(msgspec.Struct, frozen=True, kw_only=True):
    """The pool that was used, and how."""

    url: str
    #: ``tmpfs`` and the like are memory and no storage
    file_system: str
    is_direct: bool
    direct_reason: str
    #: how it is made sure that storage is read and not the page cache
    page_cache: str
    block_tokens: int
    block_reason: str
    groups: int
    block_bytes: tuple[int, ...]
    token_bytes: int


class DemoResult(msgspec.Struct, frozen=True, kw_only=True):
    """The whole demo."""

    schema: Literal["kvdepot-demo"] = "kvdepot-demo"
    schema_version: Literal[1] = 1
    kvdepot_version: str
    #: UTC, as ISO 8601 writes it
    finished_at: str
    wall_s: float
    environment: dict[str, str]
    model: ModelFacts
    document: DocumentFacts
    pool: PoolResult
    arms: tuple[ArmResult, ...]
    #: recompute's time to first token over follow_up's
    speedup_follow_up_vs_recompute: float
    why_changed_first_line_reuses_nothing: str
    #: what did not go as it should; empty when all is well
    problems: tuple[str, ...]

    def arm(self, name: str) -> ArmResult:
        """One arm by its name."""
        return next(arm for arm in self.arms if arm.name == name)


def encode_result(result: DemoResult) -> bytes:
    """The text of ``demo.json``."""
    return msgspec.json.format(msgspec.json.encode(result), indent=2) + b"\n"


def decode_result(text: bytes) -> DemoResult:
    """Read a ``demo.json`` of this version.

    Raises:
        msgspec.ValidationError: it is another file or another version.
    """
    return msgspec.json.decode(text, type=DemoResult)
