"""One line for each request: everything that a number in a report was made of."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from typing import Literal

import msgspec

from kvdepot.errors import ConfigError

__all__ = ["Kind", "Row", "decode_rows", "digest_of", "encode_row"]

#: discarded to warm a process up; measured; measured to see whether the machine has changed
Kind = Literal["warmup", "measured"]

_DIGEST_CHARACTERS = 16


class Row(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One request. Times are monotonic seconds of the client; tokens are the server's usage."""

    run: int
    round: str
    arm: str
    seq: int
    #: tokens that the document was cut to; 0 outside of the rounds
    length: int = 0
    #: how often this part of the plan was begun; only the last one counts
    attempt: int = 0
    kind: Kind = "measured"
    #: the load point of a peak or contention test
    load: str = ""
    session: str = ""
    turn: int = 0
    #: first ask F, follow-up U, or the rest M, by oracle
    ask_class: str = ""
    salt: str = ""
    question: int = 0
    scheduled_s: float = 0.0
    sent_s: float = 0.0
    #: None where nothing came
    first_s: float | None = None
    last_s: float | None = None
    ended_s: float = 0.0
    #: None where the server gave no usage; a client cannot count tokens
    prompt_tokens: int | None = None
    output_tokens: int | None = None
    cached_tokens: int | None = None
    #: by tier; whether it is exact for a request is said by the window
    reused: dict[str, int] | None = None
    oracle_tokens: int = 0
    #: of the oracle's tokens, those of the system prompt that all requests have in common
    common_tokens: int = 0
    status: int = 0
    error: str = ""
    finish: str = ""
    output_digest: str = ""
    #: the beginning of the answer
    output: str = ""
    #: seconds between one output event and the next, in steps of 10 us
    gaps_s: list[float] = msgspec.field(default_factory=list)
    events: int = 0

    @property
    def is_ok(self) -> bool:
        """It was answered to its end."""
        return not self.error and self.first_s is not None

    @property
    def ttft_s(self) -> float | None:
        """From the intended send to the first token; closed loops intend to send when they do."""
        return None if self.first_s is None else self.first_s - self.scheduled_s

    @property
    def latency_s(self) -> float | None:
        """From the intended send to the last token."""
        return None if self.last_s is None else self.last_s - self.scheduled_s

    @property
    def tpot_s(self) -> float | None:
        """Seconds for each output token behind the first."""
        if self.first_s is None or self.last_s is None or (self.output_tokens or 0) < 2:
            return None
        return (self.last_s - self.first_s) / ((self.output_tokens or 0) - 1)


_ENCODER = msgspec.json.Encoder()
_DECODER = msgspec.json.Decoder(Row)


def encode_row(row: Row) -> bytes:
    """One line, without its end."""
    return _ENCODER.encode(row)


def decode_rows(lines: Iterable[bytes]) -> Iterator[Row]:
    """Rows of a file; a last line that was cut off by a crash is left out.

    Raises:
        ConfigError: another line is not a row; names it.
    """
    broken = 0
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        if broken:
            raise ConfigError(f"line {broken} of the rows is not a row")
        try:
            yield _DECODER.decode(line)
        except msgspec.MsgspecError:
            broken = number


def digest_of(text: str) -> str:
    """A short digest: of salts and outputs, which a report need not repeat."""
    return hashlib.sha256(text.encode()).hexdigest()[:_DIGEST_CHARACTERS]
