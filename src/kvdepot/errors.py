"""Every error that kvdepot raises, in one tree, so that callers can catch a kind and not a message.

    KvdepotError
    ├── ConfigError (ValueError)          a setting is wrong: what was found, what is allowed
    │   └── PoolUrlError                  a pool URL that does not name exactly one place
    ├── IdentityError
    │   ├── IdentityMismatch              two deployments differ; carries the field and both values
    │   └── IdentityUnknown               a field cannot be determined, so sharing must stay off
    ├── Uncacheable                       this request cannot be keyed and must be computed
    ├── UnsupportedModel                  the engine cannot cut this model's cache; carries the reason
    ├── FormatError
    │   ├── CorruptSegment                a segment's header, footer or trailer does not verify
    │   └── UnknownVersion                written by another format version; carries both versions
    ├── PoolError                         carries the path and the operation
    │   ├── PoolUnavailable  (retryable)  the storage did not answer, or answered with an I/O error
    │   ├── PoolFull         (retryable)  capacity, free space, inodes or a file-size limit is used up
    │   └── PoolDenied                    permissions, a read-only file system, a file where a folder is due
    └── WriterNameTaken (retryable)       a live writer holds this name

A missing block is not an error: absence is an `Outcome`. A cache failure never fails a request.
"""

from __future__ import annotations

__all__ = [
    "ConfigError",
    "CorruptSegment",
    "FormatError",
    "IdentityError",
    "IdentityMismatch",
    "IdentityUnknown",
    "KvdepotError",
    "PoolDenied",
    "PoolError",
    "PoolFull",
    "PoolUnavailable",
    "PoolUrlError",
    "Uncacheable",
    "UnknownVersion",
    "UnsupportedModel",
    "WriterNameTaken",
]


class KvdepotError(Exception):
    """Base of the tree. `hint` is a next step for a person; the CLI prints it as ``hint: ...``."""

    retryable: bool = False

    def __init__(self, message: str, *, hint: str = "") -> None:
        super().__init__(message)
        self.hint = hint


class ConfigError(KvdepotError, ValueError):
    """A setting is wrong. The message says which, what was found and what is allowed."""


class PoolUrlError(ConfigError):
    """A pool URL does not name exactly one place."""


class IdentityError(KvdepotError):
    """Bytes may not be shared between two deployments, or it is not known whether they may."""


class IdentityMismatch(IdentityError):
    """Two identities that should be equal differ in `field`."""

    def __init__(self, field: str, ours: object, theirs: object) -> None:
        super().__init__(f"identity field {field!r} differs: ours {ours!r}, theirs {theirs!r}")
        self.field = field
        self.ours = ours
        self.theirs = theirs


class IdentityUnknown(IdentityError):
    """At least one identity field cannot be determined; sharing stays off."""


class Uncacheable(KvdepotError):
    """The request cannot be keyed (for example malformed image metadata); it must be computed."""


class UnsupportedModel(KvdepotError):
    """The engine cannot cut and restore this model's cache; the message says why."""


class FormatError(KvdepotError):
    """Stored bytes are not what this release writes."""


class CorruptSegment(FormatError):
    """A segment's header, footer or trailer does not verify. `kind` is a short word for counters."""

    def __init__(self, message: str, *, kind: str) -> None:
        super().__init__(message)
        self.kind = kind


class UnknownVersion(FormatError):
    """The pool or segment was written by another format version."""

    def __init__(self, what: str, found: object, supported: object) -> None:
        super().__init__(
            f"{what} has format version {found}, this release reads version {supported}",
            hint="use the release that wrote it, or give this release an empty folder",
        )
        self.found = found
        self.supported = supported


class PoolError(KvdepotError):
    """The storage under a pool refused an operation."""

    def __init__(self, message: str, *, path: str = "", hint: str = "") -> None:
        super().__init__(message, hint=hint)
        self.path = path


class PoolUnavailable(PoolError):
    """The storage did not answer, or answered with an I/O error."""

    retryable = True


class PoolFull(PoolError):
    """Capacity, free space, inodes, quota or a file-size limit is used up."""

    retryable = True


class PoolDenied(PoolError):
    """Permissions, a read-only file system, or a file where a folder is due."""


class WriterNameTaken(KvdepotError):
    """A live writer holds this name."""

    retryable = True
