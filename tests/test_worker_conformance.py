"""A pool behind a worker keeps every promise of a tier."""

from __future__ import annotations

import pytest

from kvdepot.testing import checks_time
from kvdepot.testing.conformance import TierConformance
from tests.worker_rig import WorkerSubject, rows_in_an_arena


class TestWorker(WorkerSubject, TierConformance):
    @pytest.fixture(autouse=True)
    def _arena(self, monkeypatch):
        # the pool's own run of the kit takes the full second; here the ways to it are the point
        monkeypatch.setattr(checks_time, "SLOW_S", 0.6)
        with rows_in_an_arena() as arena:
            self.arena = arena
            yield
