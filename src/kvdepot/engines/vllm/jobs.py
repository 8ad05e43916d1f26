"""vLLM's jobs on their way through the pool, from their submission until their rows are free.

A job's rows belong to the pool until it is settled, and only then is vLLM told of its end, because vLLM
gives the rows to others with it. A load that is late is decided long before that, and a request may wait
for less time than its load may take; `late_keys` has the chunks of such loads, so that the connector can
let requests go on without them.

Keys, rows and records of a job's chunks are made on a thread of ours (`Handover`), a part at a time;
only the first part of a load is begun at once, because a request waits for it.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

from vllm.v1.kv_offload.base import OffloadKey, get_offload_group_idx
from vllm.v1.kv_offload.tiering.base import JobResult, TransferJob

from kvdepot.clock import Clock
from kvdepot.engines.vllm.admit import StoreAdmission
from kvdepot.engines.vllm.blocks import RequestBlocks
from kvdepot.engines.vllm.handover import Handover
from kvdepot.engines.vllm.host_region import HostRegion
from kvdepot.engines.vllm.moving import STORE_CHUNKS, Moving
from kvdepot.keys import BlockKey
from kvdepot.tiers import Job, Outcome, Read, Tier, Turn, Write

__all__ = ["Ended", "TierJobs"]


class Ended(NamedTuple):
    """A job's end."""

    result: JobResult
    #: chunks that it stored, and the bytes that were written for them
    stored: Sequence[OffloadKey] = ()
    stored_bytes: int = 0
    #: the method that a bug of ours has ended it in; empty without one
    broken: str = ""


class TierJobs:
    """The jobs of one tier. Used by the scheduler's thread alone; nothing waits but `quiesce` and `close`.

    Args:
        region: where the rows are.
        block_tokens: tokens of a chunk, by group.
        chained: groups in which a chunk is of no use without the one before it.
        admission: which chunks are written.
        clock: for deadlines and for waiting.
    """

    def __init__(
        self,
        region: HostRegion,
        block_tokens: Mapping[int, int],
        chained: Collection[int],
        admission: StoreAdmission,
        clock: Clock,
    ) -> None:
        self._region = region
        self._block_tokens = block_tokens
        self._chained = chained
        self._admission = admission
        self._clock = clock
        self._handover = Handover()
        self._moving: dict[int, Moving] = {}
        self._refused: list[Ended] = []
        self._loads = 0
        #: chunks of loads that nobody waits for any more; none of them is to be had before all are
        self.late_keys: set[OffloadKey] = set()

    def __len__(self) -> int:
        return len(self._moving)

    @property
    def rows_storing(self) -> int:
        """Rows that stores keep from being used for something else."""
        return sum(len(moving.keys) for moving in self._moving.values() if not moving.is_load)

    def load(
        self,
        pool: Tier,
        transfer: TransferJob,
        blocks: RequestBlocks,
        deadline_s: float,
        *,
        patience_s: float = math.inf,
    ) -> Moving:
        """Begin to load; for the pool all of it is one request.

        Args:
            pool: to load from.
            transfer: vLLM's job.
            blocks: its request's.
            deadline_s: what has not come by then is given up.
            patience_s: its request waits for so long.
        """
        self._loads += 1
        request, row_bytes = self._loads, self._region.row_bytes
        give_up_at_s = self._clock.monotonic_s() + deadline_s
        chunks = dict(zip(transfer.keys, transfer.chunk_ids.tolist(), strict=True))

        def begin(part: Sequence[OffloadKey], left: int) -> tuple[Sequence[OffloadKey], Job]:
            rows = self._region.rows(chunks[key] for key in part)
            reads = [Read(blocks.key(key), row) for key, row in zip(part, rows, strict=True)]
            left_s = max(give_up_at_s - self._clock.monotonic_s(), 0.0)
            turn = Turn(request, left * row_bytes)
            return part, pool.load(reads, deadline_s=left_s, turn=turn)

        moving = Moving(
            transfer.job_id,
            list(chunks),
            blocks,
            lambda keys: keys,
            begin,
            is_load=True,
            patience_s=patience_s,
            clock=self._clock,
        )
        self._moving[moving.number] = moving
        if moving.begin_part():
            self._hand_over(moving)
        return moving

    def store(
        self,
        pool: Tier,
        transfer: TransferJob,
        blocks: RequestBlocks,
        *,
        prompt_tokens: int,
        partial: Collection[OffloadKey] = (),
    ) -> None:
        """Have it stored, parents before their children; vLLM hands the chunks over as a set.

        Those in `partial` are left out, and those that write admission does not want.
        """
        blocks.learn(transfer.req_context)
        left_out = frozenset(partial)
        chunks = dict(zip(transfer.keys, transfer.chunk_ids.tolist(), strict=True))

        def order(keys: Sequence[OffloadKey]) -> Sequence[OffloadKey]:
            whole = [key for key in keys if key not in left_out]
            return self._admission.in_order(blocks.in_order(whole))

        def begin(part: Sequence[OffloadKey], _: int) -> tuple[Sequence[OffloadKey], Job | None]:
            wanted = self._admission.wanted(
                part, blocks, prompt_tokens=prompt_tokens, lookup=pool.lookup
            )
            if not wanted:
                return wanted, None
            rows = self._region.rows(chunks[key] for key in wanted)
            return wanted, pool.store(
                [self._write(key, row, blocks) for key, row in zip(wanted, rows, strict=True)]
            )

        moving = Moving(
            transfer.job_id, list(chunks), blocks, order, begin, is_load=False, clock=self._clock
        )
        self._moving[moving.number] = moving
        self._hand_over(moving)

    def touch(self, pool: Tier, keys: Collection[OffloadKey], blocks: RequestBlocks) -> None:
        """Pass uses on; lost where there are very many."""
        used = list(keys)
        found: list[BlockKey] = []

        def step() -> bool:
            part = used[len(found) : len(found) + STORE_CHUNKS]
            found.extend(map(blocks.key, part))
            is_more = len(found) < len(used)
            if not is_more:
                pool.touch(found)
            return is_more

        self._handover.offer(step)

    def tokens(self, keys: Collection[OffloadKey]) -> int:
        """How many tokens of the prompt these chunks are, in the group that has the most of them."""
        tokens = self._block_tokens
        if len(tokens) == 1:
            return len(keys) * next(iter(tokens.values()))
        found = Counter(map(get_offload_group_idx, keys))
        return max((count * tokens[group] for group, count in found.items()), default=0)

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
        self._refused.append(Ended(JobResult(transfer.job_id, success=not is_failure)))

    def ended(self) -> list[Ended]:
        """What has ended since the last call."""
        found, self._refused = self._refused, []
        for number, moving in list(self._moving.items()):
            if moving.is_settled:
                del self._moving[number]
                found.append(self._end(moving))
            elif moving.is_load and not moving.is_late_noted:
                self._note_late(moving)
        return found

    def cancel(self) -> None:
        """Give up what has not begun."""
        for moving in self._moving.values():
            moving.cancel()

    def quiesce(self, timeout_s: float) -> bool:
        """Wait until no row is in use, or time is up; whether none is."""
        give_up_at_s = self._clock.monotonic_s() + timeout_s

        def left_s() -> float:
            return max(give_up_at_s - self._clock.monotonic_s(), 0.0)

        return all(moving.wait_settled(left_s) for moving in list(self._moving.values()))

    def close(self, timeout_s: float) -> None:
        """Begin what was submitted, within a time; what is left then is given up, and later jobs too."""
        if not self._handover.close(timeout_s):
            self.cancel()

    # below

    def _hand_over(self, moving: Moving) -> None:
        # a request waits for a load, and nobody for a store
        if not self._handover.put(moving.begin_part, is_urgent=moving.is_load):
            moving.cancel()

    def _write(self, key: OffloadKey, row: memoryview, blocks: RequestBlocks) -> Write:
        group = get_offload_group_idx(key)
        parent = blocks.parent(key) if group in self._chained else blocks.root
        return Write(blocks.key(key), parent, row, self._block_tokens[group])

    def _end(self, moving: Moving) -> Ended:
        is_whole = moving.is_whole
        done = [] if is_whole and moving.is_load else moving.done
        if moving.is_late_noted:
            self.late_keys.difference_update(moving.keys)
        if moving.is_load and not is_whole:
            _note_lost(moving)
        finished_s = moving.started_s if moving.finished_s is None else moving.finished_s
        result = JobResult(
            moving.number,
            success=is_whole,
            successful_keys=tuple(done) if moving.is_load and done and not is_whole else None,
            transfer_time=finished_s - moving.started_s,
            transfer_bytes=moving.bytes_done,
        )
        method = "submit_load" if moving.is_load else "submit_store"
        return Ended(
            result,
            stored=() if moving.is_load else done,
            stored_bytes=0 if moving.is_load else moving.bytes_done,
            broken=method if moving.is_broken else "",
        )

    def _note_late(self, moving: Moving) -> None:
        if moving.is_decided:
            if Outcome.LATE not in moving.outcomes:
                return  # all is there, and the last thread lets go in a moment
            _note_lost(moving)
        elif self._clock.monotonic_s() < moving.let_go_at_s:
            return
        else:
            moving.blocks.is_given_up = True
        moving.is_late_noted = True
        # also those that have come: for vLLM they are on their way until the whole job has ended, and
        # it would wait for them
        self.late_keys.update(moving.keys)


def _note_lost(moving: Moving) -> None:
    """The request computes what did not come, and asks no more if the storage was late."""
    lost: list[OffloadKey] = []
    for key, outcome in moving.results:
        if outcome is not Outcome.DONE:
            lost.append(key)
            moving.blocks.is_given_up |= outcome is Outcome.LATE
    moving.blocks.lost.update(lost)
