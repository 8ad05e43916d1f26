"""From a request's blocks to few long reads.

Neighbouring blocks of a request that are neighbours in a segment form an *extent*; extents are cut at
block borders into *units* of a few MiB, so that one request is read by several threads at once.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from kvdepot.io.buffers import ALIGNMENT
from kvdepot.keys import BlockKey
from kvdepot.pool.index import Locations
from kvdepot.pool.segments import Segment
from kvdepot.tiers import Job, Outcome, Read

__all__ = ["PlannedBlock", "Unit", "plan_units"]


class PlannedBlock(NamedTuple):
    """One block of a unit."""

    key: BlockKey
    segment_id: int
    offset: int


class Unit(NamedTuple):
    """Neighbouring reads of a job whose blocks lie next to each other in one segment; one call.

    `offsets` are relative to `offset`, where the first block begins; `length_bytes` reaches to the end
    of the last block's padding.
    """

    job: Job
    segment: Segment
    #: position of the first read in the job
    first: int
    reads: Sequence[Read]
    offset: int
    length_bytes: int
    offsets: list[int]
    lengths: list[int]
    checksums: list[int]

    def block(self, index: int) -> PlannedBlock:
        """One of the unit's blocks, for reports."""
        return PlannedBlock(
            self.reads[index].key, self.segment.id, self.offset + self.offsets[index]
        )


def plan_units(
    job: Job,
    reads: Sequence[Read],
    first: int,
    at: Locations,
    segment_of: Callable[[int], Segment | None],
    *,
    unit_bytes: int,
) -> list[Unit]:
    """Cut reads into units, in their order; what cannot be read is resolved as missing here.

    Args:
        job: whose outcomes the reads are.
        reads: neighbouring reads of the job.
        first: position of the first of them in the job.
        at: where their blocks are.
        segment_of: the segment of an id, None if it has gone.
        unit_bytes: a unit's size, unless a single block is larger.
    """
    # another length under the same key cannot be this block, whatever it is
    wanted = np.fromiter((read.into.nbytes for read in reads), dtype=np.int64, count=len(reads))
    is_readable = at.is_present & (at.lengths == wanted)
    padded = -(-at.lengths // ALIGNMENT) * ALIGNMENT
    ends = at.offsets + padded
    follows = np.zeros(len(reads), dtype=bool)
    follows[1:] = (
        is_readable[1:]
        & is_readable[:-1]
        & (at.segment_ids[1:] == at.segment_ids[:-1])
        & (at.offsets[1:] == ends[:-1])
    )
    units: list[Unit] = []
    borders = [*np.flatnonzero(~follows).tolist(), len(reads)]
    for start, stop in itertools.pairwise(borders):
        segment = segment_of(int(at.segment_ids[start])) if is_readable[start] else None
        if segment is None:
            job.resolve_run(first + start, [Outcome.MISS] * (stop - start), [0] * (stop - start))
            continue
        for begin, end in _cuts(at.offsets, ends, start, stop, unit_bytes=unit_bytes):
            offset = int(at.offsets[begin])
            units.append(
                Unit(
                    job,
                    segment,
                    first + begin,
                    reads[begin:end],
                    offset,
                    int(ends[end - 1]) - offset,
                    (at.offsets[begin:end] - offset).tolist(),
                    at.lengths[begin:end].tolist(),
                    at.checksums[begin:end].tolist(),
                )
            )
    return units


def _cuts(
    offsets: npt.NDArray[np.int64],
    ends: npt.NDArray[np.int64],
    start: int,
    stop: int,
    *,
    unit_bytes: int,
) -> Iterator[tuple[int, int]]:
    """Cut an extent at block borders into pieces of at most `unit_bytes`, or of one block."""
    while start < stop:
        limit = int(offsets[start]) + unit_bytes
        end = start + max(int(np.searchsorted(ends[start:stop], limit, side="right")), 1)
        yield start, end
        start = end
