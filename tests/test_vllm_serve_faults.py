"""A running server whose pool is damaged, emptied, deleted, or full: it answers right and stays up.

The caches before the pool are emptied, the pool is spoiled, and the same prompt is asked again: whatever
comes back from the pool, the greedy answer is the one that was computed. The counters say what happened,
and afterwards the pool is of use again.
"""

from __future__ import annotations

import os
import random
import resource
import shutil
import subprocess
import time
from contextlib import contextmanager
from pathlib import Path

import pytest

from kvdepot.testing.damage import DAMAGES, Spot
from tests.vllm_server import GIVEN_UP, segments, serving, wait_for_new_segments

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.timeout(290)]

BLOCK = 64
OPTIONS = ["--capacity", "24MiB", "--host-bytes", "8MiB", "--block-tokens", str(BLOCK)]
ARGUMENTS = ["--dtype", "float32", "--block-size", "32", "--max-model-len", "1024"]
LENGTH = 700
WHOLE = LENGTH // BLOCK * BLOCK


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """On a small file system of its own where that is allowed, so that a test can fill it."""
    folder = tmp_path_factory.mktemp("faults")
    disk = folder / "disk"
    disk.mkdir()
    is_mounted = os.geteuid() == 0 and not subprocess.call(
        ["mount", "-t", "tmpfs", "-o", "size=48m", "kvdepot-test", str(disk)]
    )
    yield folder
    if is_mounted:
        subprocess.run(["umount", "-l", str(disk)], check=True)


@pytest.fixture(scope="module")
def model(folder):
    from tests.vllm_models import tiny_llama

    return tiny_llama(folder / "model")


@pytest.fixture
def server(folder, model):
    """One for each fault: after a few of them in a row a root is left alone for a while."""
    pool = folder / "disk" / "pool"
    with serving(model, pool, folder / "log", options=OPTIONS, arguments=ARGUMENTS) as server:
        yield server


@pytest.fixture
def pool(folder, server):
    return folder / "disk" / "pool"


def prompt_of(seed):
    return random.Random(seed).choices(range(256), k=LENGTH)


def stored(server, pool, prompt):
    """The computed answer, and its segments: its blocks are in the pool, and nowhere before it."""
    before, written = segments(pool), server.metric("kvdepot_store_blocks_total")
    answer = server.ask(prompt)
    assert answer.cached_tokens == 0
    # a segment may be a straggler of the prompt before; the blocks are this one's
    server.wait_for(written + LENGTH // BLOCK, "kvdepot_store_blocks_total")
    fresh = wait_for_new_segments(pool, before)
    server.forget()
    return answer, fresh


def check_that_the_pool_is_of_use(server, pool, seed):
    prompt = prompt_of(f"after {seed}")
    computed, _ = stored(server, pool, prompt)
    assert server.found(prompt, WHOLE).tokens == computed.tokens


FAULTS = (
    "kvdepot_corrupt_blocks_total",
    "kvdepot_corrupt_segments_total",
    "kvdepot_load_failed_blocks_total",
    "kvdepot_load_missing_blocks_total",
    "kvdepot_lost_segments_total",
)


@pytest.mark.parametrize(
    "damage", [each for each in DAMAGES if not each.is_void], ids=lambda each: each.name
)
def test_damaged_segments(server, pool, folder, damage):
    prompt = prompt_of(damage.name)
    computed, fresh = stored(server, pool, prompt)
    counted = sum(map(server.metric, FAULTS))
    for path in fresh:
        size_bytes = path.stat().st_size
        other = folder / "disk" / "other"
        other.write_bytes(random.Random(1).randbytes(size_bytes))
        damage.apply(path, Spot(size_bytes // 2, 64, other))
    if damage.name == "add_byte":
        # no byte of a block that is known by its place; whoever opens the pool anew refuses it
        found = server.ask(prompt)
        assert found.tokens == computed.tokens
        assert found.cached_tokens in (0, WHOLE)
    else:
        check_that_the_fault_is_counted(server, prompt, computed, counted)
    assert server.is_up()
    check_that_the_pool_is_of_use(server, pool, damage.name)


def check_that_the_fault_is_counted(server, prompt, computed, counted):
    """By the first load that reads it: one that a busy machine holds up is late before that."""
    until_s = time.monotonic() + 60
    while time.monotonic() < until_s:
        given_up = sum(map(server.metric, GIVEN_UP))
        found = server.ask(prompt)
        assert found.tokens == computed.tokens
        assert found.cached_tokens < WHOLE
        server.wait_for(counted + given_up + 1, *FAULTS, *GIVEN_UP)
        if sum(map(server.metric, FAULTS)) > counted:
            return
        server.forget()
    raise AssertionError(f"no fault is counted\n{server.tail()}")


def wait_until_something_is_stored(server, timeout_s=120):
    written = server.metric("kvdepot_store_blocks_total")
    until_s = time.monotonic() + timeout_s
    while server.metric("kvdepot_store_blocks_total") == written:
        assert time.monotonic() < until_s, server.tail()
        server.ask(prompt_of(time.monotonic()))
        time.sleep(1)
    time.sleep(2.5)  # the rest of it


def test_missing_segments(server, pool):
    prompt = prompt_of("missing")
    computed, fresh = stored(server, pool, prompt)
    counted = sum(map(server.metric, FAULTS))
    for path in fresh:
        path.unlink()
    check_that_the_fault_is_counted(server, prompt, computed, counted)
    assert server.is_up()
    check_that_the_pool_is_of_use(server, pool, "missing")


def test_a_deleted_pool(server, pool):
    prompt = prompt_of("deleted")
    computed, _ = stored(server, pool, prompt)
    counted = sum(map(server.metric, FAULTS))
    shutil.rmtree(pool)
    check_that_the_fault_is_counted(server, prompt, computed, counted)
    # it is made anew within a minute, and takes stores again
    wait_until_something_is_stored(server)
    check_that_the_pool_is_of_use(server, pool, "deleted")


def test_a_full_disk(server, pool):
    prompt = prompt_of("before it is full")
    computed, _ = stored(server, pool, prompt)
    dropped = server.metric("kvdepot_dropped_pool_full_total")
    with no_room(server, pool.parent):
        # what is there is still of use
        assert server.found(prompt, WHOLE).tokens == computed.tokens
        server.ask(prompt_of("full"))
        server.wait_for(dropped + 1, "kvdepot_dropped_pool_full_total")
        assert server.is_up()
    # after trouble the pool takes no stores for some seconds
    wait_until_something_is_stored(server)
    check_that_the_pool_is_of_use(server, pool, "full")


@contextmanager
def no_room(server, disk):
    """Fill the disk if it is a small one of our own; else limit the files that its writer can make."""
    if disk.is_mount():
        filler = disk / "filler"
        try:
            with filler.open("wb", buffering=0) as file, pytest.raises(OSError, match="No space"):
                write_without_end(file)
            yield
        finally:
            filler.unlink()
        return
    worker = worker_of(server)
    before = resource.prlimit(worker, resource.RLIMIT_FSIZE)
    resource.prlimit(worker, resource.RLIMIT_FSIZE, (4096, before[1]))
    try:
        yield
    finally:
        resource.prlimit(worker, resource.RLIMIT_FSIZE, before)


def write_without_end(file):
    while True:
        file.write(bytes(1 << 16))


def worker_of(server):
    """The process that does the pool's I/O for a server."""
    found = [
        int(entry.name)
        for entry in Path("/proc").iterdir()
        if entry.name.isdigit() and is_worker(entry, server.process.pid)
    ]
    (worker,) = found
    return worker


def is_worker(entry, group):
    try:
        command = (entry / "cmdline").read_bytes()
        return b"kvdepot.pool.worker_child" in command and os.getpgid(int(entry.name)) == group
    except OSError:
        return False  # it has just ended
