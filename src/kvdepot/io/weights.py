"""The weights fingerprint: what tells one model's files from another's.

It covers the names, sizes and content of the files that decide which KV a model computes, and which
tokens a text becomes: config, tokenizer, tensor index, chat template, and the weight files. It does
not depend on where the folder is, on times, or on the order of listing.

Limits, honestly: weight files are read whole up to `WHOLE_BYTES_MAX` in sum. Beyond that each file
gives its size, its safetensors header (names, types and shapes of all tensors), both ends of every
tensor that the header names, and `SAMPLE_WINDOWS` windows of `SAMPLE_WINDOW_BYTES`, spread evenly. A
fine-tune changes the tensors that it trains at their ends as well; a change of single numbers inside a
tensor, between two windows, goes unnoticed. Other formats than safetensors have the windows alone. The
checksum (xxh3, 128 bits) finds accidents, not forgers.
"""

from __future__ import annotations

import hashlib
import os
import struct
from collections.abc import Iterator
from pathlib import Path

import msgspec
import xxhash

from kvdepot.identity import UNDETERMINED
from kvdepot.io.disk import translated
from kvdepot.units import GIB, KIB, MIB

__all__ = [
    "SAMPLE_WINDOWS",
    "SAMPLE_WINDOW_BYTES",
    "WHOLE_BYTES_MAX",
    "weights_fingerprint",
]

#: read whole up to here; at the 1-3 GB/s of a local disk that is a few seconds at start
WHOLE_BYTES_MAX = 8 * GIB
SAMPLE_WINDOWS = 64
SAMPLE_WINDOW_BYTES = 64 * KIB

_WEIGHT_SUFFIXES = (".safetensors", ".bin", ".pt", ".pth", ".gguf")
_TEXT_SUFFIXES = (".json", ".jinja", ".txt", ".model", ".tiktoken", ".py")
#: says how answers are sampled, not what KV is computed
_WITHOUT_EFFECT = frozenset({"generation_config.json"})
_READ_BYTES = 8 * MIB
_TENSOR_END_BYTES = 4 * KIB
#: a safetensors header is bounded by its format; a larger number is another kind of file
_HEADER_BYTES_MAX = 100 * MIB


class _Tensor(msgspec.Struct):
    """What is needed of a header's entry; ``__metadata__`` has none of it."""

    data_offsets: tuple[int, int] = (0, 0)


def weights_fingerprint(folder: str | Path, *, whole_bytes_max: int = WHOLE_BYTES_MAX) -> str:
    """The fingerprint of a model's folder: 64 hexadecimal digits. Blocks on reading.

    Args:
        folder: holds the files of one model; sub-folders are not looked at, links are followed.
        whole_bytes_max: weight files of more than so many bytes in sum are sampled.

    Returns:
        `UNDETERMINED`, which switches sharing off, when the folder has no weight files.

    Raises:
        PoolError: a file cannot be read.
    """
    with translated("list the model's folder", str(folder)):
        files = sorted(path for path in Path(folder).iterdir() if path.is_file())
    weights = [path for path in files if path.suffix in _WEIGHT_SUFFIXES]
    if not weights:
        return UNDETERMINED
    texts = [
        path for path in files if path.suffix in _TEXT_SUFFIXES and path.name not in _WITHOUT_EFFECT
    ]
    total = hashlib.sha256(b"kvdepot weights v1\n")
    with translated("read the model's files in", str(folder)):
        is_whole = sum(path.stat().st_size for path in weights) <= whole_bytes_max
        for path in sorted(texts + weights):
            is_sampled = path in weights and not is_whole
            name = path.name.encode("utf-8", "surrogateescape")
            total.update(struct.pack("<QQ?", len(name), path.stat().st_size, is_sampled))
            total.update(name + (_sampled(path) if is_sampled else _whole(path)))
    return total.hexdigest()


def _whole(path: Path) -> bytes:
    digest = xxhash.xxh3_128()
    buffer = memoryview(bytearray(_READ_BYTES))
    with path.open("rb", buffering=0) as file:
        while got := file.readinto(buffer):
            digest.update(buffer[:got])
    return digest.digest()


def _sampled(path: Path) -> bytes:
    digest = xxhash.xxh3_128()
    with path.open("rb", buffering=0) as file:
        length = os.fstat(file.fileno()).st_size
        header_bytes = _header_bytes(file.fileno(), length)
        ends = _tensor_ends(file.fileno(), header_bytes)
        for offset, count in [(0, header_bytes), *ends, *_windows(length)]:
            digest.update(struct.pack("<QQ", offset, count))
            digest.update(os.pread(file.fileno(), count, offset))
    return digest.digest()


def _header_bytes(fd: int, length: int) -> int:
    """Bytes of a safetensors header with its length field; 0 for another kind of file."""
    start = os.pread(fd, 9, 0)
    if len(start) < 9 or start[8:9] != b"{":
        return 0
    count = 8 + int(struct.unpack("<Q", start[:8])[0])
    return count if count <= min(length, _HEADER_BYTES_MAX) else 0


def _tensor_ends(fd: int, header_bytes: int) -> list[tuple[int, int]]:
    """(offset, bytes) of the two ends of every tensor of a safetensors file."""
    if header_bytes == 0:
        return []
    try:
        header = msgspec.json.decode(os.pread(fd, header_bytes - 8, 8), type=dict[str, _Tensor])
    except msgspec.MsgspecError:
        return []  # another kind of file that begins alike: the windows have to do
    ends: list[tuple[int, int]] = []
    for tensor in header.values():
        start, stop = tensor.data_offsets
        count = min(_TENSOR_END_BYTES, max(stop - start, 0))
        ends += [(header_bytes + start, count), (header_bytes + stop - count, count)]
    return sorted(ends)


def _windows(length: int) -> Iterator[tuple[int, int]]:
    """(offset, bytes) of the windows of a file, the first at its beginning, the last at its end."""
    count = min(SAMPLE_WINDOW_BYTES, length)
    last = length - count
    for index in range(SAMPLE_WINDOWS):
        yield last * index // (SAMPLE_WINDOWS - 1), count
