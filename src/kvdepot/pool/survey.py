"""Looking at a whole root from outside: what it holds, and whether every byte of it verifies.

For people and their tools; nothing here takes a lease or changes a file. All calls block on file
calls, and scrubbing reads everything.
"""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from kvdepot.clock import Clock, SystemClock
from kvdepot.errors import FormatError, PoolError
from kvdepot.identity import Identity
from kvdepot.io.buffers import ALIGNMENT, aligned_bytes
from kvdepot.io.disk import Disk, DiskFile, Space
from kvdepot.keys import BlockKey
from kvdepot.pool.catalog import Catalog, SegmentEntry
from kvdepot.pool.poolfile import PoolFile, need_pool_file, read_manifest
from kvdepot.pool.segment import HEADER_BYTES, Records, block_checksum, decode_header
from kvdepot.pool.segments import read_records
from kvdepot.units import MIB, round_up

__all__ = ["NamespaceSurvey", "PoolSurvey", "SegmentCheck", "scrub", "survey"]

_SCRUB_READ_BYTES = 8 * MIB


class NamespaceSurvey(msgspec.Struct, frozen=True, kw_only=True):
    """One namespace. `identity` is None where the manifest is missing or damaged."""

    digest: str
    identity: Identity | None
    segments: int
    segment_bytes: int
    blocks: int
    #: segments whose trailer or footer does not verify, or that cannot be read
    bad_segments: int


class PoolSurvey(msgspec.Struct, frozen=True, kw_only=True):
    """One root. Byte counts are of file lengths."""

    place: str
    pool: PoolFile
    namespaces: tuple[NamespaceSurvey, ...]
    used_bytes: int
    #: segments being written, or left by dead writers
    unfinished: int
    unfinished_bytes: int
    is_direct: bool
    space: Space


class SegmentCheck(msgspec.Struct, frozen=True, kw_only=True):
    """What scrubbing found of one segment."""

    path: str
    blocks: int
    bad_blocks: int
    payload_bytes: int
    #: why the segment as a whole is of no use; empty when it is sound
    problem: str = ""

    @property
    def is_sound(self) -> bool:
        """Every byte that a reader would use verifies."""
        return not self.problem and self.bad_blocks == 0


def survey(disk: Disk, *, clock: Clock | None = None) -> PoolSurvey:
    """Count what a root holds; reads every footer, no payload.

    Raises:
        ConfigError: there is no pool.
        UnknownVersion, FormatError: it is of another format.
        PoolError: the storage refused.
    """
    pool = need_pool_file(disk)
    catalog = Catalog(disk, clock or SystemClock())
    catalog.refresh(is_full=True)
    unfinished = catalog.tmp_entries()
    return PoolSurvey(
        place=disk.place,
        pool=pool,
        namespaces=tuple(
            _survey_namespace(disk, digest, entries)
            for digest, entries in sorted(catalog.by_namespace().items())
        ),
        used_bytes=catalog.used_bytes,
        unfinished=len(unfinished),
        unfinished_bytes=sum(entry.reserved_bytes for entry in unfinished),
        is_direct=disk.is_direct,
        space=disk.space(),
    )


def scrub(disk: Disk, *, clock: Clock | None = None) -> Iterator[SegmentCheck]:
    """Read every segment of a root wholly and check every checksum; one result per segment.

    A segment that is evicted meanwhile is left out.

    Raises:
        ConfigError, UnknownVersion, FormatError: as `survey`.
    """
    need_pool_file(disk)
    catalog = Catalog(disk, clock or SystemClock())
    catalog.refresh(is_full=True)
    for entry in sorted(catalog.entries(), key=lambda each: each.path):
        check = _check_segment(disk, entry)
        if check is not None:
            yield check


def _survey_namespace(disk: Disk, digest: str, entries: list[SegmentEntry]) -> NamespaceSurvey:
    blocks = bad = 0
    for entry in entries:
        try:
            records = read_records(disk, entry, bytes.fromhex(digest))
        except (FormatError, PoolError):
            bad += 1
            continue
        blocks += 0 if records is None else len(records)
    return NamespaceSurvey(
        digest=digest,
        identity=read_manifest(disk, digest),
        segments=len(entries),
        segment_bytes=sum(entry.length_bytes for entry in entries),
        blocks=blocks,
        bad_segments=bad,
    )


def _check_segment(disk: Disk, entry: SegmentEntry) -> SegmentCheck | None:
    digest = bytes.fromhex(entry.namespace)
    records: Records | None = None
    bad_blocks = 0
    problem = ""
    try:
        records = read_records(disk, entry, digest)
        file = disk.open(entry.path) if records is not None else None
        if records is None or file is None:
            return None
        try:
            _check_header(file, entry, digest)
            bad_blocks = _count_bad_blocks(file, records, digest)
        finally:
            file.close()
    except (FormatError, PoolError) as error:
        problem = str(error)
    return SegmentCheck(
        path=entry.path,
        blocks=0 if records is None else len(records),
        bad_blocks=bad_blocks,
        payload_bytes=0 if records is None else int(records["length"].sum()),
        problem=problem,
    )


def _check_header(file: DiskFile, entry: SegmentEntry, digest: bytes) -> None:
    page = aligned_bytes(HEADER_BYTES)
    if file.read(0, [page]) != HEADER_BYTES:
        raise FormatError("the segment has no header")
    stamp = decode_header(page)
    if stamp.identity_digest != digest or stamp.name != entry.name:
        raise FormatError("the header is another segment's")


def _count_bad_blocks(file: DiskFile, records: Records, digest: bytes) -> int:
    bad = start = 0
    while start < len(records):
        first = int(records["offset"][start])
        stop = start + 1
        while (
            stop < len(records)
            and int(records["offset"][stop]) + int(records["length"][stop]) - first
            <= _SCRUB_READ_BYTES
        ):
            stop += 1
        end = int(records["offset"][stop - 1]) + int(records["length"][stop - 1])
        buffer = aligned_bytes(round_up(end - first, ALIGNMENT))
        got = file.read(first, [buffer])
        for record in records[start:stop]:
            offset = int(record["offset"]) - first
            data = buffer[offset : offset + int(record["length"])]
            key = BlockKey(record["key"].tobytes())
            is_whole = offset + data.nbytes <= got
            bad += not is_whole or block_checksum(digest, key, data) != int(record["checksum"])
        start = stop
    return bad
