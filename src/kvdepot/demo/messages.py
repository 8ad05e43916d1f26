"""What the demo and the process of an arm say to each other: one JSON object a line.

The demo writes a `Job` to the arm's standard input, then the lines ``ask`` and ``end``. The arm answers on
its standard output: `Step`s while it works, `Ready` when it may be asked, `Answered` when what it
computed is stored and visible to others, or `Failed`. An arm whose input ends, ends.
"""

from __future__ import annotations

import msgspec

__all__ = [
    "ASK",
    "END",
    "Answered",
    "Failed",
    "Job",
    "Message",
    "PoolFacts",
    "Ready",
    "Step",
    "decode_job",
    "decode_message",
    "encode",
]

ASK = "ask"
END = "end"


class Job(msgspec.Struct, frozen=True, kw_only=True):
    """What one process is to do."""

    arm: str
    model_folder: str
    model_name: str
    dtype: str
    block_tokens: int | None
    #: None: no depot
    pool_url: str | None
    #: the pool is the demo's own and is gone afterwards: no caution about others' space
    is_own_pool: bool
    #: salt of all keys, so that blocks of earlier runs are not found
    run_id: str
    #: room for this many tokens in the host tier
    host_tokens: int
    instruction: str
    document: str
    question: str
    max_new_tokens: int
    stop: tuple[str, ...]
    #: wait, before the clock starts, until another process's blocks of the document are seen
    awaits_blocks: bool = False


class Step(msgspec.Struct, frozen=True, tag="step"):
    """Something that takes time is under way. `total` is 0 where it is not known."""

    what: str
    done: int
    total: int


class PoolFacts(msgspec.Struct, frozen=True):
    """What the arm found out about its pool."""

    block_tokens: int
    block_reason: str
    groups: int
    block_bytes: tuple[int, ...]
    token_bytes: int
    is_direct: bool
    direct_reason: str


class Ready(msgspec.Struct, frozen=True, tag="ready", kw_only=True):
    """The engine is warm and may be asked."""

    prompt_tokens: int
    context_tokens: int
    attention: str
    #: what computes here: versions, threads, instruction set
    environment: dict[str, str]
    #: None without a pool
    pool: PoolFacts | None


class Answered(msgspec.Struct, frozen=True, tag="answered", kw_only=True):
    """The end of an answer; what it stored is visible to others."""

    ttft_s: float
    total_s: float
    prompt_tokens: int
    computed_tokens: int
    reused_tokens: dict[str, int]
    #: by the tier's own count of what was loaded and verified
    bytes_read: int
    #: by the tier's own count of what was written
    bytes_written: int
    answer: str
    answer_tokens: int
    #: how long another process's blocks were waited for before the clock started
    awaited_s: float
    #: segments that were written out and dropped from the page cache before the clock started
    settled_files: int
    #: counters of blocks that were not stored, by the reason; empty when all were
    dropped_blocks: dict[str, int]


class Failed(msgspec.Struct, frozen=True, tag="failed"):
    """The arm cannot go on."""

    message: str
    hint: str


Message = Step | Ready | Answered | Failed

_message_decoder: msgspec.json.Decoder[Message] = msgspec.json.Decoder(Message)


def encode(message: Message | Job) -> bytes:
    """One line."""
    return msgspec.json.encode(message) + b"\n"


def decode_job(line: bytes) -> Job:
    """The demo's first line."""
    return msgspec.json.decode(line, type=Job)


def decode_message(line: bytes) -> Message:
    """One line of an arm."""
    return _message_decoder.decode(line)
