"""R2p and the second engine with real parts: embedded engines in processes of their own, real pools.

The model is tiny and its weights are random. Nothing here depends on how fast anything is: a load that is
given up because the machine is busy is computed, and counted as that.
"""

from __future__ import annotations

import pytest

pytestmark = [pytest.mark.engine, pytest.mark.slow]
pytest.importorskip("torch")
pytest.importorskip("transformers")
pytest.importorskip("aiohttp")

from kvdepot import __version__  # noqa: E402
from kvdepot.bench.rows import decode_rows  # noqa: E402
from kvdepot.bench.summary import decode_summary  # noqa: E402
from kvdepot.cli.main import run  # noqa: E402
from tests.tiny_models import save_tiny, tiny_config  # noqa: E402

ROUNDS = """
version = 1
name = "paths"
runs = 1
document_tokens = [600]
output_tokens = 4
requests = 2

[[rounds]]
name = "R1b"
role = "tier"
expects = "computed"

[[rounds]]
name = "R2"
role = "tier"
salts = "stored"
of = "R1b"
restarts = true
drops_pages = true
expects = "storage"
"""

CONTENTION = """
version = 1
name = "two engines"

[contention]
noises = [{ name = "C5", kind = "engine" }]
load = { name = "closed 2", kind = "closed", connections = 2 }
traffic = { sessions = 2, turns = 2, document_tokens = 60, turn_tokens = 20, output_tokens = 4 }
"""


@pytest.fixture
def bench(tmp_path, monkeypatch):
    """Run a plan on the embedded engine; its summary."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    model = save_tiny(tmp_path / "model", config=tiny_config(max_position_embeddings=2048))

    def measure(plan, *arguments):
        file = tmp_path / "plan.toml"
        file.write_text(plan)
        out = tmp_path / "out"
        run(
            ["bench", "run", "--plan", str(file), "--engine", "embedded", "--model", str(model),
             "--host-bytes", "64MiB", "--out", str(out), *arguments]
        )  # fmt: skip
        summary = decode_summary((out / "summary.json").read_bytes(), "summary.json")
        # whatever the time: nothing was lost, and the accounts close
        assert not [
            each
            for each in summary.findings
            if each.level == "invalid" and each.guard in ("G1", "G6", "G11")
        ]
        return out, summary

    return measure


def writers_of(pool):
    """Processes that have published segments."""
    return {path.name.partition("-")[0] for path in pool.glob("ns/*/*/*.kvseg")}


@pytest.mark.timeout(300)
def test_another_path_under_the_tier_is_an_arm_of_its_own(bench, tmp_path):
    other = tmp_path / "other"
    out, summary = bench(ROUNDS, "--path", f"other={other}")
    rounds = {(each.round, each.arm): each for each in summary.rounds}
    assert set(rounds) == {
        (name, arm) for name in ("R1b", "R2") for arm in ("kvdepot", "kvdepot-other")
    }
    assert all((each.requests, each.failed) == (2, 0) for each in rounds.values())
    # each arm stored into its own pool what it computed, as many bytes as the other
    assert writers_of(out / "pool")
    assert writers_of(other)
    stored = {rounds["R1b", arm].stored_bytes for arm in ("kvdepot", "kvdepot-other")}
    assert len(stored) == 1
    assert stored != {0}
    # and was asked again under the salts that it had stored itself
    rows = [
        each
        for each in decode_rows((out / "rows.jsonl").read_bytes().splitlines())
        if each.kind == "measured"
    ]
    salts = {
        (name, arm): {each.salt for each in rows if (each.round, each.arm) == (name, arm)}
        for name, arm in rounds
    }
    for arm in ("kvdepot", "kvdepot-other"):
        assert salts["R1b", arm] == salts["R2", arm]
    assert all(each.oracle_tokens > 300 for each in rows if each.round == "R2")
    assert not salts["R2", "kvdepot"] & salts["R2", "kvdepot-other"]
    # the paths are laid beside each other, each with its own ceilings
    names = {each.name for each in summary.ratios}
    assert {f"kvdepot-other over kvdepot, {name}" for name in ("R1b", "R2")} <= names
    assert set(summary.ceilings) == {"kvdepot", "kvdepot-other"}
    assert "kvdepot-other" in (out / "report.html").read_text(encoding="utf-8")


@pytest.mark.timeout(300)
def test_a_second_engine_fills_the_same_pool_while_the_first_is_measured(bench):
    out, summary = bench(CONTENTION)
    assert [(each.noise, each.arm) for each in summary.loads] == [
        (noise, "kvdepot") for noise in ("C0 first", "C5", "C0 last")
    ]
    assert all((each.requests, each.failed) == (4, 0) for each in summary.loads)
    # it was started once, answered before it was measured beside, and stored
    assert len(list((out / "logs-second").iterdir())) == 1
    assert [each.noise_bytes > 0 for each in summary.loads] == [False, True, False]
    assert len(writers_of(out / "pool")) == len(list((out / "logs").iterdir())) + 1
    # it asked under salts of its own: what the first one could reuse is the same beside it
    oracle = {each.tokens.oracle for each in summary.loads}
    assert len(oracle) == 1
    assert summary.engines == {"kvdepot": f"kvdepot embedded {__version__}"}
    assert "C5" in (out / "report.html").read_text(encoding="utf-8")
