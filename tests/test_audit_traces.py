"""kvdepot.audit.traces: public formats to the token as by brute force, and what each can answer."""

from __future__ import annotations

import json

import pytest

from kvdepot.audit.run import AuditOptions, audit
from kvdepot.audit.sources import read_log, read_rows
from kvdepot.audit.traces import RAG_ORDER, are_chained, trace_record
from kvdepot.io.lines import Line
from tests.audit_oracle import chained_reuse, shared_file

OPTIONS = AuditOptions(capacity_tokens=200_000)


def rows_of(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.mark.parametrize("name", ["mooncake_conversation", "mooncake_synthetic"])
def test_mooncake(name):
    path = shared_file(f"traces/{name}.jsonl")
    rows = sorted(rows_of(path), key=lambda row: row["timestamp"])
    tokens = [
        [min(512, row["input_length"] - 512 * n) for n in range(len(row["hash_ids"]))]
        for row in rows
    ]
    expected = chained_reuse([0] * len(rows), [row["hash_ids"] for row in rows], tokens)
    result = audit(read_log(path), name, OPTIONS)
    assert result.input.kind == "chained trace"
    assert result.totals.input_tokens == sum(row["input_length"] for row in rows)
    assert result.totals.reused_tokens == expected
    assert result.totals.block_tokens == 512
    assert result.findings == []
    assert any("causes" in each for each in result.input.cannot_answer)
    totals = result.totals
    assert totals.follow_up_reused_tokens + totals.first_ask_reused_tokens == expected
    assert result.capacity_curve[-1].lru_tokens == expected
    assert result.verdict[-1].what == "more_gpus"


def test_claude_code_sessions():
    path = shared_file("traces/weka_cc_sample.jsonl")
    rows = sorted(rows_of(path), key=lambda row: row["t"])
    ids = [
        [n for first, last in row["hash_id_ranges"] for n in range(first, last + 1)] for row in rows
    ]
    tokens = [
        [
            max(0, min(row["block_size"], row["in"] - row["block_size"] * n))
            for n in range(len(each))
        ]
        for row, each in zip(rows, ids, strict=True)
    ]
    # ids are chained and local to a conversation: reuse is the leading run of known ids
    known: dict[str, set[int]] = {}
    expected = 0
    for row, each, sizes in zip(rows, ids, tokens, strict=True):
        seen = known.setdefault(row["conv"], set())
        hits = next((n for n, block in enumerate(each) if block not in seen), len(each))
        expected += sum(sizes[:hits])
        seen.update(each)
    result = audit(read_log(path), "weka", OPTIONS)
    assert result.totals.reused_tokens == expected
    assert result.totals.input_tokens == sum(row["in"] for row in rows)
    # the README's share for all 710 conversations
    assert result.totals.token_share == pytest.approx(0.963, abs=0.02)


def test_ragpulse():
    path = shared_file("traces/ragpulse.jsonl")
    rows = sorted(rows_of(path), key=lambda row: float(row["timestamp"]))
    ids = [[n for part in RAG_ORDER for n in row["hash_ids"].get(part) or []] for row in rows]
    tokens = []
    for row, each in zip(rows, ids, strict=True):
        share, rest = divmod(row["input_length"], len(each))
        tokens.append([share + (n < rest) for n in range(len(each))])
    expected = chained_reuse([0] * len(rows), ids, tokens)
    result = audit(read_log(path), "ragpulse", OPTIONS)
    assert result.input.kind == "content trace"
    assert result.totals.input_tokens == sum(row["input_length"] for row in rows)
    assert result.totals.reused_tokens == expected
    # the changing piece of the system prompt masks the order of the passages
    assert [finding.place for finding in result.findings] == ["sys_prompt", "passages_ids"]
    assert (result.findings[1].alone_tokens or 0) < 0.2 * (result.findings[1].proved_tokens or 0)
    assert result.waterfall[-1].reused_tokens == expected + sum(
        finding.proved_tokens or 0 for finding in result.findings
    )


def test_chained_and_content_ids_are_told_apart():
    assert are_chained([(0, [1, 2, 3]), (0, [1, 2, 4])])
    assert not are_chained([(0, [1, 2, 3]), (0, [1, 3])])
    # ids that are local to a conversation do not meet
    assert are_chained([(0, [1, 2]), (1, [2, 1])])


def lines(*rows):
    return [Line(number, json.dumps(row).encode()) for number, row in enumerate(rows, start=1)]


def test_bailian_rows_have_blocks_of_16_and_seconds():
    row = {
        "chat_id": 1,
        "parent_chat_id": -1,
        "timestamp": 61.5,
        "input_length": 40,
        "hash_ids": [1, 2, 3],
    }
    record = trace_record(row, 1)
    assert record.trace.tokens == [16, 16, 8]
    assert record.time_s == 61.5


def test_a_row_s_own_block_size_is_honoured():
    row = {"timestamp": 2000, "input_length": 100, "block_size": 64, "hash_ids": [1, 2]}
    record = trace_record(row, 1)
    assert record.trace.tokens == [64, 36]
    assert record.time_s == 2.0


@pytest.mark.parametrize(
    "row",
    [
        {"timestamp": 0, "input_length": "many", "hash_ids": [1]},
        {"timestamp": 0, "input_length": 10, "hash_ids": [True]},
        {"timestamp": 0, "input_length": 10, "block_size": 0, "hash_ids": [1]},
        {"timestamp": 0, "input_length": -5, "hash_ids": [1]},
        {"conv": "a", "t": 0, "in": 10, "hash_id_ranges": [[0, 10**12]]},
        {"conv": "a", "t": 0, "in": 10, "hash_id_ranges": [[0]]},
    ],
)
def test_a_broken_row_is_named_and_the_rest_is_read(row):
    good = {"timestamp": 0, "input_length": 512, "hash_ids": [1]}
    reading = read_rows(lines(good, row, good))
    assert len(reading.records) == 2
    assert reading.broken == 1
    assert reading.problems[0].line == 2


def test_arrivals_alone_say_nothing_about_reuse():
    reading = read_rows(lines({"timestamp": "2023-11-16 18:17:03", "context_tokens": 4808}))
    assert reading.records == []
    assert "nothing about reuse" in reading.problems[0].what
