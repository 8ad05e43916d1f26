"""What stands in vLLM's JSON, which vLLM fits, and how the scheduler's waits are counted."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest

import tests.needs_vllm  # noqa: F401  # isort: skip

import vllm
from vllm.v1.kv_offload.base import ReqContext, make_offload_key

from kvdepot.engines.vllm import host_region, opening, versions
from kvdepot.engines.vllm.blocks import RequestBlocks
from kvdepot.engines.vllm.calls import BOUNDS_S, CallTimes, fenced, timed
from kvdepot.engines.vllm.settings import parse_settings
from kvdepot.engines.vllm.stats import (
    CALLS,
    ENGINE_COUNTERS,
    ENGINE_GAUGES,
    PREFIX,
    TierStats,
    metric_definitions,
)
from kvdepot.errors import ConfigError, IdentityUnknown, PoolUnavailable, PoolUrlError
from kvdepot.keys import adopt_key, root_key
from kvdepot.metrics import METRICS, Counters
from kvdepot.policy.admission import AdmissionSettings
from kvdepot.testing.simclock import FakeClock
from kvdepot.units import GIB, MIB
from tests.identities import IDENTITY

pytestmark = pytest.mark.vllm


def parsed(**given):
    given.setdefault("urls", ["file:///pool"])
    return parse_settings(given, region_bytes=64 * MIB, row_bytes=MIB)


def test_settings_of_the_pool_and_of_the_tier_stand_side_by_side():
    settings = parsed(capacity="2GiB", segment_bytes="16MiB", load_deadline_s=1.5, io="threads")
    assert settings.pool.urls == ("file:///pool",)
    assert settings.pool.capacity_bytes == 2 * GIB
    assert settings.pool.segment_bytes == 16 * MIB
    assert settings.load_deadline_s == 1.5
    assert settings.io == "threads"


def test_what_waits_to_be_written_takes_half_of_the_host_region_unless_told_otherwise():
    assert parsed().pool.write_queue_bytes == 32 * MIB
    assert parsed(write_queue_bytes="3MiB").pool.write_queue_bytes == 3 * MIB


def test_everything_is_written_unless_told_otherwise():
    assert parsed().admission == AdmissionSettings()
    given = {"when": "second_sight", "prompt_tokens_min": 9, "bytes_per_day": "1GiB"}
    assert parsed(admission=given).admission == AdmissionSettings(
        when="second_sight", prompt_tokens_min=9, bytes_per_day=GIB
    )


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"admission": {"when": "never"}}, "never"),
        ({"admission": {"prompt_tokens_min": -1}}, "negative"),
        ({"admission": {"bytes_a_day": 1}}, "bytes_a_day"),
        ({"admission": "second_sight"}, "admission"),
        ({"capcity": "1GiB"}, "capcity"),
        ({"io": "proces"}, "io"),
        ({"load_deadline_s": 0}, "load_deadline_s"),
        ({"capacity": "1GX"}, "1GX"),
        ({"urls": []}, "at least one URL"),
    ],
)
def test_a_wrong_setting_is_named(given, message):
    with pytest.raises(ConfigError, match=message):
        parsed(**given)


def test_a_url_that_names_no_place_is_refused_at_once():
    with pytest.raises(PoolUrlError):
        parsed(urls=["fs://pool"])


def test_the_installed_version_is_tested_and_has_the_interface():
    assert versions.is_tested(vllm.__version__)
    assert versions.interface_faults() == []
    assert versions.check_interface(vllm.__version__) == ""


@pytest.mark.parametrize(
    ("version", "is_in"),
    [("0.31.9", False), ("0.32.0", True), ("0.32.4+cpu", True), ("0.33.0", False), ("x", False)],
)
def test_the_tested_range(version, is_in):
    assert versions.is_tested(version) is is_in


def test_another_interface_is_described(monkeypatch):
    monkeypatch.setattr(versions, "_NAMES", [("vllm.v1.kv_offload.base", "ReqContext.no_such")])
    assert "ReqContext.no_such" in versions.check_interface(vllm.__version__)
    monkeypatch.setattr(versions, "_NAMES", [])
    where = ("vllm.v1.kv_offload.tiering.base", "SecondaryTierManager.lookup", ("no_such",))
    monkeypatch.setattr(versions, "_PARAMETERS", [where])
    assert "no_such" in versions.check_interface(vllm.__version__)


def test_an_untested_version_is_a_warning(caplog):
    assert versions.check_interface("0.40.0") == ""
    assert "0.40.0" in caplog.text


class Thing:
    def __init__(self, clock):
        self.clock = clock
        self.times = CallTimes(clock)

    @timed
    @fenced(lambda: -1)
    def act(self, seconds, fails=False):
        self.clock.advance(seconds)
        if fails:
            raise RuntimeError("bug")
        return 1


def test_calls_are_counted_by_their_duration_and_bugs_are_fenced(caplog):
    thing = Thing(FakeClock())
    assert [thing.act(4e-6), thing.act(9e-4), thing.act(0.002)] == [1, 1, 1]
    assert thing.act(0.0, fails=True) == -1
    assert thing.act(0.0, fails=True) == -1
    assert thing.times.calls("act") == 5
    assert thing.times.slow_calls("act") == 1
    assert thing.times.seconds["act"] == pytest.approx(0.002904)
    assert sum(thing.times.counts["act"]) == 5
    assert len(thing.times.counts["act"]) == len(BOUNDS_S) + 1
    assert thing.times.errors == {"act": 2}
    assert caplog.text.count("act failed") == 1, "one trace is enough"


def test_numbers_are_told_once_and_all_of_them_are_defined():
    clock = FakeClock()
    counters, times = Counters(), CallTimes(clock)
    stats = TierStats(counters, times, clock, "tier")
    counters.add("load_blocks_total", 3)
    times.note("lookup", 0.1)
    times.errors["lookup"] = 1
    first = stats.take(None, 2, 1)
    assert first.data["data"][PREFIX + "load_blocks_total"] == {("tier",): 3}
    assert first.data["data"][PREFIX + "scheduler_slow_calls_total"] == {("tier", "lookup"): 1}
    assert first.data["data"][PREFIX + "active_jobs"] == {("tier",): 2}
    assert stats.take(None, 0, 0) is None, "too soon"
    clock.advance(1)
    counters.add("load_blocks_total", 1)
    second = stats.take(None, 0, 0)
    assert second.data["data"][PREFIX + "load_blocks_total"] == {("tier",): 1}
    assert PREFIX + "scheduler_calls_total" not in second.data["data"]
    defined = metric_definitions()
    assert set(first.data["data"]) <= set(defined)
    names = (*METRICS, *CALLS, *ENGINE_COUNTERS, *ENGINE_GAUGES)
    assert set(defined) == {PREFIX + name for name in names}


def test_a_region_without_a_descriptor_serves_threads_alone(tmp_path):
    memory = memoryview(bytearray(4 * MIB)).cast("B", (4, MIB))
    region = host_region.HostRegion(object(), memory)
    assert not region.is_shared
    region.rows([2])[0][:] = b"x" * MIB
    assert memory[2, 5] == ord("x")
    with pytest.raises(ConfigError, match="process"):
        region.open_pool(parsed(urls=[f"file://{tmp_path}"], io="process"), IDENTITY, Counters())


def test_a_pool_that_does_not_answer_is_opened_later(monkeypatch):
    monkeypatch.setattr(opening, "_RETRY_S", 0.01)
    tries = []

    def open_pool(identity):
        tries.append(identity)
        if len(tries) < 3:
            raise PoolUnavailable("no answer", path="x")
        return pool

    pool: Any = FakePool()
    one = opening.PoolOpening(lambda: IDENTITY, open_pool)
    one.start(60)
    assert one.pool is None
    while one.pool is None:
        time.sleep(0.01)
    assert tries == [IDENTITY] * 3
    one.close(1.5)
    assert pool.closed_in_s == 1.5
    assert one.pool is None


def test_what_can_never_be_opened_is_refused_once(caplog):
    def find():
        raise IdentityUnknown("hash_seed not determined", hint="set it")

    pool: Any = FakePool()
    one = opening.PoolOpening(find, lambda identity: pool)
    one.start(60)
    assert (one.pool, one.refusal) == (None, "hash_seed not determined")
    assert "set it" in caplog.text


def test_a_wrong_setting_stops_the_engine_s_start():
    def open_pool(identity):
        raise ConfigError("capacity")

    with pytest.raises(ConfigError):
        opening.PoolOpening(lambda: IDENTITY, open_pool).start(60)


def test_a_pool_that_turns_up_after_the_end_is_closed():
    go_on = threading.Event()
    pool: Any = FakePool()

    def open_pool(identity):
        go_on.wait(60)
        return pool

    one = opening.PoolOpening(lambda: IDENTITY, open_pool)
    one.start(0.01)
    one.close(1)
    go_on.set()
    one._thread.join(60)
    assert one.pool is None
    assert pool.closed_in_s == 0.0


class FakePool:
    closed_in_s: float | None = None

    def close(self, timeout_s):
        self.closed_in_s = timeout_s


def test_answers_are_looked_up_ahead_and_kept_for_one_step():
    context = ReqContext("request")
    keys = [make_offload_key(bytes([number]) * 32, 0) for number in range(100)]
    for number, key in enumerate(keys):
        context.set_offload_key_position(key, number)
    asked = []
    held = {adopt_key(b"i" * 32, key + b"x") for key in keys[:90]}

    def lookup(wanted):
        asked.append(len(wanted))
        return next((n for n, key in enumerate(wanted) if key not in held), len(wanted))

    request = RequestBlocks(b"i" * 32, b"x")
    for _ in range(2):
        answers = [
            request.holds(key, context, lookup, generation=1, is_chained=True) for key in keys[:91]
        ]
        assert answers == [True] * 90 + [False]
        assert asked == [16, 64, 20]
    assert not request.holds(keys[0], context, lambda wanted: 0, generation=2, is_chained=True)
    assert request.in_order(reversed(keys)) == keys
    assert request.parent(keys[5]) == request.key(keys[4])
    assert request.parent(keys[0]) == root_key(b"i" * 32)
