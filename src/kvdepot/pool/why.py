"""Why a prompt is not reused: looks a prompt up in every namespace of a root, past any engine.

For people and their tools; reads every footer, no payload, and changes nothing. All calls block.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from kvdepot.clock import Clock, SystemClock
from kvdepot.errors import ConfigError, FormatError, PoolError, Uncacheable
from kvdepot.identity import differences
from kvdepot.io.disk import Disk
from kvdepot.keys import BlockKey, RequestExtras, block_keys, group_key
from kvdepot.policy.reasons import ADVICE, Reason
from kvdepot.pool.catalog import Catalog, SegmentEntry
from kvdepot.pool.poolfile import need_pool_file, read_manifest
from kvdepot.pool.segments import read_records

__all__ = ["NamespaceAnswer", "why"]

#: of the keys that can be made from token ids alone
_OWN_SCHEME = "sha256-chain"


class NamespaceAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """What one namespace has of a prompt."""

    digest: str
    model_name: str
    #: full blocks of the prompt, and how many of them from the first on are there in all groups
    blocks: int
    found: int
    block_tokens: int
    #: why the next block is not there; None when all are
    reason: Reason | None
    detail: str
    advice: str


def why(
    disk: Disk,
    token_ids: Sequence[int],
    *,
    namespace: str = "",
    salt: str | None = None,
    clock: Clock | None = None,
) -> list[NamespaceAnswer]:
    """Say for each namespace how far a prompt is there, and why no further; the best one first.

    Args:
        disk: the root.
        token_ids: the prompt's.
        namespace: the first digits of the one that was expected to have it; all of them otherwise.
        salt: the tenant's, if it has one.
        clock: for tests that own the time.

    Raises:
        ConfigError: there is no pool, or the prompt cannot be keyed.
        PoolError: the storage refused.
    """
    need_pool_file(disk)
    catalog = Catalog(disk, clock or SystemClock())
    catalog.refresh(is_full=True)
    entries = catalog.by_namespace()
    looks = [_Look(disk, digest, found, token_ids, salt) for digest, found in entries.items()]
    looks.sort(key=lambda look: (-look.found, look.digest))
    return [look.answer(looks) for look in looks if look.digest.startswith(namespace.lower())]


class _Look:
    """One namespace, looked through for a prompt."""

    def __init__(
        self,
        disk: Disk,
        digest: str,
        entries: Sequence[SegmentEntry],
        token_ids: Sequence[int],
        salt: str | None,
    ) -> None:
        self.digest = digest
        self.identity = read_manifest(disk, digest)
        self.blocks = self.found = self.found_without_salt = 0
        self.has_later = False
        self._has_salt = salt is not None
        if self.identity is None or self.identity.hash_scheme != _OWN_SCHEME:
            return
        chains = [self._chain(token_ids, salt)]
        if salt is not None:
            chains.append(self._chain(token_ids, None))
        wanted = {key for chain in chains for keys in chain for key in keys}
        present = _present(disk, entries, bytes.fromhex(digest), wanted)
        held = [
            [all(key in present for key in block) for block in zip(*chain, strict=True)]
            for chain in chains
        ]
        self.blocks = len(held[0])
        self.found = _leading(held[0])
        self.has_later = any(held[0][self.found :])
        self.found_without_salt = _leading(held[-1]) if salt is not None else 0

    def _chain(self, token_ids: Sequence[int], salt: str | None) -> list[list[BlockKey]]:
        assert self.identity is not None
        try:
            keys = block_keys(
                bytes.fromhex(self.digest),
                token_ids,
                self.identity.block_tokens,
                RequestExtras(tenant_salt=salt),
            )
        except Uncacheable as error:
            raise ConfigError(f"the prompt cannot be keyed: {error}") from error
        groups = range(len(self.identity.groups))
        return [[group_key(key, group) for key in keys] for group in groups]

    def answer(self, others: Sequence[_Look]) -> NamespaceAnswer:
        """In the light of what the other namespaces have."""
        reason, detail = self._reason(others)
        identity = self.identity
        return NamespaceAnswer(
            digest=self.digest,
            model_name="" if identity is None else identity.model_name,
            blocks=self.blocks,
            found=self.found,
            block_tokens=0 if identity is None else identity.block_tokens,
            reason=reason,
            detail=detail,
            advice="" if reason is None else ADVICE[reason],
        )

    def _reason(self, others: Sequence[_Look]) -> tuple[Reason | None, str]:
        identity = self.identity
        if identity is None:
            return Reason.NOT_KEYED, "its manifest is missing or damaged"
        if identity.hash_scheme != _OWN_SCHEME:
            scheme = identity.hash_scheme
            return (
                Reason.NOT_KEYED,
                f"its keys come from the engine ({scheme}): see the engine's log",
            )
        if not self.blocks:
            return Reason.TOO_SHORT, f"a block has {identity.block_tokens} tokens"
        if self.found == self.blocks:
            return None, ""
        if self.has_later:
            return Reason.EVICTED, "blocks behind it are there, so it was there too"
        if self.found_without_salt > self.found:
            return Reason.SALT, f"{self.found_without_salt} blocks are there without the salt"
        best = max(others, key=lambda look: look.found)
        if best.found > self.found and best.identity is not None:
            fields = ", ".join(name for name, _, _ in differences(identity, best.identity))
            text = f"{best.found} blocks are in {best.digest[:12]}, which differs in {fields}"
            return Reason.OTHER_IDENTITY, text
        return Reason.NEVER_STORED, "or it was evicted together with what follows it"


def _leading(held: Sequence[bool]) -> int:
    return held.index(False) if False in held else len(held)


def _present(
    disk: Disk, entries: Sequence[SegmentEntry], digest: bytes, wanted: set[BlockKey]
) -> set[BlockKey]:
    found: set[BlockKey] = set()
    for entry in entries:
        try:
            records = read_records(disk, entry, digest)
        except (FormatError, PoolError):
            continue  # `verify` is what names bad segments
        if records is not None:
            joined = records["key"].tobytes()
            keys = {BlockKey(joined[start : start + 32]) for start in range(0, len(joined), 32)}
            found |= keys & wanted
    return found
