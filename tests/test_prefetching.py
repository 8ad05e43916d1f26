"""Reading ahead for requests that wait: who, how much, and what happens when storage is not well."""

from __future__ import annotations

import errno
import time

import pytest

from kvdepot.depot import Depot
from kvdepot.finding import Finder, Hit, runs_of
from kvdepot.policy.decide import Mode, Run
from kvdepot.prefetching import Wanted
from kvdepot.testing.toy import ToyEngine
from tests.depot_rig import BLOCKS, GROUPS, Rig
from tests.tries import eventually, in_some_try

#: rows of each group: one prompt fills a quarter
ROWS = 4 * BLOCKS
_BLOCK_BYTES = sum(GROUPS)


@pytest.fixture
def engine() -> ToyEngine:
    return ToyEngine(GROUPS)


@pytest.fixture
def prompts(engine):
    return [engine.prompt(seed, BLOCKS, extra_tokens=5) for seed in range(4)]


@pytest.fixture
def folder(tmp_path, engine, prompts):
    """A pool that another process has filled."""
    with Rig(tmp_path / "p", engine, rows=8 * ROWS) as rig:
        for tokens in prompts:
            rig.store(tokens)
        assert rig.depot.drain(60)
    return tmp_path / "p"


def wanted(rig, *waiting):
    return [Wanted(number, rig.engine.keys(tokens), len(tokens)) for number, tokens in waiting]


def look(rig, *waiting, busy_s=10.0):
    rig.depot.prefetcher.look_ahead(wanted(rig, *waiting), busy_s=busy_s)


def read_ahead_bytes(depot: Depot) -> int:
    return depot.counters()["load_bytes_total"]


def wait_for_bytes(rig, count):
    assert eventually(lambda: read_ahead_bytes(rig.depot) >= count)


def test_who_waits_finds_its_prefix_in_memory(folder, engine, prompts):
    with Rig(folder, engine, rows=ROWS) as rig:
        look(rig, (1, prompts[0]))
        wait_for_bytes(rig, BLOCKS * _BLOCK_BYTES)
        rig.depot.prefetcher.claim(engine.keys(prompts[0]))
        plan = rig.plan(prompts[0])
        assert (plan.mode, plan.near_blocks) == (Mode.COMPUTE, BLOCKS)
        found = rig.depot.chunks(plan.keys[: plan.blocks])
        assert rig.read(found, prompts[0]) == list(range(BLOCKS))
        found.release()
        assert read_ahead_bytes(rig.depot) == BLOCKS * _BLOCK_BYTES
        counters = rig.depot.counters()
        assert counters["prefetch_requests_total"] == 1
        assert counters["prefetch_bytes_total"] == BLOCKS * _BLOCK_BYTES


def test_half_of_the_rows_stays_with_the_running_request(folder, engine, prompts):
    with Rig(folder, engine, rows=ROWS) as rig:
        look(rig, *enumerate(prompts))
        assert rig.depot.counters()["prefetch_requests_total"] == 2
        wait_for_bytes(rig, 2 * BLOCKS * _BLOCK_BYTES)
        # the group whose rows are fewest sets the measure
        free, clean, used = rig.depot.hosts[-1].counts()
        assert (free + clean, used) == (ROWS // 2, ROWS // 2)
        rig.depot.prefetcher.claim(engine.keys(prompts[0]))
        rig.depot.drain(0.0)
        # the first one's rows are cached now and may go to the third one
        look(rig, (1, prompts[1]), (2, prompts[2]), (3, prompts[3]))
        assert rig.depot.counters()["prefetch_requests_total"] == 3


def test_blocks_that_others_bring_are_not_read_twice(folder, engine, prompts):
    with Rig(folder, engine, rows=ROWS) as rig:
        rig.faults.hold("read")
        rig.depot.prefetcher.claim(engine.keys(prompts[0]))
        look(rig, (1, prompts[0]), (2, prompts[1]), (3, prompts[1]))
        look(rig, (1, prompts[0]), (2, prompts[1]), (3, prompts[1]))
        assert rig.depot.counters()["prefetch_requests_total"] == 1
        assert [host.counts()[2] for host in rig.depot.hosts] == [BLOCKS] * len(GROUPS)


def test_whoever_has_gone_gives_its_rows_back(folder, engine, prompts):
    with Rig(folder, engine, rows=ROWS) as rig:
        look(rig, (1, prompts[0]))
        wait_for_bytes(rig, BLOCKS * _BLOCK_BYTES)
        look(rig)
        assert all(host.counts()[2] == 0 for host in rig.depot.hosts)
        # what was read is not lost
        assert rig.plan(prompts[0]).near_blocks == BLOCKS


def test_a_request_whose_turn_comes_at_once_reads_for_itself(folder, engine, prompts):
    with Rig(folder, engine, rows=ROWS) as rig:
        rig.depot.policies.cost.loaded("disk", 1 << 20, 0.01)
        look(rig, (1, prompts[0]), busy_s=0.0)
        assert rig.depot.counters()["prefetch_requests_total"] == 0


def test_a_prefetch_that_hangs_holds_nobody_up_and_teaches_nothing(folder, engine, prompts):
    def attempt():
        with Rig(folder, engine, rows=ROWS) as rig:
            rig.faults.hold("read")
            look(rig, (1, prompts[0]))
            began_s = time.monotonic()
            rig.depot.prefetcher.claim(engine.keys(prompts[0]))
            plan = rig.plan(prompts[0])
            assert time.monotonic() - began_s < 0.1
            # neither a success nor a failure: the request makes its own load, with its own deadline
            assert plan.mode is Mode.LOAD
            assert not rig.depot.policies.cost.knows_reads("disk")
            assert rig.depot.policies.breaker.is_closed
            rig.faults.clear()

    in_some_try(attempt)


def test_storage_that_fails_is_left_alone(folder, engine, prompts):
    with Rig(folder, engine, rows=ROWS) as rig:
        rig.faults.fail("read", errno.EIO)

        def is_left_alone():
            look(rig, (1, prompts[0]), (2, prompts[1]))
            # by the breaker, or segment by segment, whichever was first
            is_absent = all(rig.depot.pool.lookup(engine.keys(each)) == 0 for each in prompts[:2])
            return is_absent or not rig.depot.policies.breaker.is_closed

        assert eventually(is_left_alone)
        begun = rig.depot.counters()["prefetch_requests_total"]
        look(rig, (1, prompts[0]), (2, prompts[1]))
        assert rig.depot.counters()["prefetch_requests_total"] == begun
        rig.faults.clear()


def test_what_both_tiers_have_together_is_found(folder, engine, prompts):
    keys = engine.keys(prompts[0])
    with Rig(folder, engine, rows=ROWS) as rig:
        found = rig.depot.chunks(keys[:4])
        assert rig.read(found, prompts[0][: 4 * 16]) == list(range(4))
        found.release()
        hit = Finder(rig.depot.hosts, rig.depot.pool).find(keys)
        assert hit == Hit(BLOCKS, ("host",) * 4 + ("disk",) * (BLOCKS - 4))
        assert runs_of(hit, 100) == [Run("host", 4, 0), Run("disk", BLOCKS - 4, 100)]
        assert Finder(rig.depot.hosts, None).find(keys).blocks == 4
