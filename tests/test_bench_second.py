"""A second engine of the same arm as noise: it works while the first is measured, and is ended then."""

from __future__ import annotations

import time

import pytest

pytest.importorskip("aiohttp")

from kvdepot.bench.contention import contend
from kvdepot.bench.plan import Arm, Contention, Load, Noise, Plan, Traffic
from kvdepot.bench.prompts import shipped_material
from kvdepot.bench.rig import Rig
from kvdepot.bench.secondengine import SecondEngine
from kvdepot.bench.session import open_session
from kvdepot.bench.summary import summarise
from kvdepot.clock import SystemClock
from kvdepot.errors import ConfigError, KvdepotError
from kvdepot.io.results import ResultFolder
from kvdepot.testing.fakeserver import FakeBehaviour, FakeServer
from tests.bench_rig import FakeLauncher, FakeProbe

ARM = Arm(name="kvdepot", role="tier", command=("engine",))
TRAFFIC = Traffic(sessions=3, turns=2, document_tokens=300, output_tokens=2)
NOISE = Noise(name="C5", kind="engine")
PLAN = Plan(
    name="test",
    contention=Contention(
        noises=(NOISE,), load=Load(name="load", kind="closed", connections=2), traffic=TRAFFIC
    ),
)
DOES = {"kvdepot": FakeBehaviour(base_s=0.005, keeps=("disk",))}


class OneMore(FakeLauncher):
    """Says when it was stopped."""

    stops = 0

    def stop(self):
        self.stops += 1


@pytest.fixture(autouse=True)
def _counts_at_once(monkeypatch):
    monkeypatch.setattr("kvdepot.bench.asking._COUNT_INTERVAL_S", 0.0)


def rig_of(session, first, second):
    material = shipped_material()
    probe = FakeProbe(first)
    launcher = FakeLauncher(first, DOES)
    return Rig(session, material, launcher, probe, SystemClock(), lambda *_: None, "", second)


def test_it_fills_and_reads_beside_the_measured_one(tmp_path):
    with FakeServer() as first, FakeServer() as other, ResultFolder(tmp_path / "out") as folder:
        second = OneMore(other, DOES)
        session = open_session(folder, PLAN, [ARM], shipped_material(), version="1", wall_s=0.0)
        rig = rig_of(session, first, second)
        contend(rig)
        contend(rig)  # what is measured is not measured again, and no engine is started for it
        summary = summarise(session)
        asked, measured = other.requests, first.requests
    assert second.starts == ["kvdepot"]
    assert second.stops == 1
    assert [each.noise for each in summary.loads] == ["C0 first", "C5", "C0 last"]
    # the same arm and documents, under salts of its own
    assert asked
    assert not {each["cache_salt"] for each in asked} & {each["cache_salt"] for each in measured}
    noisy = summary.loads[1]
    assert noisy.failed == 0
    assert noisy.noise_bytes > 0


def test_it_asks_first_and_follows_up_until_it_is_ended(tmp_path):
    with FakeServer() as first, FakeServer() as other, ResultFolder(tmp_path / "out") as folder:
        session = open_session(folder, PLAN, [ARM], shipped_material(), version="1", wall_s=0.0)
        rig = rig_of(session, first, OneMore(other, DOES))
        with SecondEngine(rig, NOISE, ARM, TRAFFIC) as engine:
            until_s = time.monotonic() + 60
            while engine.requests < 14 and time.monotonic() < until_s:
                time.sleep(0.01)
        count = len(other.requests)
        assert engine.requests == count >= 14
        # three documents and three follow-ups, then others: nothing is asked for twice
        salts = [each["cache_salt"] for each in other.requests]
        assert salts[:12] == [salts[0]] * 6 + [salts[6]] * 6
        assert salts[0] != salts[6]
        assert engine.bytes_moved == 1024 * 16 * round(engine.bytes_moved / 16384)
        time.sleep(0.1)
        assert len(other.requests) == count


def test_one_that_does_not_answer_is_no_noise(tmp_path):
    fails = {"kvdepot": FakeBehaviour(fails_every=1)}
    with FakeServer() as first, FakeServer() as other, ResultFolder(tmp_path / "out") as folder:
        session = open_session(folder, PLAN, [ARM], shipped_material(), version="1", wall_s=0.0)
        second = OneMore(other, fails)
        with pytest.raises(KvdepotError, match=r"C5: .* kvdepot failed: .*programmed failure"):
            SecondEngine(rig_of(session, first, second), NOISE, ARM, TRAFFIC).__enter__()
    assert second.stops == 1


def test_an_arm_that_nobody_can_start_twice_is_refused(tmp_path):
    with FakeServer() as first, ResultFolder(tmp_path / "out") as folder:
        session = open_session(folder, PLAN, [ARM], shipped_material(), version="1", wall_s=0.0)
        with pytest.raises(ConfigError, match="needs a second engine"):
            SecondEngine(rig_of(session, first, None), NOISE, ARM, TRAFFIC).__enter__()
        there = Arm(name="there", role="tier", url=first.url)
        second = OneMore(first, DOES)
        with pytest.raises(ConfigError, match="there has no command"):
            SecondEngine(rig_of(session, first, second), NOISE, there, TRAFFIC).__enter__()
