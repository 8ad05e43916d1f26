"""kvdepot.keys: equal keys mean equal KV, on every machine, in every process, for ever."""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvdepot.errors import ConfigError, Uncacheable
from kvdepot.identity import FORMAT_VERSION, decode_manifest
from kvdepot.keys import (
    KEY_BYTES,
    BlockKey,
    Image,
    RequestExtras,
    adopt_key,
    block_keys,
    group_key,
    root_key,
)
from tests import key_oracle
from tests.children import run_python
from tests.identities import EXTRAS, IDENTITY, extras_changes, identity_changes

GOLDEN_FILE = Path(__file__).parent / "data" / "keys-v1.json"
GOLDEN = json.loads(GOLDEN_FILE.read_text())
VECTORS = GOLDEN["vectors"]
DIGEST = IDENTITY.digest()
TOKENS = [(7 * index) % 1000 for index in range(48)]


def extras_of(written):
    lora = written.get("lora_digest")
    return RequestExtras(
        written.get("tenant_salt"),
        None if lora is None else bytes.fromhex(lora),
        tuple(Image(bytes.fromhex(content), *rest) for content, *rest in written.get("images", [])),
    )


# --- golden vectors: stored blocks are found again by these very bytes


def test_there_are_golden_vectors_of_this_format_version():
    assert GOLDEN["format_version"] == FORMAT_VERSION
    assert len(VECTORS) >= 20
    assert len({vector["name"] for vector in VECTORS}) == len(VECTORS)


def test_the_golden_file_never_changes():
    digest = hashlib.sha256(GOLDEN_FILE.read_bytes()).hexdigest()
    assert digest == "d4553085110ba3c1746ea93b995970b17c01e26837c4c0fb02af48f4e19cc30e", (
        "keys-v1.json is frozen; a change of keys raises FORMAT_VERSION and gets a file of its own"
    )


@pytest.mark.parametrize("vector", VECTORS, ids=[vector["name"] for vector in VECTORS])
def test_golden_vectors(vector):
    fields = {**GOLDEN["identity"], **vector["identity"]}
    identity = decode_manifest(json.dumps(fields).encode())
    assert identity.digest().hex() == vector["identity_digest"]
    keys = block_keys(
        identity.digest(), vector["tokens"], vector["block_tokens"], extras_of(vector["extras"])
    )
    assert [key.hex() for key in keys] == vector["keys"]
    assert [group_key(key, 1).hex() for key in keys] == vector["group_1_keys"]
    assert [group_key(key, 0) for key in keys] == keys


@pytest.mark.parametrize("vector", VECTORS, ids=[vector["name"] for vector in VECTORS])
def test_golden_vectors_agree_with_a_second_implementation(vector):
    digest = key_oracle.identity_digest({**GOLDEN["identity"], **vector["identity"]})
    assert digest.hex() == vector["identity_digest"]
    keys = key_oracle.keys(digest, vector["tokens"], vector["block_tokens"], vector["extras"])
    assert keys == vector["keys"]
    assert [key_oracle.group_key(key, 1) for key in keys] == vector["group_1_keys"]


def test_golden_adopted_keys():
    digest = bytes.fromhex(VECTORS[0]["identity_digest"])
    for vector in GOLDEN["adopted"]:
        engine_hash = bytes.fromhex(vector["engine_hash"])
        assert adopt_key(digest, engine_hash).hex() == vector["key"]
        assert key_oracle.adopted_key(digest, engine_hash) == vector["key"]


# --- every field counts


def test_every_identity_field_alone_changes_every_key():
    ours = set(block_keys(DIGEST, TOKENS, 16, EXTRAS))
    assert len(ours) == 3
    seen = set(ours)
    others = dict(identity_changes())
    # the last group's first field is changed by two names of the generator
    del others["groups[0].name"]
    for name, other in others.items():
        keys = block_keys(other.digest(), TOKENS, 16, EXTRAS)
        assert not seen & set(keys), name
        seen |= set(keys)


@pytest.mark.parametrize(("name", "other"), list(extras_changes()))
def test_every_request_field_alone_changes_the_keys(name, other):
    ours = block_keys(DIGEST, TOKENS, 16, EXTRAS)
    theirs = block_keys(DIGEST, TOKENS, 16, other)
    # salt and LoRA hold from the first token on; an image from the block on that it begins or began in
    first = 0
    if name.startswith("images"):
        places = {*EXTRAS.images} ^ {*other.images}
        first = min(image.token_offset for image in places) // 16
    assert ours[:first] == theirs[:first]
    assert not set(ours[first:]) & set(theirs[first:])


def test_absent_empty_and_zero_stay_apart():
    roots = [
        root_key(DIGEST, RequestExtras(tenant_salt=salt, lora_digest=lora))
        for salt in (None, "", "\0", "0", "None", "()", "False")
        for lora in (None, b"", b"\0", b"0", b"None")
    ]
    assert len(set(roots)) == len(roots)


def test_a_salt_is_not_a_lora_digest():
    salted = root_key(DIGEST, RequestExtras(tenant_salt="abc"))
    assert salted != root_key(DIGEST, RequestExtras(lora_digest=b"abc"))
    joined = {
        root_key(DIGEST, RequestExtras(tenant_salt="ab", lora_digest=b"c")),
        root_key(DIGEST, RequestExtras(tenant_salt="a", lora_digest=b"bc")),
    }
    assert len(joined) == 2


def test_a_thousand_images_never_collide():
    # LMCache#4086: image ids squeezed into 16 bits collide after about 300
    keys = {
        block_keys(DIGEST, TOKENS[:16], 16, RequestExtras(images=(Image(os.urandom(16), 4, 8),)))[0]
        for _ in range(1000)
    }
    assert len(keys) == 1000


def test_the_same_image_twice_hits_and_a_moved_one_misses():
    image = Image(b"\x07" * 32, 20, 8)
    ours = block_keys(DIGEST, TOKENS, 16, RequestExtras(images=(image,)))
    assert block_keys(DIGEST, list(TOKENS), 16, RequestExtras(images=(Image(*image),))) == ours
    moved = image._replace(token_offset=21)
    theirs = block_keys(DIGEST, TOKENS, 16, RequestExtras(images=(moved,)))
    assert theirs[0] == ours[0]
    assert not set(theirs[1:]) & set(ours[1:])


def test_the_order_in_which_images_are_listed_does_not_matter():
    images = (Image(b"\x07" * 32, 20, 8), Image(b"\x08" * 32, 2, 8), Image(b"\x09" * 32, 2, 8))
    forward = block_keys(DIGEST, TOKENS, 16, RequestExtras(images=images))
    assert block_keys(DIGEST, TOKENS, 16, RequestExtras(images=images[::-1])) == forward


# --- what cannot be keyed is computed; it never gets a key that another input has too


@pytest.mark.parametrize(
    "image",
    [
        Image(b"", 0, 4),
        Image(b"\x01" * 15, 0, 4),
        Image("a" * 32, 0, 4),  # type: ignore[arg-type]
        Image(None, 0, 4),  # type: ignore[arg-type]
        Image(b"\x01" * 32, -1, 4),
        Image(b"\x01" * 32, 0, 0),
        Image(b"\x01" * 32, 0, -4),
        Image(b"\x01" * 32, 45, 4),
        Image(b"\x01" * 32, 48, 1),
        Image(b"\x01" * 32, None, 4),  # type: ignore[arg-type]
        Image(b"\x01" * 32, 0, 4.0),  # type: ignore[arg-type]
        (b"\x01" * 32, 0),
        None,
    ],
)
def test_malformed_images_are_uncacheable(image):
    with pytest.raises(Uncacheable, match="malformed image"):
        block_keys(DIGEST, TOKENS, 16, RequestExtras(images=(image,)))


@pytest.mark.parametrize(
    "extras",
    [
        RequestExtras(tenant_salt=b"a"),  # type: ignore[arg-type]
        RequestExtras(tenant_salt=0),  # type: ignore[arg-type]
        RequestExtras(tenant_salt="\ud800"),
        RequestExtras(lora_digest="ab"),  # type: ignore[arg-type]
        RequestExtras(lora_digest=7),  # type: ignore[arg-type]
    ],
)
def test_malformed_salts_and_adapters_are_uncacheable(extras):
    with pytest.raises(Uncacheable, match="salt or LoRA"):
        block_keys(DIGEST, TOKENS, 16, extras)


@pytest.mark.parametrize(
    "tokens",
    [
        [0.0] * 16,
        [1.5] * 16,
        [-1] * 16,
        [2**32] * 16,
        [2**64] * 16,
        [2**70] * 16,
        [-(2**70)] * 16,
        [None] * 16,
        ["1"] * 16,
        "a" * 16,
        b"a" * 16,
        [[1]] * 16,
        [[1], [1, 2]] * 8,
        [True] * 16,
        np.zeros((16, 2), dtype=np.int64),
        np.zeros(16, dtype=np.float32),
    ],
)
def test_malformed_token_ids_are_uncacheable(tokens):
    with pytest.raises(Uncacheable):
        block_keys(DIGEST, tokens, 16)


def test_a_prompt_without_token_ids_is_uncacheable_and_never_negative():
    # vllm#53495: prompts given as embeddings all had the key of nothing, and a match of -16 tokens
    with pytest.raises(Uncacheable, match="without token ids"):
        block_keys(DIGEST, None, 16)  # type: ignore[arg-type]
    assert block_keys(DIGEST, [], 16) == []


@pytest.mark.parametrize("block_tokens", [0, -1, -16])
def test_a_block_needs_tokens(block_tokens):
    with pytest.raises(ConfigError, match="block_tokens"):
        block_keys(DIGEST, TOKENS, block_tokens)


@pytest.mark.parametrize("length", range(8))
def test_a_short_engine_hash_is_uncacheable(length):
    with pytest.raises(Uncacheable, match=f"{length} bytes"):
        adopt_key(DIGEST, b"\x01" * length)


# --- the chain


tokens_lists = st.lists(st.integers(0, 2**32 - 1), max_size=48)


@given(tokens_lists, st.integers(1, 16), st.integers(0, 48))
def test_keys_of_a_prefix_are_a_prefix_of_the_keys(tokens, block_tokens, cut):
    keys = block_keys(DIGEST, tokens, block_tokens)
    assert len(keys) == len(tokens) // block_tokens
    assert all(len(key) == KEY_BYTES for key in keys)
    assert len(set(keys)) == len(keys)
    part = tokens[:cut]
    assert block_keys(DIGEST, part, block_tokens) == keys[: len(part) // block_tokens]


@pytest.mark.parametrize("length", range(3 * 16 + 1))
def test_every_length_gives_the_full_blocks(length):
    assert len(block_keys(DIGEST, TOKENS[:length], 16)) == length // 16


@given(tokens_lists.filter(bool), st.data())
def test_a_changed_token_changes_its_block_and_all_later_ones_only(tokens, data):
    place = data.draw(st.integers(0, len(tokens) - 1))
    other = data.draw(st.integers(0, 2**32 - 1).filter(lambda token: token != tokens[place]))
    block_tokens = data.draw(st.integers(1, 16))
    ours = block_keys(DIGEST, tokens, block_tokens)
    theirs = block_keys(DIGEST, [*tokens[:place], other, *tokens[place + 1 :]], block_tokens)
    block = place // block_tokens
    assert theirs[:block] == ours[:block]
    assert not set(theirs[block:]) & set(ours[block:])


@given(tokens_lists, st.integers(1, 16))
def test_keys_agree_with_the_second_implementation(tokens, block_tokens):
    keys = [key.hex() for key in block_keys(DIGEST, tokens, block_tokens)]
    assert keys == key_oracle.keys(DIGEST, tokens, block_tokens, {})


@given(tokens_lists)
def test_the_container_of_the_tokens_does_not_matter(tokens):
    keys = block_keys(DIGEST, tokens, 4)
    assert block_keys(DIGEST, tuple(tokens), 4) == keys
    for dtype in (np.uint32, np.int64, np.uint64, ">u4", "<i8"):
        assert block_keys(DIGEST, np.array(tokens, dtype=dtype), 4) == keys  # type: ignore[arg-type]


def test_blocks_of_other_sizes_share_no_key():
    by_size = [set(block_keys(DIGEST, [3] * 64, size)) for size in (1, 2, 4, 8, 16, 32, 64)]
    assert len(set.union(*by_size)) == sum(map(len, by_size))


def test_a_root_never_names_a_block_and_groups_are_apart():
    keys = block_keys(DIGEST, TOKENS, 16)
    every = [root_key(DIGEST), *keys]
    every += [group_key(key, group) for key in keys for group in (1, 2, 300)]
    every += [adopt_key(DIGEST, key) for key in keys]
    assert len(set(every)) == len(every)


# --- processes and machines


_CHILD = """
import json
from kvdepot.keys import block_keys
from tests.identities import EXTRAS, IDENTITY
from kvdepot.keys import RequestExtras
found = [key.hex() for key in block_keys(IDENTITY.digest(), list(range(64)), 16, EXTRAS)]
for salt in (None, "", "0"):
    extras = RequestExtras(tenant_salt=salt)
    found += [key.hex() for key in block_keys(IDENTITY.digest(), list(range(64)), 16, extras)]
print(json.dumps([hash("kvdepot"), found]))
"""


def test_keys_are_equal_across_processes_seeds_and_bare_environments():
    # vllm#42625, LMCache PR#1897: keys that depend on the hash seed, or on None's address
    environments = [
        {"PYTHONHASHSEED": "0"},
        {"PYTHONHASHSEED": "1"},
        {"PYTHONHASHSEED": "random"},
        {"PYTHONHASHSEED": "random", "LC_ALL": "C", "PYTHONUTF8": "0"},
        {},
        dict(os.environ),
    ]
    answers = []
    for env in environments:
        child = run_python(_CHILD, env=env)
        assert child.returncode == 0, child.stderr
        answers.append(json.loads(child.stdout))
    assert len({seed_dependent for seed_dependent, _ in answers}) > 1
    ours = [key.hex() for key in block_keys(DIGEST, list(range(64)), 16, EXTRAS)]
    for salt in (None, "", "0"):
        extras = RequestExtras(tenant_salt=salt)
        ours += [key.hex() for key in block_keys(DIGEST, list(range(64)), 16, extras)]
    assert all(keys == ours for _, keys in answers)


def test_keys_are_plain_bytes():
    key = block_keys(DIGEST, TOKENS, 16)[0]
    assert type(key) is bytes
    assert BlockKey(key) is key
