"""Comparing results and reading those of other tools."""

from __future__ import annotations

import json

import msgspec
import pytest

from kvdepot.bench.compare import compare, differences
from kvdepot.bench.figures import tokens_of
from kvdepot.bench.importing import TOOLS, import_result, rows_of_tool, tool_of
from kvdepot.bench.plan import Arm, Plan
from kvdepot.bench.session import State
from kvdepot.bench.summary import RoundFigures, Summary
from kvdepot.cli.benchshow import print_comparison
from kvdepot.cli.main import run
from kvdepot.errors import ConfigError


def summary(*run_ttft_s, nonce="a", verdict="VALID", **plan):
    state = State(
        version="1", digest="d", nonce=nonce, began_wall_s=0.0,
        plan=Plan(name="p", **plan), arms=(Arm(name="kvdepot", role="tier"),),
        material="m", material_digest="m", environment={"processor": "x", "cores": "2"},
    )  # fmt: skip
    figures = RoundFigures(
        round="R2", arm="kvdepot", role="tier", length=1024, verdict="VALID", runs=len(run_ttft_s),
        requests=1, failed=0, ttft=None, run_ttft_s=list(run_ttft_s), tpot=None, itl=None,
        tokens=tokens_of([]), attribution="usage", loaded_bytes=None, stored_bytes=None,
        device_read_bytes=None, needle=(0, 0),
    )  # fmt: skip
    return Summary(
        state=state, verdict=verdict, findings=[], rounds=[figures], ratios=[], equals=[],
        curve=None, break_even=[], loads=[], files=[],
    )  # fmt: skip


def test_a_difference_an_equality_and_neither():
    base = summary(1.0, 1.01, 0.99, 1.0)
    slower = summary(1.5, 1.52, 1.49, 1.5, nonce="b")
    same = summary(1.0, 1.01, 1.0, 0.99, nonce="c")
    loose = summary(0.5, 2.0, 1.0, 1.1, nonce="d")
    found = compare([("base", base), ("slower", slower), ("same", same), ("loose", loose)])
    assert [each.other for each in found.figures] == ["slower", "same", "loose"]
    assert [each.says for each in found.figures] == [
        "slower",
        "equal within 10 %",
        "no difference shown, and no equality either",
    ]
    first = found.figures[0]
    assert first.estimate.value == pytest.approx(1.5, rel=0.01)
    assert first.p_adjusted is not None
    assert first.estimate.p is not None
    # three tests are one family
    assert first.p_adjusted == pytest.approx(3 * first.estimate.p)
    (single,) = compare([("a", summary(1.0)), ("b", summary(2.0, nonce="b"))]).figures
    assert single.says == "one run: nothing can be said"


def test_what_is_not_comparable_is_refused_with_the_reason():
    base = summary(1.0, 1.0)
    assert list(differences(base, summary(1.0, nonce="b"))) == []
    for other, words in [
        (summary(1.0, nonce="b", output_tokens=64), "output tokens"),
        (summary(1.0, nonce="b", document_tokens=(2048,)), "document tokens"),
        (base, "same result"),
        (msgspec.structs.replace(summary(1.0, nonce="b"), tool="AIPerf"), "different tools"),
    ]:
        with pytest.raises(ConfigError, match=words):
            compare([("a", base), ("b", other)])
    bad = summary(1.0, 1.0, nonce="b", verdict="INVALID")
    with pytest.raises(ConfigError, match="INVALID"):
        compare([("a", base), ("b", bad)])
    assert compare([("a", base), ("b", bad)], allows_invalid=True).notes == ["b is INVALID"]
    with pytest.raises(ConfigError, match="two results"):
        compare([("a", base)])


def test_the_command_compares_files(tmp_path, capsys):
    for name, each in (("a", summary(1.0, 1.1)), ("b", summary(2.0, 2.1, nonce="b"))):
        (tmp_path / f"{name}.json").write_bytes(msgspec.json.encode(each))
    assert run(["bench", "compare", str(tmp_path / "a.json"), str(tmp_path / "b.json")]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["figures"][0]["figure"] == "R2 kvdepot 1024"
    (tmp_path / "c.json").write_bytes(b"{}")
    assert run(["bench", "compare", str(tmp_path / "a.json"), str(tmp_path / "c.json")]) == 2
    assert "no summary" in capsys.readouterr().err
    comparison = compare([("a", summary(1.0, 1.1)), ("b", summary(2.0, 2.1, nonce="b"))])
    print_comparison(comparison)
    assert "R2 kvdepot 1024" in capsys.readouterr().out


# results in the forms that the tools write, made for these tests

VLLM = {
    "duration": 3.0,
    "completed": 2,
    "input_lens": [100, 200, 50],
    "output_lens": [3, 2, 0],
    "ttfts": [0.5, 0.25, 0.0],
    "itls": [[0.1, 0.1], [0.2], []],
    "start_times": [10.0, 11.0, 12.0],
    "errors": ["", "", "refused"],
}
AIPERF = [
    {
        "metadata": {
            "request_start_ns": 10**9,
            "benchmark_phase": "profiling",
            "x_correlation_id": "s",
            "turn_index": 1,
        },
        "metrics": {
            "time_to_first_token": {"value": 500.0, "unit": "ms"},
            "request_latency": {"value": 700.0, "unit": "ms"},
            "input_sequence_length": {"value": 100, "unit": "tokens"},
            "output_sequence_length": {"value": 3, "unit": "tokens"},
            "usage_prompt_cache_read_tokens": {"value": 60, "unit": "tokens"},
        },
        "error": None,
    },
    {"metadata": {"request_start_ns": 0, "benchmark_phase": "warmup"}, "metrics": {}},
    {
        "metadata": {"request_start_ns": 2 * 10**9, "benchmark_phase": "profiling"},
        "metrics": {},
        "error": {"message": "refused"},
    },
]
GUIDELLM = {
    "benchmarks": [
        {
            "requests": {
                "successful": [
                    {
                        "request_start_time": 10.0,
                        "time_to_first_token_ms": 500.0,
                        "request_latency": 0.7,
                        "prompt_tokens": 100,
                        "output_tokens": 3,
                    }
                ],
                "incomplete": [],
                "errored": [{"request_start_time": 11.0, "error": "refused"}],
            }
        }
    ]
}
LMCACHE = (
    "request_id,successful,ttft,request_latency,num_input_tokens,num_output_tokens,decode_speed,"
    "submit_time,first_token_time,finish_time,error\n"
    "a,True,0.5,0.7,100,3,10.0,10.0,10.5,10.7,\n"
    "b,False,0.0,0.0,0,0,0.0,11.0,0.0,11.0,refused\n"
)
FILES = {
    "vllm bench serve": json.dumps(VLLM).encode(),
    "AIPerf": "\n".join(map(json.dumps, AIPERF)).encode(),
    "GuideLLM": json.dumps(GUIDELLM).encode(),
    "lmcache bench engine": LMCACHE.encode(),
}


@pytest.mark.parametrize("tool", TOOLS)
def test_other_tools_results_become_rows(tool):
    content = FILES[tool]
    assert tool_of(content, "f") == tool
    rows = rows_of_tool(content, tool, "f")
    first, last = rows[0], rows[-1]
    assert first.ttft_s == pytest.approx(0.5)
    assert first.latency_s == pytest.approx(0.7)
    assert (first.prompt_tokens, first.output_tokens) == (100, 3)
    assert first.is_ok
    # failures are kept
    assert not last.is_ok
    assert "refused" in last.error
    with pytest.raises(ConfigError, match=r"not a result|no requests"):
        rows_of_tool(b"{}", tool, "f")


def test_what_they_know_of_caches_is_kept():
    row = rows_of_tool(FILES["AIPerf"], "AIPerf", "f")[0]
    assert (row.cached_tokens, row.session, row.turn) == (60, "s", 1)


def test_an_import_is_a_result_with_its_doubts(tmp_path, capsys):
    path = tmp_path / "result.json"
    path.write_bytes(FILES["vllm bench serve"])
    found = import_result(path, tmp_path / "out", version="1")
    assert found.tool == "vllm bench serve"
    (load,) = found.loads
    assert (load.requests, load.failed) == (3, 1)
    said = " ".join(each.reason for each in found.findings)
    assert "not evaluated" in said
    assert "cannot be told apart" in said
    assert "refused" in said
    # again, into the same folder: the same result
    assert import_result(path, tmp_path / "out", version="1") == found
    assert run(["bench", "import", str(path), "--out", str(tmp_path / "out2")]) == 0
    assert "vllm bench serve" in capsys.readouterr().out
    assert (tmp_path / "out2" / "report.html").exists()


def test_what_cannot_be_imported_is_said(tmp_path):
    for content in (b"", b"{", b"[1]", b"a,b\n1,2\n", b'{"x": 1}'):
        with pytest.raises(ConfigError, match="no result that can be imported"):
            tool_of(content, "f")
    with pytest.raises(ConfigError, match="unknown tool"):
        rows_of_tool(b"", "none", "f")
