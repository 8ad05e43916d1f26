"""Bodies of the OpenAI-compatible API, as far as this server knows them.

Fields that are not known are ignored, as other servers do; a field that is known and cannot be honoured
is refused, because an answer to another question is worse than none.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import msgspec

from kvdepot.errors import ConfigError

__all__ = [
    "ApiError",
    "Ask",
    "Tokenize",
    "chunk",
    "decode_ask",
    "decode_tokenize",
    "error_body",
    "event",
    "usage_of",
    "whole",
]

_MAX_TOKENS = 16


class ApiError(Exception):
    """A request that is answered with an error body."""

    def __init__(self, status: int, message: str, *, kind: str = "invalid_request_error") -> None:
        super().__init__(message)
        self.status = status
        self.kind = kind


class Ask(NamedTuple):
    """One generation, whichever of the two routes it came by."""

    prompt: str | list[int]
    #: in place of a prompt
    messages: list[dict[str, str]] | None
    model: str | None
    max_tokens: int
    temperature: float
    top_p: float
    seed: int | None
    stop: tuple[str, ...]
    is_streamed: bool
    with_usage: bool
    ignore_eos: bool
    cache_salt: str | None


class _StreamOptions(msgspec.Struct):
    include_usage: bool = False


class _Part(msgspec.Struct):
    type: str
    text: str = ""


class _Message(msgspec.Struct):
    role: str
    content: str | list[_Part]


class _Common(msgspec.Struct, kw_only=True):
    model: str | None = None
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    stream: bool = False
    stream_options: _StreamOptions | None = None
    ignore_eos: bool = False
    min_tokens: int | None = None
    cache_salt: str | None = None
    n: int | None = None


class _Completion(_Common, kw_only=True):
    prompt: str | list[int]
    logprobs: int | None = None
    echo: bool = False


class _Chat(_Common, kw_only=True):
    messages: list[_Message]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    tools: list[Any] | None = None


class Tokenize(msgspec.Struct):
    """Body of the tokenize route: a prompt, or messages."""

    prompt: str | None = None
    messages: list[_Message] | None = None

    def as_messages(self) -> list[dict[str, str]] | None:
        """The messages with plain text as content."""
        return None if self.messages is None else _plain(self.messages)


def decode_ask(body: bytes, *, is_chat: bool) -> Ask:
    """A request's body.

    Raises:
        ApiError: it is not JSON, lacks something, or asks for what this server cannot do.
    """
    asked = _decoded(body, _Chat if is_chat else _Completion)
    assert isinstance(asked, _Common)
    _refuse(asked)
    limit = asked.max_tokens
    if isinstance(asked, _Chat) and asked.max_completion_tokens is not None:
        limit = asked.max_completion_tokens
    if asked.min_tokens and not asked.ignore_eos:
        raise ApiError(400, "min_tokens is honoured together with ignore_eos only")
    stop = [asked.stop] if isinstance(asked.stop, str) else asked.stop or []
    return Ask(
        prompt=asked.prompt if isinstance(asked, _Completion) else "",
        messages=_plain(asked.messages) if isinstance(asked, _Chat) else None,
        model=asked.model,
        max_tokens=_MAX_TOKENS if limit is None else limit,
        # the API's default is 1; a temperature of 0 has to be asked for
        temperature=1.0 if asked.temperature is None else asked.temperature,
        top_p=1.0 if asked.top_p is None else asked.top_p,
        seed=asked.seed,
        stop=tuple(stop),
        is_streamed=asked.stream,
        with_usage=asked.stream_options is not None and asked.stream_options.include_usage,
        ignore_eos=asked.ignore_eos,
        cache_salt=asked.cache_salt,
    )


def decode_tokenize(body: bytes) -> Tokenize:
    """The body of a tokenize request. Raises `ApiError` as `decode_ask`."""
    asked = _decoded(body, Tokenize)
    assert isinstance(asked, Tokenize)
    if (asked.prompt is None) == (asked.messages is None):
        raise ApiError(400, "give either prompt or messages")
    return asked


def _decoded(body: bytes, kind: type[msgspec.Struct]) -> msgspec.Struct:
    try:
        return msgspec.json.decode(body, type=kind)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise ApiError(400, f"the body is not a valid request: {error}") from error


def _refuse(asked: _Common) -> None:
    if asked.n not in (None, 1):
        raise ApiError(400, f"n must be 1, not {asked.n}")
    if getattr(asked, "logprobs", None):
        raise ApiError(400, "logprobs are not given")
    if getattr(asked, "echo", False):
        raise ApiError(400, "echo is not supported")
    if getattr(asked, "tools", None):
        raise ApiError(400, "tools are not supported")
    if asked.cache_salt == "":
        raise ApiError(400, "cache_salt must not be empty")


def _plain(messages: Sequence[_Message]) -> list[dict[str, str]]:
    return [{"role": each.role, "content": _content(each)} for each in messages]


def _content(message: _Message) -> str:
    if isinstance(message.content, str):
        return message.content
    if any(part.type != "text" for part in message.content):
        raise ApiError(400, "only text content is supported")
    return "".join(part.text for part in message.content)


# answers


def usage_of(prompt_tokens: int, completion_tokens: int, reused: dict[str, int]) -> dict[str, Any]:
    """The account of one request; ``cached_tokens_by_tier`` is our own addition."""
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
        "prompt_tokens_details": {
            "cached_tokens": sum(reused.values()),
            "cached_tokens_by_tier": reused,
        },
    }


def chunk(
    head: dict[str, Any],
    *,
    is_chat: bool,
    text: str | None = None,
    is_first: bool = False,
    finish: str | None = None,
) -> bytes:
    """One event of a stream."""
    if is_chat:
        delta: dict[str, str] = {"role": "assistant"} if is_first else {}
        if text is not None:
            delta["content"] = text
        choice: dict[str, Any] = {"index": 0, "delta": delta, "finish_reason": finish}
        kind = "chat.completion.chunk"
    else:
        choice = {"index": 0, "text": text or "", "finish_reason": finish}
        kind = "text_completion"
    return event({**head, "object": kind, "choices": [choice]})


def whole(
    head: dict[str, Any], *, is_chat: bool, text: str, finish: str, usage: dict[str, Any]
) -> dict[str, Any]:
    """An answer that is not streamed."""
    choice: dict[str, Any] = {"index": 0, "finish_reason": finish}
    if is_chat:
        choice["message"] = {"role": "assistant", "content": text}
    else:
        choice["text"] = text
    kind = "chat.completion" if is_chat else "text_completion"
    return {**head, "object": kind, "choices": [choice], "usage": usage}


def event(body: dict[str, Any]) -> bytes:
    """A server-sent event."""
    return b"data: " + msgspec.json.encode(body) + b"\n\n"


def error_body(error: ApiError | ConfigError, *, status: int) -> dict[str, Any]:
    """What stands in the body of an answer that is an error."""
    kind = error.kind if isinstance(error, ApiError) else "invalid_request_error"
    return {"error": {"message": str(error), "type": kind, "param": None, "code": status}}
