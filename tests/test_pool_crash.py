"""Dying anywhere: kill -9 at every named point of the write path, and power loss at every call.

After each death: no wrong bytes, no temporary file outlives its writer's lease, and the next process
works. Real processes die by SIGKILL on a real folder; power loss is simulated, because nothing else
can show which unsynced sectors did not arrive.
"""

from __future__ import annotations

import random
import signal
import subprocess
import sys
import threading
import time

import pytest

from kvdepot.errors import PoolError
from kvdepot.io.localdisk import LocalDisk
from kvdepot.pool import lease, reader, writer
from kvdepot.pool.survey import scrub, survey
from kvdepot.pool.tier import PoolTier
from kvdepot.testing.faults import DEATH_POINTS
from kvdepot.testing.simclock import FakeClock
from kvdepot.testing.simdisk import CRASH_PHASES, SimDisk
from kvdepot.testing.toy import ToyEngine
from kvdepot.tiers import Outcome
from kvdepot.units import KIB, MIB
from tests.children import ROOT, SOURCE, run_python
from tests.pool_rig import ask, held_bytes, pool_config, put, segment_files, tmp_files
from tests.tries import eventually

DONE, MISS = Outcome.DONE, Outcome.MISS
CAPACITY = 512 * KIB

# a real process, a real signal

WRITER = """
import sys
from kvdepot.pool.tier import PoolTier
from kvdepot.testing.faults import dying_disk
from kvdepot.testing.toy import ToyEngine, ToyServer
from tests.pool_rig import pool_config

root, point, nth = sys.argv[1], sys.argv[2], int(sys.argv[3])
engine = ToyEngine((4096,))
# small segments and little room: a few prompts meet every verb, evictions included
config = pool_config(root, capacity_bytes=512 * 1024, segment_bytes=64 * 1024, lease_s=0.3,
                     discover_interval_s=0.02, segment_age_s=0.02)
disk = dying_disk(root, point, nth=nth)
with PoolTier.open(config, engine.identity, disks=[disk]) as tier:
    server = ToyServer(engine, tier)
    for seed in range(30):
        server.ask(engine.prompt(seed, 12))
        tier.drain(10)
        server.ask(engine.prompt(seed, 12))
print("survived")
"""


def verify_next_run(root, engine):
    """A new process on what is left: everything right, nothing leaked, stores work."""
    config = pool_config(
        root, capacity_bytes=CAPACITY, segment_bytes=64 * KIB, lease_s=0.1, discover_interval_s=60
    )
    with PoolTier.open(config, engine.identity) as tier:
        hits = 0
        for seed in range(30):
            tokens = engine.prompt(seed, 12)
            found = tier.lookup(engine.keys(tokens))
            outcomes = ask(tier, engine, tokens)
            assert outcomes[:found] == (DONE,) * found
            hits += found
        give_up_at_s = time.monotonic() + 60
        while tmp_files(root) and time.monotonic() < give_up_at_s:
            time.sleep(0.11)
            tier.tick()
        assert tmp_files(root) == []
        # the lease of a cleaner that died is taken over by the next one that has to clean
        leases = {path.name for path in (root / "lease").iterdir()} - {"cleaner.lease"}
        assert leases == {f"{tier.roots[0].writer}.lease"}
        fresh = engine.prompt(1000, 6)
        # the asks above made the whole pool look just used, so the first try may evict its own blocks
        for _ in range(2):
            assert set(put(tier, engine, fresh)) == {DONE}
        assert set(ask(tier, engine, fresh)) == {DONE}
        assert tier.usage().used_bytes <= CAPACITY
    assert (held_bytes([root]) or 0) <= CAPACITY
    assert all(check.is_sound for check in scrub(LocalDisk(root, is_read_only=True)))
    return hits


#: a writer's life has few calls of these
RARE = ("lock", "release", "beat", "sync")
#: the n-th call reaches the pool's opening (small files first), its first segments, its steady state
DEATHS = [
    (point, nth)
    for point in DEATH_POINTS
    for nth in ((1,) if point.startswith(RARE) else (1, 4, 15))
]


@pytest.mark.parametrize(("point", "nth"), DEATHS)
def test_kill_at_every_point_of_the_write_path(tmp_path, point, nth):
    root = tmp_path / "pool"
    child = run_python(WRITER, str(root), point, str(nth))
    assert (child.returncode, child.stdout) == (-signal.SIGKILL, ""), child.stderr
    verify_next_run(root, ToyEngine((4096,)))


def test_a_writer_that_is_not_killed_leaves_nothing_behind(tmp_path):
    root = tmp_path / "pool"
    child = run_python(WRITER, str(root), "sync:before", "1000")
    assert (child.returncode, child.stdout) == (0, "survived\n"), child.stderr
    assert tmp_files(root) == []
    assert list((root / "lease").iterdir()) == []
    assert verify_next_run(root, ToyEngine((4096,))) > 60


# simulated: every mutating call, every phase, both kinds of death


class Life:
    """One process over a simulated disk, on this thread, with a clock of its own."""

    def __init__(self, disk, engine, clock):
        self.disk = disk
        self.engine = engine
        self.clock = clock
        config = pool_config(
            "/simulated", capacity_bytes=640 * KIB, segment_bytes=20 * KIB, lease_s=5.0
        )
        self.tier = PoolTier.open(
            config, engine.identity, clock=clock, disks=[disk], has_threads=False
        )

    def put(self, tokens):
        job = self.tier.store(self.engine.writes(tokens))
        self.tier.run_pending(flush=True)
        assert job.is_settled
        return job.outcomes

    def ask(self, tokens):
        reads = self.engine.reads(tokens)
        job = self.tier.load(reads)
        self.tier.run_pending()
        assert job.is_settled
        self.engine.check(reads, job.outcomes)
        return job.outcomes

    def pass_time(self, seconds):
        self.clock.advance(seconds)
        self.tier.tick()


#: what fills the pool before anything can go wrong, and what is stored and evicted after that
OLD_PROMPTS, NEW_PROMPTS = 31, 7


def full_disk(engine):
    """A disk whose pool is full, durably, and closed."""
    disk = SimDisk()
    life = Life(disk, engine, FakeClock(0.0, 1_600_000_000.0))
    for seed in range(OLD_PROMPTS):
        life.put(engine.prompt(seed, 3))
    life.tier.close()
    disk.settle()
    return disk


def whole_life(disk, engine):
    """Stores, loads, touches, evictions, discovery, a clean end."""
    life = Life(disk, engine, FakeClock())
    for seed in range(OLD_PROMPTS, OLD_PROMPTS + NEW_PROMPTS):
        life.put(engine.prompt(seed, 3))
        life.ask(engine.prompt(seed - 2, 3))
        life.pass_time(3.0)
    life.tier.close()


def verify_image(disk, engine, *, is_same_boot):
    """What a later process makes of a dead one's remains."""
    clock = FakeClock(50_000.0, 1_800_000_000.0)
    with pytest.MonkeyPatch.context() as patch:
        if not is_same_boot:
            patch.setattr(lease, "host_boot_id", lambda: "after the power loss")
        life = Life(disk, engine, clock)
        hits = 0
        for seed in range(OLD_PROMPTS + NEW_PROMPTS):
            tokens = engine.prompt(seed, 3)
            found = life.tier.lookup(engine.keys(tokens))
            outcomes = life.ask(tokens)  # the oracle sees every DONE row
            hits += outcomes.count(DONE)
            # damage is found out by loading, once; then lookup knows
            again = life.ask(tokens)
            now = life.tier.lookup(engine.keys(tokens))
            assert now <= found
            assert again[:now] == (DONE,) * now
        for _ in range(4):
            life.pass_time(6.0)
        assert [name for name in disk.names() if name.startswith("tmp/")] == []
        leases = {name for name in disk.names() if name.startswith("lease/")}
        assert leases - {"lease/cleaner.lease"} == {f"lease/{life.tier.roots[0].writer}.lease"}
        fresh = engine.prompt(1000, 3)
        assert set(life.put(fresh)) == {DONE}
        assert set(life.ask(fresh)) == {DONE}
        held = sum(len(disk.content(name)) for name in disk.names() if name.endswith(".kvseg"))
        assert held == life.tier.usage().used_bytes <= 640 * KIB
        life.tier.close()
    return hits


class Deaths:
    """Every way to die in a life that begins with a full pool, and one that begins with none."""

    def __init__(self):
        self.engine = ToyEngine((4096,))
        self.full = full_disk(self.engine)
        disk = self.full.crash(0)  # all is durable, so this is an exact copy
        whole_life(disk, self.engine)
        assert disk.counts["publish"] >= NEW_PROMPTS
        assert disk.counts["remove"] >= NEW_PROMPTS - 2
        assert disk.counts["touch"] >= NEW_PROMPTS - 2
        #: changing calls of a whole life
        self.calls = disk.mutations

    def die(self, at, phase):
        """A dead handle on what is left; calls below 1 count from the first of a new pool."""
        media = self.full.crash(0) if at > 0 else SimDisk(seed=-at)
        at = at if at > 0 else 1 - at
        disk = media.attach(crash_at=at, crash_phase=phase)
        try:
            whole_life(disk, self.engine)
        except PoolError:
            pass  # the process does not outlive its disk; how it ends does not matter
        assert disk.is_dead
        return disk

    def points(self):
        return range(-20, self.calls + 1)


@pytest.mark.parametrize("phase", CRASH_PHASES)
def test_power_loss_at_every_call(phase):
    deaths = Deaths()
    hits = [
        verify_image(disk.crash(seed), deaths.engine, is_same_boot=False)
        for disk in (deaths.die(at, phase) for at in deaths.points())
        for seed in range(2)
    ]
    # the images are not all empty: this tested something
    assert sum(hits) > 20 * len(hits)


def test_without_checksums_power_loss_would_serve_wrong_bytes(monkeypatch):
    """The test above is able to fail: blind the reader, and the oracle sees what it let through."""
    for module in (reader, writer):
        monkeypatch.setattr(module, "block_checksum", lambda *_: 0)
    with pytest.raises(AssertionError, match="wrong bytes"):
        test_power_loss_at_every_call("after")


@pytest.mark.parametrize("phase", CRASH_PHASES)
def test_kill_at_every_call(phase):
    deaths = Deaths()
    for at in deaths.points():
        disk = deaths.die(at, phase)
        verify_image(disk.attach(), deaths.engine, is_same_boot=True)


def test_what_was_published_survives_a_kill():
    engine = ToyEngine((4096,))
    disk = SimDisk()
    life = Life(disk, engine, FakeClock())
    tokens = engine.prompt(1, 3)
    assert set(life.put(tokens)) == {DONE}
    disk.kill()
    after = Life(disk.attach(), engine, FakeClock())
    assert set(after.ask(tokens)) == {DONE}


def test_a_crash_while_the_remains_of_a_crash_are_swept():
    """Recovery dies as well, at its early calls; the third process still works."""
    deaths = Deaths()
    for at in range(-19, deaths.calls, 17):
        for second_at in (1, 2, 3, 5, 8):
            first = deaths.die(at, "half")
            second = first.attach(crash_at=second_at, crash_phase="half")
            try:
                whole_life(second, deaths.engine)
            except PoolError:
                pass  # as above
            assert second.is_dead
            verify_image(second.attach(), deaths.engine, is_same_boot=True)


# three writers on one root, killed at random, the oracle on every read

SERVER = """
import random, sys, time
from kvdepot.pool.tier import PoolTier
from kvdepot.testing.toy import ToyEngine, ToyServer
from tests.pool_rig import pool_config

root, seed, seconds = sys.argv[1], int(sys.argv[2]), float(sys.argv[3])
engine = ToyEngine((4096, 1024))
source = random.Random(seed)
config = pool_config(root, capacity_bytes=1 << 20, segment_bytes=64 * 1024, lease_s=0.5,
                     discover_interval_s=0.02, segment_age_s=0.02)
asked = reused = 0
give_up_at_s = time.monotonic() + seconds
with PoolTier.open(config, engine.identity) as tier:
    server = ToyServer(engine, tier)
    while time.monotonic() < give_up_at_s or asked <= 10 or not reused:
        tokens = engine.prompt(0, 2) + engine.prompt(source.randrange(1, 20), 6)
        answer = server.ask(tokens)
        asked += 1
        reused += answer.reused
    assert tier.usage().used_bytes <= 1 << 20
print(asked, reused)
"""


class Fleet:
    """Writer processes that are replaced when they are killed."""

    def __init__(self, root):
        self.root = root
        self.started = 0
        self.children = []
        self.ended = []

    def start(self, seconds):
        self.started += 1
        prelude = f"import sys; sys.path[:0] = [{str(SOURCE)!r}, {str(ROOT)!r}]\n"
        arguments = [str(self.root), str(self.started), str(seconds)]
        self.children.append(
            subprocess.Popen(
                [sys.executable, "-c", prelude + SERVER, *arguments],
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
        )

    def kill_one(self, source):
        child = self.children.pop(source.randrange(len(self.children)))
        child.kill()
        self._collect(child, {-signal.SIGKILL, 0})

    def wait(self):
        for child in self.children:
            self._collect(child, {0})
        self.children = []

    def _collect(self, child, expected):
        output, errors = child.communicate(timeout=60)
        assert child.returncode in expected, errors
        assert "Traceback" not in errors
        self.ended.append((child.returncode, output))

    def stop(self):
        for child in self.children:
            child.kill()
            child.communicate()


@pytest.mark.slow
def test_three_writers_on_one_root_with_random_kills(tmp_path):
    root = tmp_path / "pool"
    source = random.Random(7)
    fleet = Fleet(root)
    held_max, stop = [0], threading.Event()

    def watch():
        while not stop.wait(0.005):
            held_max[0] = max(held_max[0], held_bytes([root]) or 0)

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        for _ in range(3):
            fleet.start(30)
        for _ in range(8):
            time.sleep(source.uniform(0.5, 1.2))
            fleet.kill_one(source)
            fleet.start(30)
        for child in fleet.children[:]:
            child.kill()
            fleet._collect(child, {-signal.SIGKILL})
        fleet.children = []
        for _ in range(3):
            fleet.start(1.5)
        fleet.wait()
    finally:
        stop.set()
        watcher.join()
        fleet.stop()
    served = [tuple(map(int, output.split())) for code, output in fleet.ended if code == 0]
    assert len(served) == 3
    assert all(asked > 10 and reused > 0 for asked, reused in served), served
    assert 0 < held_max[0] <= MIB
    engine = ToyEngine((4096, 1024))
    with PoolTier.open(pool_config(root, capacity_bytes=MIB, lease_s=0.1), engine.identity) as tier:
        assert eventually(lambda: not tmp_files(root))
        for seed in range(1, 20):
            ask(tier, engine, engine.prompt(0, 2) + engine.prompt(seed, 6))
    assert list((root / "lease").iterdir()) == []
    disk = LocalDisk(root, is_read_only=True)
    assert all(check.is_sound for check in scrub(disk))
    assert survey(disk).used_bytes == sum(path.stat().st_size for path in segment_files(root))
