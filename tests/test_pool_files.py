"""kvdepot.pool.poolfile and kvdepot.pool.sizes: a root's small files, and how large things may be."""

from __future__ import annotations

import json
import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvdepot.errors import (
    ConfigError,
    FormatError,
    IdentityMismatch,
    PoolFull,
    PoolUnavailable,
    UnknownVersion,
)
from kvdepot.identity import FORMAT_VERSION, encode_manifest
from kvdepot.io.buffers import ALIGNMENT
from kvdepot.io.disk import Space
from kvdepot.io.localdisk import LocalDisk
from kvdepot.pool.poolfile import (
    open_namespace,
    open_pool_file,
    read_pool_file,
    restore_pool_file,
)
from kvdepot.pool.segment import empty_segment_bytes
from kvdepot.pool.sizes import Limits, block_bytes_max, configured_capacity, segment_bytes_within
from kvdepot.units import GIB, MIB
from tests.identities import IDENTITY, replaced

DIGEST = IDENTITY.digest().hex()


@pytest.fixture
def disk(tmp_path):
    return LocalDisk(tmp_path / "pool", direct="off")


def snapshot(disk):
    return {path: path.read_bytes() for path in disk.root.rglob("*") if path.is_file()}


def small_files(disk):
    return sorted(str(path.relative_to(disk.root)) for path in snapshot(disk))


# --- pool.json


def test_a_pool_file_is_made_once_and_then_read(disk):
    assert read_pool_file(disk) is None
    made = open_pool_file(disk, 5 * GIB, is_read_only=False)
    assert made.capacity_bytes == 5 * GIB
    assert made.version == FORMAT_VERSION
    assert len(bytes.fromhex(made.pool_id)) == 16
    # what is there holds, whatever the next one would like
    assert open_pool_file(disk, 7 * GIB, is_read_only=False) == made
    assert open_pool_file(disk, None, is_read_only=True) == made
    assert read_pool_file(disk) == made
    assert small_files(disk) == ["pool.json"]


def test_a_capacity_that_is_not_given_is_half_of_the_free_space(disk):
    free = disk.space().free_bytes
    made = open_pool_file(disk, None, is_read_only=False)
    assert made.capacity_bytes == pytest.approx(free // 2, rel=0.1)


def test_read_only_makes_no_pool(disk):
    with pytest.raises(ConfigError, match="holds no pool") as caught:
        open_pool_file(disk, GIB, is_read_only=True)
    assert caught.value.hint
    assert small_files(disk) == []


def test_processes_that_make_a_pool_together_agree_on_one(disk):
    start = threading.Barrier(8)
    made = []

    def work():
        start.wait()
        made.append(open_pool_file(disk, GIB, is_read_only=False))

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(set(made)) == 1
    assert small_files(disk) == ["pool.json"]


def _written(disk, **changes):
    open_pool_file(disk, GIB, is_read_only=False)
    file = disk.root / "pool.json"
    fields = {**json.loads(file.read_text()), **changes}
    file.write_text(json.dumps({name: value for name, value in fields.items() if value != "gone"}))


@pytest.mark.parametrize("version", [0, FORMAT_VERSION + 1, "1", None, 1.5])
def test_another_version_is_refused_with_both_named(disk, version):
    _written(disk, version=version, capacity_bytes="of another form")
    with pytest.raises(UnknownVersion) as caught:
        read_pool_file(disk)
    assert (caught.value.found, caught.value.supported) == (version, FORMAT_VERSION)
    assert f"version {version}" in str(caught.value)
    assert f"version {FORMAT_VERSION}" in str(caught.value)


@pytest.mark.parametrize(
    "changes",
    [
        {"format": "another store"},
        {"format": "gone"},
        {"pool_id": "gone"},
        {"pool_id": "ab"},
        {"pool_id": "x" * 32},
        {"pool_id": 7},
        {"capacity_bytes": "gone"},
        {"capacity_bytes": "1 GiB"},
        {"capacity_bytes": None},
    ],
)
def test_a_file_that_is_no_pool_s_is_refused_and_kept(disk, changes):
    _written(disk, **changes)
    before = snapshot(disk)
    for is_read_only in (False, True):
        with pytest.raises(FormatError, match=r"pool\.json"):
            open_pool_file(disk, GIB, is_read_only=is_read_only)
    assert snapshot(disk) == before


@pytest.mark.parametrize("text", [b"", b"{", b"[]", b"null", b"\xff\xfe", b"\0" * 4096, b'"text"'])
def test_damaged_bytes_are_refused_with_a_hint(disk, text):
    (disk.root / "pool.json").write_bytes(text)
    with pytest.raises(FormatError, match="damaged") as caught:
        open_pool_file(disk, GIB, is_read_only=False)
    assert caught.value.hint
    assert (disk.root / "pool.json").read_bytes() == text


def test_fields_of_a_later_release_are_ignored(disk):
    _written(disk, compression="zstd")
    assert read_pool_file(disk).capacity_bytes == GIB


def test_a_deleted_pool_file_is_restored_as_it_was(disk):
    made = open_pool_file(disk, GIB, is_read_only=False)
    restore_pool_file(disk, made)
    before = snapshot(disk)
    (disk.root / "pool.json").unlink()
    restore_pool_file(disk, made)
    assert snapshot(disk) == before


@pytest.mark.parametrize("kind", [PoolFull, PoolUnavailable])
def test_a_refusal_in_mid_write_leaves_nothing(disk, monkeypatch, kind):
    from kvdepot.io.localfile import LocalFile

    def refuse(self, offset, parts):
        raise kind("refused")

    with monkeypatch.context() as patch:
        patch.setattr(LocalFile, "write", refuse)
        with pytest.raises(kind):
            open_pool_file(disk, GIB, is_read_only=False)
        with pytest.raises(kind):
            open_namespace(disk, IDENTITY, is_read_only=False)
    assert small_files(disk) == []


# --- manifests


def test_a_namespace_is_made_once_and_compared_after(disk):
    open_namespace(disk, IDENTITY, is_read_only=True)
    assert small_files(disk) == []
    open_namespace(disk, IDENTITY, is_read_only=False)
    assert small_files(disk) == [f"ns/{DIGEST}/identity.json"]
    before = snapshot(disk)
    assert list(before.values()) == [encode_manifest(IDENTITY)]
    for is_read_only in (False, True):
        open_namespace(disk, IDENTITY, is_read_only=is_read_only)
    assert snapshot(disk) == before


def test_a_manifest_of_another_identity_is_refused_by_field(disk):
    open_namespace(disk, IDENTITY, is_read_only=False)
    other = replaced(IDENTITY, "kv_dtype", "float16")
    (disk.root / "ns" / DIGEST / "identity.json").write_bytes(encode_manifest(other))
    with pytest.raises(IdentityMismatch) as caught:
        open_namespace(disk, IDENTITY, is_read_only=False)
    assert caught.value.field == "kv_dtype"
    assert (caught.value.ours, caught.value.theirs) == ("bfloat16", "float16")


@pytest.mark.parametrize("text", [b"", b"{}", b"\0" * 100, b"pickle"])
def test_a_damaged_manifest_is_refused_with_a_hint(disk, text):
    open_namespace(disk, IDENTITY, is_read_only=False)
    (disk.root / "ns" / DIGEST / "identity.json").write_bytes(text)
    with pytest.raises(FormatError, match=r"identity\.json is damaged") as caught:
        open_namespace(disk, IDENTITY, is_read_only=False)
    assert "namespace folder" in caught.value.hint


# --- sizes


def space(total, inodes=None):
    return Space(total, total, inodes, inodes)


@pytest.mark.parametrize(
    ("total", "inodes", "free_bytes", "free_inodes"),
    [
        (100 * GIB, 1_000_000, 5 * GIB, 1_000),
        (1_000 * GIB, 10_000, 10 * GIB, 101),
        (MIB, 32, MIB // 20, 1),
        (MIB, None, MIB // 20, 1),
    ],
)
def test_floors_that_are_not_given(total, inodes, free_bytes, free_inodes):
    assert Limits.of(space(total, inodes), 7, None, None) == Limits(7, free_bytes, free_inodes)


def test_floors_that_are_given_hold_as_they_are():
    assert Limits.of(space(GIB, 100), 7, 0, 0) == Limits(7, 0, 0)
    assert Limits.of(space(GIB, 100), 7, 12, 34) == Limits(7, 12, 34)


def test_a_capacity_of_one_s_own_is_kept_and_said(caplog):
    assert configured_capacity("p", None, 5) == 5
    assert configured_capacity("p", 5, 5) == 5
    assert caplog.records == []
    assert configured_capacity("p", GIB, 5 * GIB) == GIB
    assert "1 GiB is set here, pool.json says 5 GiB" in caplog.text


@given(
    capacity=st.integers(1, 1 << 40),
    wanted=st.integers(1, 1 << 32),
    block_bytes=st.integers(1, 1 << 28),
)
def test_a_segment_holds_a_block_and_eight_fit_if_they_can(capacity, wanted, block_bytes):
    least = empty_segment_bytes(1) + -(-block_bytes // ALIGNMENT) * ALIGNMENT
    if least > capacity:
        with pytest.raises(ConfigError, match="cannot hold one block"):
            segment_bytes_within(capacity, wanted, block_bytes, place="p")
        return
    size = segment_bytes_within(capacity, wanted, block_bytes, place="p")
    assert size % ALIGNMENT == 0
    assert least <= size <= capacity
    assert block_bytes_max(size) >= block_bytes
    # larger than wanted, or than an eighth, only for the sake of one block
    assert size <= max(min(wanted, capacity // 32), least)
