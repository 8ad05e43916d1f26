"""Chunks that were stored, for vLLM's stream of KV events."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from typing import Any

from vllm.v1.kv_offload.base import Locality, Medium, OffloadingEvent, OffloadKey

__all__ = ["StoredEvents"]

log = logging.getLogger(__name__)


class StoredEvents:
    """Of one tier, on the scheduler's thread.

    Args:
        settings: vLLM's, of its events; without its stream nobody would take them.
        is_wanted: the tier's own setting.
        locality: of the storage.
        owner: what vLLM calls the tier.
    """

    def __init__(
        self, settings: Any, *, is_wanted: bool, locality: Locality | None, owner: str
    ) -> None:
        self._is_on = is_wanted and settings.enable_kv_cache_events
        if is_wanted and not self._is_on:
            log.warning("enable_kv_events is set, but vLLM's KV cache events are off")
        self._locality = locality
        self._owner = owner
        self._events: list[OffloadingEvent] = []

    def stored(self, keys: Sequence[OffloadKey]) -> None:
        """Chunks are in the pool."""
        if self._is_on and keys:
            self._events.append(
                OffloadingEvent(
                    keys=list(keys),
                    medium=Medium.STORAGE,
                    removed=False,
                    locality=self._locality,
                    ownership=self._owner,
                )
            )

    def take(self) -> Iterator[OffloadingEvent]:
        """Those since the last time."""
        events, self._events = self._events, []
        yield from events
