"""The read queue: requests in order, roots that fail left alone and taken back by themselves."""

from __future__ import annotations

import errno
import time
from types import SimpleNamespace
from typing import Any

import pytest

from kvdepot.io.localdisk import LocalDisk
from kvdepot.keys import BlockKey
from kvdepot.policy.breaker import Fault
from kvdepot.pool.plan import Unit
from kvdepot.pool.read_queue import ReadQueue, Request, Task
from kvdepot.pool.tier import PoolTier
from kvdepot.testing.faults import FaultDisk, FaultPlan
from kvdepot.testing.toy import ToyEngine
from kvdepot.tiers import Job, Outcome, Read, Turn
from tests.pool_rig import ask, pool_config, put
from tests.tries import eventually

UNIT = 1 << 20


def make_queue(**fields) -> ReadQueue:
    settings: dict[str, Any] = {
        "threads_per_root": 2,
        "unit_bytes": UNIT,
        "budget_bytes": 8 * UNIT,
        "stall_s": 5.0,
    }
    return ReadQueue(**{**settings, **fields})


def root(name: str = "root") -> Any:
    return SimpleNamespace(disk=SimpleNamespace(place=name))


class Load:
    """A load of some one-block units of one root."""

    def __init__(
        self, queue: ReadQueue, units: int, *, of: Any, now: float = 0.0, turn: Turn | None = None
    ):
        keys = [BlockKey(number.to_bytes(32, "big")) for number in range(units)]
        self.reads = [Read(key, memoryview(bytearray(UNIT))) for key in keys]
        self.job = Job(keys)
        self.of: Any = SimpleNamespace(root=of)
        queue.submit(self.job, self.reads, turn, now)

    def units(self, first: int, stop: int) -> list[Unit]:
        return [
            Unit(self.job, self.of, n, self.reads[n : n + 1], 0, UNIT, [0], [UNIT], [0])
            for n in range(first, stop)
        ]


def plan(queue: ReadQueue, loads: list[Load], now: float = 0.0) -> list[Task]:
    """Plan whatever the queue wants planned, and return the tasks that it then gives out."""
    tasks: list[Task] = []
    while (work := queue.take(now)) is not None:
        if isinstance(work, Request):
            load = next(each for each in loads if each.job is work.job)
            work.next = len(work.reads)
            queue.planned(work, load.units(0, len(load.reads)))
        else:
            tasks.append(work)
    return tasks


def read_all(queue: ReadQueue, loads: list[Load], now: float = 0.0) -> list[Job]:
    """Serve everything; whose unit came when."""
    served: list[Job] = []
    while tasks := plan(queue, loads, now):
        for task in tasks:
            served.append(task.unit.job)
            queue.done(task, now, None, is_unread=False)
    return served


def test_the_shortest_request_is_read_first():
    queue, of = make_queue(threads_per_root=1), root()
    long, short = Load(queue, 6, of=of), Load(queue, 2, of=of)
    served = read_all(queue, [long, short])
    assert served == [short.job] * 2 + [long.job] * 6
    assert not queue.is_busy


def test_loads_of_one_request_keep_their_order_whatever_their_sizes():
    queue, of = make_queue(threads_per_root=1), root()
    first = Load(queue, 4, of=of, turn=Turn(7, 5 * UNIT))
    last = Load(queue, 1, of=of, turn=Turn(7, 1 * UNIT))
    other = Load(queue, 3, of=of)
    served = read_all(queue, [first, last, other])
    assert served == [other.job] * 3 + [first.job] * 4 + [last.job]


def test_lanes_go_before_sizes():
    queue, of = make_queue(threads_per_root=1), root()
    probe = Load(queue, 1, of=of, turn=Turn(1, UNIT, lane=2))
    ahead = Load(queue, 1, of=of, turn=Turn(2, UNIT, lane=1))
    wanted = Load(queue, 5, of=of)
    served = read_all(queue, [probe, ahead, wanted])
    assert served == [wanted.job] * 5 + [ahead.job, probe.job]


def test_nothing_overtakes_what_is_still_being_planned():
    queue, of = make_queue(), root()
    first, second = Load(queue, 4, of=of), Load(queue, 5, of=of)
    request = queue.take(0.0)
    assert isinstance(request, Request)
    assert request.job is first.job
    assert queue.take(0.0) is None
    request.next = 2
    queue.planned(request, first.units(0, 2))
    again = queue.take(0.0)
    assert again is request
    task = queue.take(0.0)  # while its rest is planned, its beginning is read
    assert isinstance(task, Task)
    assert task.unit.job is first.job
    request.next = 4
    queue.planned(request, first.units(2, 4))
    assert queue.wants_storage
    follower = queue.take(0.0)
    assert isinstance(follower, Task)
    assert follower.unit.job is first.job
    assert second.job.leading_done == 0


def test_threads_and_bytes_of_one_root_are_bounded():
    queue, of = make_queue(threads_per_root=2), root()
    load = Load(queue, 5, of=of)
    assert len(plan(queue, [load])) == 2
    queue, of = make_queue(threads_per_root=9, budget_bytes=3 * UNIT), root()
    load = Load(queue, 8, of=of)
    assert len(plan(queue, [load])) == 3


def test_a_root_that_hangs_is_refused_and_the_others_go_on():
    queue, sick, well = make_queue(), root("sick"), root("well")
    load = Load(queue, 4, of=sick)
    held = plan(queue, [load], 0.0)
    assert [task.is_refused for task in held] == [False, False]
    assert plan(queue, [load], 4.0) == []
    refused = plan(queue, [load], 6.0)
    assert [task.is_refused for task in refused] == [True, True]
    health = queue.health(6.0)[0]
    assert (health.place, health.breaker, health.reason) == ("sick", "open", "late")
    assert not queue.wants_storage
    other = Load(queue, 2, of=well)
    assert [task.is_refused for task in plan(queue, [other], 6.0)] == [False, False]
    # it wakes up: what hung comes, and then a probe
    for task in held:
        queue.done(task, 13.0, None, is_unread=False)
    for now in (20.0, 20.1):
        third = Load(queue, 1, of=sick)
        (probe,) = plan(queue, [third], now)
        assert probe.is_probe
        queue.done(probe, now, None, is_unread=False)
    assert queue.health(20.2)[0].breaker == "closed"


def hung_root(queue: ReadQueue, of: Any, threads: int = 2) -> list[Task]:
    """A root that is left alone since second 6; the tasks that hang on it."""
    load = Load(queue, threads, of=of)
    held = plan(queue, [load], 0.0)
    assert plan(queue, [load], 6.0) == []
    assert queue.health(6.0)[0].breaker == "open"
    return held


def test_a_load_tries_a_root_as_a_whole():
    queue, of = make_queue(), root()
    for task in hung_root(queue, of):
        queue.done(task, 7.0, None, is_unread=False)
    tried, other = Load(queue, 5, of=of), Load(queue, 9, of=of)
    tasks = plan(queue, [tried, other], 8.0)
    # two threads: the rest of the load waits for them, and the other load is answered
    reading = [task for task in tasks if not task.is_refused]
    assert [task.unit.job for task in reading] == [tried.job] * 2
    assert {task.unit.job for task in tasks if task.is_refused} == {other.job}
    while reading:
        for task in reading:
            queue.done(task, 8.1, None, is_unread=False)
        reading = plan(queue, [tried, other], 8.1)
        assert not any(task.is_refused for task in reading)
    assert queue.health(8.2)[0].breaker == "closed"


def test_a_load_whose_try_fails_is_answered():
    queue, of = make_queue(threads_per_root=1), root()
    for task in hung_root(queue, of, threads=1):
        queue.done(task, 7.0, None, is_unread=False)
    load = Load(queue, 3, of=of)
    (tried,) = plan(queue, [load], 8.0)
    assert tried.is_probe
    queue.done(tried, 8.1, Fault.ERROR, is_unread=False)
    assert [task.is_refused for task in plan(queue, [load], 8.1)] == [True, True]


def test_a_probe_goes_through_a_pause_of_the_root_but_never_behind_threads_that_hang():
    queue, of = make_queue(), root()
    held = hung_root(queue, of)
    behind = Load(queue, 1, of=of, turn=Turn(1, UNIT, lane=2))
    assert [task.is_refused for task in plan(queue, [behind], 6.1)] == [True]
    for task in held:
        queue.done(task, 6.2, None, is_unread=False)
    probe = Load(queue, 2, of=of, turn=Turn(2, 2 * UNIT, lane=2))
    tasks = plan(queue, [probe], 6.3)
    assert [(task.is_probe, task.is_refused) for task in tasks] == [(True, False)] * 2
    for task in tasks:
        queue.done(task, 6.4, None, is_unread=False)
    assert queue.health(6.5)[0].breaker == "closed"


def test_clearing_takes_everything_out():
    queue, of = make_queue(threads_per_root=1), root()
    load, other = Load(queue, 3, of=of), Load(queue, 4, of=of)
    work = queue.take(0.0)
    assert isinstance(work, Request)
    work.next = 3
    queue.planned(work, load.units(0, 3))
    task = queue.take(0.0)
    requests, units = queue.clear()
    assert [each.job for each in requests] in ([other.job], [])
    assert len(units) == 2
    assert isinstance(task, Task)
    assert queue.reading_now() == [task.unit]


# --- with a pool


@pytest.fixture
def engine() -> ToyEngine:
    return ToyEngine([4096])


def test_a_root_that_gives_errors_is_left_alone_and_closes_by_itself(tmp_path, engine):
    plan_ = FaultPlan()
    config = pool_config(tmp_path / "pool", discover_interval_s=0.05, read_unit_bytes=4096)
    with PoolTier.open(
        config, engine.identity, disks=[FaultDisk(LocalDisk(tmp_path / "pool"), plan_)]
    ) as tier:
        prompt = engine.prompt(1, 8)
        put(tier, engine, prompt)
        assert set(ask(tier, engine, prompt)) == {Outcome.DONE}
        assert [each.breaker for each in tier.health()] == ["closed"]
        plan_.fail("read", errno.EIO)
        assert Outcome.DONE not in ask(tier, engine, prompt)
        (health,) = tier.health()
        assert health.breaker == "open"
        assert health.reason == "error"
        assert tier.counters.snapshot()["load_refused_blocks_total"] > 0
        plan_.clear()
        assert eventually(lambda: set(ask(tier, engine, prompt)) == {Outcome.DONE})
        assert tier.health()[0].breaker == "closed"


def test_a_load_of_a_hung_root_is_answered_while_all_its_threads_hang(tmp_path, engine):
    plan_ = FaultPlan()
    config = pool_config(tmp_path / "pool", read_threads=3, read_stall_s=0.3, read_unit_bytes=4096)
    with PoolTier.open(
        config, engine.identity, disks=[FaultDisk(LocalDisk(tmp_path / "pool"), plan_)]
    ) as tier:
        prompt = engine.prompt(1, 8)
        put(tier, engine, prompt)
        barrier = plan_.hold("read")
        hung = tier.load(engine.reads(prompt))
        for _ in range(3):
            assert barrier.wait_reached()
        time.sleep(0.4)
        late = tier.load(engine.reads(prompt))
        assert late.wait(60), "it waits behind reads that hang until the end"
        assert set(late.outcomes) == {Outcome.FAILED}
        barrier.open()
        assert hung.wait_settled(60)


def test_stores_wait_for_loads_a_moment_and_then_go_on(tmp_path, engine):
    plan_ = FaultPlan()
    with PoolTier.open(
        pool_config(tmp_path / "pool", segment_age_s=0.05),
        engine.identity,
        disks=[FaultDisk(LocalDisk(tmp_path / "pool"), plan_)],
    ) as tier:
        prompt = engine.prompt(1, 4)
        put(tier, engine, prompt)
        barrier = plan_.hold("read")
        load = tier.load(engine.reads(prompt))
        assert barrier.wait_reached()
        begun = time.monotonic()
        store = tier.store(engine.writes(engine.prompt(2, 4)))
        assert store.wait(60)
        assert time.monotonic() - begun >= 0.2
        assert set(store.outcomes) == {Outcome.DONE}
        barrier.open()
        assert load.wait_settled(60)


def test_one_slow_read_among_good_ones_does_not_close_a_root():
    queue, of = make_queue(), root()
    slow = Load(queue, 1, of=of)
    (hung,) = plan(queue, [slow], 0.0)
    for now in (1.0, 2.0, 6.0):
        quick = Load(queue, 1, of=of)
        (task,) = plan(queue, [quick], now)
        assert not task.is_refused
        queue.done(task, now + 0.1, None, is_unread=False)
    assert queue.health(7.0)[0].breaker == "closed"
    queue.done(hung, 8.0, None, is_unread=False)
