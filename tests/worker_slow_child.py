"""A worker whose storage takes as long as a file says; run by tests in place of the real one.

Arguments: the file, which holds seconds as one double, and the channel's descriptor.
"""

from __future__ import annotations

import struct
import sys
import time
from pathlib import Path

from kvdepot.io.localdisk import LocalDisk
from kvdepot.pool.worker_child import main
from kvdepot.testing.faults import FaultDisk, FaultPlan
from kvdepot.urls import distinct_roots


class PacedPlan(FaultPlan):
    """Makes each call wait as long as the file says; a 0 in the file lets all go at once."""

    def __init__(self, pace: Path) -> None:
        super().__init__()
        self.pace = pace

    def seconds(self) -> float:
        (seconds,) = struct.unpack("d", self.pace.read_bytes())
        return seconds

    def meet(self, verb, name, offset=0, length_bytes=0):
        until_s = time.monotonic() + self.seconds()
        while (left_s := until_s - time.monotonic()) > 0 and self.seconds():
            time.sleep(min(left_s, 0.02))
        return super().meet(verb, name, offset, length_bytes)


def make_disks(config):
    plan = PacedPlan(Path(sys.argv[1]))
    return [
        FaultDisk(LocalDisk(root.path, direct=config.direct), plan)
        for root in distinct_roots(config.urls)
    ]


if __name__ == "__main__":
    main(make_disks=make_disks)
