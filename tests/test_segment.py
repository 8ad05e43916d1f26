"""The segment format: what is written is read back, and no single flipped bit of a frame passes.

The expected bytes of the fixed example are built here by hand, from docs/format.md.
"""

from __future__ import annotations

import struct

import numpy as np
import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from kvdepot.errors import CorruptSegment, FormatError, UnknownVersion
from kvdepot.identity import FORMAT_VERSION
from kvdepot.keys import BlockKey
from kvdepot.pool.segment import (
    HEADER_BYTES,
    RECORD,
    TRAILER_BYTES,
    SegmentName,
    SegmentStamp,
    block_checksum,
    decode_footer,
    decode_header,
    decode_trailer,
    empty_segment_bytes,
    encode_header,
    encode_tail,
    key_table,
    parse_segment_name,
)

STAMP = SegmentStamp(bytes(range(32)), b"p" * 16, SegmentName("0123456789abcdef", 42))


def some_records(count: int) -> np.ndarray:
    records = np.zeros(count, dtype=RECORD)
    records["key"] = key_table([bytes([i % 251]) * 32 for i in range(count)])
    records["offset"] = (np.arange(count) + 1) * 4096
    records["length"] = 1000
    records["tokens"] = 16
    records["checksum"] = np.arange(count)
    return records


def test_the_frame_is_as_documented() -> None:
    header = bytes(encode_header(STAMP, 123))
    assert len(header) == 4096
    fields = struct.unpack_from("<8sII32s16s8sQI", header)
    assert fields == (
        b"kvdepotH",
        1,
        4096,
        bytes(range(32)),
        b"p" * 16,
        bytes.fromhex("0123456789abcdef"),
        123,
        42,
    )
    assert struct.unpack_from("<Q", header, 4088)[0] == xxhash.xxh3_64_intdigest(header[:4088])
    records = some_records(3)
    tail = bytes(encode_tail(STAMP, records, 16384))
    assert len(tail) == 4096
    assert tail[: 3 * 96] == records.tobytes()
    trailer = tail[-128:]
    assert struct.unpack_from("<8sII32s16s8sQQQQQ", trailer) == (
        b"kvdepotT",
        1,
        3,
        bytes(range(32)),
        b"p" * 16,
        bytes.fromhex("0123456789abcdef"),
        42,
        16384,
        16384 + 4096,
        xxhash.xxh3_64_intdigest(records.tobytes()),
        0,
    )
    assert struct.unpack_from("<Q", trailer, 120)[0] == xxhash.xxh3_64_intdigest(trailer[:120])
    assert RECORD.itemsize == 96
    fields_of = RECORD.fields
    assert fields_of is not None
    assert [place[1] for place in fields_of.values()] == [0, 32, 64, 72, 76, 80, 88]


@pytest.mark.parametrize("count", [1, 2, 41, 42, 43, 700])
def test_a_tail_is_read_back(count: int) -> None:
    records = some_records(count)
    offset = (count + 1) * 4096
    tail = encode_tail(STAMP, records, offset)
    length = offset + tail.nbytes
    assert length - count * 4096 == empty_segment_bytes(count)
    trailer = decode_trailer(tail[-TRAILER_BYTES:], length)
    assert trailer.stamp == STAMP
    found = decode_footer(trailer, tail[: count * RECORD.itemsize])
    assert found.tobytes() == records.tobytes()


@given(st.integers(0, HEADER_BYTES * 8 - 1))
def test_no_flipped_bit_of_a_header_passes(bit: int) -> None:
    page = bytearray(encode_header(STAMP, 7))
    page[bit // 8] ^= 1 << bit % 8
    with pytest.raises(FormatError):
        decode_header(memoryview(page))


@given(st.integers(0, TRAILER_BYTES * 8 - 1))
def test_no_flipped_bit_of_a_trailer_passes(bit: int) -> None:
    tail = encode_tail(STAMP, some_records(1), 8192)
    trailer = bytearray(tail[-TRAILER_BYTES:])
    trailer[bit // 8] ^= 1 << bit % 8
    with pytest.raises(FormatError):
        decode_trailer(memoryview(trailer), 8192 + 4096)


@given(st.integers(0, RECORD.itemsize * 5 * 8 - 1))
def test_no_flipped_bit_of_a_footer_passes(bit: int) -> None:
    tail = encode_tail(STAMP, some_records(5), 6 * 4096)
    trailer = decode_trailer(tail[-TRAILER_BYTES:], 7 * 4096)
    table = bytearray(tail[: 5 * RECORD.itemsize])
    table[bit // 8] ^= 1 << bit % 8
    with pytest.raises(CorruptSegment):
        decode_footer(trailer, memoryview(table))


def _break_overlap(records: np.ndarray) -> None:
    records["length"][0] = 5000


def _break_order(records: np.ndarray) -> None:
    records["offset"][:2] = records["offset"][:2][::-1].copy()


def _break_alignment(records: np.ndarray) -> None:
    records["offset"][1] += 512


def _break_end(records: np.ndarray) -> None:
    records["length"][-1] = 1 << 20


def _break_header(records: np.ndarray) -> None:
    records["offset"][0] = 0


def _break_empty(records: np.ndarray) -> None:
    records["length"][1] = 0


def _break_wrap(records: np.ndarray) -> None:
    records["offset"][-1] = 2**63 + 4096


@pytest.mark.parametrize(
    "break_it",
    [
        _break_overlap,
        _break_order,
        _break_alignment,
        _break_end,
        _break_header,
        _break_empty,
        _break_wrap,
    ],
)
def test_a_footer_that_verifies_and_makes_no_sense_is_refused(break_it) -> None:
    records = some_records(4)
    break_it(records)
    tail = encode_tail(STAMP, records, 5 * 4096)
    trailer = decode_trailer(tail[-TRAILER_BYTES:], 6 * 4096)
    with pytest.raises(CorruptSegment, match="overlap or leave"):
        decode_footer(trailer, tail[: 4 * RECORD.itemsize])


def _with_version(page: bytearray, checked: int) -> memoryview:
    struct.pack_into("<I", page, 8, FORMAT_VERSION + 1)
    struct.pack_into("<Q", page, checked, xxhash.xxh3_64_intdigest(page[:checked]))
    return memoryview(page)


def test_another_version_is_named_with_ours() -> None:
    header = _with_version(bytearray(encode_header(STAMP, 7)), HEADER_BYTES - 8)
    with pytest.raises(UnknownVersion, match=f"version {FORMAT_VERSION + 1}.*{FORMAT_VERSION}"):
        decode_header(header)
    tail = encode_tail(STAMP, some_records(1), 8192)
    trailer = _with_version(bytearray(tail[-TRAILER_BYTES:]), TRAILER_BYTES - 8)
    with pytest.raises(UnknownVersion):
        decode_trailer(trailer, 8192 + 4096)


def test_a_trailer_of_another_length_is_refused() -> None:
    tail = encode_tail(STAMP, some_records(1), 8192)
    with pytest.raises(CorruptSegment, match="another length"):
        decode_trailer(tail[-TRAILER_BYTES:], 8192 + 8192)


def test_the_checksum_binds_bytes_to_key_and_identity() -> None:
    data = memoryview(bytes(4096))
    key, other = BlockKey(b"a" * 32), BlockKey(b"b" * 32)
    assert block_checksum(b"i" * 32, key, data) != block_checksum(b"i" * 32, other, data)
    assert block_checksum(b"i" * 32, key, data) != block_checksum(b"j" * 32, key, data)


@pytest.mark.parametrize(
    "name",
    [
        "",
        "0123456789abcdef-0000002a.kvseg.tmp",
        "0123456789ABCDEF-0000002a.kvseg",
        "../0123456789abcdef-0000002a.kvseg",
        "0123456789abcdef-0000002a.kvseg\n",
        "0123456789abcde-0000002a.kvseg",
        "\u0660123456789abcdef-0000002a.kvseg",
    ],
)
def test_names_that_we_did_not_give_are_not_ours(name: str) -> None:
    assert parse_segment_name(name) is None


def test_a_name_is_read_back() -> None:
    assert parse_segment_name(str(STAMP.name)) == STAMP.name
