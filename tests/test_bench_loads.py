"""Load points on the fake server: classes, saturation, storms, traces, contention.

The server is a FAKE with programmed latencies: the numbers here say nothing about any engine.
"""

from __future__ import annotations

import asyncio
import time

import msgspec
import pytest

pytest.importorskip("aiohttp")

from kvdepot.bench.contention import NoiseMaker, contend, degradation, noise_order
from kvdepot.bench.loadfigures import check_loads, load_figures
from kvdepot.bench.peaktest import LoadPlace, LoadRunner
from kvdepot.bench.plan import Arm, Contention, Load, Noise, Peak, Plan, Traffic
from kvdepot.bench.prompts import shipped_material
from kvdepot.bench.rig import Rig
from kvdepot.bench.rows import Row
from kvdepot.bench.saturation import find_saturation, is_sustained
from kvdepot.bench.session import open_session
from kvdepot.bench.summary import summarise
from kvdepot.bench.traces import FORMATS, TraceRow, read_trace_rows, spread_bins
from kvdepot.bench.traffic import session_turns, storm_turns, text_of_blocks, trace_turns
from kvdepot.clock import SystemClock
from kvdepot.errors import ConfigError, KvdepotError
from kvdepot.io.noise import NoiseOrder
from kvdepot.io.results import ResultFolder
from kvdepot.testing.fakeserver import FakeBehaviour, FakeServer
from tests.bench_rig import FakeLauncher, FakeProbe
from tests.tries import in_one_try_of, in_some_try

pytestmark = pytest.mark.timeout(300)

ARMS = [Arm(name="recompute", role="recompute"), Arm(name="kvdepot", role="tier")]
MATERIAL = shipped_material()


@pytest.fixture(autouse=True)
def _counts_at_once(monkeypatch):
    monkeypatch.setattr("kvdepot.bench.asking._COUNT_INTERVAL_S", 0.0)


def rig_of(session, server, does):
    launcher, probe = FakeLauncher(server, does), FakeProbe(server)
    return Rig(session, MATERIAL, launcher, probe, SystemClock(), lambda what, done, total: None)


def behaviours():
    computing = FakeBehaviour(base_s=0.01, token_s=0.0001)
    tier = FakeBehaviour(base_s=0.01, token_s=0.0001, keeps=("disk",), read_s={"disk": 0.000002})
    return {"recompute": computing, "kvdepot": tier}


def peaked(tmp_path, server, does, *loads, traffic=None, arms=ARMS, runs=1):
    traffic = traffic or Traffic(sessions=6, turns=3, document_tokens=400, output_tokens=2)
    plan = Plan(name="test", peak=Peak(runs=runs, traffic=traffic, loads=loads))
    with ResultFolder(tmp_path / "out") as folder:
        session = open_session(folder, plan, arms, MATERIAL, version="1", wall_s=0.0)
        runner = LoadRunner(rig_of(session, server, does))
        runner.peak()
        runner.peak()  # what is measured is not measured again
        return summarise(session), session.rows()


@in_one_try_of(5)
def test_first_asks_and_follow_ups_come_out_apart(tmp_path):
    with FakeServer() as server:
        summary, rows = peaked(
            tmp_path, server, behaviours(), Load(name="closed 3", kind="closed", connections=3)
        )
    recompute, tier = summary.loads
    assert (recompute.arm, tier.arm) == ("recompute", "kvdepot")
    for each in (recompute, tier):
        counts = {figures.ask_class: figures.requests for figures in each.classes}
        # by oracle: the same in both arms, whatever was reused
        assert counts == {"F": 6, "U": 12, "M": 0}
        assert each.failed == 0
    first, follow_up, _ = tier.classes
    assert first.tokens.share == 0.0
    assert follow_up.tokens.share > 0.75
    assert follow_up.outcomes == {"disk": 12}
    assert recompute.classes[1].outcomes == {"miss": 12}
    assert first.ttft is not None
    assert follow_up.ttft is not None
    assert follow_up.ttft.p50.value < first.ttft.p50.value
    measured = [row for row in rows if row.kind == "measured"]
    assert len(measured) == 36
    assert {row.turn for row in measured} == {0, 1, 2}
    # no p95 of 18 requests
    assert not follow_up.ttft.p95.is_bounded
    assert not [f for f in summary.findings if f.level == "invalid"]


@in_one_try_of(5)
def test_littles_law_closes_in_a_closed_loop(tmp_path):
    traffic = Traffic(sessions=60, turns=1, document_tokens=400, output_tokens=2)
    with FakeServer() as server:
        summary, _ = peaked(
            tmp_path, server, behaviours(), Load(name="c", kind="closed", connections=4),
            traffic=traffic, arms=ARMS[:1],
        )  # fmt: skip
    (load,) = summary.loads
    assert load.little == pytest.approx(4, rel=0.12)
    assert load.throughput == pytest.approx(4 / load.mean_latency_s, rel=0.12)


@in_one_try_of(5)
def test_the_saturation_rate_of_a_known_server_is_found(tmp_path):
    # two slots of 20 ms each: 100 requests a second
    does = {"recompute": FakeBehaviour(base_s=0.02, slots=2)}
    traffic = Traffic(sessions=200, turns=1, document_tokens=64, output_tokens=2)
    with FakeServer() as server:
        summary, _ = peaked(
            tmp_path, server, does,
            Load(name="sat", kind="saturation", rate=40, requests=120, variation=0.0),
            Load(name="half", kind="open", share=0.5, requests=40),
            traffic=traffic, arms=ARMS[:1],
        )  # fmt: skip
    trials = [each for each in summary.loads if each.load.startswith("sat at")]
    assert len(trials) >= 4
    half = next(each for each in summary.loads if each.load == "half")
    # a busy machine may find less; more than the server has cannot be found
    assert 25 <= half.throughput <= 62


def test_finding_saturation_ends_close_to_the_edge():
    async def keeps_up(rate):
        return rate <= 37.0

    for start in (1.0, 37.0, 500.0):
        rate, trials = asyncio.run(find_saturation(keeps_up, start=start))
        assert 37.0 / 1.1 <= rate <= 37.0
        assert len(trials) <= 14


def test_a_growing_queue_is_not_sustained():
    def rows(latency):
        return [
            Row(run=0, round="", arm="", seq=i, scheduled_s=i * 0.1, first_s=i * 0.1 + latency(i),
                last_s=i * 0.1 + latency(i), ended_s=i * 0.1 + latency(i))
            for i in range(100)
        ]  # fmt: skip

    assert is_sustained(rows(lambda i: 0.05 + 0.01 * (i % 3)))
    assert not is_sustained(rows(lambda i: 0.05 + 0.02 * i))
    failed = rows(lambda i: 0.05)
    failed[3] = msgspec.structs.replace(failed[3], error="500")
    assert not is_sustained(failed)


def test_a_storm_comes_back_to_a_new_process(tmp_path):
    with FakeServer() as server:
        does = behaviours()
        launcher = FakeLauncher(server, does)
        summary, rows = peaked(
            tmp_path, server, does, Load(name="storm 4", kind="storm", connections=4), arms=ARMS[1:]
        )
        del launcher
    (load,) = summary.loads
    assert load.requests == 4
    assert len(load.by_rank_s) == 4
    assert load.by_rank_s == sorted(load.by_rank_s)
    assert {row.ask_class for row in rows if row.kind == "measured"} == {"U"}
    assert load.tokens.share > 0.7


def test_a_storm_expects_whole_blocks_of_the_engine_not_of_the_arm(tmp_path):
    does = behaviours()
    does["kvdepot"].block_tokens = 128
    with FakeServer() as server:
        summary, rows = peaked(
            tmp_path, server, does, Load(name="storm 4", kind="storm", connections=4), arms=ARMS[1:]
        )
    (load,) = summary.loads
    # with the arm's 16 the oracle would ask for tokens that no block of 128 holds
    assert load.tokens.capture == pytest.approx(1.0)
    (follow_up,) = [figures for figures in load.classes if figures.ask_class == "U"]
    assert follow_up.outcomes == {"disk": 4}
    assert all(row.oracle_tokens % 128 == 0 for row in rows)


def test_a_tier_that_does_harm_is_said_to(tmp_path):
    does = behaviours()
    does["kvdepot"].read_s = {"disk": 0.0003}
    with FakeServer() as server:
        summary, rows = peaked(tmp_path, server, does, Load(name="c", kind="closed", connections=1))
    assert any("does harm" in each.reason for each in summary.findings)
    plan = summary.state.plan
    assert list(check_loads([], rows, [], plan, {})) == []
    assert load_figures(rows, [], plan) == []


def test_sessions_are_mixed_and_their_turns_in_order():
    traffic = Traffic(sessions=8, turns=3, document_tokens=100, common_tokens=20)
    turns = session_turns(traffic, Load(name="x", kind="closed"), MATERIAL, salt="s", seed=1)
    assert len(turns) == 24
    seen: dict[str, int] = {}
    for index, turn in enumerate(turns):
        ask = turn.item
        assert ask.turn == seen.get(ask.session, 0)
        seen[ask.session] = ask.turn + 1
        if turn.after is not None:
            assert turn.after < index
            before = turns[turn.after].item
            assert before.session == ask.session
            # a follow-up begins with all that was said before
            assert ask.text.startswith(before.text)
    kinds = [turn.item.turn for turn in turns]
    assert kinds != sorted(kinds)
    # every text begins with what is common, and documents differ
    assert len({turn.item.text[:80] for turn in turns}) == 1
    assert len({turn.item.text for turn in turns if turn.item.turn == 0}) == 8
    drawn = session_turns(
        msgspec.structs.replace(traffic, zipf=1.2), Load(name="x", kind="closed", requests=90),
        MATERIAL, salt="s", seed=1,
    )  # fmt: skip
    assert len(drawn) == 90
    firsts, returns = storm_turns(turns, 5)
    assert len(firsts) == len(returns) == 5
    assert max(turn.at_s for turn in returns) < 1.0


def test_equal_block_ids_are_equal_text_and_the_rest_is_unique():
    one = text_of_blocks([1, 2, 3], 16, 60, unique=1)
    two = text_of_blocks([1, 2, 9], 16, 60, unique=2)
    assert len(one) == len(two) == 240
    assert one[:128] == two[:128]
    assert one[128:192] != two[128:192]
    assert one[192:] != text_of_blocks([1, 2, 3], 16, 60, unique=2)[192:]
    assert one == text_of_blocks([1, 2, 3], 16, 60, unique=1)


SAMPLES = {
    "mooncake": b'{"timestamp": 3000, "input_length": 1030, "output_length": 5, "hash_ids": [0, 7]}\n'
    b'{"timestamp": 0, "input_length": 520, "output_length": 5, "hash_ids": [0]}',
    "bailian": b'{"timestamp": 1.5, "input_length": 40, "output_length": 5, "hash_ids": [4, 5],'
    b' "chat_id": 2, "parent_chat_id": 1, "root_chat_id": 1, "type": "text", "turn": 2}',
    "weka": b'{"conv": "trace_0298", "agent": null, "turn": 1, "t": 23.0, "in": 190, "out": 165,'
    b' "think_time": 13.0, "block_size": 64, "hash_id_ranges": [[1, 2], [9, 9]]}',
    "ragpulse": b'{"timestamp": "82", "input_length": 700, "output_length": 192, "hash_ids": '
    b'{"sys_prompt": [8], "passages_ids": [7, 6], "user_input": [2]}, "session_id": "x"}',
    "azure": b"TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:17:03.9799600,4808,10\n"
    b"2023-11-16 18:17:05.0319600,3180,8",
}


@pytest.mark.parametrize("form", FORMATS)
def test_public_traces_become_one_form(form):
    rows = read_trace_rows(SAMPLES[form], form, "a file")
    assert rows[0].at_s == 0.0
    assert all(row.input_tokens > 0 for row in rows)
    with pytest.raises(ConfigError, match="record 1 of a file"):
        read_trace_rows(b'{"x": 1}', form, "a file")


def test_what_traces_say():
    first, second = read_trace_rows(SAMPLES["mooncake"], "mooncake", "f")
    assert (first.input_tokens, second.at_s, second.blocks) == (520, 3.0, [0, 7])
    (weka,) = read_trace_rows(SAMPLES["weka"], "weka", "f")
    assert weka.session
    assert weka.think_s == 13.0
    assert [each & 0xFFFF for each in weka.blocks] == [1, 2, 9]
    (rag,) = read_trace_rows(SAMPLES["ragpulse"], "ragpulse", "f")
    assert rag.blocks == [8, 7, 6, 2]
    azure = read_trace_rows(SAMPLES["azure"], "azure", "f")
    assert azure[1].at_s == pytest.approx(1.052)
    as_lines = (
        b'{"timestamp": "2023-11-16 18:17:03.97", "context_tokens": 9, "generated_tokens": 1}'
    )
    assert read_trace_rows(as_lines, "azure", "f")[0].input_tokens == 9
    for content, words in [(b"", "no requests"), (b"{", "line 1"), (b"\xff", "UTF-8")]:
        with pytest.raises(ConfigError, match=words):
            read_trace_rows(content, "mooncake", "f")
    with pytest.raises(ConfigError, match="no trace format"):
        read_trace_rows(b"", "none", "f")


def test_rounded_times_are_spread_over_their_bins():
    rows = [TraceRow(3.0 * (index // 4), 10, 1, [], 16) for index in range(40)]
    spread, bin_s = spread_bins(rows, seed=1)
    assert bin_s == 3.0
    assert len({row.at_s for row in spread}) == 40
    assert max(row.at_s for row in spread) < 30.0
    exact = [TraceRow(0.37 * index, 10, 1, [], 16) for index in range(10)]
    assert spread_bins(exact, seed=1) == (exact, 0.0)


@in_one_try_of(5)
def test_a_trace_is_replayed(tmp_path):
    path = tmp_path / "trace.jsonl"
    lines = [
        {"timestamp": 100 * i, "input_length": 600, "output_length": 2, "hash_ids": [0, i // 2]}
        for i in range(6)
    ]
    path.write_bytes(b"\n".join(msgspec.json.encode(line) for line in lines))
    traffic = Traffic(trace=str(path), trace_format="mooncake", time_scale=0.5)
    with FakeServer() as server:
        summary, rows = peaked(
            tmp_path, server, behaviours(), Load(name="trace", kind="trace"),
            traffic=traffic, arms=ARMS[1:],
        )  # fmt: skip
    measured = sorted((r for r in rows if r.kind == "measured"), key=lambda r: r.scheduled_s)
    assert len(measured) == 6
    gap_s = measured[-1].scheduled_s - measured[0].scheduled_s
    assert gap_s == pytest.approx(0.25, abs=0.02)
    assert summary.loads[0].tokens.share > 0.3
    turns = trace_turns([TraceRow(0, 900, 1, [1], 512, session="a")] * 2, traffic, salt="s")
    assert turns[1].after == 0
    assert (
        len(
            trace_turns([TraceRow(0, 900, 1, [], 512)], Traffic(input_tokens_max=100), salt="")[
                0
            ].item.text
        )
        == 400
    )


def test_a_load_without_a_rate_or_a_trace_is_refused(tmp_path):
    with FakeServer() as server:
        for load in (Load(name="x", kind="open", share=0.5), Load(name="y", kind="trace")):
            with pytest.raises(ConfigError, match=f"load {load.name}"):
                peaked(tmp_path / load.name, server, behaviours(), load)


# contention


def test_quiet_comes_first_and_last():
    noises = [Noise(name=f"C{i}", kind="read", folder="/x") for i in range(1, 6)]
    order = [each.name for each in noise_order(noises, seed=3)]
    assert order[0] == "C0 first"
    assert order[-1] == "C0 last"
    assert sorted(order[1:-1]) == [f"C{i}" for i in range(1, 6)]
    assert order == [each.name for each in noise_order(noises, seed=3)]


@pytest.mark.parametrize("kind", ["read", "write", "network"])
def test_noise_moves_bytes_at_its_share_and_leaves_nothing(tmp_path, kind):
    noise = Noise(name="n", kind=kind, share=0.3, folder=str(tmp_path))

    def attempt():
        with NoiseMaker(noise, ARMS[0]) as maker:
            time.sleep(0.5)
        assert maker.bytes_moved > 0

    in_some_try(attempt)
    assert list(tmp_path.iterdir()) == []
    assert NoiseOrder(kind, 0.3).block_bytes == 1 << 20


def test_noise_goes_only_where_the_user_says(tmp_path):
    with pytest.raises(ConfigError, match="needs a folder"):
        NoiseMaker(Noise(name="n", kind="read"), ARMS[0]).__enter__()
    with pytest.raises(KvdepotError, match="noise n failed"):
        NoiseMaker(Noise(name="n", kind="read", folder=str(tmp_path / "none")), ARMS[0]).__enter__()
    mark = tmp_path / "mark"
    degraded = Noise(name="n", kind="command", begin=("touch", str(mark)), end=("rm", str(mark)))
    with NoiseMaker(degraded, ARMS[0]):
        assert mark.exists()
    assert not mark.exists()
    with pytest.raises(KvdepotError, match="command of a noise failed"):
        NoiseMaker(msgspec.structs.replace(degraded, begin=("false",)), ARMS[0]).__enter__()


@in_one_try_of(5)
def test_contention_has_its_degradation(tmp_path):
    # the "noise" makes the fake slower, as a degraded path would
    slow = tmp_path / "slow"
    noise = Noise(name="C6", kind="command", begin=("touch", str(slow)), end=("rm", str(slow)))
    plan = Plan(
        name="test",
        contention=Contention(
            noises=(noise,),
            load=Load(name="load", kind="closed", connections=2),
            traffic=Traffic(sessions=5, turns=2, document_tokens=300, output_tokens=2),
        ),
    )
    with FakeServer() as server, ResultFolder(tmp_path / "out") as folder:
        does = behaviours()
        quiet = server.account

        def account(text, salt):
            if slow.exists():
                time.sleep(0.05)
            return quiet(text, salt)

        server.account = account  # type: ignore[method-assign]
        session = open_session(folder, plan, ARMS, MATERIAL, version="1", wall_s=0.0)
        contend(rig_of(session, server, does))
        summary = summarise(session)
    assert [each.noise for each in summary.loads] == ["C0 first", "C6", "C0 last"]
    lost = degradation(summary.loads[1], summary.loads)
    assert lost is not None
    assert lost > 0.3
    assert degradation(summary.loads[0], summary.loads) is None
    assert LoadPlace(0, ARMS[0], "C6", plan.contention.load, Traffic(), 0).label.endswith(
        "load, C6"
    )
