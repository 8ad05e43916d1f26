"""Rows of request logs: OpenAI bodies, and the wrappers that proxies and tracers put around them.

LiteLLM payloads, Langfuse observations, Azure batch and gateway rows and OpenTelemetry GenAI spans all
come down to a body and a few facts; a row may hold several spans.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import numpy as np

from kvdepot.audit.records import Body, Record, parse_time
from kvdepot.audit.tokenlog import MAX_TOKEN_ID, Ids

__all__ = ["DEPTH_MAX", "chat_records", "is_cut", "is_deep", "is_int_list", "packed_ids"]

#: schemas are compared and written level by level; real ones have some ten
DEPTH_MAX = 150

_WRAPPERS = (
    "body",
    "request",
    "requestBody",
    "request_body",
    "kwargs",
    "input",
    "proxy_server_request",
    "properties",
    "data",
)
_TIMES = (
    "timestamp",
    "time",
    "ts",
    "start_time",
    "startTime",
    "request_time",
    "created_at",
    "created",
    "TimeGenerated",
    "startTimeUnixNano",
    "datetime",
)
_SESSIONS = (
    "session_id",
    "sessionId",
    "session",
    "conversation_id",
    "chat_id",
    "thread_id",
    "gen_ai.conversation.id",
    "trace_id",
    "traceId",
)
_USERS = ("user", "userId", "user_id", "end_user", "enduser.id", "user.id", "safety_identifier")
_IDS = ("request_id", "requestId", "id", "custom_id", "CorrelationId", "call_id", "spanId")
_SALTS = ("cache_salt",)
_ADAPTERS = ("lora_name", "lora", "adapter", "lora_request")
_TOKENS = ("prompt_token_ids", "token_ids", "input_ids", "tokens")
_CUTS = ("litellm_truncated", "[truncated]", "[TRUNCATED]", "...(truncated)", "<truncated>")


def chat_records(row: dict[str, Any], line: int) -> Iterator[Record]:
    """The requests in one row; none if it holds no prompt."""
    for attributes in _spans(row):
        record = _record(attributes, line)
        if record is not None:
            yield record


def is_int_list(value: object) -> bool:
    """Whether a value is a non-empty list of integers."""
    return (
        isinstance(value, list)
        and bool(value)
        and all(isinstance(each, int) and not isinstance(each, bool) for each in value)
    )


def packed_ids(ids: list[int]) -> Ids:
    """Token ids as an array.

    Raises:
        ValueError: an id is out of range.
    """
    if min(ids) < 0 or max(ids) > MAX_TOKEN_ID:
        raise ValueError(f"token ids must be between 0 and {MAX_TOKEN_ID}")
    return np.array(ids, np.int32)


def _spans(row: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """A row as it is, or the spans of an OpenTelemetry export, attributes and all, in one level."""
    scopes = row.get("resourceSpans")
    if isinstance(scopes, list):
        for resource in scopes:
            for scope in _lists(resource, "scopeSpans"):
                for span in _lists(scope, "spans"):
                    yield _flat_span(span)
        return
    yield _flat_span(row) if isinstance(row.get("attributes"), dict | list) else row


def _lists(value: object, key: str) -> list[Any]:
    found = value.get(key) if isinstance(value, dict) else None
    return [each for each in found if isinstance(each, dict)] if isinstance(found, list) else []


def _flat_span(span: dict[str, Any]) -> dict[str, Any]:
    attributes = span.get("attributes", {})
    if isinstance(attributes, list):
        attributes = {
            each.get("key"): next(iter((each.get("value") or {"": None}).values()), None)
            for each in attributes
            if isinstance(each, dict)
        }
    return {**{key: value for key, value in span.items() if key != "attributes"}, **attributes}


def _decoded(value: object) -> object:
    """Exports often hold JSON as text."""
    if isinstance(value, str) and value[:1] in ("{", "["):
        try:
            found = json.loads(value)
        except (ValueError, RecursionError):
            return value
        return value if is_deep(found) else found
    return value


def is_deep(value: object) -> bool:
    """Whether objects and arrays stand in each other over more than `DEPTH_MAX` levels."""
    level = [value]
    for _ in range(DEPTH_MAX):
        level = [
            child
            for each in level
            if isinstance(each, dict | list)
            for child in (each.values() if isinstance(each, dict) else each)
            if isinstance(child, dict | list)
        ]
        if not level:
            return False
    return True


def _record(row: dict[str, Any], line: int) -> Record | None:
    layers = _layers(row)
    record = Record(line)
    for layer in layers:
        ids = next((layer[key] for key in _TOKENS if is_int_list(layer.get(key))), None)
        if ids is None and is_int_list(layer.get("prompt")):
            ids = layer["prompt"]
        body = _body(layer)
        if ids is not None:
            record.ids = packed_ids(ids)
        elif body is not None:
            record.body = body
        elif isinstance(layer.get("prompt"), str):
            record.prompt = layer["prompt"]
        else:
            continue
        break
    else:
        return None
    _facts(record, layers)
    return record


def _layers(row: dict[str, Any]) -> list[dict[str, Any]]:
    """The row and the wrapped objects in it, outermost first, two levels deep."""
    layers = [row]
    for outer in layers[:1]:
        for key in _WRAPPERS:
            inner = _decoded(outer.get(key))
            if isinstance(inner, list) and key == "input" and _is_messages(inner):
                inner = {"messages": inner}
            if isinstance(inner, dict):
                layers.append(inner)
                for deeper_key in _WRAPPERS:
                    deeper = _decoded(inner.get(deeper_key))
                    if isinstance(deeper, dict):
                        layers.append(deeper)
    return layers


def _is_messages(value: object) -> bool:
    return (
        isinstance(value, list)
        and bool(value)
        and all(isinstance(each, dict) and isinstance(each.get("role"), str) for each in value)
    )


def _body(layer: dict[str, Any]) -> Body | None:
    messages = _decoded(layer.get("messages"))
    if _is_messages(messages):
        return {**layer, "messages": messages}
    spoken = _decoded(layer.get("gen_ai.input.messages") or layer.get("RequestMessages"))
    if not _is_messages(spoken):
        return None
    assert isinstance(spoken, list)
    made = [_from_otel(each) for each in spoken]
    system = _decoded(layer.get("gen_ai.system_instructions"))
    if system:
        parts = system if isinstance(system, list) else [{"type": "text", "content": system}]
        made.insert(0, _from_otel({"role": "system", "parts": parts}))
    body: Body = {"messages": made, "model": layer.get("gen_ai.request.model")}
    tools = _decoded(layer.get("gen_ai.tool.definitions"))
    if isinstance(tools, list):
        body["tools"] = tools
    return body


def _from_otel(message: dict[str, Any]) -> dict[str, Any]:
    parts = message.get("parts")
    if not isinstance(parts, list):
        return message
    texts, calls = [], []
    made: dict[str, Any] = {"role": message["role"]}
    for part in parts:
        if not isinstance(part, dict):
            continue
        kind = part.get("type")
        if kind == "tool_call":
            arguments = part.get("arguments")
            text = arguments if isinstance(arguments, str) else json.dumps(arguments)
            calls.append({"id": part.get("id"), "type": "function",
                          "function": {"name": part.get("name"), "arguments": text}})  # fmt: skip
        elif kind == "reasoning":
            made["reasoning_content"] = part.get("content")
        else:
            texts.append(str(part.get("content", part.get("response", part.get("result", "")))))
    made["content"] = "".join(texts)
    if calls:
        made["tool_calls"] = calls
    return made


def _facts(record: Record, layers: list[dict[str, Any]]) -> None:
    record.time_s = next(
        (
            at
            for layer in layers
            for key in _TIMES
            if (at := parse_time(layer.get(key))) is not None
        ),
        None,
    )
    metadata = [_decoded(layer.get("metadata")) for layer in layers]
    layers = [*layers, *(each for each in metadata if isinstance(each, dict))]
    record.session = _text(layers, _SESSIONS)
    record.user = _text(layers, _USERS)
    record.request_id = _text(layers, _IDS)
    salt, adapter = _text(layers, _SALTS), _text(layers, _ADAPTERS)
    model = _text(layers, ("model", "gen_ai.request.model"))
    pairs = (("cache_salt", salt), ("lora", adapter), ("model", model))
    record.extra = tuple((name, value) for name, value in pairs if value is not None)
    record.usage_prompt, record.usage_cached = _usage(layers)


def _text(layers: list[dict[str, Any]], keys: tuple[str, ...]) -> str | None:
    for key in keys:
        for layer in layers:
            value = layer.get(key)
            if isinstance(value, str | int) and not isinstance(value, bool) and value != "":
                return str(value)
    return None


def _usage(layers: list[dict[str, Any]]) -> tuple[int | None, int | None]:
    total = cached = None
    for layer in layers:
        for holder in (layer, _decoded(layer.get("response"))):
            usage = holder.get("usage") if isinstance(holder, dict) else None
            for source in (usage, layer.get("usageDetails"), layer):
                if not isinstance(source, dict):
                    continue
                details = source.get("prompt_tokens_details") or {}
                if total is None:
                    total = _count(
                        source, "prompt_tokens", "PromptTokens", "gen_ai.usage.input_tokens"
                    )
                if cached is None and isinstance(details, dict):
                    cached = _count(details, "cached_tokens")
                if cached is None:
                    cached = _count(
                        source, "input_cached_tokens", "gen_ai.usage.cache_read.input_tokens"
                    )
    return total, cached


def _count(source: dict[str, Any], *keys: str) -> int | None:
    for key in keys:
        value = source.get(key)
        if isinstance(value, int | float) and not isinstance(value, bool) and value >= 0:
            return int(value)
    return None


def is_cut(record: Record) -> bool:
    """Whether the logger says in the text that it cut the prompt."""
    if record.prompt is not None:
        return record.prompt.rstrip()[-60:].endswith(_CUTS) or "litellm_truncated" in record.prompt
    messages = record.body["messages"] if record.body else []
    return any(
        isinstance(each.get("content"), str) and "litellm_truncated" in each["content"]
        for each in messages
    )
