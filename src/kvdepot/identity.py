"""Identity: everything deployment-level that must be equal before stored bytes may be reused.

One frozen struct, one digest. The digest names the namespace folder and enters every block key; the
fields are stored beside the data as a readable manifest and compared field by field when a namespace
is opened, so that a disagreement is named and never averaged away. A field that cannot be determined
is set to `UNDETERMINED`, which switches sharing off; it is never left out.
"""

from __future__ import annotations

import hashlib
from typing import Any

import msgspec

from kvdepot.errors import ConfigError, IdentityMismatch, IdentityUnknown

__all__ = [
    "FORMAT_VERSION",
    "UNDETERMINED",
    "CacheGroup",
    "Identity",
    "compare",
    "decode_manifest",
    "differences",
    "encode_manifest",
]

#: Version of the on-disk format and of the key builder. Any change of bytes or of keys raises it.
FORMAT_VERSION = 1

#: The value of a field that could not be determined. An identity that holds it cannot be digested.
UNDETERMINED = "?"


class CacheGroup(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Geometry of one KV-cache group: the layers whose KV of a token run forms one block."""

    name: str
    #: ``full`` attention or a sliding ``window`` of it; recurrent ``state`` is refused until it is supported
    kind: str
    layers: tuple[int, ...]
    #: KV heads per layer that this rank holds
    kv_heads: int
    #: elements of one head vector, for K and for V (they differ with multi-head latent attention)
    key_dim: int
    value_dim: int
    #: bytes of one block of this group
    block_bytes: int


class Identity(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What must be equal before bytes may be reused. Every field takes part in the digest."""

    model_name: str
    #: digest over config, tokenizer, tensor index and sampled content of the weight files
    weights_fingerprint: str
    #: raised by an engine that changes weights in place
    weights_epoch: int = 0
    #: resolved names such as ``bfloat16``; never ``auto``
    model_dtype: str
    kv_dtype: str
    #: digest of the KV quantisation scales; empty for unquantised KV
    kv_scale_digest: str = ""
    #: order of the axes inside a block, outermost first
    kv_layout: str
    groups: tuple[CacheGroup, ...]
    block_tokens: int
    tensor_parallel_size: int = 1
    pipeline_parallel_size: int = 1
    context_parallel_size: int = 1
    #: what this rank's bytes hold: ``replicated``, or ``shard 2 of 8``
    rank_content: str = "replicated"
    #: attention implementation, where it changes the KV that is computed or its layout
    attention: str
    engine: str
    engine_version: str
    #: version of the adapter's own cutting and layout rules
    adapter_version: int
    hash_scheme: str = "sha256-chain"
    hash_seed: str = ""
    format_version: int = FORMAT_VERSION

    @property
    def undetermined(self) -> tuple[str, ...]:
        """Names of the fields that could not be determined, in the groups too."""
        named: list[tuple[str, CacheGroup | Identity]] = [("", self)]
        named += [(f"groups[{index}].", group) for index, group in enumerate(self.groups)]
        return tuple(
            prefix + name
            for prefix, struct in named
            for name in struct.__struct_fields__
            if getattr(struct, name) == UNDETERMINED
        )

    def digest(self) -> bytes:
        """32 bytes that are equal exactly when all fields are equal.

        SHA-256 over the canonical JSON of the fields (names sorted, no white space, UTF-8), so the
        value does not depend on the process, the hash seed, the machine or the field order here.

        Raises:
            IdentityUnknown: a field is undetermined.
        """
        if self.undetermined:
            raise IdentityUnknown(
                f"identity unknown, sharing off: {', '.join(self.undetermined)} not determined",
                hint="give the field explicitly, or point to the model's files",
            )
        return hashlib.sha256(b"kvdepot identity\n" + _canonical(self)).digest()

    @property
    def block_bytes(self) -> tuple[int, ...]:
        """Bytes of one block, per group."""
        return tuple(group.block_bytes for group in self.groups)


def _canonical(identity: Identity) -> bytes:
    return msgspec.json.encode(msgspec.to_builtins(identity), order="sorted")


def encode_manifest(identity: Identity) -> bytes:
    """The identity as the JSON text that is stored beside the data."""
    return msgspec.json.format(_canonical(identity), indent=2) + b"\n"


def decode_manifest(text: bytes) -> Identity:
    """Read a stored manifest.

    Raises:
        ConfigError: the text is not a manifest of this format.
    """
    try:
        identity = msgspec.json.decode(text, type=Identity, strict=True)
        written = msgspec.json.decode(text, type=dict[str, msgspec.Raw])
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise ConfigError(f"not an identity manifest: {error}") from error
    missing = sorted(set(Identity.__struct_fields__) - written.keys())
    if missing:
        # a default is for who makes an identity; who reads one must find every field
        raise ConfigError(f"not an identity manifest: it lacks {', '.join(missing)}")
    return identity


def differences(ours: Identity, theirs: Identity) -> list[tuple[str, Any, Any]]:
    """Fields that differ, as (dotted name, our value, their value); groups are compared inside."""
    found: list[tuple[str, Any, Any]] = []
    for name in ours.__struct_fields__:
        mine, other = getattr(ours, name), getattr(theirs, name)
        if mine == other:
            continue
        if name == "groups" and len(mine) == len(other):
            for index, (a, b) in enumerate(zip(mine, other, strict=True)):
                found += [
                    (f"groups[{index}].{field}", getattr(a, field), getattr(b, field))
                    for field in a.__struct_fields__
                    if getattr(a, field) != getattr(b, field)
                ]
        else:
            found.append((name, mine, other))
    return found


def compare(ours: Identity, theirs: Identity) -> None:
    """Check that two identities are equal, field by field.

    Raises:
        IdentityMismatch: names the first field that differs.
    """
    for name, mine, other in differences(ours, theirs):
        raise IdentityMismatch(name, mine, other)
