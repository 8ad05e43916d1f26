"""kvdepot.identity: every field counts, alone; manifests are compared field by field."""

from __future__ import annotations

import json

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvdepot.errors import ConfigError, IdentityMismatch, IdentityUnknown
from kvdepot.identity import (
    FORMAT_VERSION,
    UNDETERMINED,
    CacheGroup,
    Identity,
    compare,
    decode_manifest,
    differences,
    encode_manifest,
)
from tests.identities import GROUP, IDENTITY, field_names, identity_changes, replaced

CHANGES = list(identity_changes())


def test_the_generator_covers_every_field():
    names = {name for name, _ in CHANGES}
    assert names >= set(Identity.__struct_fields__)
    assert names >= {f"groups[0].{name}" for name in CacheGroup.__struct_fields__}


@pytest.mark.parametrize(("name", "other"), CHANGES, ids=[name for name, _ in CHANGES])
def test_one_changed_field_changes_the_digest_and_is_named(name, other):
    assert other.digest() != IDENTITY.digest()
    found = differences(IDENTITY, other)
    assert len(found) == 1
    field, ours, theirs = found[0]
    assert field.startswith(name)
    assert ours != theirs
    with pytest.raises(IdentityMismatch) as caught:
        compare(IDENTITY, other)
    assert caught.value.field == field
    assert (caught.value.ours, caught.value.theirs) == (ours, theirs)
    assert field in str(caught.value)


def test_no_two_changes_share_a_digest():
    # groups and groups[0].name are the same change, made twice
    distinct = {msgspec.json.encode(other) for _, other in CHANGES}
    digests = {other.digest() for _, other in CHANGES}
    assert len(digests) == len(distinct) == len(CHANGES) - 1
    assert all(len(digest) == 32 for digest in digests)


def test_equal_identities_have_equal_digests_and_no_differences():
    again = decode_manifest(encode_manifest(IDENTITY))
    assert again == IDENTITY
    assert again.digest() == IDENTITY.digest()
    assert differences(IDENTITY, again) == []
    compare(IDENTITY, again)


def test_the_digest_is_sha256_over_sorted_json():
    # an oracle by the standard library alone
    import hashlib

    fields = json.loads(encode_manifest(IDENTITY))
    text = json.dumps(fields, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    expected = hashlib.sha256(b"kvdepot identity\n" + text.encode()).digest()
    assert IDENTITY.digest() == expected


STRING_FIELDS = [
    (prefix, name)
    for prefix, struct in (("", IDENTITY), ("groups[0].", GROUP))
    for name in struct.__struct_fields__
    if isinstance(getattr(struct, name), str)
]


@pytest.mark.parametrize(("prefix", "name"), STRING_FIELDS)
def test_an_undetermined_field_switches_sharing_off_and_is_named(prefix, name):
    if prefix:
        identity = replaced(IDENTITY, "groups", (replaced(GROUP, name, UNDETERMINED),))
    else:
        identity = replaced(IDENTITY, name, UNDETERMINED)
    assert identity.undetermined == (prefix + name,)
    with pytest.raises(IdentityUnknown, match="sharing off") as caught:
        identity.digest()
    assert prefix + name in str(caught.value)
    assert caught.value.hint


def test_values_near_each_other_stay_apart():
    spellings = ["", "0", "None", "null", "()", "[]", "false", " ", "?\0", "??"]
    digests = {replaced(IDENTITY, "hash_seed", text).digest() for text in spellings}
    assert len(digests) == len(spellings)
    # text that looks like the JSON around it stays text
    quoted = replaced(IDENTITY, "model_name", 'a","kv_dtype":"b')
    assert decode_manifest(encode_manifest(quoted)) == quoted


def test_a_resolved_dtype_is_the_same_however_it_was_asked_for():
    # vllm PR#49438: the unresolved word was hashed; here only resolved names exist
    assert replaced(IDENTITY, "kv_dtype", "float16").digest() != IDENTITY.digest()
    assert replaced(IDENTITY, "kv_dtype", "bfloat16").digest() == IDENTITY.digest()


def test_the_manifest_is_readable_and_complete():
    text = encode_manifest(IDENTITY)
    assert text.endswith(b"}\n")
    fields = json.loads(text)
    assert list(fields) == sorted(Identity.__struct_fields__)
    assert fields["groups"][0]["layers"] == [0, 1]
    assert fields["format_version"] == FORMAT_VERSION


@pytest.mark.parametrize("name", Identity.__struct_fields__)
def test_a_manifest_that_lacks_a_field_is_refused(name):
    fields = json.loads(encode_manifest(IDENTITY))
    del fields[name]
    with pytest.raises(ConfigError, match=name):
        decode_manifest(json.dumps(fields).encode())


@pytest.mark.parametrize("name", CacheGroup.__struct_fields__)
def test_a_manifest_whose_group_lacks_a_field_is_refused(name):
    fields = json.loads(encode_manifest(IDENTITY))
    del fields["groups"][0][name]
    with pytest.raises(ConfigError, match=name):
        decode_manifest(json.dumps(fields).encode())


@pytest.mark.parametrize("name", Identity.__struct_fields__)
@pytest.mark.parametrize("value", [None, 1.5, {"a": 1}])
def test_a_manifest_with_a_foreign_type_is_refused(name, value):
    fields = json.loads(encode_manifest(IDENTITY))
    fields[name] = value
    with pytest.raises(ConfigError, match="not an identity manifest"):
        decode_manifest(json.dumps(fields).encode())


@pytest.mark.parametrize(
    "text",
    [b"", b"{}", b"[]", b"null", b"\x00" * 64, b"\xff\xfe{}", b'{"model_name": "a"', b"pickle"],
)
def test_other_bytes_are_no_manifest(text):
    with pytest.raises(ConfigError, match="not an identity manifest"):
        decode_manifest(text)


def test_a_manifest_with_an_extra_field_is_refused_by_name():
    fields = json.loads(encode_manifest(IDENTITY))
    fields["expert_parallel_size"] = 2
    with pytest.raises(ConfigError, match="expert_parallel_size"):
        decode_manifest(json.dumps(fields).encode())


@given(st.binary(max_size=80), st.integers(0, 2000))
def test_damaged_manifests_are_refused_or_equal_something_whole(noise, place):
    text = encode_manifest(IDENTITY)
    damaged = text[:place] + noise + text[place + len(noise) :]
    try:
        read = decode_manifest(damaged)
    except ConfigError:
        return
    assert field_names(read) == field_names(IDENTITY)
    assert (read == IDENTITY) == (read.digest() == IDENTITY.digest())


def test_block_bytes_are_per_group():
    two = replaced(IDENTITY, "groups", (GROUP, replaced(GROUP, "block_bytes", 2048)))
    assert two.block_bytes == (1024, 2048)


def test_identities_cannot_be_changed_in_place():
    with pytest.raises(AttributeError):
        IDENTITY.kv_dtype = "float16"  # type: ignore[misc]
