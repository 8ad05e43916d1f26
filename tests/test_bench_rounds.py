"""The rounds from end to end on the fake server, and planted cheats that the guards must name.

The server is a FAKE with programmed latencies: the numbers here say nothing about any engine.
"""

from __future__ import annotations

import dataclasses

import msgspec
import pytest

pytest.importorskip("aiohttp")

from kvdepot.bench.blocks import schedule
from kvdepot.bench.breakeven import fit_curve, predict
from kvdepot.bench.figures import tokens_of
from kvdepot.bench.guard_rounds import Result
from kvdepot.bench.guard_time import check_drift
from kvdepot.bench.guards import GUARDS, verdict_of
from kvdepot.bench.headlines import ratios_of
from kvdepot.bench.plan import Arm, Round
from kvdepot.bench.rows import Row, decode_rows, encode_row
from kvdepot.bench.session import read_session
from kvdepot.bench.summary import decode_summary, summarise
from kvdepot.errors import ConfigError
from kvdepot.io.results import ResultFolder
from kvdepot.testing.fakeserver import FakeServer
from tests.bench_rig import PLAN, FakeLauncher, FakeProbe, behaviours, measured
from tests.tries import in_one_try_of

pytestmark = pytest.mark.timeout(300)


@pytest.fixture
def pool(tmp_path):
    folder = tmp_path / "pool"
    folder.mkdir()
    (folder / "blocks").write_bytes(b"x" * 10_000)
    return str(folder)


def run(tmp_path, pool, does=None, *, residency=0.0, restarts=True, plan=PLAN):
    with FakeServer() as server:
        launcher = FakeLauncher(server, does or behaviours(), restarts=restarts)
        probe = FakeProbe(server, residency=residency)
        return measured(tmp_path / "out", server, launcher, probe, plan=plan, pool=pool)


def said(summary, guard, level):
    """Reasons that a guard gave, at a level."""
    return [
        f"{f.where}: {f.reason}" for f in summary.findings if (f.guard, f.level) == (guard, level)
    ]


@in_one_try_of(5)
def test_an_honest_engine_gets_its_numbers_and_no_complaint(tmp_path, pool):
    summary = run(tmp_path, pool)
    assert summary.verdict == "VALID WITH NOTES"
    # small samples are said to be small, and a busy machine may have drifted
    assert {f.guard for f in summary.findings} <= {"G9", "G12"}
    rounds = {each.round: each for each in summary.rounds}
    assert set(rounds) == {"R1a", "R1b", "R2", "R2n", "R3"}
    assert rounds["R1a"].tokens.share == 0.0
    # the fake reuses whole blocks, an endless cache all tokens but the last
    assert rounds["R2"].tokens.capture == pytest.approx(1.0)
    assert rounds["R2"].tokens.by_source["disk"] == rounds["R2"].tokens.reused
    assert rounds["R2"].loaded_bytes == rounds["R2"].tokens.reused * 1024
    assert rounds["R2"].device_read_bytes == rounds["R2"].loaded_bytes
    # R2 has brought the blocks into memory
    assert set(rounds["R3"].tokens.by_source) == {"computed", "host"}
    assert rounds["R3"].tokens.capture == pytest.approx(1.0, abs=0.03)
    assert rounds["R2n"].tokens.share == 0.0
    ratios = {each.name: each.estimate for each in summary.ratios}
    assert ratios["speed-up, R2"].value > 2
    assert ratios["speed-up, R3"].runs == 2
    assert "store overhead, R1b" in ratios
    # the fake computes a token in 0.1 ms, and the curve finds it
    assert summary.curve is not None
    assert summary.curve.seconds(512) == pytest.approx(0.0535, rel=0.35)
    (found,) = summary.break_even
    assert found.token_bytes == 1024
    assert found.stored_token_bytes == pytest.approx(1024, rel=0.05)
    again = decode_summary(msgspec.json.encode(summary), "summary.json")
    assert again == summary


def test_cheat_a_prefix_cache_left_on_while_recomputing(tmp_path, pool):
    # a warm-up with the same salt is what it takes: the engine ignores salts
    does = behaviours()
    does["recompute"].keeps = ("device",)
    with FakeServer() as server:
        account = server.account
        server.account = lambda text, salt: account(text, "the same for all")  # type: ignore[method-assign]
        summary = measured(
            tmp_path / "out", server, FakeLauncher(server, does), FakeProbe(server), pool=pool
        )
    assert summary.verdict == "INVALID"
    assert any("R1a" in each for each in said(summary, "G3", "invalid"))


def test_cheat_page_cache_left_warm(tmp_path, pool):
    summary = run(tmp_path, pool, residency=0.9)
    assert any("page cache" in each for each in said(summary, "G3", "invalid"))
    summary = run(tmp_path / "2", pool, behaviours(device_share=0.0))
    assert any("came from a cache" in each for each in said(summary, "G2", "invalid"))


def test_cheat_a_host_tier_that_leaks_into_the_storage_round(tmp_path, pool):
    summary = run(tmp_path, pool, restarts=False)
    assert any("host memory" in each for each in said(summary, "G3", "invalid"))
    assert any(
        "no restart" in each or "not started" in each for each in said(summary, "G3", "note")
    )


def test_cheat_a_slow_baseline(tmp_path, pool):
    does = behaviours()
    does["recompute"] = dataclasses.replace(does["recompute"], token_s=0.0002)
    summary = run(tmp_path, pool, does)
    assert any("baseline is slow" in each for each in said(summary, "G4", "invalid"))


def test_cheat_chunks_counted_instead_of_usage(tmp_path, pool):
    does = behaviours()
    for each in does.values():
        each.gives_usage = False
    summary = run(tmp_path, pool, does)
    assert any("without usage" in each for each in said(summary, "G6", "invalid"))


def test_cheat_a_server_that_lies_about_cached_tokens(tmp_path, pool):
    summary = run(tmp_path, pool, behaviours(cached_lie=100))
    assert any("claim" in each for each in said(summary, "G1", "invalid"))


def test_cheat_a_slow_server_that_claims_reuse(tmp_path, pool):
    # no counters to compare with: what remains is that it is as slow as computing
    summary = run(tmp_path, pool, behaviours(read_s={"disk": 0.0001, "host": 0.0001}))
    assert any("are said to be reused" in each for each in said(summary, "G1", "note"))


def test_cheat_another_answer(tmp_path, pool):
    summary = run(tmp_path, pool, behaviours(other_answer=True))
    assert said(summary, "G7", "invalid")


def test_failed_requests_stay_and_make_it_invalid(tmp_path, pool):
    summary = run(tmp_path, pool, behaviours(fails_every=5))
    assert any("programmed failure" in each for each in said(summary, "G11", "invalid"))
    assert sum(each.failed for each in summary.rounds) > 0


def edited(folder, change):
    """The result again, with other rows."""
    with ResultFolder(folder) as results:
        rows = [each for row in decode_rows(results.lines("rows.jsonl")) for each in change(row)]
        results.write("rows.jsonl", b"\n".join(encode_row(row) for row in rows))
        return summarise(read_session(results))


def test_edited_rows_are_found_out(tmp_path, pool):
    run(tmp_path, pool)
    whole = (tmp_path / "out" / "rows.jsonl").read_bytes()

    def again(change):
        (tmp_path / "out" / "rows.jsonl").write_bytes(whole)
        return edited(tmp_path / "out", change)

    def is_r2(row, seq):
        return row.round == "R2" and row.kind == "measured" and row.seq == seq

    # a failed request that was dropped
    dropped = again(lambda row: [] if is_r2(row, 1) and row.run == 0 else [row])
    assert any("failures were dropped" in each for each in said(dropped, "G11", "invalid"))

    salts = {
        (row.seq, row.run): row.salt
        for row in decode_rows(whole.splitlines())
        if row.round == "R2" and row.kind == "measured"
    }

    # a repetition that reads what an earlier one of the round has read
    def nested(row):
        same = is_r2(row, 2) and row.run == 0
        return [msgspec.structs.replace(row, salt=salts[0, 0]) if same else row]

    assert any("earlier one" in each for each in said(again(nested), "G3", "invalid"))

    # a run with the seed of another run
    def same_seed(row):
        same = row.run == 1 and row.round == "R2" and row.kind == "measured"
        return [msgspec.structs.replace(row, salt=salts[row.seq, 0]) if same else row]

    assert any("same salts" in each for each in said(again(same_seed), "G3", "invalid"))

    # an arm that was asked something shorter
    def shorter(row):
        is_it = row.round == "R2" and row.prompt_tokens
        return [msgspec.structs.replace(row, prompt_tokens=row.prompt_tokens - 1) if is_it else row]

    found = again(shorter)
    assert said(found, "G6", "invalid")
    assert said(found, "G1", "invalid")


def test_an_interrupted_run_goes_on(tmp_path, pool):
    class Interrupted(Exception):
        pass

    def interrupt(what, done, total):
        if "run 2, kvdepot, R2:" in what:
            raise Interrupted

    with FakeServer() as server:
        launcher, probe = FakeLauncher(server, behaviours()), FakeProbe(server)
        with pytest.raises(Interrupted):
            measured(tmp_path / "out", server, launcher, probe, pool=pool, tell=interrupt)
        partial = summarise_of(tmp_path / "out")
        # missing requests of the block that was not finished
        assert (
            said(partial, "G11", "invalid") or {r.round: r.runs for r in partial.rounds}["R2"] == 1
        )
        launcher.starts.clear()
        counts = []
        summary = measured(
            tmp_path / "out", server, launcher, probe, pool=pool,
            tell=lambda what, done, total: counts.append((done, total)),
        )  # fmt: skip
    # only the second run of the tier was done again: started for R1b and for R2
    assert set(launcher.starts) <= {"kvdepot", "recompute"}
    assert launcher.starts.count("kvdepot") == 2
    assert {each.round: each.runs for each in summary.rounds}["R2"] == 2
    assert summary.verdict == "VALID WITH NOTES"
    assert counts[-1][0] == counts[-1][1]
    other = msgspec.structs.replace(PLAN, seed=2)
    with pytest.raises(ConfigError, match="another plan"):
        measured(tmp_path / "out", server, launcher, probe, plan=other, pool=pool)


def summarise_of(folder):
    with ResultFolder(folder) as results:
        return summarise(read_session(results))


def test_a_plan_that_would_fill_the_disk_is_refused(tmp_path, pool, monkeypatch):
    monkeypatch.setattr("kvdepot.bench.conduct.free_bytes_of", lambda path: 1 << 20)
    with pytest.raises(ConfigError, match="stores up to"):
        run(tmp_path, pool)


def test_bytes_of_a_token_that_are_not_the_config_s(tmp_path, pool):
    with FakeServer() as server:
        count = server.count

        def more(name, value):
            count(name, value * 1.05 if "store_bytes" in name else value)

        server.count = more  # type: ignore[method-assign]
        summary = measured(
            tmp_path / "out",
            server,
            FakeLauncher(server, behaviours()),
            FakeProbe(server),
            pool=pool,
        )
    assert any("were written for a token" in each for each in said(summary, "G2", "invalid"))


def test_blocks_take_turns():
    arms = [
        Arm(name="a", role="recompute"),
        Arm(name="b", role="tier"),
        Arm(name="x", role="reader"),
    ]
    plan = msgspec.structs.replace(PLAN, runs=2)
    assert [(b.run, b.arm.name) for b in schedule(plan, arms)] == [
        (0, "a"), (0, "b"), (0, "x"), (1, "b"), (1, "a"), (1, "x"),
    ]  # fmt: skip
    shuffled = msgspec.structs.replace(PLAN, runs=6, order="random")
    orders = {
        tuple(b.arm.name for b in schedule(shuffled, arms)[3 * r : 3 * r + 3]) for r in range(6)
    }
    assert len(orders) == 2
    assert schedule(shuffled, arms) == schedule(shuffled, arms)


def test_a_second_reader_is_compared_by_equivalence(tmp_path, pool):
    reader = Round(
        name="R2x", role="reader", salts="stored", of="R1b", restarts=True, expects="storage"
    )
    plan = msgspec.structs.replace(PLAN, rounds=(*PLAN.rounds, reader), runs=2)
    arms = [
        Arm(name="recompute", role="recompute"),
        Arm(name="kvdepot", role="tier", pool=pool),
        Arm(name="other", role="reader", pool=pool),
    ]
    does = behaviours()
    does["other"] = does["kvdepot"]
    with FakeServer() as server:
        summary = measured(
            tmp_path / "out", server, FakeLauncher(server, does), FakeProbe(server),
            plan=plan, arms=arms,
        )  # fmt: skip
    shared = next(each for each in summary.rounds if each.round == "R2x")
    assert shared.tokens.capture == pytest.approx(1.0, abs=0.03)
    assert [each.name for each in summary.equals] == ["R2x = R2"]


def test_memory_alone_must_not_read_storage(tmp_path):
    rounds = (
        Round(name="R1d", role="dram"),
        Round(name="R2d", role="dram", salts="stored", of="R1d", expects="host"),
    )
    plan = msgspec.structs.replace(PLAN, rounds=rounds, runs=1)
    arms = [Arm(name="memory", role="dram")]
    for tiers, is_held in ((("host",), True), (("disk",), False)):
        does = {"memory": dataclasses.replace(behaviours()["kvdepot"], keeps=tiers)}
        with FakeServer() as server:
            summary = measured(
                tmp_path / tiers[0], server, FakeLauncher(server, does), FakeProbe(server),
                plan=plan, arms=arms,
            )  # fmt: skip
        assert (said(summary, "G3", "invalid") == []) == is_held


def test_drift_of_the_control():
    def row(at, run, ttft_s):
        return Row(
            run=run, round="R1a", arm="a", seq=at, scheduled_s=0.0, first_s=ttft_s, last_s=ttft_s
        )

    steady = Result("R1a", "a", "computed", [row(0, 0, 1.0), row(0, 1, 1.02)], [])
    drifted = Result("R1a", "a", "computed", [row(0, 0, 1.0), row(0, 1, 1.2)], [])
    assert not list(check_drift(steady))
    assert "+20%" in next(iter(check_drift(drifted))).reason
    assert (
        "one run"
        in next(iter(check_drift(Result("R1a", "a", "computed", [row(0, 0, 1.0)], [])))).reason
    )
    assert ratios_of([steady]) == []


def test_the_account_of_tokens():
    rows = [
        Row(run=0, round="R", arm="a", seq=0, prompt_tokens=100, output_tokens=5, cached_tokens=60,
            reused={"host": 20, "disk": 40}, oracle_tokens=80),
        Row(run=0, round="R", arm="a", seq=1, prompt_tokens=100, output_tokens=5, cached_tokens=20,
            oracle_tokens=80),
        Row(run=0, round="R", arm="a", seq=2, error="failed"),
    ]  # fmt: skip
    found = tokens_of(rows)
    assert found.by_source == {"computed": 120, "host": 20, "disk": 40, "cached": 20}
    assert (found.share, found.oracle_share) == (0.4, 0.8)
    assert found.capture == pytest.approx(0.5)
    # 120 computed where 40 had to be
    assert found.amplification == pytest.approx(3.0)
    assert (found.requests_with_reuse, found.requests) == (2, 2)


def test_the_curve_of_computing_is_not_negative_and_finds_its_shape():
    def seconds(n):
        return 0.1 + 0.001 * n + 1e-7 * n * n

    curve = fit_curve([(n, seconds(n)) for n in (100, 1000, 5000, 20000)])
    assert curve is not None
    assert (curve.a, curve.b, curve.c) == pytest.approx((0.1, 0.001, 1e-7), rel=1e-6)
    assert curve.seconds(1000, after=1000) == pytest.approx(0.1)
    falling = fit_curve([(100, 1.0), (1000, 0.9), (5000, 0.8)])
    assert falling is not None
    assert min(falling.a, falling.b, falling.c) >= 0
    assert fit_curve([(100, 1.0)]) is None
    found = predict(curve, prompt_tokens=1100, reused_tokens=1000, token_bytes=1000, read_rate=1e6)
    assert found == pytest.approx(1.0 + curve.seconds(1100, after=1000))


def test_verdicts():
    assert verdict_of([]) == "VALID"
    assert list(GUARDS) == [f"G{number}" for number in range(1, 13)]
