"""A restore in chunks: some blocks over all groups at a time, from the front or from the back.

An engine that needs all layers of a block at once reads a prefix so, and each chunk that is there earns
the prefill that it saves. From the back, the engine computes the front meanwhile, until the two meet: a
load that stands still then costs nothing.

Used by one engine thread; the pool's threads fill the rows.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import NamedTuple

from kvdepot.host import HostRows
from kvdepot.keys import BlockKey
from kvdepot.loads import Loads, reason_of
from kvdepot.policy.reasons import Reason
from kvdepot.tiers import Job, Outcome, Read, Turn
from kvdepot.units import MIB, ceil_div

__all__ = ["Chunk", "ChunkRestore", "Fill", "GiveBack"]

#: large enough for long reads, small enough that progress is seen and little is lost at the meeting
_CHUNK_BYTES = 8 * MIB
#: chunks of a request, at least, if it has as many blocks
_CHUNKS_MIN = 16

#: a row that may hold a block once its job is settled: (row, key, position in the job)
Fill = tuple[int, BlockKey, int]
#: takes rows back once the job is settled: (group index, rows, what may have landed, job)
GiveBack = Callable[[int, list[int], Sequence[Fill], Job], None]


class Chunk(NamedTuple):
    """Blocks that are there. `rows` has one list for each group, one view of exactly a block each."""

    first: int
    blocks: int
    rows: list[list[memoryview]]
    #: per block, whether it came from storage
    is_from_disk: list[bool]


class _Part:
    """A chunk on its way."""

    __slots__ = ("first", "job", "keys", "loaded", "rows")

    def __init__(self, first: int, keys: list[list[BlockKey]], rows: list[list[int]]) -> None:
        self.first = first
        #: per group
        self.keys = keys
        self.rows = rows
        #: (group, index in the chunk) of each read of the job
        self.loaded: list[tuple[int, int]] = []
        self.job: Job | None = None


class ChunkRestore:
    """A running restore in chunks. `release` it in the end.

    Args:
        hosts: of the groups.
        loads: of the depot.
        group_keys: per group, the keys of the blocks.
        give_back: takes rows whose job is not settled.
        is_from_back: the last chunk first.
        lane: 0 where a request waits for it, 1 where one will want it; see `kvdepot.tiers.Turn`.
    """

    def __init__(
        self,
        hosts: Sequence[HostRows],
        loads: Loads,
        group_keys: Sequence[Sequence[BlockKey]],
        give_back: GiveBack,
        *,
        is_from_back: bool,
        lane: int = 0,
    ) -> None:
        self._hosts = hosts
        self._loads = loads
        self._keys = group_keys
        self._give_rows_back = give_back
        self._is_from_back = is_from_back
        self._lane = lane
        self.blocks = len(group_keys[0])
        block_bytes = sum(host.block_bytes for host in hosts)
        self._step = max(min(_CHUNK_BYTES // block_bytes, ceil_div(self.blocks, _CHUNKS_MIN)), 1)
        self._request = loads.next_request()
        self._left_bytes = self.blocks * block_bytes
        #: blocks that are still to be asked for: [low, high)
        self._low, self._high = 0, self.blocks
        self._parts: deque[_Part] = deque()
        self._out: _Part | None = None
        #: blocks handed out so far, from the end where it began
        self.taken = 0
        self.bytes_read = 0
        #: why no further chunk comes; None while one may
        self.ended_by: Reason | None = None
        for host, keys in zip(hosts, group_keys, strict=True):
            host.refresh(keys)  # what it has itself must not make room for the rest
        self._ask()

    @property
    def is_over(self) -> bool:
        """No further chunk comes."""
        return self.ended_by is not None or self.taken == self.blocks

    @property
    def is_decided(self) -> bool:
        """Of every chunk that was asked for it is known whether it is there."""
        return all(part.job is None or part.job.is_decided for part in self._parts)

    def poll(self) -> Chunk | None:
        """The next chunk in order if it is there. Its rows are valid until the next call."""
        self._give_out_back()
        self._ask()
        if not self._parts or self.ended_by is not None:
            if not self._parts and self.taken < self.blocks and self.ended_by is None:
                self.ended_by = Reason.HOST_FULL
            return None
        part = self._parts[0]
        if part.job is not None:
            if not part.job.is_decided:
                return None
            bad = next((o for o in part.job.outcomes if o is not Outcome.DONE), None)
            if bad is not None:
                self.ended_by = reason_of(bad)
                return None
        self._out = self._parts.popleft()
        count = len(part.rows[0])
        self.taken += count
        from_disk = {index for _, index in part.loaded}
        return Chunk(
            part.first,
            count,
            [
                [host.row(row) for row in rows]
                for host, rows in zip(self._hosts, part.rows, strict=True)
            ],
            [index in from_disk for index in range(count)],
        )

    def wait(self, timeout_s: float) -> bool:
        """Block until the next chunk is decided, or time is over; whether `poll` has news."""
        if not self._parts or self._parts[0].job is None:
            return True
        return self._parts[0].job.wait(max(timeout_s, 0.0))

    def give_up(self) -> None:
        """It is too slow: no further chunk is wanted. What is under way may still land in memory."""
        self.ended_by = Reason.DEADLINE
        self._end(is_unwanted=False)

    def release(self) -> None:
        """Give all rows back; idempotent. What is not needed any more is taken back."""
        self._end(is_unwanted=True)

    # below

    def _end(self, *, is_unwanted: bool) -> None:
        self._give_out_back()
        self._low = self._high
        while self._parts:
            part = self._parts.popleft()
            if part.job is not None:
                (self._loads.take_back if is_unwanted else self._loads.give_up)(part.job)
            self._give_back(part)
        self._loads.collect()

    def _ask(self) -> None:
        while self._low < self._high and self.ended_by is None:
            step = min(self._step, self._high - self._low)
            first = self._high - step if self._is_from_back else self._low
            part = self._part(first, first + step)
            if part is None:
                return
            if self._is_from_back:
                self._high = first
            else:
                self._low = first + step
            self._parts.append(part)

    def _part(self, first: int, stop: int) -> _Part | None:
        """Rows for a chunk, and its load; None when there are not enough rows now."""
        keys = [list(chain[first:stop]) for chain in self._keys]
        rows: list[list[int]] = []
        part = _Part(first, keys, rows)
        reads: list[Read] = []
        for group, (host, chain) in enumerate(zip(self._hosts, keys, strict=True)):
            held = [host.acquire(key) for key in chain]
            missing = [index for index, row in enumerate(held) if row is None]
            fresh = host.reserve(len(missing))
            taken = [row for row in held if row is not None] + fresh
            if len(fresh) < len(missing):
                host.release(taken)
                for other, others in zip(self._hosts, rows, strict=False):
                    other.release(others)
                return None
            for index, row in zip(missing, fresh, strict=True):
                held[index] = row
                part.loaded.append((group, index))
                reads.append(Read(chain[index], host.row(row)))
            rows.append([row for row in held if row is not None])
        if reads:
            turn = Turn(self._request, self._left_bytes, self._lane)
            part.job = self._loads.load(reads, turn)
            self._left_bytes -= sum(read.into.nbytes for read in reads)
        return part

    def _give_out_back(self) -> None:
        if self._out is not None:
            part, self._out = self._out, None
            self._give_back(part)

    def _give_back(self, part: _Part) -> None:
        job = part.job
        if job is None:
            for host, rows in zip(self._hosts, part.rows, strict=True):
                host.release(rows)
            return
        self.bytes_read += job.bytes_done
        fills: list[list[Fill]] = [[] for _ in self._hosts]
        for position, ((group, index), outcome) in enumerate(
            zip(part.loaded, job.outcomes, strict=True)
        ):
            fill = (part.rows[group][index], part.keys[group][index], position)
            if outcome is Outcome.DONE:
                self._hosts[group].fill(fill[0], fill[1])
            else:
                fills[group].append(fill)
        for group, rows in enumerate(part.rows):
            self._give_rows_back(group, rows, fills[group], job)
