"""Ceilings: how fast a pool's files are read and rows are copied, with clocks that the test owns."""

from __future__ import annotations

import itertools
import os
import sys
import types

import msgspec
import pytest

pytest.importorskip("aiohttp")

from kvdepot.bench.ceilings import (
    Ceilings,
    DepthRate,
    decode_ceilings,
    encode_ceilings,
    measure_ceilings,
    unit_of,
)
from kvdepot.bench.page import result_page
from kvdepot.bench.plan import Arm
from kvdepot.bench.scrape import Counts, counts_of
from kvdepot.bench.session import read_session
from kvdepot.bench.summary import summarise
from kvdepot.cli.benchshow import print_summary
from kvdepot.clock import SystemClock
from kvdepot.identity import encode_manifest
from kvdepot.io import copyrate, hostcounters
from kvdepot.io.copyrate import CopyOrder, CopyRate, CopyReport, host_rates
from kvdepot.io.hostcounters import link_rate
from kvdepot.io.poolcontent import pool_content
from kvdepot.io.readrate import read_rates
from kvdepot.io.results import ResultFolder
from kvdepot.testing.fakeserver import FakeServer
from kvdepot.units import KIB, MIB
from tests.bench_rig import FakeLauncher, FakeProbe, behaviours, measured
from tests.identities import GROUP, IDENTITY

ARM = Arm(name="kvdepot", role="tier", command=("engine",))


class Ticking:
    """A clock on which a second passes between one look and the next."""

    def __init__(self):
        self._ticks = itertools.count()

    def monotonic_s(self) -> float:
        return float(next(self._ticks))

    def wall_s(self) -> float:
        return 0.0


def files_in(folder, **sizes):
    for name, size in sizes.items():
        (folder / name).write_bytes(os.urandom(size))
    return sizes


def a_pool(folder, *, blocks=3, name="1" * 64):
    """A pool with a namespace, its manifest and one segment; not to be opened as a pool."""
    hour = folder / "ns" / name / "2026113017"
    hour.mkdir(parents=True)
    group = msgspec.structs.replace(GROUP, block_bytes=96 * KIB)
    identity = msgspec.structs.replace(IDENTITY, groups=(group,))
    (hour.parent / "identity.json").write_bytes(encode_manifest(identity))
    segment = hour / "00000000000000ab-00000001.kvseg"
    segment.write_bytes(os.urandom(blocks * MIB))
    return identity, segment


def test_a_rate_is_bytes_over_the_span_from_the_first_read_to_the_last(tmp_path):
    sizes = files_in(tmp_path, a=2 * MIB, b=MIB)
    # the gate opens at 0; a look before and a look after each of three reads
    found = read_rates(tmp_path, sizes, Ticking(), unit_bytes=MIB, span_s=100)
    assert found is not None
    # three units cannot be read eight at once
    assert found.rates == ((1, 3 * MIB / 6),)
    # no read is begun after the span: at 1 and at 3 there is time, at 5 there is none
    short = read_rates(tmp_path, sizes, Ticking(), unit_bytes=MIB, span_s=4)
    assert short is not None
    assert short.rates == ((1, 2 * MIB / 4),)


def test_as_many_reads_at_once_as_there_are_units(tmp_path):
    sizes = files_in(tmp_path, a=4 * MIB, b=4 * MIB + 1000)
    found = read_rates(tmp_path, sizes, SystemClock(), unit_bytes=64 * KIB, bytes_max=8 * MIB)
    assert found is not None
    assert [depth for depth, _ in found.rates] == [1, 8, 32]
    assert all(rate > 0 for _, rate in found.rates)


def test_what_is_too_little_or_gone_has_no_rate(tmp_path):
    clock = SystemClock()
    assert read_rates(tmp_path, {}, clock, unit_bytes=MIB) is None
    sizes = files_in(tmp_path, a=1000, b=500_000)
    assert read_rates(tmp_path, sizes, clock, unit_bytes=MIB) is None
    # evicted since it was looked at
    assert read_rates(tmp_path, {"gone": 8 * MIB}, clock, unit_bytes=MIB) is None


def test_a_pool_says_what_its_newest_blocks_are(tmp_path):
    assert pool_content(tmp_path / "none") == (None, {})
    files_in(tmp_path, **{"block-a": 10, "block-b": 20})
    foreign = pool_content(tmp_path)
    assert foreign.manifest is None
    assert foreign.sizes == {"block-a": 10, "block-b": 20}
    _, older = a_pool(tmp_path, name="1" * 64)
    os.utime(older, (1, 1))
    identity, newer = a_pool(tmp_path, name="2" * 64)
    found = pool_content(tmp_path)
    assert found.manifest == encode_manifest(identity)
    assert found.sizes == {str(newer.relative_to(tmp_path)): 3 * MIB}
    (newer.parents[1] / "identity.json").unlink()
    assert pool_content(tmp_path).manifest is None


@pytest.mark.parametrize(
    ("blocks", "files", "unit"),
    [
        ((64 * KIB,), [], 4 * MIB),
        # whole blocks, padded to pages, of the largest group
        ((100_000, 60_000), [], 40 * 102_400),
        ((5 * MIB,), [], 5 * MIB),
        # where each block is a file, it is read whole
        ((), [368_640, 368_640, 100], 368_640),
        ((), [10_000], 12_288),
        ((), [64 * MIB], 4 * MIB),
        ((), [], 4 * MIB),
    ],
)
def test_a_read_is_of_whole_blocks(blocks, files, unit):
    assert unit_of(blocks, files) == unit


def test_an_arm_with_a_pool_gets_all_its_ceilings(tmp_path, monkeypatch):
    identity, _ = a_pool(tmp_path)
    monkeypatch.setattr("kvdepot.bench.ceilings.file_system_of", lambda path: "nfs4")
    monkeypatch.setattr("kvdepot.bench.ceilings.link_rate", lambda: 1.25e9)
    arm = msgspec.structs.replace(ARM, pool=str(tmp_path))
    found = measure_ceilings(arm, Counts(device="cpu"), SystemClock())
    assert found is not None
    assert found.block_bytes == identity.block_bytes
    assert found.unit_bytes == unit_of(identity.block_bytes, [])
    assert found.reads[0].depth == 1
    assert found.network == 1.25e9
    assert found.copy_device == "cpu"
    assert {each.copy_bytes for each in found.copies} == {max(identity.block_bytes)}
    least = found.least
    assert least is not None
    known = [found.read_rate, found.network, found.copy_rate]
    assert least[1] == min(rate for rate in known if rate is not None)
    # an engine elsewhere copies elsewhere
    far = Arm(name="far", role="tier", url="http://far:8000", pool=str(tmp_path))
    found = measure_ceilings(far, Counts(), SystemClock())
    assert found is not None
    assert (found.copy_device, found.copies) == ("", ())


def test_an_empty_pool_has_no_ceilings(tmp_path):
    arm = msgspec.structs.replace(ARM, pool=str(tmp_path))
    assert measure_ceilings(arm, Counts(), SystemClock()) is None


def test_a_copy_that_fails_costs_only_its_ceiling(tmp_path, monkeypatch):
    a_pool(tmp_path)
    monkeypatch.setattr("kvdepot.bench.ceilings.sys.executable", str(tmp_path / "none"))
    arm = msgspec.structs.replace(ARM, pool=str(tmp_path))
    found = measure_ceilings(arm, Counts(), SystemClock())
    assert found is not None
    assert (found.copies, found.least) == ((), ("device", found.read_rate))


def test_rows_are_copied_by_one_thread_and_by_several():
    rates = host_rates(64 * KIB, SystemClock(), cores=2, work_bytes=4 * MIB)
    assert [(each.threads, each.copy_bytes) for each in rates] == [(1, 64 * KIB), (2, 64 * KIB)]
    assert all(each.rate > 0 for each in rates)
    # a row that fills the memory cannot be shared out
    (alone,) = host_rates(8 * MIB, SystemClock(), cores=2, work_bytes=4 * MIB)
    assert (alone.threads, alone.copy_bytes) == (1, 4 * MIB)
    # a second from the gate to the end
    (known,) = host_rates(MIB, Ticking(), cores=1, work_bytes=4 * MIB)
    assert known.rate == 4 * MIB


class FakeTorch(types.SimpleNamespace):
    """As much of torch as is used; counts copies."""

    uint8 = "uint8"

    def __init__(self, *, has_device):
        self.copies = 0
        self.cuda = types.SimpleNamespace(is_available=lambda: has_device, synchronize=lambda: None)

    def zeros(self, shape, *, dtype, device="cpu"):
        return FakeTensor(self)


class FakeTensor:
    def __init__(self, torch):
        self._torch = torch

    def pin_memory(self):
        return self

    def __getitem__(self, index):
        return self

    def copy_(self, source, *, non_blocking):
        self._torch.copies += 1


def test_the_device_is_the_one_that_torch_sees(tmp_path, monkeypatch):
    order = CopyOrder(row_bytes=64 * MIB)
    report = copyrate._device_report
    monkeypatch.setattr(copyrate, "_DRIVERS", ())
    assert report(order, Ticking()) is None
    monkeypatch.setattr(copyrate, "_DRIVERS", (tmp_path,))

    monkeypatch.setitem(sys.modules, "torch", None)
    assert report(order, Ticking()) == CopyReport(device="")
    monkeypatch.setitem(sys.modules, "torch", FakeTorch(has_device=False))
    assert report(order, Ticking()) is None
    torch = FakeTorch(has_device=True)
    monkeypatch.setitem(sys.modules, "torch", torch)
    # four rows one by one, then all of them in one, three times each; a second each time
    assert report(order, Ticking()) == CopyReport(
        device="cuda",
        rates=(
            CopyRate(threads=1, copy_bytes=64 * MIB, rate=256 * MIB),
            CopyRate(threads=1, copy_bytes=256 * MIB, rate=256 * MIB),
        ),
    )
    assert torch.copies == 3 * (4 + 1)


def test_the_engine_says_where_its_memory_is():
    assert counts_of('kvdepot_engine_info{device="cpu"} 1\n').device == "cpu"
    assert counts_of("kvdepot_engine_block_tokens 16\n").device is None


def test_the_fastest_link_counts(tmp_path, monkeypatch):
    root = tmp_path / "net"
    for name, speed in (("lo", "999999"), ("eth0", "10000\n"), ("eth1", "25000\n"), ("eth2", "-1")):
        (root / name).mkdir(parents=True)
        (root / name / "speed").write_text(speed)
    monkeypatch.setattr(hostcounters, "_NETWORK_LINKS", root)
    assert link_rate() == 25e9 / 8
    monkeypatch.setattr(hostcounters, "_NETWORK_LINKS", tmp_path / "none")
    assert link_rate() is None


CEILINGS = Ceilings(
    block_bytes=(131_072,),
    unit_bytes=4 * MIB,
    reads=(DepthRate(depth=1, rate=2e9), DepthRate(depth=8, rate=3e9)),
    copy_device="cpu",
    copies=(CopyRate(threads=1, copy_bytes=131_072, rate=9e9),),
)


def test_ceilings_are_kept_and_those_of_earlier_releases_are_read():
    assert decode_ceilings(encode_ceilings({"a": CEILINGS})) == {"a": CEILINGS}
    assert decode_ceilings(None) == {}
    (old,) = decode_ceilings(b'{"a": 3919474109.5}').values()
    assert old.least == ("device", 3919474109.5)
    assert [each.depth for each in old.reads] == [1]
    for unreadable in (b"{", b"[]", b'{"schema": "kvdepot-bench-ceilings/9", "arms": {}}'):
        assert decode_ceilings(unreadable) == {}
    assert Ceilings().least is None


def test_they_are_in_the_summary_and_in_both_reports(tmp_path, capsys):
    pool = tmp_path / "pool"
    pool.mkdir()
    files_in(pool, blocks=10_000)
    with FakeServer() as server:
        launcher, probe = FakeLauncher(server, behaviours()), FakeProbe(server)
        summary = measured(tmp_path / "out", server, launcher, probe, pool=str(pool))
    assert summary.ceilings == {}  # ten kilobytes say nothing
    with ResultFolder(tmp_path / "out") as folder:
        session = read_session(folder)
        session.keep_ceilings("kvdepot", CEILINGS)
        summary = summarise(session)
    assert summary.ceilings == {"kvdepot": CEILINGS}
    assert summary.break_even[0].least_ceiling == "device"
    english, chinese = result_page(summary), result_page(summary, lang="zh")
    for page in (english, chinese):
        for word in ("1: 2\N{NO-BREAK SPACE}GB/s; 8: 3\N{NO-BREAK SPACE}GB/s", "O_DIRECT"):
            assert word in page
    assert "Ceilings" in english
    assert "起约束作用者" in chinese
    print_summary(summary)
    said = capsys.readouterr().out
    assert "ceilings of" in said
    assert "of the least ceiling (device" in said
