"""kvdepot.cli.audit and what it prints and writes: kvdepot.audit.gates, kvdepot.audit.result,
kvdepot.audit.summary, kvdepot.audit.page, kvdepot.audit.words, kvdepot.audit.verdict,
kvdepot.report.lines; exit statuses.
"""

from __future__ import annotations

import io
import json
import os
import re
import shutil
import subprocess

import msgspec
import pytest

from kvdepot.audit.causes import CAUSES
from kvdepot.audit.gates import exit_status, parse_points
from kvdepot.audit.page import audit_page, short_count
from kvdepot.audit.result import AuditResult, decode_audit, encode_audit
from kvdepot.audit.run import AuditOptions, audit
from kvdepot.audit.sources import read_log
from kvdepot.audit.summary import summary
from kvdepot.audit.verdict import duration
from kvdepot.audit.words import _TEXTS, EDITS, in_language, say
from kvdepot.cli import main as cli_main
from kvdepot.errors import ConfigError
from kvdepot.report.lines import Line, Mark, line_chart
from tests.audit_planted import planted
from tests.children import run_python


def run(capsys, *arguments):
    status = cli_main.run(["audit", *[str(argument) for argument in arguments]])
    out, err = capsys.readouterr()
    return status, out, err


@pytest.fixture(scope="module")
def logs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("logs")
    for name in ("clock_and_passages", "clean_singles"):
        rows = planted(name).rows
        text = "\n".join(json.dumps(row) for row in rows)
        (folder / f"{name}.jsonl").write_text(text)
    return folder


@pytest.fixture(scope="module")
def result(logs):
    return audit(
        read_log(logs / "clock_and_passages.jsonl"), "clock_and_passages.jsonl", AuditOptions()
    )


@pytest.fixture(scope="module")
def clean(logs):
    return audit(read_log(logs / "clean_singles.jsonl"), "clean_singles.jsonl", AuditOptions())


# --- the command


def test_a_faulty_log_in_a_minute(capsys, logs, tmp_path):
    page, data = tmp_path / "out" / "page.html", tmp_path / "out" / "result.json"
    status, out, err = run(
        capsys, logs / "clock_and_passages.jsonl", "--html", page, "--json", data
    )
    assert (status, err) == (0, "")
    assert "[time] A time or date stands before the body" in out
    assert "messages[0] (system)" in out
    assert "points proved" in out
    assert max(len(line) for line in out.splitlines()) <= 110
    found = decode_audit(data.read_bytes(), "x")
    assert found.findings[0].cause == "time"
    assert page.read_text().startswith("<!doctype html>")


def test_json_on_standard_output_and_a_log_on_standard_input(capsys, logs, monkeypatch):
    raw = (logs / "clean_singles.jsonl").read_bytes()
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(raw)))
    status, out, _ = run(capsys, "-", "--json", "-")
    assert status == 0
    assert decode_audit(out.encode(), "x").input.name == "standard input"


@pytest.mark.parametrize(
    ("arguments", "status", "said"),
    [
        (["--fail-under", "0.5"], 2, "is under 0.5"),
        (["--fail-under", "0.001"], 0, ""),
        (["--fail-on", "time"], 2, "time at messages[0] (system)"),
        (["--fail-on", "any"], 2, "piece_order at"),
        (["--fail-on", "tool_order"], 0, ""),
        (["--fail-on", "nonsense"], 1, "no such cause"),
        (["--language", "fr"], 1, "no such language"),
        (["--max-regress", "lots"], 1, "not percentage points"),
        (["--model", "/no/such/folder"], 1, "no such model folder"),
        (["--block-tokens", "0"], 1, "must be positive"),
        (["--baseline", "/no/such/file"], 1, "cannot read"),
        (["--html", "/proc/no/page.html"], 1, "cannot write"),
    ],
)
def test_exit_statuses(capsys, logs, arguments, status, said):
    found, _, err = run(capsys, logs / "clock_and_passages.jsonl", *arguments)
    assert found == status
    assert said in err
    assert "Traceback" not in err


def test_an_input_that_cannot_be_trusted_is_status_3(capsys, logs, tmp_path):
    path = tmp_path / "broken.jsonl"
    good = (logs / "clean_singles.jsonl").read_bytes().splitlines()[:20]
    path.write_bytes(b"\n".join([*good, b'{"messages": [', b"\0\0", b"[1"]))
    status, out, err = run(capsys, path)
    assert status == 3
    assert "cannot be trusted" in out
    assert "line 21: not JSON" in out
    assert "line 22: holds NUL bytes" in out
    assert "3 of 23 lines" in err


def test_names_that_are_no_text_are_written_all_the_same(capsys, tmp_path):
    rows = []
    for number in range(40):
        text = f"lone \ud800 {'words of a document ' * 40}{number}"
        names = {"user": "\udfff", "session_id": "\ud800", "cache_salt": f"\ud800{number % 2}"}
        rows.append({**names, "timestamp": number, "messages": [{"role": "user", "content": text}]})
    log = tmp_path / os.fsdecode(b"odd\xff.jsonl")
    log.write_text("\n".join(map(json.dumps, rows)))
    page, data = tmp_path / "page.html", tmp_path / "result.json"
    status, out, _ = run(capsys, log, "--html", page, "--json", data, "--show-values")
    assert status == 0
    assert "\udcff" not in out
    assert decode_audit(data.read_bytes(), "x").input.name == "odd?.jsonl"
    assert "odd?.jsonl" in page.read_text()


def test_an_empty_input_is_status_1(capsys, tmp_path):
    (tmp_path / "x").write_text("\n\n")
    status, out, err = run(capsys, tmp_path / "x")
    assert (status, out) == (1, "")
    assert err.startswith("error: ")
    assert "hint: " in err


def test_a_baseline_notices_what_was_lost(capsys, logs, tmp_path):
    base = tmp_path / "base.json"
    assert run(capsys, logs / "clean_singles.jsonl", "--json", base)[0] == 0
    assert run(capsys, logs / "clean_singles.jsonl", "--baseline", base)[0] == 0
    status, _, err = run(capsys, logs / "clock_and_passages.jsonl", "--baseline", base)
    assert status == 2
    assert "points against the baseline" in err
    allowed = ("--baseline", base, "--max-regress", "99pp")
    assert run(capsys, logs / "clock_and_passages.jsonl", *allowed)[0] == 0
    (tmp_path / "other.json").write_text("{}")
    assert run(capsys, logs / "clean_singles.jsonl", "--baseline", tmp_path / "other.json")[0] == 1


def test_gates_of_a_result_that_cannot_be_trusted(clean):
    doubtful = msgspec.structs.replace(clean, is_trustworthy=False, distrust=["why"])
    assert exit_status(doubtful, fail_under=1.0) == (3, ["why"])
    assert exit_status(clean) == (0, [])
    assert parse_points(" 2 % ") == parse_points("2pp") == 2.0


# --- the result


def test_the_json_comes_back_equal_and_knows_its_schema(result):
    assert decode_audit(encode_audit(result), "x") == result
    assert result.schema == "kvdepot.audit/1"
    other = json.loads(encode_audit(result))
    other["schema"] = "kvdepot.audit/999"
    with pytest.raises(ConfigError, match="999"):
        decode_audit(json.dumps(other).encode(), "x")
    # a later release may add fields
    other = json.loads(encode_audit(result)) | {"new": 1}
    assert decode_audit(json.dumps(other).encode(), "x") == result


def test_the_account_adds_up(result, clean):
    for each in (result, clean):
        totals = each.totals
        assert totals.reused_tokens + totals.computed_tokens == totals.input_tokens
        assert (
            totals.follow_up_reused_tokens + totals.first_ask_reused_tokens == totals.reused_tokens
        )
        assert each.waterfall[0].reused_tokens == totals.reused_tokens
        assert each.capacity_curve[-1].lru_tokens == totals.reused_tokens
        assert each.keep_curve[-1].reused_tokens <= totals.reused_tokens
        assert [line.what for line in each.verdict][-1] == "more_gpus"
        assert sorted(line.what for line in each.verdict) == [
            "cache",
            "more_gpus",
            "reorder",
            "route",
        ]
        reused = [point.lru_tokens for point in each.capacity_curve]
        assert reused == sorted(reused)
    assert result.verdict[0].what == "reorder"
    assert result.verdict[0].tokens == sum(finding.proved_tokens for finding in result.findings)
    strip = result.findings[0].example.strip
    assert min(strip.hit_tokens, strip.gap_tokens, strip.body_tokens, strip.new_tokens) >= 0
    assert strip.body_tokens > strip.hit_tokens


# --- for people


def test_the_summary_of_a_clean_log_says_so(clean):
    text = summary(clean)
    assert "No prompt breaks that are worth an edit." in text
    assert "no edit of the prompts is worth it" in text


def without_tags(page):
    return re.sub(r"<[^>]+>", " ", page)


def test_the_page_loads_nothing_and_says_what_was_found(result):
    page = audit_page(result)
    assert not re.search(r"(?:src|href)=|https?://|@import|url\(", page)
    text = without_tags(page)
    for word in ("Verdict", "A time or date stands before the body", "Several instances", "LRU"):
        assert word in text
    assert page.count("<svg") >= 2
    assert 'class="strip"' in page
    assert '<html lang="en">' in page


def test_the_chinese_page_is_chinese(result):
    page = audit_page(result, "zh")
    assert '<html lang="zh">' in page
    text = without_tags(page)
    for word in ("结论", "正文之前有时间或日期", "多实例", "修改"):
        assert word in text
    assert "Verdict" not in text
    assert "A time or date" not in text
    assert "values in" not in text
    assert "结论" in summary(result, "zh")


def test_every_text_is_in_both_languages():
    han = re.compile("[\u4e00-\u9fff]")
    for english, chinese in [*EDITS.values(), *_TEXTS.values()]:
        assert not han.search(english)
        assert han.search(chinese) or chinese in ("LRU", "token")
    for cause in CAUSES.values():
        assert han.search(cause.title_zh)
        assert han.search(cause.advice_zh)
    assert in_language("4 values in 9 requests", "zh") == "9 个请求中有 4 个值"
    assert in_language("4 values in 9 requests", "en") == "4 values in 9 requests"
    assert say("verdict") == "Verdict"


def test_text_from_the_log_is_escaped(logs):
    rows = planted("user_profile_in_system").rows
    for row in rows:
        row["messages"][0]["content"] = row["messages"][0]["content"].replace(
            "You talk to ", "<b>&x "
        )
    path = logs / "marked.jsonl"
    path.write_text("\n".join(json.dumps(row) for row in rows))
    page = audit_page(audit(read_log(path), "<script>", AuditOptions(show_values=True)))
    assert "<script>" not in page
    assert "<b>&x" not in page
    assert "&lt;b&gt;&amp;x" in page


def test_numbers_for_people():
    assert [short_count(each) for each in (12, 1234, 2_500_000, 7e9)] == [
        "12",
        "1.23 k",
        "2.5 M",
        "7 G",
    ]
    assert [duration(each) for each in (1.5, 150, 9000, 300000)] == [
        "1.5 s",
        "2.5 min",
        "2.5 h",
        "3.47 d",
    ]


def test_a_chart_of_nothing_is_nothing():
    def chart_of(lines, *, marks=()):
        return line_chart(lines, label="x", x_label="x", x_text=str, y_text=str, marks=marks)

    assert chart_of([]) == ""
    assert chart_of([Line("a", [(1, 1)])]) == ""
    lines = [Line("a", [(1, 0), (10, 2)]), Line("b", [(1, 1), (10, 1)])]
    chart = chart_of(lines, marks=[Mark(3, "m")])
    assert chart.count("<polyline") == 2
    assert ">m</text>" in chart


@pytest.mark.slow
def test_a_browser_shows_the_page_without_scrolling_sideways(result, tmp_path):
    browser = shutil.which("chromium") or shutil.which("google-chrome")
    if browser is None:
        pytest.skip("no browser on this machine")
    for language in ("en", "zh"):
        path = tmp_path / f"{language}.html"
        size = "document.documentElement.scrollWidth + ' ' + innerWidth"
        probe = f"<script>document.title = {size}</script></body>"
        path.write_text(audit_page(result, language).replace("</body>", probe))
        done = subprocess.run(
            [browser, "--headless", "--no-sandbox", "--disable-gpu", "--window-size=500,900",
             f"--user-data-dir={tmp_path / 'profile'}", "--dump-dom", f"file://{path}"],
            capture_output=True, text=True, timeout=100,
        )  # fmt: skip
        wide, window = map(int, re.search(r"<title>(\d+) (\d+)</title>", done.stdout).groups())
        assert wide <= window


def test_help_needs_no_extra_library():
    done = run_python(
        "from kvdepot.cli.main import run\nassert run(['audit', '--help']) == 0\n"
        "print(sorted({'numpy', 'tokenizers', 'jinja2', 'aiohttp'} & set(sys.modules)))"
    )
    assert done.stdout.splitlines()[-1] == "[]", done.stderr
    assert "--fail-under" in done.stdout


def test_a_result_is_what_the_schema_says():
    assert set(AuditResult.__struct_fields__) >= {"schema", "findings", "waterfall", "verdict"}
