"""Counters of one process, and the one table that names them.

Names follow Prometheus: base units, a unit in the name, ``_total`` on what only grows. A name that is
not in the table is a bug and raises.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from types import MappingProxyType

from kvdepot.policy.reasons import Reason

__all__ = ["METRICS", "Counters"]

#: name -> help text
METRICS: Mapping[str, str] = MappingProxyType(
    {
        "lookup_blocks_total": "blocks of prompts looked up",
        "lookup_hit_blocks_total": "blocks of prompts found, from the first on without a gap",
        "load_blocks_total": "blocks loaded and verified",
        "load_bytes_total": "payload bytes loaded and verified",
        "load_reads_total": "read calls to storage",
        "load_missing_blocks_total": "blocks gone between lookup and load",
        "load_failed_blocks_total": "blocks whose read gave an error",
        "load_late_blocks_total": "blocks that arrived when their load was late or cancelled",
        "load_given_up_blocks_total": "blocks not read because their load was late or cancelled by then",
        "load_refused_blocks_total": "blocks not read because their root was left alone",
        "corrupt_blocks_total": "blocks whose bytes did not verify",
        "corrupt_segments_total": "segments whose header, footer or trailer did not verify",
        "lost_segments_total": "segments that were gone when they were to be read",
        "store_blocks_total": "blocks written",
        "store_bytes_total": "payload bytes written",
        "store_present_blocks_total": "blocks not written because they were present or on their way",
        "store_cancelled_blocks_total": "blocks whose store was taken back",
        "store_not_admitted_blocks_total": "blocks not written because admission did not want them",
        "not_admitted_class_blocks_total": "of these, blocks of prompts that are too short",
        "not_admitted_first_sight_blocks_total": "of these, blocks computed for the first time",
        "not_admitted_budget_blocks_total": "of these, blocks beyond the day's budget of writes",
        "dropped_queue_full_total": "blocks not stored because the write queue was full",
        "dropped_pool_full_total": "blocks not stored because capacity, space or inodes were used up",
        "dropped_error_total": "blocks not stored because the storage gave an error",
        "dropped_too_large_total": "blocks not stored because they do not fit into a segment",
        "dropped_read_only_total": "blocks not stored because the pool is opened read-only",
        "dropped_closed_total": "blocks not stored because the tier was closed",
        "dropped_no_worker_total": "blocks not stored because no worker process was there",
        "segments_published_total": "segments made visible",
        "segments_abandoned_total": "segments given up before they were visible",
        "segments_evicted_total": "segments removed to make room",
        "segment_bytes_evicted_total": "bytes of segments removed to make room",
        "leftovers_swept_total": "files of dead writers removed",
        "discovered_segments_total": "segments of other writers taken into the index",
        "decided_load_total": "requests that load their prefix",
        "decided_meet_total": "requests that compute the front of their prefix while its back is read",
        "decided_compute_total": "requests that read nothing",
        "reuse_complete_total": "requests of which every full block was reused",
        **{
            f"reuse_ended_{reason.value}_total": f"requests whose reuse ended: {reason.value}"
            for reason in Reason
        },
        "prefetch_requests_total": "requests whose prefix was read ahead while they waited",
        "prefetch_bytes_total": "payload bytes read ahead; their blocks count as the host's when used",
        "worker_restarts_total": "worker processes started in place of one that ended or hung",
    }
)


class Counters:
    """Thread-safe counters over `METRICS`."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._values = dict.fromkeys(METRICS, 0)

    def add(self, name: str, count: int = 1) -> None:
        """Add to one counter. Raises KeyError for a name that is not in the table."""
        with self._lock:
            self._values[name] += count

    def snapshot(self) -> dict[str, int]:
        """All counters now."""
        with self._lock:
            return dict(self._values)
