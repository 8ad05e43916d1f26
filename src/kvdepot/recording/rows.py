"""From a request and the end of its answer to one row that `kvdepot audit` reads."""

from __future__ import annotations

import hashlib
import hmac
import json
import re
import secrets
import zlib
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from kvdepot.errors import ConfigError

__all__ = ["TAIL_BYTES", "Redaction", "is_prompt_path", "row_of", "usage_of"]

#: the end of an answer that is looked at for its usage; the last event of a stream is far smaller
TAIL_BYTES = 256 * 1024
#: as long as the longest line that the audit reads
_UNPACKED_BYTES_MAX = 256 << 20
_PROMPT_PATHS = ("/chat/completions", "/completions", "/responses", "/messages")
_SESSION_HEADERS = ("x-session-id", "x-conversation-id", "x-trace-id")
_REQUEST_HEADERS = ("x-request-id", "x-correlation-id")
_USERS = ("user", "user_id", "safety_identifier")


class Redaction:
    """What of a request is not written as it is. The salt lives as long as the process.

    Args:
        hash_users: names of users and sessions become hashes.
        patterns: regular expressions; what they match in texts becomes a hash of the same for the same.
        drop: names of fields of the body that are left out.

    Raises:
        ConfigError: a pattern is no regular expression.
    """

    def __init__(
        self, *, hash_users: bool = False, patterns: Sequence[str] = (), drop: Sequence[str] = ()
    ) -> None:
        self._hash_users = hash_users
        self._drop = frozenset(drop)
        self._salt = secrets.token_bytes(32)
        try:
            self._patterns = [re.compile(each) for each in patterns]
        except re.error as error:
            raise ConfigError(f"not a regular expression: {error}") from error

    @property
    def changes_bodies(self) -> bool:
        """Whether a body may have to be written otherwise."""
        return bool(self._patterns or self._drop or self._hash_users)

    def name(self, value: str) -> str:
        """A user or session, hashed if that was asked for."""
        return f"h-{self._digest(value)}" if self._hash_users else value

    def body(self, value: Any, *, is_top: bool = True) -> Any:
        """A body without what must not be written."""
        if isinstance(value, dict):
            return {
                key: self.name(str(each))
                if is_top and key in _USERS
                else self.body(each, is_top=False)
                for key, each in value.items()
                if not (is_top and key in self._drop)
            }
        if isinstance(value, list):
            return [self.body(each, is_top=False) for each in value]
        if isinstance(value, str):
            for pattern in self._patterns:
                value = pattern.sub(lambda match: f"[{self._digest(match[0])}]", value)
        return value

    def _digest(self, text: str) -> str:
        digest = hmac.new(self._salt, text.encode("utf-8", "replace"), hashlib.sha256)
        return digest.hexdigest()[:12]


def is_prompt_path(path: str) -> bool:
    """Whether requests to a path hold prompts."""
    return path.rstrip("/").endswith(_PROMPT_PATHS)


def row_of(
    body: bytes,
    *,
    headers: Mapping[str, str],
    path: str,
    time_s: float,
    status: int,
    usage: Any,
    redaction: Redaction,
) -> bytes | None:
    """One line of the log, with its end; None for a body that is no JSON object.

    Headers are never written, but for ids of requests and sessions.
    """
    lower = {key.lower(): value for key, value in headers.items()}
    plain = _unpacked(body, lower.get("content-encoding", "").lower())
    try:
        decoded = json.loads(plain or b"")
    except (ValueError, RecursionError):
        return None
    if not isinstance(decoded, dict):
        return None
    session = next((lower[key] for key in _SESSION_HEADERS if lower.get(key)), None)
    request = next((lower[key] for key in _REQUEST_HEADERS if lower.get(key)), None)
    if redaction.changes_bodies:
        decoded = redaction.body(decoded)
    row: dict[str, Any] = {
        "request_id": request or secrets.token_hex(8),
        "timestamp": time_s,
        "path": path,
        "status": status,
    }
    if session is not None:
        row["session_id"] = redaction.name(session)
    row["body"] = decoded
    if isinstance(usage, dict):
        row["usage"] = usage
    return (
        msgspec.json.encode(row) + b"\n" if _is_encodable(row) else json.dumps(row).encode() + b"\n"
    )


def _is_encodable(row: dict[str, Any]) -> bool:
    """Whether all texts are valid Unicode; lone surrogates are written as escapes."""
    try:
        msgspec.json.encode(row)
    except (UnicodeEncodeError, msgspec.MsgspecError, OverflowError):
        return False
    return True


def _unpacked(data: bytes, encoding: str) -> bytes | None:
    """Bytes without their content encoding; None where it is not known, damaged, or hides too much."""
    if encoding in ("", "identity"):
        return data
    if encoding not in ("gzip", "deflate"):
        return None
    unpacker = zlib.decompressobj(zlib.MAX_WBITS | 32)  # either header
    try:
        plain = unpacker.decompress(data, _UNPACKED_BYTES_MAX)
    except zlib.error:
        return None
    return plain if unpacker.eof else None


def usage_of(tail: bytes, *, encoding: str = "", is_whole: bool = True) -> Any:
    """The ``usage`` in an answer or in the last events of a stream; None where there is none.

    Args:
        tail: the end of the answer's bytes.
        encoding: the answer's content encoding.
        is_whole: whether the tail is the whole answer; a part cannot be unpacked.
    """
    if encoding and not is_whole:
        return None
    plain = _unpacked(tail, encoding)
    if plain is None:
        return None
    text = plain.decode("utf-8", "replace")
    try:
        whole = json.loads(text)
    except (ValueError, RecursionError):
        return _usage_of_events(text)
    return whole.get("usage") if isinstance(whole, dict) else None


def _usage_of_events(text: str) -> Any:
    for line in reversed(text.splitlines()):
        if not line.startswith("data:") or '"usage"' not in line:
            continue
        try:
            event = json.loads(line[5:])
        except (ValueError, RecursionError):
            continue
        if isinstance(event, dict) and isinstance(event.get("usage"), dict):
            return event["usage"]
    return None
