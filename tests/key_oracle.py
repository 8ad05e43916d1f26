"""Block keys computed a second time, with `hashlib` and `json` alone and no line of kvdepot.keys.

Written from the words of the format: so a change of the product's key builder, made on purpose or
not, disagrees with this file and with the golden vectors.
"""

from __future__ import annotations

import hashlib
import json
from typing import Any


def _field(value: bytes | None) -> bytes:
    if value is None:
        return bytes([0])
    return bytes([1]) + len(value).to_bytes(8, "little") + value


def identity_digest(fields: dict[str, Any]) -> bytes:
    text = json.dumps(fields, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    return hashlib.sha256(b"kvdepot identity\n" + text.encode()).digest()


def keys(digest: bytes, tokens: list[int], block_tokens: int, extras: dict[str, Any]) -> list[str]:
    """Hex keys of the full blocks. `extras` is as in the golden file: texts, hex digests."""
    salt, lora = extras.get("tenant_salt"), extras.get("lora_digest")
    parent = hashlib.sha256(
        b"kvdepot root v1\n"
        + _field(digest)
        + _field(None if salt is None else salt.encode())
        + _field(None if lora is None else bytes.fromhex(lora))
    ).digest()
    found = []
    for first in range(0, len(tokens) - block_tokens + 1, block_tokens):
        last = first + block_tokens
        text = parent + (4 * block_tokens).to_bytes(4, "little")
        for token in tokens[first:last]:
            text += token.to_bytes(4, "little")
        inside = [
            (offset, bytes.fromhex(content), count)
            for content, offset, count in extras.get("images", [])
            if offset < last and offset + count > first
        ]
        if inside:
            text += b"images"
        for offset, content, count in sorted(inside):
            text += _field(content)
            text += (offset - first).to_bytes(8, "little", signed=True)
            text += count.to_bytes(8, "little", signed=True)
        parent = hashlib.sha256(text).digest()
        found.append(parent.hex())
    return found


def group_key(key: str, group_index: int) -> str:
    if group_index == 0:
        return key
    text = b"kvdepot group\n" + bytes.fromhex(key) + group_index.to_bytes(4, "little")
    return hashlib.sha256(text).hexdigest()


def adopted_key(digest: bytes, engine_hash: bytes) -> str:
    return hashlib.sha256(b"kvdepot adopted\n" + _field(digest) + engine_hash).hexdigest()
