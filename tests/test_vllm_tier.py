"""The tier under vLLM's own managers: what is stored comes back, byte for byte, or is a miss.

What moves is kept by kvdepot.engines.vllm.jobs.
"""

from __future__ import annotations

import time

import pytest

import tests.needs_vllm  # noqa: F401  # isort: skip

from kvdepot.testing.damage import flip_byte
from kvdepot.testing.faults import FaultPlan
from tests.pool_rig import find_blocks
from tests.vllm_rig import ROW_BYTES, Ask, TierRig, row_identity

pytestmark = pytest.mark.vllm


@pytest.mark.parametrize("io", ["threads", "process"])
def test_a_later_engine_gets_what_an_earlier_one_stored(tmp_path, io):
    with TierRig(tmp_path / "pool", io=io) as rig:
        rig.put(Ask("a", 10))
    with TierRig(tmp_path / "pool", io=io) as rig:
        assert rig.take(Ask("a", 12)) == 10
        assert rig.take(Ask("b", 3)) == 0
        counts = rig.tier.counters.snapshot()
    assert counts["load_blocks_total"] == 10
    assert counts["load_bytes_total"] == 10 * ROW_BYTES


def test_two_engines_share_a_pool_while_both_run(tmp_path):
    with TierRig(tmp_path / "pool") as one, TierRig(tmp_path / "pool") as other:
        one.put(Ask("a", 5))
        give_up_s = time.monotonic() + 30
        while not (count := other.take(Ask("a", 5))):
            assert time.monotonic() < give_up_s
            time.sleep(0.05)
        assert count == 5


def test_lookups_make_no_file_calls(tmp_path):
    plan = FaultPlan()
    with TierRig(tmp_path / "pool", plan=plan) as rig:
        rig.put(Ask("a", 5))
        rig.forget_host()
        ask = Ask("a", 5)
        rig.begin(ask)
        before = plan.total_here
        rig.hits(ask)
        rig.hits(Ask("b", 5))
        assert plan.total_here == before


def test_a_damaged_block_ends_the_prefix_and_is_computed(tmp_path):
    identity = row_identity()
    with TierRig(tmp_path / "pool", identity=identity) as rig:
        rig.put(Ask("a", 6))
        blocks = rig.tier._blocks(Ask("a", 6).context)
        place = find_blocks(tmp_path / "pool", identity.digest())[blocks.key(Ask("a", 6).keys[3])]
        flip_byte(place.path, place.offset + 100)
        rig.forget_host()
        assert rig.take(Ask("a", 6)) == 3
        assert rig.tier.counters.snapshot()["corrupt_blocks_total"] == 1


def test_a_late_load_is_decided_at_its_deadline_and_ended_when_the_rows_are_free(tmp_path):
    plan = FaultPlan()
    with TierRig(tmp_path / "pool", plan=plan, load_deadline_s=0.3) as rig:
        rig.put(Ask("a", 4))
        rig.forget_host()
        barrier = plan.hold("read")
        ask = Ask("a", 4)
        rig.begin(ask)
        assert rig.hits(ask) is None
        assert barrier.wait_reached()
        while not rig.tier.jobs.late_keys:
            assert rig.hits(ask) is None, "rows were given away that a read still fills"
        assert rig.tier.jobs.late_keys == set(ask.keys)
        plan.clear()
        barrier.open()
        assert rig.wait_hits(ask) == 0, "a request that was given up asks no more"
        rig.end(ask)
        rig.wait_idle()
        assert not rig.tier.jobs.late_keys


def test_an_engine_under_another_connector_keeps_nothing(tmp_path, caplog):
    with TierRig(tmp_path / "pool", has_engine=False) as rig:
        rig.put(Ask("a", 4))
        rig.forget_host()
        assert rig.take(Ask("a", 4)) == 0
    assert "KvdepotConnector" in caplog.text
    assert not (tmp_path / "pool").exists()
