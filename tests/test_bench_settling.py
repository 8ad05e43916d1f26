"""What was stored is waited for: the engine's own word, or a pool whose files stand still."""

from __future__ import annotations

import threading
import time

import pytest

pytest.importorskip("aiohttp")

from kvdepot.bench.plan import Arm
from kvdepot.bench.settling import settle
from kvdepot.clock import SystemClock
from kvdepot.testing.fakeserver import FakeServer
from tests.bench_rig import with_client
from tests.tries import in_one_try_of


@pytest.fixture(autouse=True)
def _short_waits(monkeypatch):
    monkeypatch.setattr("kvdepot.bench.settling._LOOK_INTERVAL_S", 0.02)
    monkeypatch.setattr("kvdepot.bench.settling._STILL_S", 0.4)


def settled(arm):
    with FakeServer() as server:
        return with_client(server.url, lambda client: settle(client, arm, SystemClock()))


def test_an_engine_without_a_pool_has_nothing_to_wait_for():
    assert settled(Arm(name="recompute", role="recompute")) is None


def test_the_engines_word_is_taken():
    assert settled(Arm(name="a", role="tier", settles=("/drain",))) is True
    assert settled(Arm(name="a", role="tier", settles=("/drain", "/nowhere"))) is False


@in_one_try_of(5)
def test_a_pool_that_is_still_written_is_waited_for(tmp_path):
    folder = tmp_path / "ns"
    folder.mkdir()

    def write():
        for number in range(5):
            time.sleep(0.1)
            (folder / f"{number}.part").write_bytes(b"x" * 100)
            (folder / f"{number}.part").rename(folder / str(number))

    writer = threading.Thread(target=write)
    writer.start()
    assert settled(Arm(name="a", role="tier", pool=str(tmp_path))) is True
    names = {path.name for path in folder.iterdir()}
    writer.join()
    assert names == {"0", "1", "2", "3", "4"}


@in_one_try_of(5)
def test_a_pool_that_never_stands_still_is_said_to(tmp_path, monkeypatch):
    monkeypatch.setattr("kvdepot.bench.settling._WAIT_MAX_S", 0.5)
    stop = threading.Event()

    def write():
        with (tmp_path / "log").open("ab", buffering=0) as opened:
            while not stop.wait(0.05):
                opened.write(b"x")

    writer = threading.Thread(target=write)
    writer.start()
    try:
        assert settled(Arm(name="a", role="tier", pool=str(tmp_path))) is False
    finally:
        stop.set()
        writer.join()
