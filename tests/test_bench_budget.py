"""A plan's budget says what the plan then does."""

from __future__ import annotations

import json

import msgspec
import pytest

pytest.importorskip("aiohttp")

from kvdepot.bench.blocks import requests_of, schedule
from kvdepot.bench.budget import Costs, budget_of
from kvdepot.bench.plan import PRESETS, Contention, Load, Noise, Peak, Plan, Traffic, preset
from kvdepot.bench.targets import TYPICAL, embedded_arms
from kvdepot.cli.benchshow import print_budget
from kvdepot.cli.main import run
from kvdepot.testing.fakeserver import FakeServer
from tests.bench_rig import PLAN, FakeLauncher, FakeProbe, behaviours, measured

ARMS = embedded_arms(model="", pool="pool", host_bytes=1)
#: an engine for which only one thing takes time
FREE = Costs(start_s=0.0, prefill_rate=float("inf"), output_s=0.0, edge_s=0.0)


def test_starts_and_requests_are_those_of_the_run(tmp_path):
    with FakeServer() as server:
        launcher = FakeLauncher(server, behaviours())
        summary = measured(tmp_path / "out", server, launcher, FakeProbe(server))
        asked = len(server.requests)
    arms = [arm for arm in ARMS if arm.name in ("recompute", "kvdepot")]
    phases = budget_of(PLAN, arms, FREE)
    assert sum(each.starts for each in phases) == len(launcher.starts)
    assert sum(each.warmups + each.requests for each in phases) == asked
    planned = {(each.part, each.arm): each.requests for each in phases}
    for each in summary.rounds:
        assert planned[each.round, each.arm] == each.requests


@pytest.mark.parametrize("name", PRESETS)
def test_every_preset_has_a_budget(name):
    plan = preset(name)
    phases = budget_of(plan, ARMS, TYPICAL["embedded"])
    of_rounds = sum(requests_of(plan, block) for block in schedule(plan, ARMS))
    rounds = {"R0", *(each.name for each in plan.rounds)}
    assert sum(e.warmups + e.requests for e in phases if e.part in rounds) == of_rounds
    assert all(each.seconds > 0 for each in phases)


def test_the_quick_presets_keep_their_promise():
    seconds = sum(each.seconds for each in budget_of(preset("quick"), ARMS, TYPICAL["embedded"]))
    # ten minutes are promised for a quiet machine; half of it is left for one that is not
    assert seconds < 330


def test_what_costs_what():
    plan = Plan(
        name="t",
        peak=Peak(
            traffic=Traffic(sessions=4, turns=2, document_tokens=100, turn_tokens=10, output_tokens=5),
            loads=(
                Load(name="closed", kind="closed", connections=2),
                Load(name="storm", kind="storm", connections=3),
                Load(name="trace", kind="trace"),
            ),
        ),
        contention=Contention(
            noises=(Noise(name="C3", kind="read"),), traffic=Traffic(sessions=1, turns=1)
        ),
    )  # fmt: skip
    phases = {(e.part, e.arm): e for e in budget_of(plan, ARMS, FREE._replace(start_s=2.0))}
    # a trace does not say how long it is
    assert [part for part, arm in phases if arm == "kvdepot"] == [
        "closed", "storm", "contention, C0 first", "contention, C3", "contention, C0 last",
    ]  # fmt: skip
    assert phases["closed", "kvdepot"].seconds == 2.0
    assert phases["storm", "kvdepot"].seconds == 4.0
    assert phases["storm", "kvdepot"].requests == 6
    # three warm-ups of document and question; then 8 times all of it, or 4 documents and 8 questions
    assert phases["closed", "recompute"].computed_tokens == 3 * 110 + 8 * (100 + 15)
    assert phases["closed", "kvdepot"].computed_tokens == 3 * 110 + 4 * 100 + 8 * 10
    by_output = {(e.part, e.arm): e for e in budget_of(plan, ARMS, FREE._replace(output_s=1.0))}
    assert by_output["closed", "kvdepot"].seconds == (8 + 3) * 5


def test_it_is_shown(capsys):
    assert run(["bench", "plan", "quick", "--runs", "2", "--start-s", "10"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert sum(each["starts"] for each in told) == 8
    costs = TYPICAL["embedded"]
    phases = budget_of(msgspec.structs.replace(preset("standard"), runs=1), ARMS, costs)
    print_budget("standard", phases, costs)
    shown = capsys.readouterr().out
    assert "R1a" in shown
    assert "640 computed tokens a second" in shown


def test_a_path_without_a_name_is_refused(tmp_path, capsys):
    out = ["--out", str(tmp_path / "out"), "--engine", "embedded"]
    for wrong in (
        ["--path", "/mnt/x"],
        ["--path", f"a={tmp_path}/x", "--path", "a=y"],
        ["--path", "=x"],
    ):
        assert run(["bench", "run", *out, *wrong]) != 0
        assert "names no path of its own" in capsys.readouterr().err
