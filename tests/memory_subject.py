"""How the conformance checks reach the reference tier."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from kvdepot.testing.memorytier import MemoryBank, MemoryTier
from kvdepot.testing.subject import TierSubject
from kvdepot.units import MIB

#: folders are fresh for every test, so nothing is shared by accident
_banks: dict[Path, MemoryBank] = {}


class MemorySubject(TierSubject):
    """Banks are found again by their folder, so they outlive their tiers as a disk would."""

    counts_io = True
    is_shared = True
    make_bank: Callable[..., MemoryBank] = MemoryBank
    make: Callable[..., MemoryTier] = MemoryTier

    def bank(self, folder: Path, capacity_bytes: int | None) -> MemoryBank:
        make = type(self).make_bank
        if folder not in _banks:
            _banks[folder] = make(256 * MIB if capacity_bytes is None else capacity_bytes)
        return _banks[folder]

    def make_tier(self, folder, engine, *, capacity_bytes=None, store_bytes_max=None):
        bank = self.bank(folder, capacity_bytes) if self.is_shared else None
        if bank is None and capacity_bytes is not None:
            bank = type(self).make_bank(capacity_bytes)
        limit = 64 * MIB if store_bytes_max is None else store_bytes_max
        tier = type(self).make(bank, store_bytes_max=limit)
        if not self.is_shared:
            tier.limits = tier.limits._replace(is_persistent=False, is_shared=False)
        return tier

    def damage(self, tier, key):
        tier.bank.damage(key)

    def slow(self, tier, seconds):
        tier.delay_s = seconds

    def io_calls(self, tier):
        return getattr(tier, "io_calls", 0)  # memory only; mutants count what they should not do

    def stored_bytes(self, folder):
        bank = _banks.get(folder)
        if bank is None:
            return None
        with bank._lock:
            return sum(len(kept.data) for kept in bank._kept.values())
