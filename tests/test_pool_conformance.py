"""The pool keeps every promise of a tier, on one root, on two striped roots, direct and buffered."""

from __future__ import annotations

from kvdepot.testing.conformance import TierConformance
from tests.pool_rig import PoolSubject


class TestOneRoot(PoolSubject, TierConformance):
    pass


class TestBuffered(PoolSubject, TierConformance):
    direct = "off"
    can_slow = False  # what waits for whom does not depend on it


class TestTwoRoots(PoolSubject, TierConformance):
    roots = 2
