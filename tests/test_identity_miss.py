"""One changed field, whichever, is a miss in every tier: the class of bug that serves another's bytes.

Seven projects left one field out of their keys, each another one. So no field is named here: the
generator goes over the structs. A control with nothing changed must hit, or these tests say nothing.
"""

from __future__ import annotations

import pytest

from kvdepot.config import PoolConfig
from kvdepot.depot import Depot
from kvdepot.keys import block_keys, root_key
from kvdepot.pool.tier import PoolTier
from tests.identities import EXTRAS, IDENTITY, extras_changes, identity_changes

TOKENS = list(range(48))
HOST_BYTES = 1 << 20


def keys_of(identity, extras=EXTRAS):
    return block_keys(identity.digest(), TOKENS, identity.block_tokens, extras)


def config(root, **settings):
    return PoolConfig.of(str(root), capacity="64MiB", segment_age_s=0.05, **settings)


def store(depot, identity):
    keys = keys_of(identity)
    root = root_key(identity.digest(), EXTRAS)

    def cut(group, block, row):
        row[:] = bytes([group * 16 + block + 1]) * len(row)

    taken = depot.store(keys, root, cut, tokens=identity.block_tokens)
    assert taken == len(keys) * len(identity.groups)
    assert depot.drain(30)


@pytest.fixture(scope="module")
def stored(tmp_path_factory):
    """A pool that holds the blocks of `IDENTITY`."""
    root = tmp_path_factory.mktemp("pool") / "root"
    with Depot.open(IDENTITY, pool=config(root), host_bytes=HOST_BYTES) as depot:
        store(depot, IDENTITY)
    return root


@pytest.fixture(scope="module")
def warm():
    """A depot without a pool whose host tier holds the blocks of `IDENTITY`."""
    with Depot.open(IDENTITY, pool=None, host_bytes=HOST_BYTES) as depot:
        store(depot, IDENTITY)
        yield depot


def test_the_control_hits_in_both_tiers(stored, warm):
    assert warm.lookup(keys_of(IDENTITY)) == (3, ("host",) * 3)
    with Depot.open(IDENTITY, pool=config(stored), host_bytes=HOST_BYTES) as depot:
        assert depot.lookup(keys_of(IDENTITY)) == (3, ("disk",) * 3)


CHANGES = list(identity_changes())


@pytest.mark.parametrize(("name", "other"), CHANGES, ids=[name for name, _ in CHANGES])
def test_one_changed_identity_field_is_a_miss_in_the_host_tier(warm, name, other):
    assert warm.lookup(keys_of(other)).blocks == 0


@pytest.mark.parametrize(("name", "other"), CHANGES, ids=[name for name, _ in CHANGES])
def test_one_changed_identity_field_is_a_miss_on_disk(stored, name, other):
    with PoolTier.open(config(stored), other) as tier:
        assert tier.lookup(keys_of(other)) == 0
        # not even for somebody who asks with the keys of the first: its namespace is another one
        assert tier.lookup(keys_of(IDENTITY)) == 0
        assert tier.usage().blocks == 0
    with PoolTier.open(config(stored), IDENTITY) as tier:
        assert tier.lookup(keys_of(other)) == 0
        assert tier.lookup(keys_of(IDENTITY)) == 3


@pytest.mark.parametrize(("name", "extras"), list(extras_changes()))
def test_one_changed_request_field_is_a_miss_from_its_first_token_on(stored, warm, name, extras):
    keys = keys_of(IDENTITY, extras)
    expected = 0
    if name.startswith("images"):
        places = {*EXTRAS.images} ^ {*extras.images}
        expected = min(image.token_offset for image in places) // IDENTITY.block_tokens
    assert warm.lookup(keys).blocks == expected
    with PoolTier.open(config(stored), IDENTITY) as tier:
        assert tier.lookup(keys) == expected
        assert tier.lookup(keys[expected:]) == 0
