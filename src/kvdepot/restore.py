"""A running restore: blocks on their way from the pool into host rows, group by group.

The parts of a request are asked for in order, as rows are to be had. The engine copies one group out
while the next ones load; rows go back as it goes, so a host buffer smaller than the request serves it
too. Used by one engine thread; the pool's threads fill the rows.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence

from kvdepot.chunks import Fill, GiveBack
from kvdepot.clock import Clock
from kvdepot.host import HostRows, contiguous_runs
from kvdepot.keys import BlockKey
from kvdepot.loads import Loads, reason_of
from kvdepot.policy.reasons import Reason
from kvdepot.tiers import Job, Outcome, Read, Turn
from kvdepot.units import MIB

__all__ = ["Restore"]

#: loads are handed over in parts, so that the first can be copied out while the next ones load
_LOAD_PART_BYTES = 32 * MIB

_SETTLE_S = 0.1


class _Part:
    """Some blocks of one group on their way into rows."""

    __slots__ = ("first", "job", "keys", "loaded", "rows")

    def __init__(self, first: int, keys: Sequence[BlockKey], rows: list[int]) -> None:
        self.first = first
        self.keys = keys
        self.rows = rows
        #: positions that the job fills; the others were in the host tier
        self.loaded: list[int] = []
        self.job: Job | None = None


class Restore:
    """A running restore. Read group by group, in order; release it in the end.

    Parts of the request are asked for in order as rows are to be had, so a host buffer smaller than
    the request serves it too: `runs` gives rows back as it goes.
    """

    def __init__(
        self,
        hosts: Sequence[HostRows],
        loads: Loads,
        group_keys: list[list[BlockKey]],
        give_back: GiveBack,
        *,
        deadline_s: float | None,
        clock: Clock,
    ) -> None:
        self._hosts = hosts
        self._loads = loads
        self._request = loads.next_request()
        self._keys = group_keys
        self._left_bytes = sum(
            len(keys) * host.block_bytes for keys, host in zip(group_keys, hosts, strict=True)
        )
        self._give_rows_back = give_back
        self._clock = clock
        self._give_up_at_s = None if deadline_s is None else self._clock.monotonic_s() + deadline_s
        self.blocks = len(group_keys[0])
        self._is_from_disk = [False] * self.blocks
        self._parts: list[deque[_Part]] = [deque() for _ in group_keys]
        self._next = [0] * len(group_keys)
        self._out: tuple[int, _Part] | None = None
        self._is_released = False
        self.bytes_read = 0
        #: why fewer blocks came than were asked for; None while none is missing
        self.ended_by: Reason | None = None
        for host, keys in zip(hosts, group_keys, strict=True):
            host.refresh(keys)  # what it has itself must not make room for the rest
        self._ask()

    @property
    def tiers(self) -> tuple[str, ...]:
        """Per block the farthest tier that served it so far."""
        return tuple("disk" if is_from_disk else "host" for is_from_disk in self._is_from_disk)

    def wait_group(self, group_index: int) -> int:
        """Wait for a group; return how many of its leading blocks are good.

        Where the host buffer is smaller than the request, this speaks only of what was asked for so
        far and assumes the rest; `runs` gives the last word.
        """
        good = 0
        for part in self._parts[group_index]:
            leading = self._leading(part)
            good += leading
            if leading < len(part.rows):
                return good
        return good + self.blocks - self._next[group_index]

    def runs(self, group_index: int) -> Iterator[tuple[int, int, memoryview]]:
        """The good leading blocks of a group: (first block, blocks, their rows), in order.

        Waits for the bytes. The memory holds ``blocks`` rows of the group, each a block and its
        padding to the page, and is valid until the next step of the iterator. Fewer blocks than
        asked for are good if fewer come out.
        """
        host = self._hosts[group_index]
        parts = self._parts[group_index]
        while parts or self._next[group_index] < self.blocks:
            if not parts:
                self._ask()
                if not parts:
                    self.ended_by = self.ended_by or Reason.HOST_FULL
                    return  # no rows are to be had
            part = parts.popleft()
            self._out = (group_index, part)
            leading = self._leading(part)
            first = part.first
            for run in contiguous_runs(part.rows[:leading]):
                yield first, run.rows, host.run(run)
                first += run.rows
            self._give_out_back()
            if leading < len(part.keys):
                return
            self._ask()

    def release(self) -> None:
        """Give all rows back; what is still loading gives its rows back when it is settled."""
        if self._is_released:
            return
        self._is_released = True
        self._give_out_back()
        for group, parts in enumerate(self._parts):
            for part in parts:
                if part.job is not None:
                    self._loads.take_back(part.job)
                self._give_back(group, part)
            parts.clear()
        self._loads.collect()

    # below

    def _give_out_back(self) -> None:
        """The part that the caller was copying out; it may have left the iterator half-way."""
        if self._out is not None:
            (group, part), self._out = self._out, None
            self._give_back(group, part)

    def _ask(self) -> None:
        """Ask for further parts while there are rows; the first groups first."""
        for group in range(len(self._keys)):
            while self._next[group] < self.blocks:
                if not self._ask_part(group):
                    return

    def _ask_part(self, group: int) -> bool:
        host = self._hosts[group]
        first = self._next[group]
        # two parts must fit, so that one loads while the other is copied out
        step = max(min(_LOAD_PART_BYTES // host.row_bytes, host.row_count // 2), 1)
        keys = self._keys[group][first : first + step]
        held = [host.acquire(key) for key in keys]
        missing = [index for index, row in enumerate(held) if row is None]
        fresh = host.reserve(len(missing))
        if len(fresh) < len(missing):
            # keep the gapless beginning, give the rest back, and come again when rows are free
            keep = missing[len(fresh)]
            surplus = [row for row in held[keep:] if row is not None]
            host.release(surplus)
            keys, held, missing = keys[:keep], held[:keep], missing[: len(fresh)]
            if not keys:
                return False
        rows = [row if row is not None else -1 for row in held]
        for index, row in zip(missing, fresh, strict=True):
            rows[index] = row
        part = _Part(first, keys, rows)
        if missing:
            part.loaded = missing
            part.job = self._load([Read(keys[i], host.row(rows[i])) for i in missing])
        self._parts[group].append(part)
        self._next[group] += len(keys)
        return True

    def _load(self, reads: Sequence[Read]) -> Job:
        left_s = None
        if self._give_up_at_s is not None:
            left_s = max(self._give_up_at_s - self._clock.monotonic_s(), 0.0)
        turn = Turn(self._request, self._left_bytes)
        self._left_bytes -= sum(read.into.nbytes for read in reads)
        return self._loads.load(reads, turn, deadline_s=left_s)

    def _leading(self, part: _Part) -> int:
        """Wait for a part; how many of its leading blocks are good."""
        if part.job is None:
            return len(part.rows)
        part.job.wait()
        for position, outcome in zip(part.loaded, part.job.outcomes, strict=True):
            if outcome is not Outcome.DONE:
                self.ended_by = self.ended_by or reason_of(outcome)
                return position
            self._is_from_disk[part.first + position] = True
        return len(part.rows)

    def _give_back(self, group: int, part: _Part) -> None:
        """Cache what was loaded, and end our use of the rows, now or when the job is settled."""
        host = self._hosts[group]
        if part.job is not None:
            fills: list[Fill] = []
            for place, (position, outcome) in enumerate(
                zip(part.loaded, part.job.outcomes, strict=True)
            ):
                if outcome is Outcome.DONE:
                    host.fill(part.rows[position], part.keys[position])
                else:
                    fills.append((part.rows[position], part.keys[position], place))
            self.bytes_read += part.job.bytes_done
            if part.job.leading_done == len(part.loaded) and self._next[group] < self.blocks:
                # the rows are needed for what comes next, and the last reading thread lets go of
                # them in a moment, unless its storage hangs while it closes a file
                part.job.wait_settled(_SETTLE_S)
            self._give_rows_back(group, part.rows, fills, part.job)
        else:
            host.release(part.rows)
