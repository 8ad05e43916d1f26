"""`kvdepot bench run` from end to end: a real engine in processes of its own, a real pool, a report.

The model is tiny and its weights are random: whether a load pays is not asked here, only whether all
that is measured comes together.
"""

from __future__ import annotations

import json

import pytest

pytestmark = [pytest.mark.engine, pytest.mark.slow]
pytest.importorskip("torch")
pytest.importorskip("transformers")
pytest.importorskip("aiohttp")

from kvdepot.bench.summary import decode_summary  # noqa: E402
from kvdepot.cli.main import run  # noqa: E402
from kvdepot.units import round_up  # noqa: E402
from tests.tiny_models import save_tiny, tiny_config  # noqa: E402

PLAN = """
version = 1
name = "tiny"
runs = 1
document_tokens = [900]
output_tokens = 4
requests = 2
calibrate_tokens = [600, 900]

[[rounds]]
name = "R1a"
role = "recompute"
expects = "computed"

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

[[rounds]]
name = "R1d"
role = "dram"
expects = "computed"

[[rounds]]
name = "R2d"
role = "dram"
salts = "stored"
of = "R1d"
expects = "host"

[peak]
traffic = { sessions = 3, turns = 2, document_tokens = 60, turn_tokens = 20, output_tokens = 4 }
loads = [{ name = "closed 2", kind = "closed", connections = 2 }]
"""


@pytest.mark.timeout(400)
def test_a_plan_is_measured_and_reported(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    config = tiny_config(max_position_embeddings=2048)
    folder = save_tiny(tmp_path / "model", config=config)
    plan = tmp_path / "plan.toml"
    plan.write_text(PLAN)
    out = tmp_path / "out"
    arguments = [
        "bench",
        "run",
        "--plan",
        str(plan),
        "--engine",
        "embedded",
        "--model",
        str(folder),
    ]
    run([*arguments, "--out", str(out), "--host-bytes", "64MiB"])
    assert "R2" in capsys.readouterr().out
    summary = decode_summary((out / "summary.json").read_bytes(), "summary.json")
    rounds = {(each.round, each.arm): each for each in summary.rounds}
    assert set(rounds) == {
        ("R1a", "recompute"), ("R1b", "kvdepot"), ("R2", "kvdepot"), ("R1d", "memory"), ("R2d", "memory"),
    }  # fmt: skip
    assert all(each.failed == 0 for each in summary.rounds)
    # the server's word and its counters agree, and all did the same work
    assert not [
        f for f in summary.findings if f.guard in ("G1", "G6", "G11") and f.level == "invalid"
    ]
    assert rounds["R1b", "kvdepot"].stored_bytes
    assert [(each.load, each.arm) for each in summary.loads] == [
        ("closed 2", "recompute"), ("closed 2", "kvdepot"),
    ]  # fmt: skip
    assert summary.break_even[0].stored_token_bytes == summary.break_even[0].token_bytes
    # the pool says what its blocks are, and the engine where its KV memory is
    ceilings = summary.ceilings["kvdepot"]
    assert all(ceilings.block_bytes)
    assert ceilings.unit_bytes % round_up(max(ceilings.block_bytes), 4096) == 0
    assert ceilings.reads[0].depth == 1
    assert ceilings.copy_device == "cpu"
    assert {each.copy_bytes for each in ceilings.copies} == {max(ceilings.block_bytes)}
    least = ceilings.least
    assert least is not None
    assert least[0] in ("device", "host-to-device")
    assert summary.break_even[0].least_ceiling == least[0]
    assert "</html>" in (out / "report.html").read_text(encoding="utf-8")
    # nothing of it names the machine's folders
    for name in ("plan.json", "summary.json", "rows.jsonl", "windows.jsonl", "report.html"):
        assert str(tmp_path) not in (out / name).read_text(encoding="utf-8")
    # the plan names no interpreter, and the same command has nothing left to do
    kept = json.loads((out / "plan.json").read_bytes())
    assert kept["arms"][0]["command"][0] == "{python}"
    logs = len(list((out / "logs").iterdir()))
    run([*arguments, "--out", str(out), "--host-bytes", "64MiB"])
    assert len(list((out / "logs").iterdir())) == logs
