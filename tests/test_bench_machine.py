"""G10 with planted numbers: what others did on the machine is named, and what the bench did itself is not."""

from __future__ import annotations

import os
import subprocess
import sys

import msgspec
import pytest

pytest.importorskip("aiohttp")

from kvdepot.bench.ceilings import Ceilings, DepthRate
from kvdepot.bench.guard_machine import check_machine
from kvdepot.bench.scrape import Counts
from kvdepot.bench.windows import Edge, HostProbe, Window, decode_windows
from kvdepot.io import hostcounters
from kvdepot.io.hostcounters import (
    HostCounters,
    ProcessUse,
    environment,
    host_counters,
    process_use,
)
from kvdepot.testing.fakeserver import FakeServer
from kvdepot.units import MIB
from tests.bench_rig import FakeLauncher, FakeProbe, behaviours, measured, with_client

#: 1,000 MiB a second
CEILINGS = Ceilings(reads=(DepthRate(depth=1, rate=500 * MIB), DepthRate(depth=8, rate=1000 * MIB)))


def window(
    *,
    device=(0, 0),
    engine=(0, 0),
    own=None,
    own_cpu_s=0.0,
    residency=0.0,
    host_before=None,
    host_after=None,
    engine_name="",
):
    """Ten seconds in which counters grew by so much."""
    before = {"device_read_bytes": 7, "device_written_bytes": 3, **(host_before or {})}
    after = {"device_read_bytes": 7 + device[0], "device_written_bytes": 3 + device[1]}
    edges = [
        Edge(
            at_s=at_s,
            wall_s=at_s,
            counts=Counts(),
            host=HostCounters(**fields),
            process_bytes=moved,
            own=use,
        )
        for at_s, fields, moved, use in (
            (5.0, before, (0, 0), ProcessUse(read_bytes=1, written_bytes=1, cpu_s=2.0)),
            (
                15.0,
                {**before, **after, **(host_after or {})},
                engine,
                None
                if own is None
                else ProcessUse(
                    read_bytes=1 + own[0], written_bytes=1 + own[1], cpu_s=2 + own_cpu_s
                ),
            ),
        )
    ]
    return Window(
        run=0, round="R2", arm="a", role="tier", attempt=0, begin=edges[0], end=edges[1],
        page_residency=residency, engine=engine_name,
    )  # fmt: skip


def reasons(*windows, ceilings=CEILINGS):
    found = list(check_machine("R2", "a", windows, ceilings))
    assert {(each.guard, each.level) for each in found} <= {("G10", "note")}
    return [each.reason for each in found]


def test_foreign_bytes_are_named_with_their_share_of_the_ceiling():
    # of 10,000 MiB that the device gives in ten seconds, 2 % are 200
    ours = {"engine": (500 * MIB, 0), "own": (500 * MIB, 10 * MIB)}
    assert reasons(window(device=(600 * MIB, 110 * MIB), **ours)) == []
    (reason,) = reasons(window(device=(700 * MIB, 110 * MIB), **ours))
    assert reason == (
        "others read 200 MiB from the pool's device and wrote 100 MiB to it, 3.0% of what it gives in "
        "that time"
    )


def test_what_the_bench_has_started_is_not_foreign():
    # a noise of the contention test reads nine times what the engine does
    noisy = window(device=(5000 * MIB, 0), engine=(500 * MIB, 0), own=(5000 * MIB, 0))
    assert noisy.foreign_bytes() == (0, 0)
    assert reasons(noisy) == []
    # a window of an earlier release knows the engine alone
    old = window(device=(5000 * MIB, 0), engine=(500 * MIB, 0))
    assert old.foreign_bytes() == (4500 * MIB, 0)


def test_without_a_ceiling_they_are_laid_beside_the_engine_s_own():
    found = window(device=(103 * MIB, 0), engine=(100 * MIB, 0), own=(100 * MIB, 0))
    for ceilings in (None, Ceilings()):
        assert reasons(found, ceilings=ceilings) == [
            "others read 3 MiB from the pool's device and wrote 0 B to it, 3.0% of what the engine read"
        ]
    idle = window(device=(103 * MIB, 0), engine=(0, 0), own=(0, 0))
    assert reasons(idle, ceilings=None) == []


def test_a_guard_that_could_not_look_says_so():
    nowhere = window(
        host_before={"device_read_bytes": None}, host_after={"device_read_bytes": None}
    )
    by_hand = msgspec.structs.replace(
        window(),
        begin=msgspec.structs.replace(window().begin, process_bytes=None),
    )
    # the device was exchanged, or the engine was: a counter went back
    restarted = window(engine=(-1, 0))
    for each in (nowhere, by_hand, restarted):
        assert [reason.partition(":")[0] for reason in reasons(each)] == ["not evaluated"]
    # an arm whose pool is not on this host says it in G2 already
    assert reasons(msgspec.structs.replace(nowhere, page_residency=None)) == []


def test_swapping_heat_and_others_on_the_processors():
    found = window(
        own=(0, 0),
        own_cpu_s=12.0,
        host_before={"swapped_pages": 10, "throttles": 1, "cpu_busy_s": 100.0, "cpu_stolen_s": 5.0},
        # of 20 s of two processors the bench had 12, others 1 and other guests 0.5
        host_after={
            "swapped_pages": 1510, "throttles": 4, "cpu_busy_s": 113.0, "cpu_stolen_s": 5.5,
            "processors": 2,
        },
    )  # fmt: skip
    assert found.foreign_cpu_share() == pytest.approx(0.075)
    assert reasons(found) == [
        "the machine swapped 1,500 pages",
        "processors were slowed down 3 times because they were hot",
        "others had 8% of the processors' time",
    ]
    calm = window(
        own=(0, 0), own_cpu_s=12.0,
        host_before={"swapped_pages": 10, "throttles": 1, "cpu_busy_s": 100.0},
        host_after={"cpu_busy_s": 112.9, "processors": 2},
    )  # fmt: skip
    assert reasons(calm) == []
    assert reasons(window(host_after={"swapped_pages": None, "throttles": 9})) == []


def test_an_engine_that_became_another_is_noticed():
    same = [window(own=(0, 0), engine_name="vllm 0.32.0") for _ in range(2)]
    assert reasons(*same) == []
    assert reasons(*same, window(own=(0, 0), engine_name="vllm 0.33.0")) == [
        "the engine was not the same: vllm 0.32.0, vllm 0.33.0"
    ]


def test_windows_of_earlier_releases_are_read():
    line = msgspec.json.encode(window(device=(1, 1), own=(1, 1), own_cpu_s=1.0))
    whole = msgspec.json.decode(line)
    for edge in ("begin", "end"):
        del whole[edge]["own"]
        for name in ("cpu_stolen_s", "processors", "throttles", "temperature_c", "clock_mhz"):
            del whole[edge]["host"][name]
    del whole["engine"]
    (old,) = decode_windows([msgspec.json.encode(whole)])
    assert (old.foreign_bytes(), old.foreign_cpu_share()) == ((1, 1), None)


def test_engines_say_what_they_are_and_a_stranger_on_the_device_is_seen(tmp_path):
    pool = tmp_path / "pool"
    pool.mkdir()
    (pool / "blocks").write_bytes(b"x" * 10_000)

    class Shared(FakeProbe):
        """A device on which others read as much as the engine."""

        def host(self, pool):
            mine = super().host(pool)
            return msgspec.structs.replace(mine, device_read_bytes=2 * mine.device_read_bytes)

    with FakeServer() as server:
        assert with_client(server.url, lambda client: client.version()) == "fake 1.0"
        summary = measured(
            tmp_path / "out", server, FakeLauncher(server, behaviours()), Shared(server),
            pool=str(pool),
        )  # fmt: skip
    assert summary.engines == {"recompute": "fake 1.0", "kvdepot": "fake 1.0"}
    said = [each for each in summary.findings if each.guard == "G10"]
    assert {(each.where, each.arm) for each in said} == {("R2", "kvdepot")}
    assert all("100.0% of what the engine read" in each.reason for each in said)


def test_a_process_and_its_children_are_counted_together():
    before = process_use(os.getpid())
    assert before is not None
    spin = "import time\nwhile time.process_time() < 0.3: pass"
    subprocess.run([sys.executable, "-c", spin], check=True)
    after = HostProbe().own()
    assert after is not None
    # a child that has ended still counts
    assert after.cpu_s - before.cpu_s >= 0.25
    assert after.read_bytes >= before.read_bytes
    assert process_use(2**22 + 1) is None


def test_an_nfs_mount_has_counters_of_its_own(tmp_path, monkeypatch):
    page = tmp_path / "mountstats"
    share = tmp_path / "share"
    page.write_text(
        "device /dev/vda mounted on / with fstype ext4\n"
        f"device server:/a mounted on {tmp_path} with fstype nfs4 statvers=1.1\n"
        "\tbytes:\t1 2 3 4 5 6 7 8\n"
        f"device server:/b mounted on {share} with fstype nfs statvers=1.1\n"
        "\tbytes:\t10 20 30 40 5000 600 7 8\n"
    )
    monkeypatch.setattr(hostcounters, "_MOUNT_COUNTERS", page)
    monkeypatch.setattr(hostcounters, "device_of", lambda path: None)
    found = host_counters(share / "pool")
    assert (found.device_read_bytes, found.device_written_bytes) == (5000, 600)
    assert host_counters(tmp_path).device_read_bytes == 5
    page.write_text("device /dev/vda mounted on / with fstype ext4\n")
    assert host_counters(share).device_read_bytes is None


def test_the_record_has_versions_and_heat(tmp_path, monkeypatch):
    record = environment()
    assert record["kvdepot"]
    assert "swap_used_bytes" not in record or int(record["swap_used_bytes"]) >= 0
    for name, text in (("cpu0", "3\n"), ("cpu1", "4\n")):
        (tmp_path / name / "thermal_throttle").mkdir(parents=True)
        (tmp_path / name / "thermal_throttle" / "core_throttle_count").write_text(text)
    for name, text in (("thermal_zone0", "41000\n"), ("thermal_zone1", "62500\n")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "temp").write_text(text)
    monkeypatch.setattr(hostcounters, "_THROTTLES", tmp_path)
    monkeypatch.setattr(hostcounters, "_SENSORS", tmp_path)
    found = host_counters(None)
    assert (found.throttles, found.temperature_c) == (7, 62.5)
    assert found.processors
