"""The small files of a root: pool.json and the namespaces' manifests. Whole or absent, never replaced."""

from __future__ import annotations

import logging
import secrets

import msgspec

from kvdepot.errors import ConfigError, FormatError, PoolDenied, PoolError, UnknownVersion
from kvdepot.identity import FORMAT_VERSION, Identity, compare, decode_manifest, encode_manifest
from kvdepot.io.disk import Disk
from kvdepot.pool.catalog import NAMESPACE_FOLDER, tmp_path
from kvdepot.pool.segment import SegmentName

__all__ = [
    "MANIFEST_FILE",
    "POOL_FILE",
    "PoolFile",
    "need_pool_file",
    "open_namespace",
    "open_pool_file",
    "read_manifest",
    "read_pool_file",
    "restore_manifest",
    "restore_pool_file",
]

log = logging.getLogger(__name__)

POOL_FILE = "pool.json"
MANIFEST_FILE = "identity.json"
_FORMAT_NAME = "kvdepot pool"


class PoolFile(msgspec.Struct, frozen=True, kw_only=True):
    """The content of pool.json; fields that a later release adds are ignored."""

    format: str
    version: int
    pool_id: str
    capacity_bytes: int


def open_pool_file(disk: Disk, capacity_bytes: int | None, *, is_read_only: bool) -> PoolFile:
    """Read pool.json, or make it with the given capacity (None: half of the free space).

    Raises:
        UnknownVersion, FormatError: what is there is not of this format.
        ConfigError: there is no pool, and it may not be made.
        PoolError: the storage refused.
    """
    found = read_pool_file(disk)
    if found is not None:
        return found
    if is_read_only:
        raise ConfigError(
            f"{disk.place} holds no pool", hint="open it without read_only to make one"
        )
    fresh = PoolFile(
        format=_FORMAT_NAME,
        version=FORMAT_VERSION,
        pool_id=secrets.token_hex(16),
        capacity_bytes=(
            max(disk.space().free_bytes // 2, 1) if capacity_bytes is None else capacity_bytes
        ),
    )
    _publish_small(disk, POOL_FILE, _encoded(fresh))
    # another process may have been first: what is there holds
    made = read_pool_file(disk)
    if made is None:
        raise PoolDenied(f"{disk.place}: {POOL_FILE} vanished", path=disk.place)
    return made


def restore_pool_file(disk: Disk, pool_file: PoolFile) -> None:
    """After somebody deleted the folder under a running pool: what is written now must be readable."""
    if disk.read_small(POOL_FILE) is None:
        log.warning("%s: the pool was deleted while in use; beginning anew", disk.place)
        _publish_small(disk, POOL_FILE, _encoded(pool_file))


def restore_manifest(disk: Disk, identity: Identity) -> None:
    """As `restore_pool_file`, for the namespace that segments go on being written into."""
    path = _manifest_path(identity)
    if disk.read_small(path) is None:
        _publish_small(disk, path, encode_manifest(identity))


def open_namespace(disk: Disk, identity: Identity, *, is_read_only: bool) -> None:
    """Compare a namespace's manifest field by field, or make it.

    Raises:
        IdentityMismatch: names the field.
        FormatError: the manifest is damaged.
        PoolError: the storage refused.
    """
    path = _manifest_path(identity)
    text = disk.read_small(path)
    if text is None:
        if is_read_only:
            return
        _publish_small(disk, path, encode_manifest(identity))
        text = disk.read_small(path) or b""
    try:
        theirs = decode_manifest(text)
    except ConfigError as error:
        raise FormatError(
            f"{disk.place}/{path} is damaged: {error}",
            hint="remove the namespace folder; its blocks will be computed again",
        ) from error
    compare(identity, theirs)


def _manifest_path(identity: Identity) -> str:
    return f"{NAMESPACE_FOLDER}/{identity.digest().hex()}/{MANIFEST_FILE}"


def _encoded(pool_file: PoolFile) -> bytes:
    return msgspec.json.format(msgspec.json.encode(pool_file)) + b"\n"


def _publish_small(disk: Disk, path: str, text: bytes) -> None:
    # a name like a segment's that nobody finishes: a crash here is swept like any other
    tmp = tmp_path(SegmentName(secrets.token_hex(8), 0), len(text))
    file = disk.create(tmp, 0)
    try:
        file.write(0, [memoryview(text)])
        # once per pool; without it a power loss may leave an empty file under the final name, and
        # nobody could open the pool again
        file.sync()
        file.close()
        is_published = disk.publish(tmp, path)
    except PoolError:
        file.close()
        disk.remove(tmp)
        raise
    if not is_published:
        disk.remove(tmp)


def read_manifest(disk: Disk, digest: str) -> Identity | None:
    """A namespace's identity; None where its manifest is missing or cannot be read."""
    try:
        text = disk.read_small(f"{NAMESPACE_FOLDER}/{digest}/{MANIFEST_FILE}")
        return decode_manifest(text) if text is not None else None
    except (ConfigError, PoolError):
        return None


def need_pool_file(disk: Disk) -> PoolFile:
    """The content of pool.json, for what looks at a pool from outside.

    Raises:
        ConfigError: there is no pool.
        UnknownVersion, FormatError: as `read_pool_file`.
    """
    found = read_pool_file(disk)
    if found is None:
        raise ConfigError(
            f"{disk.place} holds no pool", hint="name the folder that holds pool.json"
        )
    return found


def read_pool_file(disk: Disk) -> PoolFile | None:
    """The content of pool.json; None when there is no pool.

    Raises:
        UnknownVersion: another format version; names both.
        FormatError: not a pool's file.
    """
    text = disk.read_small(POOL_FILE)
    if text is None:
        return None
    try:
        # the version first: a later release may change every other field
        head = msgspec.json.decode(text, type=dict[str, object])
        if head.get("format") == _FORMAT_NAME and head.get("version") != FORMAT_VERSION:
            raise UnknownVersion(f"pool {disk.place}", head.get("version"), FORMAT_VERSION)
        found = msgspec.json.decode(text, type=PoolFile, strict=True)
        if found.format != _FORMAT_NAME or len(bytes.fromhex(found.pool_id)) != 16:
            raise FormatError(f"{disk.place}: {POOL_FILE} is not a kvdepot pool's")
    except (msgspec.MsgspecError, UnicodeDecodeError, ValueError) as error:
        raise FormatError(
            f"{disk.place}: {POOL_FILE} is damaged: {error}",
            hint="remove the folder, or restore pool.json",
        ) from error
    return found
