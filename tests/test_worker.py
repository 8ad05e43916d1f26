"""The worker tier in good times: bytes, lookups, counters, sharing, opening and closing."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time

import msgspec
import numpy as np
import pytest

from kvdepot.config import WorkerConfig
from kvdepot.depot import Depot
from kvdepot.errors import (
    ConfigError,
    FormatError,
    IdentityMismatch,
    IdentityUnknown,
    PoolDenied,
    PoolUnavailable,
    PoolUrlError,
    UnknownVersion,
)
from kvdepot.identity import FORMAT_VERSION, UNDETERMINED
from kvdepot.io.buffers import HostBuffer, aligned_bytes
from kvdepot.keys import BlockKey, root_key
from kvdepot.pool import worker_outbox
from kvdepot.pool.tier import PoolTier
from kvdepot.pool.worker import WorkerTier
from kvdepot.testing.toy import ToyEngine, ToyServer, toy_identity
from kvdepot.tiers import Outcome, Read, Write
from kvdepot.units import MIB
from tests.children import ROOT, SOURCE
from tests.pool_rig import pool_config, segment_files
from tests.tries import eventually
from tests.worker_rig import (
    QUICK,
    children,
    is_running,
    open_worker,
    rows_in_an_arena,
    signal_worker,
)


@pytest.fixture
def arena():
    with rows_in_an_arena() as found:
        yield found


@pytest.fixture
def engine():
    return ToyEngine((4096, 1024))


def store(tier, engine, tokens):
    job = tier.store(engine.writes(tokens))
    assert job.wait_settled(60)
    assert tier.drain(60)
    return set(job.outcomes)


def load(tier, engine, tokens):
    reads = engine.reads(tokens)
    job = tier.load(reads)
    assert job.wait_settled(60)
    engine.check(reads, job.outcomes)
    return set(job.outcomes)


# --- bytes


def test_what_a_server_computed_the_next_process_s_server_reuses(tmp_path, arena, engine):
    prompts = [engine.prompt(seed, 6) for seed in range(4)]
    with open_worker(tmp_path, engine, arena) as tier:
        server = ToyServer(engine, tier)
        assert [server.ask(tokens).reused for tokens in prompts] == [0] * 4
        assert tier.drain(60)
        assert [server.ask(tokens).computed for tokens in prompts] == [0] * 4
    with open_worker(tmp_path, engine, arena) as tier:
        assert [ToyServer(engine, tier).ask(tokens).computed for tokens in prompts] == [0] * 4


def test_a_worker_and_threads_share_a_pool_both_ways(tmp_path, arena, engine):
    ours, theirs = engine.prompt(1, 5), engine.prompt(2, 5)
    with (
        open_worker(tmp_path, engine, arena) as tier,
        PoolTier.open(pool_config(tmp_path), engine.identity) as other,
    ):
        assert store(tier, engine, ours) == {Outcome.DONE}
        assert store(other, engine, theirs) == {Outcome.DONE}
        assert eventually(lambda: tier.lookup(engine.keys(theirs)) == 5)
        assert eventually(lambda: other.lookup(engine.keys(ours)) == 5)
        assert load(tier, engine, theirs) == load(other, engine, ours) == {Outcome.DONE}


OTHER_ENGINE = """
from pathlib import Path
from tests.worker_rig import open_worker, rows_in_an_arena
from kvdepot.testing.toy import ToyEngine
engine = ToyEngine((4096, 1024))
with rows_in_an_arena() as arena, open_worker(Path(sys.argv[1]), engine, arena) as tier:
    job = tier.store(engine.writes(engine.prompt(7, 5)))
    assert job.wait_settled(60) and tier.drain(60)
    print("stored", flush=True)
    sys.stdin.readline()
"""


def start_engine(code, *arguments):
    prelude = f"import sys; sys.path[:0] = [{str(SOURCE)!r}, {str(ROOT)!r}]\n"
    return subprocess.Popen(
        [sys.executable, "-c", prelude + code, *map(str, arguments)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


def test_two_engine_processes_share_a_pool_while_both_run(tmp_path, arena, engine):
    with (
        open_worker(tmp_path, engine, arena) as tier,
        start_engine(OTHER_ENGINE, tmp_path) as other,
    ):
        try:
            assert other.stdout.readline() == "stored\n"
            tokens = engine.prompt(7, 5)
            assert eventually(lambda: tier.lookup(engine.keys(tokens)) == 5)
            assert load(tier, engine, tokens) == {Outcome.DONE}
        finally:
            other.communicate("\n", timeout=60)
        assert other.returncode == 0
        assert load(tier, engine, tokens) == {Outcome.DONE}


def test_calls_larger_than_a_message_are_cut_and_put_together(tmp_path, arena, monkeypatch):
    monkeypatch.setattr(worker_outbox, "ROWS_MAX", 3)
    engine = ToyEngine((4096,))
    tokens = engine.prompt(1, 11)
    with open_worker(tmp_path, engine, arena) as tier:
        # a hole in the store, so that places in the message and in the job differ
        writes = engine.writes(tokens)
        assert tier.store(writes[4:5]).wait_settled(60)
        assert tier.drain(60)
        assert store(tier, engine, tokens) == {Outcome.DONE}
        reads = engine.reads(tokens + engine.prompt(2, 1))
        reads = [reads[11], *reads[:11]]
        job = tier.load(reads)
        assert job.wait_settled(60)
        assert job.outcomes == (Outcome.MISS, *[Outcome.DONE] * 11)
        assert job.bytes_done == 11 * 4096
        engine.check(reads, job.outcomes)


def test_a_depot_restores_through_a_worker_what_it_stored(tmp_path):
    identity = toy_identity((4096, 1024))
    engine = ToyEngine(identity=identity)
    tokens = engine.prompt(1, 40)
    keys = engine.keys(tokens)
    for round_number in range(2):
        with Depot.open(
            identity, pool=pool_config(tmp_path), host_bytes=4 * MIB, io="process"
        ) as depot:
            assert isinstance(depot.pool, WorkerTier)
            hit = depot.lookup(keys)
            if round_number == 0:
                assert hit.blocks == 0
                taken = depot.store(
                    keys,
                    root_key(identity.digest()),
                    lambda group, index, row: row.__setitem__(
                        slice(None), engine.block(tokens, index, group)
                    ),
                    tokens=16,
                )
                assert taken == 80
                assert depot.drain(60)
                continue
            assert hit.blocks == 40
            assert set(hit.tiers) == {"disk"}
            restore = depot.restore(keys)
            for group in range(2):
                for first, count, rows in restore.runs(group):
                    step = rows.nbytes // count
                    for index in range(count):
                        right = engine.block(tokens, first + index, group)
                        assert bytes(rows[index * step :][: len(right)]) == right
            restore.release()
            assert restore.bytes_read == 40 * (4096 + 1024)
            assert depot.counters()["load_bytes_total"] == restore.bytes_read


def test_waits_may_be_longer_than_the_system_can_count(tmp_path, arena, engine):
    tokens = engine.prompt(1, 2)
    tier = open_worker(tmp_path, engine, arena)
    # numbers as an engine has them, which no encoder knows
    writes = [write._replace(tokens=np.int64(16)) for write in engine.writes(tokens)]
    assert tier.store(writes).wait_settled(60)
    assert tier.drain(np.float64(1e12))
    job = tier.load(engine.reads(tokens), deadline_s=np.float64(1e30))
    assert job.wait_settled(60)
    assert set(job.outcomes) == {Outcome.DONE}
    tier.close(1e12)


# --- lookups and counters follow the worker


def test_a_segment_that_goes_is_not_found_any_more(tmp_path, arena, engine):
    tokens, kept = engine.prompt(1, 4), engine.prompt(2, 4)
    with open_worker(tmp_path, engine, arena) as tier:
        store(tier, engine, tokens)
        (file,) = segment_files(tmp_path)
        store(tier, engine, kept)
        assert tier.usage().blocks == 16
        file.unlink()
        assert eventually(lambda: tier.lookup(engine.keys(tokens)) == 0)
        assert tier.lookup(engine.keys(kept)) == 4
        assert eventually(lambda: tier.usage().blocks == 8)


def test_many_keys_arrive_in_pieces_and_go_as_one(tmp_path, arena):
    engine = ToyEngine((128,))
    tokens = engine.prompt(1, 2500)
    with open_worker(tmp_path, engine, arena) as tier:
        config = pool_config(tmp_path, segment_bytes=64 * MIB, segment_age_s=30.0)
        with PoolTier.open(config, engine.identity) as other:
            store(other, engine, tokens)
        assert eventually(lambda: tier.lookup(engine.keys(tokens)) == 2500)
        for file in segment_files(tmp_path):
            file.unlink()
        assert eventually(lambda: tier.lookup(engine.keys(tokens)) == 0)
        assert eventually(lambda: tier.usage().blocks == 0)


def test_the_worker_s_counts_are_ours(tmp_path, arena, engine):
    tokens = engine.prompt(1, 6)
    with open_worker(tmp_path, engine, arena) as tier:
        store(tier, engine, tokens)
        store(tier, engine, tokens)
        load(tier, engine, tokens)
        big = HostBuffer(tier.limits.block_bytes_max + 1).memory
        other = engine.writes(engine.prompt(2, 1))[0]
        assert tier.store([other._replace(data=big)]).outcomes == (Outcome.DROPPED,)
    counts = tier.counters.snapshot()
    assert counts["store_blocks_total"] == counts["load_blocks_total"] == 12
    assert counts["store_bytes_total"] == counts["load_bytes_total"] == 6 * (4096 + 1024)
    assert counts["store_present_blocks_total"] == 12
    assert counts["dropped_too_large_total"] == 1
    assert counts["segments_published_total"] == 1
    assert counts["worker_restarts_total"] == 0


def test_storing_what_is_present_counts_as_a_use(tmp_path, arena, engine):
    tokens = engine.prompt(1, 4)
    with open_worker(tmp_path, engine, arena) as tier:
        store(tier, engine, tokens)
        (file,) = segment_files(tmp_path)
        os.utime(file, (1, 1))
        assert tier.store(engine.writes(tokens)).is_settled
    assert file.stat().st_mtime > 1


def test_touches_reach_the_files(tmp_path, arena, engine):
    tokens = engine.prompt(1, 4)
    with open_worker(tmp_path, engine, arena) as tier:
        store(tier, engine, tokens)
        (file,) = segment_files(tmp_path)
        os.utime(file, (1, 1))
        tier.touch(engine.keys(tokens))
    assert file.stat().st_mtime > 1


def test_a_read_only_tier_loads_and_drops_stores(tmp_path, arena, engine):
    tokens = engine.prompt(1, 3)
    with open_worker(tmp_path, engine, arena) as tier:
        store(tier, engine, tokens)
    config = pool_config(tmp_path, read_only=True)
    with WorkerTier.open(config, engine.identity, [arena.buffer]) as tier:
        assert load(tier, engine, tokens) == {Outcome.DONE}
        assert store(tier, engine, engine.prompt(2, 3)) == {Outcome.DROPPED}
        assert tier.counters.snapshot()["dropped_read_only_total"] == 6


# --- rows


def test_rows_outside_of_the_buffers_are_refused_before_anything_is_done(tmp_path, arena, engine):
    tokens = engine.prompt(1, 3)
    keys = engine.keys(tokens)
    foreign = aligned_bytes(4096)
    over_the_end = arena.buffer.memory[-4096:]
    with open_worker(tmp_path, engine, arena) as tier:
        writes = engine.writes(tokens)
        with pytest.raises(ConfigError, match="outside of the host buffers"):
            tier.store([*writes, Write(keys[0], engine.root, foreign, 16)])
        reads = engine.reads(tokens)
        with pytest.raises(ConfigError, match="outside of the host buffers"):
            tier.load([*reads, Read(keys[0], foreign)])
        # and what every tier refuses
        gapped = arena.buffer.memory[:8192:2]
        for call in (
            lambda: tier.load([*reads, Read(keys[0], over_the_end.toreadonly())]),
            lambda: tier.load([*reads, Read(keys[0], gapped)]),
            lambda: tier.load([*reads, Read(BlockKey(b"short"), reads[0].into)]),
            lambda: tier.store([*writes, Write(keys[0], engine.root, gapped, 16)]),
            lambda: tier.store([*writes, Write(keys[0], BlockKey(b""), writes[0].data, 16)]),
            lambda: tier.store([*writes, writes[0]._replace(tokens=1 << 70)]),
            lambda: tier.touch([*keys, BlockKey(b"short")]),
        ):
            with pytest.raises(ValueError):
                call()
        empty = tier.load([Read(keys[0], over_the_end[:0])])
        assert empty.wait_settled(60)
        assert empty.outcomes == (Outcome.MISS,)
        assert tier.load([Read(keys[0], over_the_end)]).wait_settled(60)
        assert tier.drain(60)
        assert tier.usage().blocks == 0


def test_any_view_of_any_buffer_is_a_row(tmp_path):
    engine = ToyEngine((4096,))
    buffers = [HostBuffer(1 << 16, is_shared=True) for _ in range(3)]
    tokens = engine.prompt(1, 4)
    keys = engine.keys(tokens)
    with WorkerTier.open(pool_config(tmp_path), engine.identity, buffers) as tier:
        parts = [
            buffers[2].memory[8192:12288],
            buffers[0].memory[1:4097],
            buffers[1].memory[:4096].cast("I"),
            buffers[0].memory[-4096:].toreadonly(),
        ]
        for index, part in enumerate([*parts[:3], buffers[0].memory[-4096:]]):
            part.cast("B")[:] = engine.block(tokens, index)
        parents = [engine.root, *keys[:-1]]
        writes = [Write(*fields, 16) for fields in zip(keys, parents, parts, strict=True)]
        job = tier.store(writes)
        assert job.wait_settled(60)
        assert set(job.outcomes) == {Outcome.DONE}
        assert tier.drain(60)
        rows = [buffers[1].memory[16384 + 5 :][:4096], *parts[:3]]
        job = tier.load([Read(*fields) for fields in zip(keys, rows, strict=True)])
        assert job.wait_settled(60)
        for index, row in enumerate(rows):
            assert bytes(row) == engine.block(tokens, index)
    del parts, rows, writes, part, row
    for buffer in buffers:
        buffer.close()


def test_only_shared_buffers_are_taken(tmp_path, engine):
    for buffers in ([], [HostBuffer(4096)]):
        with pytest.raises(ConfigError, match="host buffer"):
            WorkerTier.open(pool_config(tmp_path), engine.identity, buffers)


# --- opening


def refused(error, tmp_path, arena, engine, **settings):
    before = children()
    with pytest.raises(error) as caught:
        WorkerTier.open(
            pool_config(tmp_path, **settings), engine.identity, [arena.buffer], settings=QUICK
        )
    assert type(caught.value) is error
    assert children() == before, "a worker was left"
    return caught.value


def test_another_format_version_is_refused_with_both_versions(tmp_path, arena, engine):
    open_worker(tmp_path, engine, arena).close()
    file = tmp_path / "pool.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "version": 99}))
    error = refused(UnknownVersion, tmp_path, arena, engine)
    assert (error.found, error.supported) == (99, FORMAT_VERSION)
    assert "99" in str(error)
    assert error.hint


def test_a_damaged_pool_file_is_refused(tmp_path, arena, engine):
    (tmp_path / "pool.json").write_text("{")
    assert "pool.json" in str(refused(FormatError, tmp_path, arena, engine))


def test_a_file_in_place_of_the_folder_is_refused(tmp_path, arena, engine):
    (tmp_path / "file").write_text("")
    error = refused(PoolDenied, tmp_path / "file", arena, engine)
    assert error.path == str(tmp_path / "file")
    assert error.hint


def test_another_identity_in_the_namespace_is_refused_by_field(tmp_path, arena, engine):
    open_worker(tmp_path, engine, arena).close()
    (file,) = tmp_path.glob("ns/*/identity.json")
    file.write_text(file.read_text().replace('"toy-weights-1"', '"fine-tuned"'))
    error = refused(IdentityMismatch, tmp_path, arena, engine)
    assert error.field == "weights_fingerprint"
    assert (error.ours, error.theirs) == ("toy-weights-1", "fine-tuned")


def test_a_capacity_below_one_block_is_refused(tmp_path, arena, engine):
    assert "capacity" in str(refused(ConfigError, tmp_path, arena, engine, capacity_bytes=2500))


def test_what_the_settings_alone_show_starts_no_worker(tmp_path, arena):
    unknown = toy_identity(weights_fingerprint=UNDETERMINED)
    with pytest.raises(IdentityUnknown):
        WorkerTier.open(pool_config(tmp_path), unknown, [arena.buffer])
    with pytest.raises(PoolUrlError):
        WorkerTier.open(pool_config("s3://bucket/kv"), toy_identity(), [arena.buffer])
    for settings in (
        {"hang_s": 0},
        {"backoff_s": float("nan")},
        {"stuck_s": float("inf")},
        {"heartbeat_s": 5.0, "hang_s": 6.0},
        {"queue_rows": 0},
    ):
        with pytest.raises(ConfigError):
            WorkerConfig(**settings)


@pytest.mark.parametrize(
    ("program", "says"),
    [
        ("import sys; sys.exit(3)", "ended with status 3"),
        ("import time; time.sleep(60)", "did not open the pool in 1.0 s"),
        (
            "import os, sys, time; os.write(int(sys.argv[1]), b'x' * 64); time.sleep(60)",
            "understood",
        ),
    ],
)
def test_a_worker_that_does_not_come_up_is_an_error_with_a_hint(
    tmp_path, arena, engine, program, says
):
    before = children()
    # what it says is to come in any time, and that it says nothing soon
    open_s = 1.0 if "1.0 s" in says else 60.0
    with pytest.raises(PoolUnavailable, match=says) as caught:
        WorkerTier.open(
            pool_config(tmp_path),
            engine.identity,
            [arena.buffer],
            settings=WorkerConfig(open_timeout_s=open_s),
            command=(sys.executable, "-c", program),
        )
    assert caught.value.hint
    assert children() == before


def test_a_program_that_cannot_be_run_is_an_error_with_a_hint(tmp_path, arena, engine):
    with pytest.raises(PoolUnavailable, match="no worker process can be started") as caught:
        WorkerTier.open(
            pool_config(tmp_path), engine.identity, [arena.buffer], command=("/no/such/program",)
        )
    assert caught.value.hint


def test_a_relative_root_is_meant_where_it_was_written(tmp_path, arena, engine, monkeypatch):
    (tmp_path / "here").mkdir()
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    with WorkerTier.open(
        pool_config("kv"), engine.identity, [arena.buffer], settings=QUICK
    ) as tier:
        store(tier, engine, engine.prompt(1, 2))
        monkeypatch.chdir(tmp_path / "elsewhere")
        signal_worker(tier, signal.SIGKILL)
        assert eventually(lambda: tier.lookup(engine.keys(engine.prompt(1, 2))) == 2)
    assert not (tmp_path / "elsewhere" / "kv").exists()


def test_the_reference_says_every_setting_and_its_true_default():
    rows = re.findall(
        r"^\| `(\w+)` \| (\S+) \|", (ROOT / "docs/worker.md").read_text(), re.MULTILINE
    )
    fields = msgspec.structs.fields(WorkerConfig)
    assert dict(rows) == {field.name: str(field.default) for field in fields}


# --- closing


def test_nothing_is_left_of_twenty_tiers(tmp_path, arena, engine):
    def census():
        threads = sum("kvdepot" in thread.name for thread in threading.enumerate())
        return len(os.listdir("/proc/self/fd")), children(), threads

    tokens = engine.prompt(1, 2)
    open_worker(tmp_path, engine, arena).close()
    before = census()
    for _ in range(20):
        with open_worker(tmp_path, engine, arena) as tier:
            assert load(tier, engine, tokens) <= {Outcome.DONE, Outcome.MISS}
            tier.store(engine.writes(tokens))
        tier.close()
        assert tier.worker_pid is None
    assert census() == before
    assert not list((tmp_path / "tmp").glob("*"))
    assert not list((tmp_path / "lease").glob("*"))
    with open_worker(tmp_path, engine, arena) as tier:
        assert load(tier, engine, tokens) == {Outcome.DONE}  # published by the closing


def test_a_ctrl_c_at_the_terminal_leaves_the_worker_to_its_engine(tmp_path, arena, engine):
    with open_worker(tmp_path, engine, arena) as tier:
        pid = tier.worker_pid
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            assert signal_worker(tier, number) == pid
        time.sleep(0.2)
        assert store(tier, engine, engine.prompt(1, 2)) == {Outcome.DONE}
        assert tier.worker_pid == pid


def test_the_worker_outlives_the_thread_that_opened_the_tier(tmp_path, arena, engine):
    # the kernel's "die with the parent" means the thread that started the process
    tiers = []
    thread = threading.Thread(target=lambda: tiers.append(open_worker(tmp_path, engine, arena)))
    thread.start()
    thread.join()
    with tiers[0] as tier:
        pid = tier.worker_pid
        time.sleep(0.2)
        assert store(tier, engine, engine.prompt(1, 2)) == {Outcome.DONE}
        assert tier.worker_pid == pid


PARENT = """
from pathlib import Path
from tests.worker_rig import open_worker, rows_in_an_arena
from kvdepot.testing.toy import ToyEngine
with rows_in_an_arena() as arena:
    tier = open_worker(Path(sys.argv[1]), ToyEngine((4096,)), arena)
    print(tier.worker_pid, flush=True)
    sys.stdin.readline()
"""


@pytest.mark.parametrize("is_stopped", [False, True])
def test_the_worker_dies_with_its_engine(tmp_path, is_stopped):
    with start_engine(PARENT, tmp_path) as parent:
        pid = int(parent.stdout.readline())
        assert is_running(pid)
        if is_stopped:
            os.kill(pid, signal.SIGSTOP)
        parent.kill()
    assert eventually(lambda: not is_running(pid))
