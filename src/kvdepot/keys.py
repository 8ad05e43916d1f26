"""Block keys: the one key builder, used by every tier and every engine.

A block key is a SHA-256 chain over token ids. The root commits to the identity and to everything
request-level that holds for the whole prompt (tenant salt, LoRA content); each step commits to the
parent key, the block's token ids and the images whose placeholders lie in the block. Equal keys
therefore mean equal KV. Encodings are length-prefixed, so no two inputs share one encoding, and
nothing here depends on ``hash()``, the hash seed, the byte order of the machine or the process.
"""

from __future__ import annotations

import hashlib
import operator
import struct
from collections.abc import Sequence
from typing import Any, NamedTuple, NewType

import numpy as np

from kvdepot.errors import ConfigError, Uncacheable

__all__ = [
    "KEY_BYTES",
    "BlockKey",
    "Image",
    "RequestExtras",
    "adopt_key",
    "block_keys",
    "group_key",
    "root_key",
]

#: 32 bytes; commits to the identity and to every token before the block's end.
BlockKey = NewType("BlockKey", bytes)
KEY_BYTES = 32


class Image(NamedTuple):
    """One multimodal input: the digest of its content and the tokens that stand for it."""

    content_digest: bytes
    token_offset: int
    token_count: int


class RequestExtras(NamedTuple):
    """Request-level inputs other than tokens that change the KV. `None` and ``""`` differ."""

    tenant_salt: str | None = None
    #: digest of the adapter's content, not its name: a name can be given to other weights
    lora_digest: bytes | None = None
    images: tuple[Image, ...] = ()


def _field(value: bytes | None) -> bytes:
    """Length-prefixed bytes; absence has an encoding of its own."""
    return b"\x00" if value is None else b"\x01" + struct.pack("<Q", len(value)) + value


def root_key(identity_digest: bytes, extras: RequestExtras = RequestExtras()) -> BlockKey:
    """The parent of a prompt's first block. Never names a block itself.

    Raises:
        Uncacheable: the salt is not text, or the LoRA digest is not bytes.
    """
    try:
        salt = None if extras.tenant_salt is None else extras.tenant_salt.encode()
        encoded = _field(identity_digest) + _field(salt) + _field(extras.lora_digest)
    except (AttributeError, TypeError, UnicodeEncodeError) as error:
        raise Uncacheable(f"malformed salt or LoRA digest: {error}") from error
    return BlockKey(hashlib.sha256(b"kvdepot root v1\n" + encoded).digest())


def block_keys(
    identity_digest: bytes,
    token_ids: Sequence[int],
    block_tokens: int,
    extras: RequestExtras = RequestExtras(),
) -> list[BlockKey]:
    """Keys of the full blocks of a prompt, in order; a trailing partial block has no key.

    Args:
        identity_digest: `Identity.digest()`.
        token_ids: the prompt's token ids, each in [0, 2**32).
        block_tokens: tokens in a block.
        extras: salt, LoRA and images of the request.

    Raises:
        Uncacheable: a token id, an image, the salt or the LoRA digest is malformed, or there are no
            token ids (prompt embeddings); the request must be computed.
        ConfigError: `block_tokens` is not positive.
    """
    if block_tokens < 1:
        raise ConfigError(f"block_tokens must be positive, not {block_tokens}")
    if not hasattr(token_ids, "__len__"):
        raise Uncacheable(f"a prompt without token ids cannot be keyed: {token_ids!r}")
    count = len(token_ids) // block_tokens
    _check_images(extras.images, len(token_ids))
    encoded = _token_bytes(token_ids[: count * block_tokens])
    step = block_tokens * 4
    parent = root_key(identity_digest, extras)
    keys: list[BlockKey] = []
    for index in range(count):
        tokens = encoded[index * step : (index + 1) * step]
        first = index * block_tokens
        images = _images_between(extras.images, first, first + block_tokens)
        parent = BlockKey(
            hashlib.sha256(parent + struct.pack("<I", step) + tokens + images).digest()
        )
        keys.append(parent)
    return keys


def group_key(key: BlockKey, group_index: int) -> BlockKey:
    """The key of the same tokens' block in another KV-cache group; group 0 keeps the chain key."""
    if group_index == 0:
        return key
    return BlockKey(
        hashlib.sha256(b"kvdepot group\n" + key + struct.pack("<I", group_index)).digest()
    )


def adopt_key(identity_digest: bytes, engine_hash: bytes) -> BlockKey:
    """The block key for an engine's own chained hash, which must commit to all tokens before it."""
    if len(engine_hash) < 8:
        raise Uncacheable(f"an engine hash of {len(engine_hash)} bytes cannot tell prefixes apart")
    return BlockKey(
        hashlib.sha256(b"kvdepot adopted\n" + _field(identity_digest) + engine_hash).digest()
    )


def _token_bytes(token_ids: Sequence[int]) -> bytes:
    if len(token_ids) == 0:
        return b""
    try:
        array = np.asarray(token_ids)
    except (OverflowError, TypeError, ValueError) as error:
        raise Uncacheable(f"token ids must be integers: {error}") from error
    # a float or a bool would be cut to an integer without a word, and two prompts would share a key
    is_flat_integers = array.ndim == 1 and array.dtype.kind in "iu"
    if not is_flat_integers or int(array.min()) < 0 or int(array.max()) > 0xFFFFFFFF:
        raise Uncacheable("token ids must be a flat sequence of integers in [0, 2**32)")
    return array.astype("<u4").tobytes()


def _check_images(images: Sequence[Image], token_count: int) -> None:
    for image in images:
        if not _is_well_formed(image, token_count):
            raise Uncacheable(f"malformed image metadata: {image!r}")


def _is_well_formed(image: Any, token_count: int) -> bool:
    """What an engine hands over is checked, types too: a guess here would mix two images' KV."""
    if not isinstance(image, Image):
        return False
    digest: Any = image.content_digest
    try:
        first = operator.index(image.token_offset)
        count = operator.index(image.token_count)
    except TypeError:
        return False
    is_digest = isinstance(digest, bytes) and len(digest) >= 16
    return is_digest and count > 0 and 0 <= first <= token_count - count


def _images_between(images: Sequence[Image], first: int, last: int) -> bytes:
    """Encoding of the images that overlap tokens [first, last), with their place relative to it."""
    found = [
        image
        for image in images
        if image.token_offset < last and image.token_offset + image.token_count > first
    ]
    if not found:
        return b""
    found.sort(key=lambda image: (image.token_offset, image.content_digest))
    return b"images" + b"".join(
        _field(image.content_digest)
        + struct.pack("<qq", image.token_offset - first, image.token_count)
        for image in found
    )
