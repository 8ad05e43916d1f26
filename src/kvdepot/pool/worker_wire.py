"""What an engine's process and its worker say to each other: small frozen structs as MessagePack.

Every message is one struct of a tagged union, every list in it has a limit, and so has the encoded
message. Bytes of blocks never travel: a row is a place in a buffer that both processes map.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any

import msgspec

from kvdepot import errors
from kvdepot.config import PoolConfig
from kvdepot.errors import KvdepotError, PoolUnavailable
from kvdepot.identity import Identity
from kvdepot.keys import KEY_BYTES, BlockKey
from kvdepot.pool.notebook import NOTE_BYTES_MAX
from kvdepot.tiers import Outcome, TierLimits, TierUsage, Turn

__all__ = [
    "KEYS_MAX",
    "MESSAGE_BYTES_MAX",
    "OUTCOMES",
    "PROTOCOL",
    "ROWS_MAX",
    "Added",
    "BufferRef",
    "Cancel",
    "Change",
    "Close",
    "Closed",
    "Command",
    "Drain",
    "Drained",
    "Forgot",
    "Load",
    "Notice",
    "Open",
    "Opened",
    "Ping",
    "Pong",
    "Progress",
    "Refused",
    "Remember",
    "Removed",
    "Report",
    "Row",
    "Store",
    "StoreRow",
    "Touch",
    "decode_command",
    "decode_notice",
    "encode",
    "error_of",
    "refusal_of",
    "split_keys",
]

#: both sides are of one release; a child from another installation is told so at once
PROTOCOL = 2
MESSAGE_BYTES_MAX = 4 << 20
#: rows of one load or store message; longer calls become several
ROWS_MAX = 16_384
#: keys of one change or touch: the parent takes such a piece in within about a millisecond
KEYS_MAX = 1024
#: outcomes by their number on the wire; PENDING is 0
OUTCOMES: tuple[Outcome, ...] = tuple(Outcome)

_Key = Annotated[bytes, msgspec.Meta(min_length=KEY_BYTES, max_length=KEY_BYTES)]
_Count = Annotated[int, msgspec.Meta(ge=0)]
_Keys = Annotated[bytes, msgspec.Meta(max_length=KEYS_MAX * KEY_BYTES)]


class _Part(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A value inside a message."""


class _Message(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """One of the union."""


class BufferRef(_Part, frozen=True):
    """A shared buffer: its descriptor, which the child has under the same number."""

    fd: _Count
    fd_offset: _Count
    length_bytes: _Count
    is_prefaulted: bool


class Row(_Part, frozen=True):
    """One block to load, and where to."""

    key: _Key
    buffer: _Count
    offset: _Count
    length: _Count


class StoreRow(_Part, frozen=True):
    """One block to store, and where from."""

    key: _Key
    parent: _Key
    tokens: _Count
    buffer: _Count
    offset: _Count
    length: _Count


# parent to child


class Open(_Message, frozen=True):
    """The first message: what to open."""

    protocol: int
    config: PoolConfig
    identity: Identity
    buffers: tuple[BufferRef, ...]
    #: of the parent's `kvdepot` logger
    log_level: int


class Load(_Message, frozen=True):
    """Fill rows. `deadline_s` counts from the message's arrival."""

    number: int
    rows: Annotated[tuple[Row, ...], msgspec.Meta(max_length=ROWS_MAX)]
    deadline_s: float | None
    turn: Turn | None = None


class Store(_Message, frozen=True):
    """Store rows."""

    number: int
    rows: Annotated[tuple[StoreRow, ...], msgspec.Meta(max_length=ROWS_MAX)]


class Cancel(_Message, frozen=True):
    """Take a load or a store back; an unknown number is over already."""

    number: int


class Touch(_Message, frozen=True):
    """Blocks were used."""

    keys: _Keys


class Remember(_Message, frozen=True):
    """Keep a small text for the next process."""

    text: Annotated[bytes, msgspec.Meta(max_length=NOTE_BYTES_MAX)]


class Drain(_Message, frozen=True):
    """Say `Drained` once all stores so far are visible."""

    number: int
    timeout_s: float


class Ping(_Message, frozen=True):
    """Say `Pong`."""

    number: int


class Close(_Message, frozen=True):
    """Publish what was stored, give the leases back, say `Closed` and end."""

    timeout_s: float


Command = Open | Load | Store | Cancel | Touch | Remember | Drain | Ping | Close


# child to parent


class Added(_Message, frozen=True):
    """A segment's blocks, or some more of them, are present."""

    segment: _Count
    keys: _Keys


class Removed(_Message, frozen=True):
    """All blocks of a segment are gone."""

    segment: _Count


class Forgot(_Message, frozen=True):
    """One block of a segment is gone."""

    segment: _Count
    key: _Key


Change = Added | Removed | Forgot


class Progress(_Part, frozen=True):
    """Where a load or store stands: one number of `OUTCOMES` per row."""

    number: int
    outcomes: Annotated[bytes, msgspec.Meta(max_length=ROWS_MAX)]
    #: the rows are the caller's again
    is_settled: bool


class Report(_Message, frozen=True):
    """What has happened, in this order: changes of the index, then what became of jobs."""

    changes: tuple[Change, ...] = ()
    progress: tuple[Progress, ...] = ()
    #: what was added to the child's counters since the last report
    counters: dict[str, int] = {}
    usage: TierUsage | None = None


class Opened(_Message, frozen=True):
    """The pool is open and the index reported."""

    limits: TierLimits
    recalled: bytes | None = None


class Refused(_Message, frozen=True):
    """The pool cannot be opened: an error of the tree, by the name of its class."""

    kind: str
    message: str
    fields: dict[str, Any]


class Drained(_Message, frozen=True):
    """The answer to `Drain`."""

    number: int
    is_drained: bool


class Pong(_Message, frozen=True):
    """The answer to `Ping`."""

    number: int
    #: how long the longest piece of work has been holding a caller's rows
    stuck_s: float


class Closed(_Message, frozen=True):
    """The answer to `Close`: everything is published that could be."""


Notice = Report | Opened | Refused | Drained | Pong | Closed

_encoder = msgspec.msgpack.Encoder()
_commands: msgspec.msgpack.Decoder[Command] = msgspec.msgpack.Decoder(Command)
_notices: msgspec.msgpack.Decoder[Notice] = msgspec.msgpack.Decoder(Notice)


def encode(message: Command | Notice) -> bytes:
    """A message as bytes."""
    return _encoder.encode(message)


def decode_command(message: bytes) -> Command:
    """What the parent says. Raises `msgspec.MsgspecError` for anything else."""
    return _commands.decode(message)


def decode_notice(message: bytes) -> Notice:
    """What the child says. Raises `msgspec.MsgspecError` for anything else."""
    return _notices.decode(message)


def split_keys(keys: bytes) -> list[BlockKey]:
    """Keys that were written one after another."""
    return [BlockKey(key) for key in _pieces(keys, KEY_BYTES)]


def _pieces(data: bytes, length: int) -> Iterator[bytes]:
    for start in range(0, len(data), length):
        yield data[start : start + length]


def refusal_of(error: Exception) -> Refused:
    """An error on its way to the parent, with all that it says; a bug travels as `PoolUnavailable`."""
    if isinstance(error, KvdepotError):
        fields = msgspec.to_builtins(vars(error), enc_hook=repr)
        return Refused(type(error).__name__, str(error), fields)
    return Refused(
        PoolUnavailable.__name__,
        f"the worker failed: {type(error).__name__}: {error}",
        {"hint": "the worker's own messages are on standard error", "path": ""},
    )


def error_of(refused: Refused) -> KvdepotError:
    """The error again, of the same class and with the same attributes.

    Without calling its constructor: the classes take different arguments and make their message of
    them, and the message is here already.
    """
    is_known = refused.kind in errors.__all__
    error_class: type[KvdepotError] = getattr(errors, refused.kind) if is_known else KvdepotError
    error = error_class.__new__(error_class, refused.message)
    vars(error).update(refused.fields)
    return error
