"""Plans of a depot over a real pool: loads that pay, chunks in both directions, and what is learned.

Covers `kvdepot.plans`, `kvdepot.loads` and `kvdepot.chunks`. The toy engine is the oracle of the bytes.
"""

from __future__ import annotations

import errno

import pytest

from kvdepot import loads
from kvdepot.policy.admission import AdmissionSettings, StoreClass
from kvdepot.policy.decide import Mode
from kvdepot.policy.reasons import Reason
from kvdepot.testing.toy import ToyEngine
from kvdepot.tiers import Outcome
from tests.depot_rig import BLOCKS, GROUPS, Rig
from tests.tries import eventually

TOKENS = BLOCKS * 16 + 5


@pytest.fixture
def engine() -> ToyEngine:
    return ToyEngine(GROUPS)


@pytest.fixture
def stored(tmp_path, engine):
    """A pool that another process has filled, and the prompt in it."""
    tokens = engine.prompt(1, BLOCKS, extra_tokens=5)
    with Rig(tmp_path / "p", engine) as rig:
        assert rig.store(tokens) == BLOCKS * len(GROUPS)
        assert rig.depot.drain(60)
    return tmp_path / "p", tokens


def test_a_first_ask_computes_and_says_why(tmp_path, engine):
    with Rig(tmp_path / "p", engine) as rig:
        tokens = engine.prompt(1, BLOCKS)
        plan = rig.plan(tokens)
        assert (plan.mode, plan.blocks, plan.near_blocks) == (Mode.COMPUTE, 0, 0)
        found = rig.depot.finished(plan, reused_blocks=0, load_s=0.0)
        assert found.reason is Reason.NEVER_STORED
        short = rig.plan(tokens[:5])
        assert rig.depot.finished(short, reused_blocks=0, load_s=0.0).reason is Reason.TOO_SHORT
        unkeyed = rig.depot.plan([], prompt_tokens=500)
        assert rig.depot.finished(unkeyed, reused_blocks=0, load_s=0.0).reason is Reason.NOT_KEYED
        assert rig.ended(Reason.NEVER_STORED) == rig.ended(Reason.TOO_SHORT) == 1


@pytest.mark.parametrize("is_from_back", [False, True])
def test_chunks_come_in_order_from_either_end(stored, engine, is_from_back):
    folder, tokens = stored
    with Rig(folder, engine) as rig:
        plan = rig.plan(tokens)
        assert (plan.mode, plan.blocks) == (Mode.LOAD, BLOCKS)
        found = rig.depot.chunks(plan.keys[: plan.blocks], is_from_back=is_from_back)
        came = rig.read(found, tokens)
        assert sorted(came) == list(range(BLOCKS))
        firsts = [number for number in came if number % 2 == 0]
        assert firsts == sorted(firsts, reverse=is_from_back)
        assert found.ended_by is None
        found.release()
        found.release()
        assert found.bytes_read == BLOCKS * sum(GROUPS)
        assert rig.depot.finished(plan, reused_blocks=BLOCKS, load_s=0.01) is None
        assert rig.depot.counters()["reuse_complete_total"] == 1
        # the policies have learned what reading takes, and the next time it is in memory
        assert rig.depot.policies.cost.knows_reads("disk")
        again = rig.plan(tokens)
        assert (again.mode, again.near_blocks) == (Mode.COMPUTE, BLOCKS)


def test_chunks_through_a_small_host_buffer(stored, engine):
    folder, tokens = stored
    with Rig(folder, engine, rows=6) as rig:
        found = rig.depot.chunks(engine.keys(tokens))
        assert rig.read(found, tokens) == list(range(BLOCKS))
        found.release()


def test_without_any_row_a_restore_ends_with_the_reason(stored, engine):
    folder, tokens = stored
    with Rig(folder, engine, rows=4) as rig:
        held = [host.reserve(host.row_count) for host in rig.depot.hosts]
        found = rig.depot.chunks(engine.keys(tokens))
        assert found.poll() is None
        assert found.is_over
        assert found.ended_by is Reason.HOST_FULL
        for host, rows in zip(rig.depot.hosts, held, strict=True):
            host.release(rows)
        found.release()


def test_what_lands_too_late_is_there_for_the_next_request(stored, engine):
    folder, tokens = stored
    with Rig(folder, engine) as rig:
        barrier = rig.faults.hold("read")
        plan = rig.plan(tokens)
        found = rig.depot.chunks(plan.keys[: plan.blocks])
        for _ in GROUPS:  # a block is there with all of its groups
            assert barrier.wait_reached()
        found.give_up()
        assert found.ended_by is Reason.DEADLINE
        ended = rig.depot.finished(plan, reused_blocks=0, load_s=0.1, ended_by=found.ended_by)
        assert ended.reason is Reason.DEADLINE
        found.release()
        rig.faults.clear()

        def has_landed():
            rig.depot.drain(0.0)
            return "host" in rig.depot.lookup(engine.keys(tokens)).tiers

        assert eventually(has_landed)
        again = rig.depot.chunks(engine.keys(tokens))
        assert rig.read(again, tokens) == list(range(BLOCKS))
        again.release()


def test_errors_end_a_restore_with_the_reason_and_open_the_breaker(stored, engine):
    folder, tokens = stored
    with Rig(folder, engine) as rig:
        rig.faults.fail("read", errno.EIO)
        for _ in range(8):
            plan = rig.plan(tokens)
            if plan.blocks == 0:
                break
            found = rig.depot.chunks(plan.keys[: plan.blocks])
            assert rig.read(found, tokens) == []
            assert found.ended_by in (Reason.FAILED, Reason.VANISHED)
            found.release()
            rig.depot.finished(plan, reused_blocks=0, load_s=0.0, ended_by=found.ended_by)
        assert rig.ended(Reason.FAILED) >= 1
        rig.faults.clear()
        assert rig.wait_until_planned(tokens)


def test_slow_storage_is_refused_probed_and_used_again(stored, engine):
    folder, tokens = stored
    with Rig(folder, engine, token_s=0.001) as rig:
        rig.faults.throttle("read", 100_000)
        reasons = set()
        for _ in range(12):
            plan = rig.plan(tokens)
            if plan.mode is Mode.LOAD:
                found = rig.depot.chunks(plan.keys[: plan.blocks])
                found.wait(plan.slack_s)
                found.give_up()
                found.release()
                ended_by = found.ended_by
            else:
                ended_by = None
            ended = rig.depot.finished(plan, reused_blocks=0, load_s=0.05, ended_by=ended_by)
            reasons.add(ended.reason)
            rig.depot.drain(0.0)
        assert reasons <= {Reason.DEADLINE, Reason.REFUSED_COST, Reason.BREAKER}
        assert reasons & {Reason.REFUSED_COST, Reason.BREAKER}
        rig.faults.clear()
        assert rig.wait_until_planned(tokens)


def test_what_admission_does_not_want_stays_in_memory(tmp_path, engine):
    tokens = engine.prompt(3, BLOCKS)
    settings = AdmissionSettings(when="second_sight")
    with Rig(tmp_path / "p", engine, admission=settings) as rig:
        assert rig.store(tokens) == BLOCKS * len(GROUPS)
        assert rig.depot.drain(60)
        counters = rig.depot.counters()
        assert counters["store_blocks_total"] == 0
        assert counters["store_not_admitted_blocks_total"] == BLOCKS
        assert rig.plan(tokens).near_blocks == BLOCKS
        rig.store(tokens, kind=StoreClass.PROMPT)
        assert rig.depot.drain(60)
        assert rig.depot.counters()["store_blocks_total"] == BLOCKS * len(GROUPS)


def test_an_answer_is_no_second_sight_of_its_prompt(tmp_path, engine):
    prompt = engine.prompt(3, BLOCKS)
    answered = [*prompt, *engine.prompt(4, 2)]
    settings = AdmissionSettings(when="second_sight")
    with Rig(tmp_path / "p", engine, rows=128, admission=settings) as rig:

        def ask_and_store() -> int:
            rig.store(prompt, kind=StoreClass.PROMPT)
            rig.store(answered, kind=StoreClass.GENERATED)
            assert rig.depot.drain(60)
            return rig.depot.counters()["store_blocks_total"]

        assert ask_and_store() == 0
        assert rig.depot.counters()["store_not_admitted_blocks_total"] == BLOCKS + 2
        assert ask_and_store() == (BLOCKS + 2) * len(GROUPS)


def test_stores_that_wait_leave_rows_to_loads(tmp_path, engine):
    with Rig(tmp_path / "p", engine, rows=64) as rig:
        rig.faults.hold("write")
        for seed in range(4):
            rig.store(engine.prompt(seed, BLOCKS))
        for host in rig.depot.hosts:
            free, clean, used = host.counts()
            assert used >= BLOCKS  # the first one had all the room it wanted
            assert free + clean >= host.row_count // 4


def test_an_evicted_block_is_told_from_one_that_never_was(tmp_path, engine):
    tokens = engine.prompt(1, BLOCKS)
    with Rig(tmp_path / "p", engine, rows=64) as rig:
        rig.store(tokens)
        assert rig.depot.drain(60)
        for host in rig.depot.hosts:
            rows = host.reserve(host.row_count)
            host.release(rows)
        for path in (tmp_path / "p").glob("ns/*/*/*.kvseg"):
            path.unlink()
        assert eventually(lambda: not rig.depot.lookup(engine.keys(tokens)).blocks)
        plan = rig.plan(tokens)
        assert rig.depot.finished(plan, reused_blocks=0, load_s=0.0).reason is Reason.EVICTED


def test_outcomes_have_reasons():
    assert loads.reason_of(Outcome.DONE) is None
    assert loads.reason_of(Outcome.CORRUPT) is Reason.CORRUPT
