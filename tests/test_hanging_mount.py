"""A real mount that hangs, fails and slows down: no request waits for it, and its end is noticed.

Needs ``/dev/fuse`` and root; skipped elsewhere. The simulated faults of `kvdepot.testing.faults` cover
the same policies without a kernel.
"""

from __future__ import annotations

import errno
import fcntl
import itertools
import mmap
import os
import resource
import threading
import time
from typing import NamedTuple

import pytest

from kvdepot.depot import Depot
from kvdepot.keys import root_key
from kvdepot.policy.deadline import EarnedDeadline
from kvdepot.policy.decide import Mode
from kvdepot.testing import fusewire
from kvdepot.testing.fusemount import FaultMount, MountFaults, why_not
from kvdepot.testing.fuseserver import FaultClock
from kvdepot.testing.toy import ToyEngine
from tests.pool_rig import pool_config
from tests.tries import eventually, in_one_try_of, in_some_try

pytestmark = [
    pytest.mark.skipif(bool(why_not()), reason=why_not() or "a mount can be made"),
    pytest.mark.timeout(120),
]

BLOCKS = 32
GROUPS = (16 * 1024, 32 * 1024)
PROMPTS = 6
#: prefill of one prompt
PREFILL_S = 0.12
HANG_S = 5.0
_TICK_S = 0.005


@pytest.fixture
def mount(tmp_path):
    (tmp_path / "behind").mkdir()
    (tmp_path / "mount").mkdir()
    with FaultMount.start(tmp_path / "behind", tmp_path / "mount") as mount:
        yield mount


# --- the mount itself


def test_directories_are_given_in_pieces():
    entries = [(f"{number:03}", number, 0o100000) for number in range(100)]
    found = b""
    offset = 0
    while piece := fusewire.directory(entries, offset, 256):
        assert len(piece) <= 256
        found += piece
        offset += len(piece) // 32
    assert found == fusewire.directory(entries, 0, 1 << 20)


def test_faults_that_are_taken_back_free_whoever_waits():
    clock = FaultClock()
    clock.set(MountFaults(hang_s=60.0))
    waiting = threading.Thread(target=clock.wait)
    waiting.start()
    clock.set(MountFaults(fail_every=2))
    waiting.join(60)
    assert not waiting.is_alive()
    assert [clock.read(1) for _ in range(4)] == [0, errno.EIO, 0, errno.EIO]


def test_it_passes_everything_through(mount, tmp_path):
    folder = mount.place / "a" / "b"
    folder.mkdir(parents=True)
    content = os.urandom(3 * 2**20 + 17)
    (folder / "file").write_bytes(content)
    assert (tmp_path / "behind" / "a" / "b" / "file").read_bytes() == content
    assert (folder / "file").read_bytes() == content
    os.link(folder / "file", folder / "link")
    assert os.path.samefile(folder / "file", folder / "link")
    os.rename(folder, mount.place / "c")
    folder = mount.place / "c"
    assert sorted(os.listdir(folder)) == ["file", "link"]
    os.truncate(folder / "link", 10)
    os.utime(folder / "link", ns=(1, 2 * 10**9))
    status = os.stat(folder / "file")
    assert (status.st_size, status.st_mtime_ns, status.st_nlink) == (10, 2 * 10**9, 2)
    with (folder / "file").open("rb") as opened:
        fcntl.flock(opened, fcntl.LOCK_EX)
        os.unlink(folder / "file")
        assert opened.read() == content[:10]
        assert os.fstat(opened.fileno()).st_nlink == 1
    with pytest.raises(FileNotFoundError):
        os.stat(folder / "file")
    with pytest.raises(FileExistsError):
        os.open(folder / "link", os.O_CREAT | os.O_EXCL)
    assert os.statvfs(folder).f_bavail > 0
    for number in range(500):
        (folder / f"{number:03}").touch()
    assert len(os.listdir(folder)) == 501


@in_one_try_of(5)
def test_its_reads_can_be_slow_late_or_fail(mount):
    mount.set(MountFaults())
    path = mount.place / "file"
    path.write_bytes(bytes(2**20))
    fd = os.open(path, os.O_RDONLY | os.O_DIRECT)
    buffer = mmap.mmap(-1, 2**20)

    def read_s() -> float:
        began_s = time.monotonic()
        assert os.preadv(fd, [buffer], 0) == 2**20
        return time.monotonic() - began_s

    mount.set(MountFaults(read_bytes_per_s=4e6))
    assert read_s() > 0.2
    mount.set(MountFaults(late_every=2, late_s=0.3))
    assert read_s() < 0.2
    assert read_s() > 0.3
    mount.set(MountFaults(fail_every=2))
    read_s()
    with pytest.raises(OSError, match="Input/output") as caught:
        read_s()
    assert caught.value.errno == errno.EIO
    mount.set(MountFaults())
    read_s()
    os.close(fd)


def test_it_can_be_full(mount):
    path = mount.place / "file"
    path.write_bytes(bytes(4096))
    mount.set(MountFaults(is_full=True))
    with path.open("r+b", buffering=0) as opened:
        with pytest.raises(OSError, match="No space"):
            os.posix_fallocate(opened.fileno(), 0, 1 << 20)
        fd = os.open(path, os.O_WRONLY | os.O_DIRECT)
        with pytest.raises(OSError, match="No space"):
            os.pwrite(fd, mmap.mmap(-1, 4096), 0)
        os.close(fd)
        assert len(opened.read()) == 4096
    mount.set(MountFaults())
    path.write_bytes(bytes(8192))
    assert path.stat().st_size == 8192


def test_while_it_hangs_everything_waits_and_then_goes_on(mount):
    (mount.place / "file").write_bytes(b"x")
    mount.set(MountFaults(hang_s=0.5))
    began_s = time.monotonic()
    assert (mount.place / "file").read_bytes() == b"x"
    assert 0.4 < time.monotonic() - began_s < 30


def test_whoever_waits_on_it_is_freed_when_it_is_closed(mount):
    mount.set(MountFaults(hang_s=60.0))
    found: list[int | None] = []

    def look():
        try:
            os.stat(mount.place / "file")
        except OSError as error:
            found.append(error.errno)

    waiting = threading.Thread(target=look)
    waiting.start()
    time.sleep(0.1)
    mount.close()
    waiting.join(60)
    assert found
    assert found[0] in (errno.ENOTCONN, errno.ECONNABORTED, errno.ENOENT)


# --- a pool on it


class Witness(threading.Thread):
    """Sees when the machine, or whoever holds the interpreter, let nobody go on."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self._lost: list[tuple[float, float]] = []
        self._is_over = False

    def run(self) -> None:
        last_s = time.monotonic()
        while not self._is_over:
            time.sleep(_TICK_S)
            now_s = time.monotonic()
            if now_s - last_s > 4 * _TICK_S:
                self._lost.append((last_s, now_s))
            last_s = now_s

    def lost_s(self, began_s: float, ended_s: float) -> float:
        """Seconds of a span in which nothing could go on."""
        time.sleep(2 * _TICK_S)  # so that it has seen the end
        return sum(
            max(min(until_s, ended_s) - max(from_s, began_s), 0.0) for from_s, until_s in self._lost
        )

    def end(self) -> None:
        self._is_over = True
        self.join()


class Answer(NamedTuple):
    ttft_s: float
    mode: Mode
    reused_blocks: int


class Asker:
    """Makes the calls of an engine whose prefill is a wait, and times each of them."""

    def __init__(self, folder, io):
        self.witness = Witness()
        self.witness.start()
        self.toy = ToyEngine(GROUPS)
        # two prompts: the others' follow-ups come from storage
        host_bytes = 2 * BLOCKS * sum(GROUPS)
        config = pool_config(folder, read_stall_s=0.5)
        self.depot = Depot.open(self.toy.identity, pool=config, host_bytes=host_bytes, io=io)
        #: seconds of calls that nobody else took the processor from
        self.calls_s: list[float] = []
        self._cutting_s = 0.0
        for blocks in (BLOCKS // 4, BLOCKS // 2, BLOCKS):
            self.depot.computed(blocks * 16, 0, PREFILL_S * blocks / BLOCKS)

    def prompt(self, seed):
        return self.toy.prompt(seed, BLOCKS, extra_tokens=4)

    def timed(self, call):
        preempted = resource.getrusage(resource.RUSAGE_THREAD).ru_nivcsw
        self._cutting_s = 0.0
        began_s = time.monotonic()
        try:
            return call()
        finally:
            span_s = time.monotonic() - began_s - self._cutting_s
            # what other processes take on a busy machine is no wait of the call's
            if resource.getrusage(resource.RUSAGE_THREAD).ru_nivcsw == preempted:
                self.calls_s.append(span_s)

    def ask(self, tokens) -> Answer:
        began_s = time.monotonic()
        keys = self.toy.keys(tokens)
        plan = self.timed(lambda: self.depot.plan(keys, prompt_tokens=len(tokens)))
        reused, ended_by = 0, None
        if plan.blocks:
            reused, ended_by = self.load(tokens, plan)
        time.sleep(PREFILL_S * (BLOCKS - reused) / BLOCKS)
        ended_s = time.monotonic()
        # a machine that stands still keeps everybody waiting; calls that do are seen below
        ttft_s = ended_s - began_s - self.witness.lost_s(began_s, ended_s)
        answer = Answer(ttft_s, plan.mode, reused)
        self.timed(
            lambda: self.depot.finished(plan, reused_blocks=reused, load_s=0.0, ended_by=ended_by)
        )
        payload = [
            [self.toy.block(tokens, index, group) for index in range(BLOCKS)]
            for group in range(len(GROUPS))
        ]

        def cut(group, index, row):
            began_s = time.monotonic()
            row[:] = payload[group][index]
            # the engine's own copy of its memory
            self._cutting_s += time.monotonic() - began_s

        root = root_key(self.toy.digest)
        self.timed(lambda: self.depot.store(keys, root, cut, tokens=16))
        return answer

    def load(self, tokens, plan):
        began_s = time.monotonic()
        chunks = self.timed(lambda: self.depot.chunks(plan.keys[: plan.blocks]))
        cost = self.depot.policies.cost
        deadline = EarnedDeadline(
            began_s, plan.slack_s, lambda blocks: cost.saved_s(blocks * 16, len(tokens))
        )
        while not chunks.is_over:
            chunk = self.timed(chunks.poll)
            if chunk is not None:
                assert chunk.rows[0][0] == self.toy.block(tokens, chunk.first, 0)
                continue
            left_s = deadline.until_s(chunks.taken, self.depot.heard_s) - time.monotonic()
            if left_s <= 0:
                chunks.give_up()
            else:
                chunks.wait(min(left_s, 0.02))
        self.timed(chunks.release)
        return chunks.taken, chunks.ended_by


@pytest.mark.timeout(300)
@pytest.mark.parametrize("io", ["threads", "process"])
def test_a_mount_that_hangs_holds_nobody_up(mount, io):
    asker = Asker(mount.place / "pool", io)
    prompts = [asker.prompt(seed) for seed in range(PROMPTS)]
    seeds = itertools.count(100)

    def is_read_back():
        answer = asker.ask(prompts[0])
        prompts.append(prompts.pop(0))
        return (answer.mode, answer.reused_blocks) == (Mode.LOAD, BLOCKS)

    def attempt():
        mount.set(MountFaults())
        assert eventually(is_read_back)
        for tokens in prompts:
            asker.ask(tokens)
        openings = asker.depot.policies.breaker.openings
        asker.calls_s.clear()

        mount.set(MountFaults(hang_s=HANG_S))
        hangs_until_s = time.monotonic() + HANG_S
        follow_ups: list[Answer] = []
        first_asks: list[Answer] = []
        while time.monotonic() < hangs_until_s - PREFILL_S:
            follow_ups.append(asker.ask(prompts[len(follow_ups) % PROMPTS]))
            first_asks.append(asker.ask(asker.prompt(next(seeds))))
        time.sleep(max(hangs_until_s - time.monotonic(), 0.0))
        calls_s = sorted(asker.calls_s)
        assert len(follow_ups) >= 5
        # a tenth, and what two busy cores do to a wait
        slowest_s = PREFILL_S * 1.10 + 0.1
        assert max(answer.ttft_s for answer in follow_ups) < slowest_s
        assert max(answer.ttft_s for answer in first_asks) < slowest_s
        # in memory are the last two prompts, which nobody asks for again
        assert follow_ups[-1].reused_blocks == 0
        assert asker.depot.policies.breaker.openings == openings + 1
        assert calls_s[int(0.99 * len(calls_s))] < 0.001, calls_s[-10:]

        assert eventually(is_read_back, timeout_s=10.0)
        assert asker.depot.policies.breaker.is_closed

    try:
        for tokens in prompts:
            asker.ask(tokens)
        assert asker.depot.drain(60)
        # a machine that stands still makes somebody wait; a hang that makes somebody wait does it each time
        in_some_try(attempt)
        assert asker.depot.counters()["worker_restarts_total"] == 0
    finally:
        mount.set(MountFaults())
        asker.witness.end()
        asker.depot.close()
