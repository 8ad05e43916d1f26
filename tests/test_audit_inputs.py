"""kvdepot.audit.sources and what it reads with: kvdepot.audit.chatlog, kvdepot.audit.enginelog,
kvdepot.audit.records, kvdepot.audit.sanity, kvdepot.io.lines; formats, and hostile input.
"""

from __future__ import annotations

import gzip
import json
import random
import re
import zlib
from typing import Any

import pytest

from kvdepot.audit.records import parse_time
from kvdepot.audit.run import AuditOptions, audit
from kvdepot.audit.sanity import distrust, in_order
from kvdepot.audit.sources import read_log, read_rows
from kvdepot.errors import ConfigError
from kvdepot.io.lines import Line, read_lines, read_text
from tests.audit_planted import planted

MESSAGES = [{"role": "system", "content": "Be kind."}, {"role": "user", "content": "Hello"}]


def read(*rows):
    return read_rows(
        Line(number, row if isinstance(row, bytes) else json.dumps(row).encode())
        for number, row in enumerate(rows, start=1)
    )


def only(row):
    reading = read(row)
    assert not reading.problems, reading.problems
    (record,) = reading.records
    return record


# --- wrappers


def test_an_openai_body_with_its_facts():
    record = only(
        {
            "request_id": "r1",
            "session_id": "s1",
            "timestamp": "2026-10-20T09:00:00Z",
            "model": "m",
            "user": "ada",
            "cache_salt": "x",
            "messages": MESSAGES,
            "usage": {"prompt_tokens": 30, "prompt_tokens_details": {"cached_tokens": 16}},
        }
    )
    assert record.body["messages"] == MESSAGES
    assert (record.request_id, record.session, record.user) == ("r1", "s1", "ada")
    assert record.extra == (("cache_salt", "x"), ("model", "m"))
    assert (record.usage_prompt, record.usage_cached) == (30, 16)
    assert record.time_s == parse_time("2026-10-20T09:00:00+00:00")


@pytest.mark.parametrize(
    "row",
    [
        # Azure and OpenAI batch
        {"custom_id": "r1", "method": "POST", "url": "/v1/chat/completions",
         "body": {"model": "m", "messages": MESSAGES}},
        # LiteLLM's logging payload
        {"id": "r1", "model": "m", "messages": MESSAGES, "startTime": 1.79e9, "end_user": "ada",
         "response": {"usage": {"prompt_tokens": 30}}},
        # Langfuse
        {"id": "r1", "type": "GENERATION", "startTime": "2026-10-20T09:00:00.000Z", "model": "m",
         "input": {"messages": MESSAGES}, "usageDetails": {"input": 30}},
        {"id": "r1", "type": "GENERATION", "model": "m", "input": MESSAGES},
        {"id": "r1", "model": "m", "input": json.dumps(MESSAGES)},
        # Azure API management
        {"CorrelationId": "r1", "TimeGenerated": "2026-10-20T09:00:00Z", "model": "m",
         "RequestMessages": json.dumps(MESSAGES), "PromptTokens": 30},
        # OpenTelemetry
        {"spanId": "r1", "attributes": {"gen_ai.request.model": "m", "gen_ai.input.messages": json.dumps(
            [{"role": each["role"], "parts": [{"type": "text", "content": each["content"]}]}
             for each in MESSAGES])}},
        {"resourceSpans": [{"scopeSpans": [{"spans": [{"spanId": "r1", "attributes": [
            {"key": "gen_ai.request.model", "value": {"stringValue": "m"}},
            {"key": "gen_ai.system_instructions", "value": {"stringValue": json.dumps(
                [{"type": "text", "content": "Be kind."}])}},
            {"key": "gen_ai.input.messages", "value": {"stringValue": json.dumps(
                [{"role": "user", "parts": [{"type": "text", "content": "Hello"}]}])}}]}]}]}]},
    ],
)  # fmt: skip
def test_wrappers_come_down_to_the_same_body(row):
    record = only(row)
    found = [{"role": each["role"], "content": each["content"]} for each in record.body["messages"]]
    assert found == MESSAGES
    assert record.request_id == "r1"
    assert ("model", "m") in record.extra


def test_tool_calls_and_reasoning_of_spans_are_kept():
    parts = [
        {"type": "reasoning", "content": "hm"},
        {"type": "text", "content": "ok"},
        {"type": "tool_call", "id": "c", "name": "f", "arguments": {"a": 1}},
    ]
    spoken = [
        {"role": "user", "parts": [{"type": "text", "content": "x"}]},
        {"role": "assistant", "parts": parts},
    ]
    record = only({"attributes": {"gen_ai.input.messages": json.dumps(spoken)}})
    answer = record.body["messages"][1]
    assert answer["reasoning_content"] == "hm"
    assert json.loads(answer["tool_calls"][0]["function"]["arguments"]) == {"a": 1}


def test_prompts_and_token_ids():
    assert only({"prompt": "one two", "model": "m"}).prompt == "one two"
    assert only({"prompt": [5, 6, 7]}).ids.tolist() == [5, 6, 7]
    assert only({"prompt_token_ids": [5, 6, 7], "messages": MESSAGES}).ids.tolist() == [5, 6, 7]


def test_a_document_over_many_lines_is_one_list():
    text = json.dumps([{"messages": MESSAGES}, {"messages": MESSAGES}], indent=1)
    reading = read(*[line.encode() for line in text.splitlines()])
    assert len(reading.records) == 2
    assert len(read(json.dumps([{"messages": MESSAGES}]).encode()).records) == 1


@pytest.mark.parametrize(
    ("value", "seconds"),
    [
        (1790000000, 1.79e9),
        (1790000000123, 1790000000.123),
        (1790000000123456789, 1790000000.123456789),
        ("1790000000.5", 1790000000.5),
        ("2023-11-16 18:17:03.9799600", 1700158623.97996),
        (3.5, 3.5),
        (None, None),
        (True, None),
        ("yesterday", None),
        (float("nan"), None),
        (1e300, None),
    ],
)
def test_times_in_any_unit(value, seconds):
    found = parse_time(value)
    assert found == (None if seconds is None else pytest.approx(seconds, abs=1e-3))


# --- what an engine writes


def debug_line(number, ids, prompt="'hi'"):
    stamp = f"DEBUG 10-20 09:00:{number:02d} [logger.py:50]"
    return f"{stamp} Request cmpl-{number} details: prompt: {prompt}, prompt_token_ids: {ids}, more".encode()


def test_vllm_debug_lines():
    ids = list(range(40))
    noise = [
        b"INFO 10-20 09:00:01 Received request cmpl-1: params: x, lora_request: None.",
        b"# other",
    ]
    reading = read(
        *noise, debug_line(1, ids), debug_line(2, ids), debug_line(3, "None", r"'it\'s'")
    )
    assert reading.kind == "engine log"
    assert [record.ids.tolist() for record in reading.records[:2]] == [ids, ids]
    assert reading.records[2].prompt == "it's"
    assert reading.records[1].time_s - reading.records[0].time_s == 1
    result = audit(reading, "log", AuditOptions())
    assert result.totals.reused_tokens == 32


def test_vllm_info_lines_have_no_prompts_and_that_is_said(tmp_path):
    path = tmp_path / "log"
    path.write_text(
        "INFO 10-20 09:00:01 Received request cmpl-1: params: SamplingParams(n=1)\n" * 3
    )
    with pytest.raises(ConfigError, match="only at DEBUG"):
        read_log(path)


def test_prompts_cut_by_max_log_len_are_not_trusted():
    rng = random.Random(1)
    lines = [
        debug_line(n, [rng.randrange(1000) for _ in range(100 if n % 2 else 20 + n)])
        for n in range(30)
    ]
    result = audit(read(*lines), "log", AuditOptions())
    assert not result.is_trustworthy
    assert "cut" in result.distrust[0]
    assert any("--max-log-len" in each for each in result.input.problems)


def stored(hashes, parent, ids, **more):
    return {"type": "BlockStored", "block_hashes": hashes, "parent_block_hash": parent,
            "token_ids": ids, "block_size": 4, **more}  # fmt: skip


def test_kv_events_give_back_the_prompts_as_far_as_they_were_stored():
    head, tail, other = [1, 2, 3, 4], [5, 6, 7, 8], [9, 9, 9, 9]
    reading = read(
        {"ts": 1.0, "events": [stored([11], None, head)]},
        {"ts": 2.0, "events": [stored([12, 13], 11, tail + other)]},
        [3.0, [["BlockStored", [14], 11, other, 4, None]]],
        {"ts": 4.0, "events": [{"type": "AllBlocksCleared"}]},
        {"ts": 5.0, "events": [stored([20], 999, tail)]},
    )
    assert reading.kind == "events"
    assert [record.ids.tolist() for record in reading.records] == [
        head + tail + other,
        head + other,
    ]
    assert "before the log began" in reading.problems[0].what
    result = audit(reading, "events", AuditOptions(block_tokens=4))
    assert result.totals.reused_tokens == 4
    assert "hits" in result.input.cannot_answer


# --- packing


def test_gzip_is_told_by_content_and_damage_ends_the_lines(tmp_path):
    rows = b"\n".join(json.dumps({"messages": MESSAGES, "n": n}).encode() for n in range(2000))
    packed = gzip.compress(rows)
    path = tmp_path / "log.jsonl"
    path.write_bytes(packed)
    assert len(read_log(path).records) == 2000
    path.write_bytes(packed[: len(packed) // 2])
    reading = read_log(path)
    assert 0 < len(reading.records) < 2000
    assert "damaged" in reading.problems[-1].what
    path.write_bytes(packed[:40] + bytes([packed[40] ^ 0xFF]) + packed[41:])
    with pytest.raises((ConfigError, zlib.error)):
        read_log(path)


def test_zstd_where_the_library_is(tmp_path, monkeypatch):
    zstd = pytest.importorskip("backports.zstd")
    path = tmp_path / "log"
    path.write_bytes(zstd.compress(json.dumps({"messages": MESSAGES}).encode()))
    assert len(read_log(path).records) == 1


def test_zstd_without_the_library_says_what_to_do(tmp_path, monkeypatch):
    monkeypatch.setattr(
        "importlib.import_module", lambda name: (_ for _ in ()).throw(ImportError(name))
    )
    path = tmp_path / "log"
    path.write_bytes(b"\x28\xb5\x2f\xfd" + bytes(20))
    with pytest.raises(ConfigError, match="zstd") as caught:
        read_log(path)
    assert "kvdepot[audit]" in caught.value.hint


def test_files_that_cannot_be_read(tmp_path):
    for call in (lambda: read_log(tmp_path / "none"), lambda: read_text(tmp_path)):
        with pytest.raises(ConfigError, match="cannot read"):
            call()
    (tmp_path / "x").write_bytes(b"\xff")
    with pytest.raises(ConfigError, match="UTF-8"):
        read_text(tmp_path / "x")
    (tmp_path / "x").write_text("\u00e9")
    assert read_text(tmp_path / "x") == "\u00e9"


def test_a_gigantic_line_is_dropped_and_the_rest_is_read(tmp_path):
    path = tmp_path / "log"
    row = json.dumps({"messages": MESSAGES}).encode()
    path.write_bytes(row + b"\n" + b'{"messages": "' + b"x" * 3_000_000 + b'"}\n' + row)
    lines = list(read_lines(path, line_bytes_max=10_000))
    assert [line.number for line in lines] == [1, 2, 3]
    assert len(lines[1].data) <= 1024
    reading = read_log(path, line_bytes_max=10_000)
    assert len(reading.records) == 2
    assert reading.problems[0].line == 2
    assert "longer than 10000 bytes (3000017" in reading.problems[0].what


# --- hostile input


@pytest.mark.parametrize(
    ("line", "what"),
    [
        (b'{"messages": [', "not JSON"),
        (b'{"messages": "x"}', "no prompt in it"),
        (b"{}", "no prompt in it"),
        (b"[1, 2]", "int where an object is expected"),
        (b"\x00\x00\x00", "NUL"),
        (b'{"a": ' * 5000 + b"1" + b"}" * 5000, "not JSON|nested"),
        (b'{"messages": [{"role": 5}]}', "no prompt in it"),
        (b'{"messages": [], "prompt": ""}' + b"\x00", "not JSON"),
    ],
)
def test_a_broken_line_is_named_and_the_rest_is_read(line, what):
    good = {"messages": MESSAGES}
    reading = read(good, line, good)
    assert len(reading.records) == 2
    assert reading.broken >= 1
    assert reading.problems[0].line == 2
    assert re.search(what, reading.problems[0].what)


def test_a_log_with_many_broken_lines_is_not_trusted():
    result = audit(read(*[{"messages": MESSAGES}] * 10, *[b"{"] * 5), "x", AuditOptions())
    assert not result.is_trustworthy
    assert "5 of 15 lines" in result.distrust[0]
    assert len(result.input.problems) == 5


def test_texts_of_any_kind_go_through_to_the_end():
    odd = [
        "\ud800 lone",
        "nul \x00 inside",
        "\ufeffbom",
        "e\u0301 \u00e9",
        "\u4e2d\u6587" * 50,
        "",
        " ",
    ]
    rows: list[Any] = [{"messages": [{"role": "user", "content": text}]} for text in odd]
    rows += [
        {"messages": [{"role": "user", "content": None}]},
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}, "b", 5, None]}]},
        {
            "messages": [
                {"role": "assistant", "content": {"a": 1}, "tool_calls": ["x", {"function": 1}]}
            ]
        },
        {
            "messages": [{"role": "user", "content": "x"}],
            "tools": "none",
            "chat_template_kwargs": 7,
        },
        {"messages": [{"role": "user", "content": "x"}], "tools": [1, None, {"function": "f"}]},
    ]
    reading = read(*rows, b'{"messages": [{"role": "user", "content": "caf\xe9"}]}')
    result = audit(reading, "x", AuditOptions())
    assert result.totals.requests == len(rows) + 1
    assert any("UTF-8" in each for each in result.input.problems)


@pytest.mark.parametrize(
    "line",
    [
        rb"DEBUG Request r2 details: prompt: '\x4 \N{no such sign}', prompt_token_ids: None",
        b"DEBUG Request r2 details: prompt: 'x', prompt_token_ids: [1, 99999999999]",
        b"DEBUG Request r2 details: prompt: 'x', prompt_token_ids: [1 2]",
    ],
)
def test_a_broken_line_of_an_engine_s_log_is_named(line):
    good = b"DEBUG Request r1 details: prompt: 'one two', prompt_token_ids: None"
    reading = read(good, line, good)
    assert (reading.kind, len(reading.records), reading.broken) == ("engine log", 2, 1)
    assert reading.problems[0].line == 2
    assert "vLLM's log" in reading.problems[0].what


def test_events_that_go_in_circles_or_are_none_leave_the_others():
    reading = read(
        stored([1], None, [5, 6], block_size=2),
        stored([2], 1, [7, 8], block_size=2, session_id=[1]),
        stored([1], 2, [9, 9], block_size=2),
        stored([2, 2], 2, [1, 2, 3, 4], block_size="two"),
        {"type": "BlockStored", "events": 5},
        stored([7], None, [1, 1 << 40]),
    )
    assert [record.ids.tolist() for record in reading.records] == [[5, 6, 7, 8]] * 2
    assert [record.session for record in reading.records] == ["[1]", None]
    assert reading.broken == 2
    assert [each.line for each in reading.problems] == [5, 6]


def test_ten_thousand_tools_and_a_schema_that_refers_to_itself():
    tool = {
        "type": "function",
        "function": {"name": "f", "parameters": {"$defs": {"n": {"$ref": "#/$defs/n"}}}},
    }
    deep: dict[str, Any] = {}
    value = deep
    for _ in range(20):
        value["properties"] = {}
        value = value["properties"]
    many = [
        {"type": "function", "function": {"name": f"f{n}", "parameters": deep}}
        for n in range(10_000)
    ]
    rows = [{"messages": MESSAGES, "tools": [tool]}] * 3 + [{"messages": MESSAGES, "tools": many}]
    result = audit(read(*rows), "x", AuditOptions())
    assert result.totals.requests == 4


@pytest.mark.parametrize("is_text", [False, True])
def test_a_schema_too_deep_to_compare_is_named(is_text):
    def row(levels, number):
        schema: dict[str, Any] = {}
        for _ in range(levels):
            schema = {"properties": schema, "number": number}
        tools = [{"type": "function", "function": {"name": "f", "parameters": schema}}]
        body = {"messages": MESSAGES, "tools": tools}
        return {"timestamp": number, "input": json.dumps(body) if is_text else body}

    reading = read(row(140, 1), row(300, 2), row(140, 3))
    assert len(reading.records) == 2
    assert [each.line for each in reading.problems] == [2]
    assert re.search("too deeply|no prompt in it", reading.problems[0].what)
    assert audit(reading, "x", AuditOptions()).totals.requests == 2


# --- order, doubles, usage


def test_a_log_back_to_front_or_mixed_gives_the_same_result():
    rows = planted("time_in_system").rows
    whole = audit(read(*rows), "x", AuditOptions())
    turned = audit(read(*reversed(rows)), "x", AuditOptions())
    mixed = audit(read(*random.Random(1).sample(rows, len(rows))), "x", AuditOptions())
    assert (whole.input.order, turned.input.order, mixed.input.order) == (
        "in order",
        "back to front",
        "mixed",
    )
    assert whole.totals == turned.totals == mixed.totals
    assert whole.waterfall == turned.waterfall == mixed.waterfall


def test_rows_that_were_logged_twice_count_once():
    rows = planted("clean_singles").rows
    result = audit(read(*rows, *rows[:30]), "x", AuditOptions())
    assert result.totals.requests == len(rows)
    assert result.input.duplicate_rows == 30


def test_a_log_without_times_is_taken_as_it_is():
    rows = [{**row, "timestamp": None} for row in planted("clean_singles").rows]
    reading = read(*rows)
    ordered = in_order(reading)
    assert ordered.order == "without times"
    result = audit(read(*rows), "x", AuditOptions())
    assert "anything about time" in result.input.cannot_answer
    assert result.findings == []


def test_prompts_that_the_logger_cut_are_not_trusted():
    cut = {"messages": [{"role": "user", "content": "text... (litellm_truncated 900 chars)"}]}
    reading = read(*[{"messages": MESSAGES}] * 10, cut)
    assert reading.cut == 1
    assert distrust(reading, (0, 0), is_estimate=True)


def test_another_tokenizer_than_the_server_s_is_noticed():
    reading = read({"messages": MESSAGES})
    assert distrust(reading, (100, 50), is_estimate=False)
    assert not distrust(reading, (100, 50), is_estimate=True)
    assert not distrust(reading, (100, 1), is_estimate=False)
