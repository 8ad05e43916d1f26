"""The tier under vLLM's own managers: what is stored comes back, byte for byte, or is a miss.

What moves is kept by kvdepot.engines.vllm.jobs, and what was stored is told by
kvdepot.engines.vllm.events.
"""

from __future__ import annotations

import errno
import os
import shutil
import signal
import threading
import time
from types import SimpleNamespace

import pytest

import tests.needs_vllm  # noqa: F401  # isort: skip

from kvdepot.engines.vllm.blocks import RequestBlocks
from kvdepot.engines.vllm.patience import Wait
from kvdepot.engines.vllm.tier import KvdepotTier
from kvdepot.errors import UnsupportedModel
from kvdepot.keys import root_key
from kvdepot.testing.damage import flip_byte
from kvdepot.testing.faults import FaultPlan
from tests.pool_rig import find_blocks
from tests.tries import eventually
from tests.vllm_rig import CHUNK_TOKENS, ROW_BYTES, Ask, TierRig, row_identity

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
        assert eventually(lambda: other.take(Ask("a", 5)) == 5)


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


def test_nobody_waits_for_the_part_of_a_late_load_that_has_come(tmp_path):
    plan = FaultPlan()
    with TierRig(tmp_path / "pool", plan=plan, load_deadline_s=0.3) as rig:
        rig.put(Ask("a", 2))
        first = {path.name for path in (tmp_path / "pool").glob("ns/*/*/*.kvseg")}
        rig.put(Ask("a", 4))
        rig.forget_host()
        barrier = plan.hold("read", when=lambda call: call.name.rsplit("/")[-1] not in first)
        ask = Ask("a", 4)
        rig.begin(ask)
        assert rig.hits(ask) is None
        assert barrier.wait_reached()
        assert eventually(lambda: rig.hits(ask) is None and bool(rig.tier.jobs.late_keys))
        # for vLLM the first two are on their way, as long as the job is
        assert rig.tier.counters.snapshot()["load_blocks_total"] == 2
        assert rig.tier.jobs.late_keys == set(ask.keys)
        barrier.open()
        rig.wait_idle()
        assert not rig.tier.jobs.late_keys
        rig.end(ask)


def test_a_load_that_nobody_waits_for_any_more_goes_on(tmp_path):
    plan = FaultPlan()
    with TierRig(tmp_path / "pool", plan=plan) as rig:
        rig.put(Ask("a", 4))
        rig.forget_host()
        rig.tier.patience.wait_for = lambda *_: Wait(60.0, is_probe=False, patience_s=0.1)
        barrier = plan.hold("read")
        ask = Ask("a", 4)
        rig.begin(ask)
        assert eventually(lambda: rig.hits(ask) is None and bool(rig.tier.jobs.late_keys))
        assert rig.tier.jobs.late_keys == set(ask.keys)
        barrier.open()
        rig.wait_idle()
        assert not rig.tier.jobs.late_keys
        rig.end(ask)
        # it landed in the host tier
        reads = plan.counts["read"]
        assert rig.take(Ask("a", 4)) == 4
        assert plan.counts["read"] == reads


def test_an_engine_under_another_connector_keeps_nothing(tmp_path, caplog):
    with TierRig(tmp_path / "pool", has_engine=False) as rig:
        rig.put(Ask("a", 4))
        rig.forget_host()
        assert rig.take(Ask("a", 4)) == 0
    assert "KvdepotConnector" in caplog.text
    assert not (tmp_path / "pool").exists()


def test_storage_that_fails_is_computed_and_counted(tmp_path):
    plan = FaultPlan()
    with TierRig(tmp_path / "pool", plan=plan) as rig:
        rig.put(Ask("a", 6))
        rig.forget_host()
        plan.fail("read")
        assert rig.take(Ask("a", 6)) == 0
        plan.clear()
        # the pool leaves a segment alone for a while after an error
        assert eventually(lambda: rig.take(Ask("a", 6)) == 6)
        counts = rig.tier.counters.snapshot()
        assert counts["load_failed_blocks_total"] == 6


def test_a_full_disk_stores_nothing_and_frees_the_rows(tmp_path):
    plan = FaultPlan()
    with TierRig(tmp_path / "pool", plan=plan) as rig:
        for verb in ("write", "create"):
            plan.fail(verb, errno.ENOSPC)
        rig.put(Ask("a", 6))
        plan.clear()
        rig.forget_host()
        assert rig.take(Ask("a", 6)) == 0
        counts = rig.tier.counters.snapshot()
        assert counts["dropped_pool_full_total"] + counts["dropped_error_total"] == 6

        def is_kept():
            rig.put(Ask("a", 6))
            rig.forget_host()
            return rig.take(Ask("a", 6)) == 6

        assert eventually(is_kept)


@pytest.mark.parametrize("io", ["threads", "process"])
def test_a_pool_that_is_deleted_is_missed_and_used_again(tmp_path, io):
    with TierRig(tmp_path / "pool", io=io) as rig:
        rig.put(Ask("a", 6))
        shutil.rmtree(tmp_path / "pool")
        rig.forget_host()
        assert rig.take(Ask("a", 6)) == 0

        def is_kept():
            rig.put(Ask("b", 4))
            rig.forget_host()
            return rig.take(Ask("b", 4)) == 4

        assert eventually(is_kept)


def test_a_worker_that_dies_is_a_miss_and_is_replaced(tmp_path):
    with TierRig(tmp_path / "pool", io="process") as rig:
        rig.put(Ask("a", 6))
        rig.forget_host()
        pid = rig.tier.pool.worker_pid
        os.kill(pid, signal.SIGKILL)
        count = rig.take(Ask("a", 6))
        assert 0 <= count <= 6
        assert eventually(lambda: rig.take(Ask("a", 6)) == 6)
        assert rig.tier.pool.worker_pid not in (None, pid)


def test_an_end_while_storage_hangs_is_short_and_touches_no_memory_of_vllm_s(tmp_path):
    plan = FaultPlan()
    rig = TierRig(tmp_path / "pool", plan=plan, close_s=0.3)
    rig.put(Ask("a", 4))
    rig.forget_host()
    barrier = plan.hold("read")
    ask = Ask("a", 4)
    rig.begin(ask)
    assert rig.hits(ask) is None
    assert barrier.wait_reached()
    began_s = time.monotonic()
    rig.manager.shutdown()
    assert time.monotonic() - began_s < 60
    assert rig.region.mmap_obj is None, "vLLM's own mapping is gone, and the read has another"
    plan.clear()
    barrier.open()
    assert rig.tier.jobs.quiesce(60)


def test_a_reset_waits_for_the_rows_that_a_read_fills(tmp_path):
    plan = FaultPlan()
    with TierRig(tmp_path / "pool", plan=plan) as rig:
        rig.put(Ask("a", 4))
        rig.forget_host()
        barrier = plan.hold("read")
        ask = Ask("a", 4)
        rig.begin(ask)
        assert rig.hits(ask) is None
        assert barrier.wait_reached()
        assert not rig.tier.jobs.quiesce(0.05)
        began_s = time.monotonic()
        threading.Timer(0.3, plan.clear).start()  # opens the barrier
        rig.manager.reset_cache()
        assert time.monotonic() - began_s >= 0.2
        assert len(rig.tier.jobs) == 0
        rig.end(ask)
        assert rig.take(Ask("a", 4)) == 4, "what is in the pool stays there"


def test_stores_are_told_to_the_event_stream(tmp_path):
    with TierRig(tmp_path / "pool", events=True, enable_kv_events=True, locality="LOCAL") as rig:
        ask = Ask("a", 3)
        rig.put(ask)
        (event,) = rig.tier.take_events()
        assert sorted(event.keys) == sorted(ask.keys)
        assert (event.medium.value, event.locality.value, event.removed) == (
            "STORAGE",
            "LOCAL",
            False,
        )
        assert list(rig.tier.take_events()) == []
        assert rig.tier.cache_hit_source.value == "disk"


def test_events_that_vllm_does_not_want_are_not_kept(tmp_path, caplog):
    with TierRig(tmp_path / "pool", enable_kv_events=True) as rig:
        rig.put(Ask("a", 3))
        assert list(rig.tier.take_events()) == []
    assert "enable_kv_events" in caplog.text


def test_a_bug_of_ours_is_a_miss_and_a_failed_job(tmp_path, monkeypatch):
    with TierRig(tmp_path / "pool") as rig:
        rig.put(Ask("a", 3))
        rig.forget_host()

        def broken(*args, **named):
            raise RuntimeError("bug")

        monkeypatch.setattr(rig.tier.pool, "load", broken)
        assert rig.take(Ask("a", 3)) == 0
        monkeypatch.setattr(rig.tier.pool, "store", broken)
        rig.put(Ask("b", 3))
        monkeypatch.setattr(rig.tier.pool, "lookup", broken)
        assert rig.take(Ask("a", 3)) == 0
        assert set(rig.tier.times.errors) == {"submit_load", "submit_store", "lookup"}


def test_requests_with_other_extras_share_nothing(tmp_path):
    with TierRig(tmp_path / "pool") as rig:
        plain, styled, unknown = Ask("a", 4), Ask("a", 4), Ask("a", 4)
        rig.tier.request_extras[styled.context.req_id] = b"lora" + b"1" * 32
        rig.tier.request_extras[unknown.context.req_id] = None
        rig.put(styled)
        rig.forget_host()
        assert rig.take(plain) == 0
        rig.forget_host()
        rig.put(unknown)
        rig.forget_host()
        assert rig.take(Ask("a", 4)) == 0, "what is not known is not kept"
        assert rig.tier.counters.snapshot()["store_blocks_total"] == 4
        again = Ask("a", 4)
        rig.tier.request_extras[again.context.req_id] = b"lora" + b"1" * 32
        assert rig.take(again) == 4
        assert rig.tier.request_extras == {}


def test_parents_are_stored_before_their_children(tmp_path, monkeypatch):
    with TierRig(tmp_path / "pool") as rig:
        written = []
        store = rig.tier.pool.store

        def noted(writes):
            written.extend(writes)
            return store(writes)

        monkeypatch.setattr(rig.tier.pool, "store", noted)
        ask = Ask("a", 12)
        rig.begin(ask)
        rig.store(ask, keys=ask.keys[:7])
        rig.store(ask, keys=ask.keys[7:])
        rig.end(ask)
        rig.wait_idle()
        blocks = ask.context.get_state(RequestBlocks)
        keys = [blocks.key(key) for key in ask.keys]
        assert [write.key for write in written] == keys
        assert [write.parent for write in written] == [root_key(rig.identity.digest()), *keys[:-1]]
        assert {write.tokens for write in written} == {CHUNK_TOKENS}


def test_calls_on_the_scheduler_s_thread_are_counted(tmp_path):
    with TierRig(tmp_path / "pool") as rig:
        rig.put(Ask("a", 3))
        rig.forget_host()
        rig.take(Ask("a", 3))
        times = rig.tier.times
        for method in ("lookup", "submit_load", "submit_store", "get_finished_jobs"):
            assert times.calls(method) > 0


def test_chunks_that_were_copied_in_part_are_not_kept(tmp_path):
    with TierRig(tmp_path / "pool") as rig:
        ask = Ask("a", 4)
        rig.tier.partial_keys[ask.context.req_id] = {ask.keys[3]}
        rig.put(ask)
        rig.forget_host()
        assert rig.take(Ask("a", 4)) == 3
        alone = Ask("b", 1)
        rig.tier.partial_keys[alone.context.req_id] = set(alone.keys)
        rig.put(alone)
        rig.forget_host()
        assert rig.take(Ask("b", 1)) == 0
        assert rig.tier.partial_keys == rig.tier.request_extras == {}


def test_a_bug_in_the_policies_ends_no_step(tmp_path, monkeypatch):
    def fail(*_):
        raise ZeroDivisionError

    with TierRig(tmp_path / "pool") as rig:
        for name in ("began", "collect", "scheduled", "finished"):
            monkeypatch.setattr(rig.tier.patience, name, fail)
        rig.put(Ask("a", 4))
        rig.forget_host()
        assert rig.take(Ask("a", 4)) == 4
        for method in ("_began", "_learn", "on_schedule_end", "on_request_finished"):
            assert rig.tier.times.errors[method] > 0


def test_an_encoder_decoder_model_is_refused(tmp_path):
    with TierRig(tmp_path / "pool") as rig:
        model = SimpleNamespace(is_encoder_decoder=True)
        rig.tier.engine = rig.tier.engine._replace(vllm_config=SimpleNamespace(model_config=model))
        with pytest.raises(UnsupportedModel, match="encoder-decoder"):
            KvdepotTier._find_identity(rig.tier, [])
