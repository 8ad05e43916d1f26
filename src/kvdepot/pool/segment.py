"""The segment format, version 1: encoding, decoding and checking, without any I/O.

A segment is an immutable file (or object) that packs blocks. All integers are little-endian; every
part begins at a multiple of 4,096 bytes, so that O_DIRECT moves it without a copy:

    header    4,096 B   magic, version, identity, pool, writer, sequence, checksum
    payloads            each block's bytes, zero-padded to 4,096
    footer              one 96-byte record per block, then zeros
    trailer     128 B   the file's last bytes: where the footer is, checksums, the file's length

Readers MUST refuse a segment whose trailer or footer does not verify, MUST check each block against
its record, and MUST NOT trust anything else in the file. The trailer repeats identity, pool, writer
and sequence, so one read of the tail finds everything; the header is compared with it when the file
is opened for reading, which catches a file that was swapped for another. docs/format.md has the
byte tables.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import xxhash

from kvdepot.errors import CorruptSegment, UnknownVersion
from kvdepot.identity import FORMAT_VERSION
from kvdepot.io.buffers import ALIGNMENT, aligned_bytes
from kvdepot.keys import KEY_BYTES, BlockKey
from kvdepot.units import round_up

__all__ = [
    "HEADER_BYTES",
    "RECORD",
    "RECORDS_MAX",
    "TRAILER_BYTES",
    "Records",
    "SegmentName",
    "SegmentStamp",
    "Trailer",
    "block_checksum",
    "decode_footer",
    "decode_header",
    "decode_trailer",
    "empty_segment_bytes",
    "encode_header",
    "encode_tail",
    "key_table",
    "parse_segment_name",
]

HEADER_BYTES = ALIGNMENT
TRAILER_BYTES = 128
#: a bound on what a hostile trailer can make a reader allocate
RECORDS_MAX = 1 << 20

RECORD = np.dtype(
    [
        ("key", "<u8", 4),
        ("parent", "<u8", 4),
        ("offset", "<u8"),
        ("length", "<u4"),
        ("tokens", "<u4"),
        ("checksum", "<u8"),
        ("reserved", "<u8"),
    ]
)
Records = npt.NDArray[np.void]

_HEADER_MAGIC = b"kvdepotH"
_TRAILER_MAGIC = b"kvdepotT"
_HEADER = struct.Struct("<8sII32s16s8sQI")
_TRAILER = struct.Struct("<8sII32s16s8sQQQQQ")
_CHECKSUM = struct.Struct("<Q")
_NAME = re.compile(r"(?P<writer>[0-9a-f]{16})-(?P<sequence>[0-9a-f]{8})\.kvseg", re.ASCII)


class SegmentName(NamedTuple):
    """Writer and sequence number; together unique in a pool."""

    writer: str
    sequence: int

    def __str__(self) -> str:
        return f"{self.writer}-{self.sequence:08x}.kvseg"


class SegmentStamp(NamedTuple):
    """What header and trailer both say about a segment."""

    identity_digest: bytes
    pool_id: bytes
    name: SegmentName


class Trailer(NamedTuple):
    """The trailer's own part."""

    stamp: SegmentStamp
    records: int
    footer_offset: int
    footer_checksum: int
    file_bytes: int


def parse_segment_name(name: str) -> SegmentName | None:
    """Writer and sequence of a segment's file name; None for a name that we did not give."""
    match = _NAME.fullmatch(name)
    return SegmentName(match["writer"], int(match["sequence"], 16)) if match else None


def block_checksum(identity_digest: bytes, key: BlockKey, data: memoryview) -> int:
    """xxh3-64 of a block's bytes, seeded by identity and key.

    The seed binds the bytes to their name: another block's bytes under this key, however intact,
    do not verify. Releases the GIL for large blocks.
    """
    seed = xxhash.xxh3_64_intdigest(identity_digest + key)
    return xxhash.xxh3_64_intdigest(data, seed)


def empty_segment_bytes(records: int) -> int:
    """Bytes of a segment beside its payloads, for so many records."""
    return HEADER_BYTES + round_up(records * RECORD.itemsize + TRAILER_BYTES, ALIGNMENT)


def encode_header(stamp: SegmentStamp, created_ns: int) -> memoryview:
    """The first 4,096 bytes, in page-aligned memory. `created_ns` is for people only."""
    page = aligned_bytes(HEADER_BYTES)
    # a clock far off must not cost the blocks
    created_ns = min(max(created_ns, 0), 2**64 - 1)
    _HEADER.pack_into(
        page,
        0,
        _HEADER_MAGIC,
        FORMAT_VERSION,
        HEADER_BYTES,
        stamp.identity_digest,
        stamp.pool_id,
        bytes.fromhex(stamp.name.writer),
        created_ns,
        stamp.name.sequence,
    )
    _CHECKSUM.pack_into(page, HEADER_BYTES - 8, xxhash.xxh3_64_intdigest(page[: HEADER_BYTES - 8]))
    return page


def decode_header(page: memoryview) -> SegmentStamp:
    """Check a header.

    Raises:
        CorruptSegment: it does not verify.
        UnknownVersion: another format version wrote it.
    """
    if page.nbytes != HEADER_BYTES or bytes(page[:8]) != _HEADER_MAGIC:
        raise CorruptSegment("no segment header", kind="header")
    (expected,) = _CHECKSUM.unpack_from(page, HEADER_BYTES - 8)
    if xxhash.xxh3_64_intdigest(page[: HEADER_BYTES - 8]) != expected:
        raise CorruptSegment("the segment header does not verify", kind="header")
    _, version, _, identity, pool_id, writer, _, sequence = _HEADER.unpack_from(page, 0)
    if version != FORMAT_VERSION:
        raise UnknownVersion("segment", version, FORMAT_VERSION)
    return SegmentStamp(identity, pool_id, SegmentName(writer.hex(), sequence))


def encode_tail(stamp: SegmentStamp, records: Records, footer_offset: int) -> memoryview:
    """Footer and trailer, zero-padded to a multiple of 4,096, in page-aligned memory.

    Args:
        stamp: as in the header.
        records: the blocks, ordered by offset.
        footer_offset: where the tail will be written; a multiple of 4,096.
    """
    table = np.ascontiguousarray(records).view(np.uint8).reshape(-1).data
    tail = aligned_bytes(round_up(table.nbytes + TRAILER_BYTES, ALIGNMENT))
    tail[: table.nbytes] = table
    trailer = tail[tail.nbytes - TRAILER_BYTES :]
    _TRAILER.pack_into(
        trailer,
        0,
        _TRAILER_MAGIC,
        FORMAT_VERSION,
        len(records),
        stamp.identity_digest,
        stamp.pool_id,
        bytes.fromhex(stamp.name.writer),
        stamp.name.sequence,
        footer_offset,
        footer_offset + tail.nbytes,
        xxhash.xxh3_64_intdigest(table),
        0,
    )
    _CHECKSUM.pack_into(
        trailer, TRAILER_BYTES - 8, xxhash.xxh3_64_intdigest(trailer[: TRAILER_BYTES - 8])
    )
    return tail


def decode_trailer(trailer: memoryview, file_bytes: int) -> Trailer:
    """Check the last 128 bytes of a file of `file_bytes`.

    Raises:
        CorruptSegment: they do not verify, or do not fit the file.
        UnknownVersion: another format version wrote them.
    """
    if trailer.nbytes != TRAILER_BYTES or bytes(trailer[:8]) != _TRAILER_MAGIC:
        raise CorruptSegment("no segment trailer", kind="trailer")
    (expected,) = _CHECKSUM.unpack_from(trailer, TRAILER_BYTES - 8)
    if xxhash.xxh3_64_intdigest(trailer[: TRAILER_BYTES - 8]) != expected:
        raise CorruptSegment("the segment trailer does not verify", kind="trailer")
    _, version, count, identity, pool_id, writer, sequence, footer_offset, length, checksum, _ = (
        _TRAILER.unpack_from(trailer, 0)
    )
    if version != FORMAT_VERSION:
        raise UnknownVersion("segment", version, FORMAT_VERSION)
    tail_bytes = round_up(count * RECORD.itemsize + TRAILER_BYTES, ALIGNMENT)
    if length != file_bytes or count > RECORDS_MAX or footer_offset + tail_bytes != file_bytes:
        raise CorruptSegment("the segment has another length than its trailer says", kind="length")
    stamp = SegmentStamp(identity, pool_id, SegmentName(writer.hex(), sequence))
    return Trailer(stamp, count, footer_offset, checksum, file_bytes)


def decode_footer(trailer: Trailer, table: memoryview) -> Records:
    """Check the footer's records; the result is a copy that owns its memory.

    Raises:
        CorruptSegment: checksum, order or bounds are wrong.
    """
    if table.nbytes != trailer.records * RECORD.itemsize:
        raise CorruptSegment("the footer is cut short", kind="footer")
    if xxhash.xxh3_64_intdigest(table) != trailer.footer_checksum:
        raise CorruptSegment("the footer does not verify", kind="footer")
    records = np.frombuffer(table, dtype=RECORD).copy()
    if np.any(records["offset"] > trailer.file_bytes):
        # before any arithmetic: an offset near 2^63 would wrap to a place that looks sound
        raise CorruptSegment("the footer's blocks overlap or leave the payload", kind="footer")
    offsets = records["offset"].astype(np.int64)
    ends = offsets + records["length"].astype(np.int64)
    is_sound = (
        bool(np.all(offsets % ALIGNMENT == 0))
        and bool(np.all(offsets >= HEADER_BYTES))
        and bool(np.all(records["length"] > 0))
        and bool(np.all(ends <= trailer.footer_offset))
        and bool(np.all(offsets[1:] >= ends[:-1]))
    )
    if not is_sound:
        raise CorruptSegment("the footer's blocks overlap or leave the payload", kind="footer")
    return records


def key_table(keys: Sequence[bytes]) -> npt.NDArray[np.uint64]:
    """Keys as rows of four words, as records and the index hold them."""
    joined = b"".join(keys)
    if len(joined) != KEY_BYTES * len(keys):
        raise ValueError(f"block keys have {KEY_BYTES} bytes each")
    return np.frombuffer(joined, dtype="<u8").reshape(len(keys), KEY_BYTES // 8)
