"""From the raw bytes of a streamed answer, with the times at which they came, to what they say.

Parsing happens when the stream has ended: while it runs, the client only notes times, so that 64
streams with 5 ms between tokens do not wait for one another.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import msgspec

__all__ = ["Arrival", "Stream", "Usage", "parse_stream", "usage_of"]

#: monotonic seconds, and the bytes that came then
Arrival = tuple[float, bytes]


class Usage(msgspec.Struct, frozen=True, kw_only=True):
    """What the server says about a request. None is what it did not say."""

    prompt_tokens: int
    output_tokens: int
    cached_tokens: int | None = None
    #: only our own servers say it
    reused: dict[str, int] | None = None


class Stream(msgspec.Struct, kw_only=True):
    """A parsed answer."""

    text: str = ""
    #: when each event with content or reasoning in it was complete
    times_s: list[float] = msgspec.field(default_factory=list)
    finish: str = ""
    usage: Usage | None = None
    #: what the server said instead of going on
    error: str = ""
    #: the end mark came
    is_whole: bool = False


def parse_stream(arrivals: Sequence[Arrival]) -> Stream:
    """Server-sent events of a chat or a completions stream; what is not understood is passed over."""
    stream = Stream()
    pieces: list[str] = []
    for at_s, data in _events(arrivals):
        if data == b"[DONE]":
            stream.is_whole = True
            continue
        try:
            body = msgspec.json.decode(data)
        except msgspec.MsgspecError:
            stream.error = stream.error or "an event is not JSON"
            continue
        if isinstance(body, dict):
            _take(stream, pieces, at_s, body)
    stream.text = "".join(pieces)
    return stream


def usage_of(body: Any) -> Usage | None:
    """The account in an answer's ``usage``; None where there is none, or not a whole one."""
    if not isinstance(body, dict):
        return None
    prompt, output = body.get("prompt_tokens"), body.get("completion_tokens")
    if not isinstance(prompt, int) or not isinstance(output, int):
        return None
    details = body.get("prompt_tokens_details")
    cached = details.get("cached_tokens") if isinstance(details, dict) else None
    tiers = details.get("cached_tokens_by_tier") if isinstance(details, dict) else None
    return Usage(
        prompt_tokens=prompt,
        output_tokens=output,
        cached_tokens=cached if isinstance(cached, int) else None,
        reused={str(name): int(count) for name, count in tiers.items()}
        if isinstance(tiers, dict)
        else None,
    )


def _events(arrivals: Sequence[Arrival]) -> Iterator[Arrival]:
    """Data of each event, at the time at which its last byte came."""
    rest = b""
    for at_s, data in arrivals:
        rest += data
        *whole, rest = rest.replace(b"\r\n", b"\n").split(b"\n\n")
        for block in whole:
            lines = [line[5:].strip() for line in block.split(b"\n") if line.startswith(b"data:")]
            if lines:
                yield at_s, b"\n".join(lines)


def _take(stream: Stream, pieces: list[str], at_s: float, body: dict[str, Any]) -> None:
    if "error" in body:
        error = body["error"]
        stream.error = str(error.get("message", error) if isinstance(error, dict) else error)
    stream.usage = usage_of(body.get("usage")) or stream.usage
    for choice in body.get("choices") or []:
        text, is_output = _text_of(choice)
        if is_output:
            stream.times_s.append(at_s)
            pieces.append(text)
        stream.finish = choice.get("finish_reason") or stream.finish


def _text_of(choice: dict[str, Any]) -> tuple[str, bool]:
    """Text of a choice, and whether the model made anything: thinking counts, an empty text does not."""
    delta = choice.get("delta")
    if not isinstance(delta, dict):
        text = choice.get("text") or ""
        return text, bool(text)
    thought = delta.get("reasoning_content") or delta.get("reasoning") or ""
    text = delta.get("content") or ""
    return text, bool(text or thought or delta.get("tool_calls"))
