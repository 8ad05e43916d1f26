"""kvdepot.audit.run on planted faults: cause and place right, gain as by brute force, no false alarm.

The blind scenarios were not looked at while the classifiers were made: `-k blind` gives their score, and
`-k seen` the score of the others. Together they are the tests of the modules that have no test of their
own, because only together they mean something: kvdepot.audit.peel, kvdepot.audit.sites,
kvdepot.audit.site, kvdepot.audit.probes, kvdepot.audit.breaks, kvdepot.audit.spans, kvdepot.audit.edits,
kvdepot.audit.edits_history, kvdepot.audit.findings, kvdepot.audit.engine, kvdepot.audit.apps,
kvdepot.audit.parts, kvdepot.audit.traffic, kvdepot.audit.causes.
"""

from __future__ import annotations

import itertools
import json

import pytest

import tests.audit_scenarios
import tests.audit_scenarios_chats  # noqa: F401
from kvdepot.audit.causes import CAUSES
from kvdepot.audit.model import load_model
from kvdepot.audit.peel import proved_tokens
from kvdepot.audit.render import taken_apart
from kvdepot.audit.run import AuditOptions, audit
from kvdepot.audit.sources import read_log, read_rows
from kvdepot.audit.tokens import PieceMemo
from kvdepot.audit.traffic import Measure
from kvdepot.io.lines import Line, read_lines
from tests import audit_oracle
from tests.audit_planted import BLIND, SCENARIOS, planted

NAMES = sorted(SCENARIOS, key=lambda name: (name in BLIND, name))
IDS = [f"{'blind' if name in BLIND else 'seen'}-{name}" for name in NAMES]
#: how the gain is counted depends on what the edit does to the prompts' length
EDITS = {
    "json_form": "canonical_json",
    "tool_keys": "canonical_tools",
    "white_space": "normal_text",
    "tool_set": "every_tool",
    "window": "wide_window",
}


def reading_of(rows):
    return read_rows(
        Line(number, json.dumps(row, ensure_ascii=False).encode())
        for number, row in enumerate(rows, start=1)
    )


def oracle(reading, block=16):
    """What brute force reuses of the same tokens; only rendering and tokenizing are shared."""
    parts = load_model(None)
    memo = PieceMemo(parts.encoder)
    records = sorted(reading.records, key=lambda each: each.time_s)
    bodies = [each.body or taken_apart(each.prompt) for each in records]
    prompts = [ids.tolist() for ids in memo.prompts(parts.renderer.render(b).text for b in bodies)]
    hits = audit_oracle.reused(prompts, block, [each.extra for each in records])
    return Measure(sum(map(len, prompts)), sum(hits))


@pytest.mark.parametrize("name", NAMES, ids=IDS)
def test_a_planted_fault_is_found_and_its_gain_is_proved(name):
    case = planted(name)
    options = AuditOptions(**case.options)
    reading = reading_of(case.rows)
    now = oracle(reading, options.block_tokens)
    result = audit(reading, name, options)
    assert result.is_trustworthy, result.distrust
    assert (result.totals.input_tokens, result.totals.reused_tokens) == now
    if case.cause == "none":
        assert result.findings == []
        return
    first = result.findings[0]
    assert (first.cause, first.place[: len(case.place)]) == (case.cause, case.place)
    if case.fixed is None:
        return
    fixed = oracle(reading_of(case.fixed), options.block_tokens)
    best = proved_tokens(now, fixed, EDITS.get(case.cause, ""))
    proved = sum(each.proved_tokens or 0 for each in result.findings)
    assert proved == pytest.approx(best, rel=0.02)


def test_every_cause_of_the_table_is_planted():
    assert {planted(name).cause for name in SCENARIOS} - {"none"} == set(CAUSES)
    assert 3 * len(BLIND) >= len(SCENARIOS)


# --- the inputs that were handed over

GIVEN = {
    "well_behaved": ("none", ""),
    "reqid_before_doc": ("request_id", "messages[1]"),
    "timestamp_system": ("time", "messages[0]"),
    "tools_shuffled": ("tool_order", "tools"),
    "whitespace_two_clients": ("white_space", "messages[0]"),
    "cache_salt_per_user": ("extra_key", "cache_salt"),
    "rag_chunk_order": ("piece_order", "messages[1]"),
    "template_rollout": ("rollout", "messages[0]"),
    "sliding_window": ("window", "messages[1]"),
    "thinking_stripped": ("reasoning", "messages[-4]"),
    "no_reuse_at_all": ("none", ""),
}


@pytest.mark.parametrize("name", GIVEN)
def test_the_given_inputs(name):
    path = audit_oracle.shared_file(f"audit_inputs/{name}.jsonl.gz")
    reading = read_log(path)
    now = oracle(reading)
    result = audit(reading, name, AuditOptions())
    assert (result.totals.input_tokens, result.totals.reused_tokens) == now
    reference = json.loads(
        audit_oracle.shared_file("audit_inputs/reuse_deepseek_tokenizer.json").read_text()
    )
    # another tokenizer gives other counts and close shares
    assert result.totals.token_share == pytest.approx(reference[name]["rate"], abs=0.01)
    cause, place = GIVEN[name]
    if cause == "none":
        assert result.findings == []
        return
    first = result.findings[0]
    assert (first.cause, first.place[: len(place)]) == (cause, place)
    twin = path.with_name(f"{name}.fixed.jsonl.gz")
    # the twin of a window keeps the whole history: prompts without a bound, which no window is cut for
    fixed = oracle(in_steps(path, twin) if cause == "window" else read_log(twin))
    proved = sum(each.proved_tokens or 0 for each in result.findings)
    assert proved == pytest.approx(proved_tokens(now, fixed, EDITS.get(cause, "")), rel=0.02)


def in_steps(logged, whole):
    """The whole history, cut where a window that is dropped by halves would be: at most twice as long."""
    made = []
    for row, full in zip(rows_of(logged), rows_of(whole), strict=True):
        assert row["request_id"] == full["request_id"]
        system, *history = full["messages"]
        dropped = len(full["messages"]) - len(row["messages"])
        step = max(2, (len(row["messages"]) - 1) // 2 * 2)
        made.append({**full, "messages": [system, *history[dropped // step * step :]]})
    return reading_of(made)


def rows_of(path):
    return [json.loads(line.data) for line in read_lines(path)]


# --- what holds for any traffic


def test_the_waterfall_adds_up():
    result = audit(reading_of(planted("clock_and_passages").rows), "x", AuditOptions())
    bars = result.waterfall
    assert len(bars) == len(result.findings) + 1 == 3
    for (before, after), finding in zip(itertools.pairwise(bars), result.findings, strict=True):
        assert after.reused_tokens - before.reused_tokens == finding.proved_tokens
    # behind the clock, the order of passages alone brings nothing
    assert (result.findings[1].alone_tokens or 0) < 0.01 * result.totals.input_tokens
    assert result.findings[0].alone_tokens == result.findings[0].proved_tokens


def test_a_sample_of_sessions_finds_the_same_and_proves_it_on_all():
    rows = planted("clock_and_passages").rows
    whole = audit(reading_of(rows), "x", AuditOptions())
    sampled = audit(reading_of(rows), "x", AuditOptions(sample_requests=60))
    assert [each.cause for each in sampled.findings] == [each.cause for each in whole.findings]
    assert [each.proved_tokens for each in sampled.findings] == [
        each.proved_tokens for each in whole.findings
    ]


def test_values_are_masked_unless_asked_for():
    rows = planted("user_profile_in_system").rows
    secret = rows[0]["messages"][0]["content"].split("\n")[0].removeprefix("You talk to ")
    secret = secret.removesuffix(" team.")
    hidden = audit(reading_of(rows), "x", AuditOptions()).findings[0].example
    shown = audit(reading_of(rows), "x", AuditOptions(show_values=True)).findings[0].example
    assert secret in shown.values
    assert all(secret not in value for value in hidden.values)
    assert secret not in hidden.diff
    assert "+++ after" in shown.diff
    assert any(line.startswith("-You talk to ") for line in shown.diff.splitlines())


def test_a_mixed_log_falls_apart_into_its_applications():
    rows = planted("clean_singles").rows + planted("clean_chats").rows
    result = audit(reading_of(rows), "x", AuditOptions())
    assert sorted(app.requests for app in result.apps) == [112, 120]
    assert sum(app.input_tokens for app in result.apps) == result.totals.input_tokens
    assert sum(app.reused_tokens for app in result.apps) == result.totals.reused_tokens
