"""vLLM's jobs on their way through the pool, from their submission until their rows are free.

A job's rows belong to the pool until it is settled, and only then is vLLM told of its end, because vLLM
gives the rows to others with it. A load that is late is decided long before that; `late_keys` says of
which chunks, so that the connector can let requests go on without them.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import NamedTuple

from vllm.v1.kv_offload.base import OffloadKey, ReqContext, get_offload_group_idx
from vllm.v1.kv_offload.tiering.base import JobResult, TransferJob

from kvdepot.clock import Clock
from kvdepot.engines.vllm.blocks import RequestBlocks
from kvdepot.engines.vllm.host_region import HostRegion
from kvdepot.tiers import Job, Outcome, Read, Tier, Write

__all__ = ["Ended", "TierJobs"]


class _Moving(NamedTuple):
    """A job on its way."""

    keys: Sequence[OffloadKey]
    blocks: RequestBlocks
    job: Job
    is_load: bool


class Ended(NamedTuple):
    """A job's end, and the chunks that it stored."""

    result: JobResult
    stored: Sequence[OffloadKey]


class TierJobs:
    """The jobs of one tier. Used by the scheduler's thread alone; nothing waits but `quiesce`.

    Args:
        region: where the rows are.
        block_tokens: tokens of a chunk, by group.
        chained: groups in which a chunk is of no use without the one before it.
        clock: for waiting.
    """

    def __init__(
        self,
        region: HostRegion,
        block_tokens: Mapping[int, int],
        chained: Collection[int],
        clock: Clock,
    ) -> None:
        self._region = region
        self._block_tokens = block_tokens
        self._chained = chained
        self._clock = clock
        self._moving: dict[int, _Moving] = {}
        self._refused: list[Ended] = []
        #: chunks whose load was late and whose rows the storage still holds
        self.late_keys: set[OffloadKey] = set()

    def __len__(self) -> int:
        return len(self._moving)

    @property
    def rows_storing(self) -> int:
        """Rows that stores keep from being used for something else."""
        return sum(len(moving.keys) for moving in self._moving.values() if not moving.is_load)

    def load(
        self, pool: Tier, transfer: TransferJob, blocks: RequestBlocks, deadline_s: float
    ) -> Job:
        """Begin to load; all of it is one load of the pool's, which is returned."""
        keys = list(transfer.keys)
        rows = self._region.rows(transfer.chunk_ids)
        reads = [Read(blocks.key(key), row) for key, row in zip(keys, rows, strict=True)]
        job = pool.load(reads, deadline_s=deadline_s)
        self._moving[transfer.job_id] = _Moving(keys, blocks, job, is_load=True)
        return job

    def store(
        self,
        pool: Tier,
        transfer: TransferJob,
        blocks: RequestBlocks,
        partial: Collection[OffloadKey] = (),
    ) -> bool:
        """Begin to store, parents before their children; vLLM hands the chunks over as a set.

        Those in `partial` are left out; False, and nothing is begun, where no other is there.
        """
        rows = dict(zip(transfer.keys, self._region.rows(transfer.chunk_ids), strict=True))
        keys = blocks.in_order((key for key in rows if key not in partial), transfer.req_context)
        if not keys:
            return False
        job = pool.store(list(self._writes(keys, rows, blocks, transfer.req_context)))
        self._moving[transfer.job_id] = _Moving(keys, blocks, job, is_load=False)
        return True

    def tokens(self, keys: Sequence[OffloadKey]) -> int:
        """How many tokens of the prompt these chunks are, in the group that has the most of them."""
        found: dict[int, int] = {}
        for key in keys:
            group = get_offload_group_idx(key)
            found[group] = found.get(group, 0) + self._block_tokens[group]
        return max(found.values(), default=0)

    def refuse(
        self,
        transfer: TransferJob,
        blocks: RequestBlocks | None = None,
        *,
        is_failure: bool = True,
    ) -> None:
        """A job that was not begun; its request, if given, looks for nothing of it again."""
        if blocks is not None:
            blocks.lost.update(transfer.keys)
        self._refused.append(Ended(JobResult(transfer.job_id, success=not is_failure), ()))

    def ended(self) -> list[Ended]:
        """What has ended since the last call."""
        found, self._refused = self._refused, []
        for number, moving in list(self._moving.items()):
            job = moving.job
            if job.is_settled:
                del self._moving[number]
                found.append(self._end(number, moving))
            elif moving.is_load and job.is_decided:
                self._note_late(moving)
        return found

    def cancel(self) -> None:
        """Give up what has not begun."""
        for moving in self._moving.values():
            moving.job.cancel()

    def quiesce(self, timeout_s: float) -> bool:
        """Wait until no row is in use, or time is up; whether none is."""
        give_up_at_s = self._clock.monotonic_s() + timeout_s
        return all(
            moving.job.wait_settled(max(give_up_at_s - self._clock.monotonic_s(), 0.0))
            for moving in list(self._moving.values())
        )

    # below

    def _writes(
        self,
        keys: Sequence[OffloadKey],
        rows: Mapping[OffloadKey, memoryview],
        blocks: RequestBlocks,
        context: ReqContext,
    ) -> Iterator[Write]:
        for key in keys:
            group = get_offload_group_idx(key)
            parent = blocks.parent(key, context) if group in self._chained else blocks.root
            yield Write(blocks.key(key), parent, rows[key], self._block_tokens[group])

    def _end(self, number: int, moving: _Moving) -> Ended:
        job = moving.job
        pairs = zip(moving.keys, job.outcomes, strict=True)
        done = [key for key, outcome in pairs if outcome is Outcome.DONE]
        is_whole = len(done) == len(moving.keys)
        if moving.is_load:
            self.late_keys.difference_update(moving.keys)
            if not is_whole:
                _note_lost(moving)
        finished_s = job.started_s if job.finished_s is None else job.finished_s
        result = JobResult(
            number,
            success=is_whole,
            successful_keys=tuple(done) if moving.is_load and done and not is_whole else None,
            transfer_time=finished_s - job.started_s,
            transfer_bytes=job.bytes_done,
        )
        return Ended(result, () if moving.is_load else done)

    def _note_late(self, moving: _Moving) -> None:
        if Outcome.LATE in moving.job.outcomes:
            self.late_keys.update(_note_lost(moving))
        # otherwise all is there, and the last thread lets go in a moment


def _note_lost(moving: _Moving) -> list[OffloadKey]:
    """The request computes what did not come, and asks no more if the storage was late."""
    lost: list[OffloadKey] = []
    for key, outcome in zip(moving.keys, moving.job.outcomes, strict=True):
        if outcome is not Outcome.DONE:
            lost.append(key)
            moving.blocks.is_given_up |= outcome is Outcome.LATE
    moving.blocks.lost.update(lost)
    return lost
