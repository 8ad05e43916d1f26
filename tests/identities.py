"""An identity to test with, and the generator that changes one field at a time.

The generator goes over the struct's own fields, so that a field added later is tested without a new
line here, or fails loudly because nobody said how to change a value of its type.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec

from kvdepot.identity import CacheGroup, Identity
from kvdepot.keys import Image, RequestExtras

GROUP = CacheGroup(
    name="layers", kind="full", layers=(0, 1), kv_heads=1, key_dim=8, value_dim=8, block_bytes=1024
)
IDENTITY = Identity(
    model_name="toy/tiny",
    weights_fingerprint="5f0c" * 16,
    model_dtype="bfloat16",
    kv_dtype="bfloat16",
    kv_layout="layer,kv,head,token,dim",
    groups=(GROUP,),
    block_tokens=16,
    attention="eager",
    engine="toy",
    engine_version="1.0",
    adapter_version=1,
)
EXTRAS = RequestExtras(
    tenant_salt="tenant a",
    lora_digest=b"\x01" * 32,
    images=(Image(b"\x02" * 32, 4, 8), Image(b"\x03" * 32, 20, 4)),
)


def changed(value: Any) -> Any:
    """Another value of the same type, as near as possible."""
    match value:
        case bool():
            return not value
        case int():
            return value + 1
        case str():
            return value[:-1] + chr(ord(value[-1]) ^ 1) if value else "x"
        case bytes():
            return value[:-1] + bytes([value[-1] ^ 1]) if value else b"x"
        case None:
            return ""
        case tuple() if type(value) is tuple and value:
            return (*value[:-1], changed_first_field(value[-1]))
        case _:
            raise AssertionError(f"no rule to change {value!r} of type {type(value).__name__}")


def changed_first_field(value: Any) -> Any:
    """A changed scalar, or a struct or named tuple with its first field changed."""
    fields = field_names(value)
    if not fields:
        return changed(value)
    return replaced(value, fields[0], changed(getattr(value, fields[0])))


def field_names(value: Any) -> tuple[str, ...]:
    return tuple(getattr(value, "__struct_fields__", getattr(value, "_fields", ())))


def replaced(value: Any, name: str, new: Any) -> Any:
    if isinstance(value, msgspec.Struct):
        return msgspec.structs.replace(value, **{name: new})
    return value._replace(**{name: new})


def identity_changes() -> Iterator[tuple[str, Identity]]:
    """(dotted field name, identity with that field alone changed), for every field."""
    for name in IDENTITY.__struct_fields__:
        yield name, replaced(IDENTITY, name, changed(getattr(IDENTITY, name)))
    for name in GROUP.__struct_fields__:
        group = replaced(GROUP, name, changed(getattr(GROUP, name)))
        yield f"groups[0].{name}", replaced(IDENTITY, "groups", (group,))
    yield "groups", replaced(IDENTITY, "groups", (GROUP, GROUP))


def extras_changes() -> Iterator[tuple[str, RequestExtras]]:
    """(dotted field name, extras with that field alone changed), for every field."""
    for name in EXTRAS._fields:
        yield name, replaced(EXTRAS, name, changed(getattr(EXTRAS, name)))
        yield f"{name} absent", replaced(EXTRAS, name, RequestExtras._field_defaults[name])
    for index, image in enumerate(EXTRAS.images):
        for name in image._fields:
            images = list(EXTRAS.images)
            images[index] = replaced(image, name, changed(getattr(image, name)))
            yield f"images[{index}].{name}", EXTRAS._replace(images=tuple(images))
