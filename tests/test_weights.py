"""The weights fingerprint: changed by any change that matters, and by nothing else."""

from __future__ import annotations

import os
import shutil
import struct

import pytest

from kvdepot.errors import PoolError
from kvdepot.identity import UNDETERMINED
from kvdepot.io.weights import SAMPLE_WINDOW_BYTES, SAMPLE_WINDOWS, weights_fingerprint

HEADER = b'{"w":{"dtype":"F32","shape":[4],"data_offsets":[0,16]}}'
FILES = {
    "config.json": b'{"model_type":"llama"}',
    "model-00001-of-00002.safetensors": struct.pack("<Q", len(HEADER)) + HEADER + bytes(16),
    "model-00002-of-00002.safetensors": struct.pack("<Q", len(HEADER)) + HEADER + b"\x01" * 16,
    "model.safetensors.index.json": b'{"weight_map":{}}',
    "tokenizer.json": b"{}",
    "tokenizer_config.json": b"{}",
    "chat_template.jinja": b"{{ messages }}",
    "merges.txt": b"a b",
    "tokenizer.model": b"\x00\x01",
}


def folder_of(path, files=FILES):
    path.mkdir(parents=True)
    for name, content in files.items():
        (path / name).write_bytes(content)
    return path


@pytest.fixture
def folder(tmp_path):
    return folder_of(tmp_path / "model")


def test_it_is_the_same_wherever_and_whenever(folder, tmp_path):
    first = weights_fingerprint(folder)
    assert len(first) == 64
    backwards = folder_of(tmp_path / "deep" / "er", dict(reversed(FILES.items())))
    for path in backwards.iterdir():
        os.utime(path, (1, 1))
    assert weights_fingerprint(backwards) == first
    assert weights_fingerprint(str(backwards)) == first


@pytest.mark.parametrize("name", FILES)
def test_every_changed_byte_changes_it(folder, name):
    before = weights_fingerprint(folder)
    content = bytearray(FILES[name])
    content[-1] ^= 1
    (folder / name).write_bytes(content)
    assert weights_fingerprint(folder) != before


@pytest.mark.parametrize("name", FILES)
def test_a_missing_or_renamed_file_changes_it(folder, name):
    seen = {weights_fingerprint(folder)}
    (folder / name).rename(folder / f"x{name}")
    seen.add(weights_fingerprint(folder))
    (folder / f"x{name}").unlink()
    seen.add(weights_fingerprint(folder))
    assert len(seen) == 3


def test_bytes_that_move_from_one_file_to_the_next_change_it(tmp_path):
    one = folder_of(tmp_path / "one", {"a.bin": b"12", "b.bin": b"3"})
    two = folder_of(tmp_path / "two", {"a.bin": b"1", "b.bin": b"23"})
    assert weights_fingerprint(one) != weights_fingerprint(two)


@pytest.mark.parametrize("name", ["README.md", "generation_config.json", "image.png"])
def test_what_changes_no_kv_does_not_change_it(folder, name):
    before = weights_fingerprint(folder)
    (folder / name).write_bytes(b"anything")
    (folder / "sub").mkdir()
    (folder / "sub" / "other.safetensors").write_bytes(b"another model")
    assert weights_fingerprint(folder) == before


def test_links_are_followed_as_a_hub_s_cache_has_them(folder, tmp_path):
    linked = tmp_path / "snapshot"
    linked.mkdir()
    for name in FILES:
        (linked / name).symlink_to(folder / name)
    assert weights_fingerprint(linked) == weights_fingerprint(folder)


def test_a_folder_without_weights_is_undetermined(folder):
    for path in folder.glob("*.safetensors"):
        path.unlink()
    assert weights_fingerprint(folder) == UNDETERMINED


def test_a_folder_that_cannot_be_read_is_an_error(folder):
    with pytest.raises(PoolError, match="absent"):
        weights_fingerprint(folder / "absent")
    shutil.rmtree(folder)
    (folder.parent / "model").write_bytes(b"a file")
    with pytest.raises(PoolError):
        weights_fingerprint(folder)


# --- sampled, beyond the bound


@pytest.fixture
def large(tmp_path):
    """Windows cover a part of this file only: 64 windows of 64 KiB in 16 MiB."""
    content = struct.pack("<Q", len(HEADER)) + HEADER + os.urandom(16 << 20)
    return folder_of(tmp_path / "large", {**FILES, "model.safetensors": content})


def sampled(folder):
    return weights_fingerprint(folder, whole_bytes_max=1 << 20)


def flip(path, offset):
    with path.open("r+b") as file:
        file.seek(offset, os.SEEK_SET if offset >= 0 else os.SEEK_END)
        byte = file.read(1)[0] ^ 1
        file.seek(offset, os.SEEK_SET if offset >= 0 else os.SEEK_END)
        file.write(bytes([byte]))


def test_sampling_is_said_in_the_fingerprint(large):
    # otherwise a bound that differs between hosts would be mistaken for other weights without a word
    assert sampled(large) != weights_fingerprint(large)
    assert sampled(large) == sampled(large)


@pytest.mark.parametrize("offset", [0, 12, 8 + len(HEADER), 16 << 19, -1])
def test_sampling_sees_the_header_the_ends_and_the_middle(large, offset):
    path = large / "model.safetensors"
    before = sampled(large)
    last = path.stat().st_size - SAMPLE_WINDOW_BYTES
    if offset == 16 << 19:
        offset = last * 31 // (SAMPLE_WINDOWS - 1) + 5
    flip(path, offset)
    assert sampled(large) != before


def test_sampling_sees_a_fine_tune_and_another_size(large):
    path = large / "model.safetensors"
    before = sampled(large)
    content = bytearray(path.read_bytes())
    for offset in range(1 << 20, len(content), 100_000):
        content[offset] ^= 1
    path.write_bytes(content)
    tuned = sampled(large)
    assert tuned != before
    path.write_bytes(content + b"\x00")
    assert sampled(large) != tuned


def test_sampling_does_not_see_one_byte_between_the_windows(large):
    # the limit that the module's docstring admits
    before = sampled(large)
    last = (large / "model.safetensors").stat().st_size - SAMPLE_WINDOW_BYTES
    between = last * 5 // (SAMPLE_WINDOWS - 1) + SAMPLE_WINDOW_BYTES + 10
    flip(large / "model.safetensors", between)
    assert sampled(large) == before
    assert weights_fingerprint(large, whole_bytes_max=1 << 30) != before


def test_a_whole_header_counts_however_long_it_is(tmp_path):
    header = b"{" + b" " * 200_000 + b"}"
    content = struct.pack("<Q", len(header)) + header + bytes(30 << 20)
    folder = folder_of(tmp_path / "model", {"model.safetensors": content})
    before = weights_fingerprint(folder, whole_bytes_max=0)
    flip(folder / "model.safetensors", 100_000)
    assert weights_fingerprint(folder, whole_bytes_max=0) != before


def test_a_length_field_that_lies_is_no_header(tmp_path):
    content = struct.pack("<Q", 1 << 60) + b"{" + bytes(100)
    folder = folder_of(tmp_path / "model", {"model.safetensors": content, "b.bin": b"short"})
    assert len(weights_fingerprint(folder, whole_bytes_max=0)) == 64


def test_both_ends_of_every_tensor_count_beyond_the_bound(tmp_path):
    # a fine-tune of one layer in a file of many: its tensors lie between the windows
    tensors = 200
    size = 1 << 17
    entries = ",".join(
        f'"t{index}":{{"dtype":"F32","shape":[{size // 4}],'
        f'"data_offsets":[{index * size},{(index + 1) * size}]}}'
        for index in range(tensors)
    )
    header = f'{{"__metadata__":{{"format":"pt"}},{entries}}}'.encode()
    content = struct.pack("<Q", len(header)) + header + bytes(tensors * size)
    folder = folder_of(tmp_path / "model", {"model.safetensors": content})
    path = folder / "model.safetensors"
    seen = {sampled(folder)}
    for index in (3, 77, 151):
        flip(path, 8 + len(header) + index * size + 100)
        seen.add(sampled(folder))
        flip(path, 8 + len(header) + (index + 1) * size - 100)
        seen.add(sampled(folder))
    assert len(seen) == 7


def test_a_header_that_is_none_leaves_the_windows(tmp_path):
    header = b"{not json" + bytes(7)
    content = struct.pack("<Q", len(header)) + header + bytes(1 << 20)
    folder = folder_of(tmp_path / "model", {"model.safetensors": content})
    before = weights_fingerprint(folder, whole_bytes_max=0)
    flip(folder / "model.safetensors", -1)
    assert weights_fingerprint(folder, whole_bytes_max=0) != before
