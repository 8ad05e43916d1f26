"""The same fault in many writings, and as bare token ids (kvdepot.audit.idlogs)."""

from __future__ import annotations

import random

import pytest

from kvdepot.audit.run import AuditOptions, audit
from kvdepot.audit.texts import with_sorted_json
from tests.audit_traffic import chats, edited, passage, question, sentence, singles
from tests.test_audit_planted import oracle, reading_of

STYLES = {
    "numbers in brackets": lambda parts: "\n\n".join(f"[{n}] {p}" for n, p in enumerate(parts, 1)),
    "named": lambda parts: "\n\n".join(f"Document {n}:\n{p}" for n, p in enumerate(parts, 1)),
    "headed": lambda parts: "\n\n".join(f"### Source\n{p}" for p in parts),
    "numbered tags": lambda parts: "\n".join(
        f'<doc id="{n}">\n{p}\n</doc>' for n, p in enumerate(parts, 1)
    ),
    "bullets": lambda parts: "\n".join(f"- {p.replace(chr(10), ' ')}" for p in parts),
    "rules": "\n---\n".join,
}


def check(rows, fixed, cause, place):
    reading = reading_of(rows)
    now = oracle(reading)
    result = audit(reading, cause, AuditOptions())
    first = result.findings[0]
    assert (first.cause, first.place[: len(place)]) == (cause, place)
    if fixed is not None:
        gain = oracle(reading_of(fixed)).reused_tokens - now.reused_tokens
        proved = sum(each.proved_tokens or 0 for each in result.findings)
        assert proved == pytest.approx(gain, rel=0.02)
    return result


@pytest.mark.parametrize("style", STYLES)
def test_passages_in_any_writing(style):
    rng = random.Random(f"styles {style}")
    write = STYLES[style]
    groups = [[passage(rng, 110).replace("\n\n", "\n") for _ in range(5)] for _ in range(4)]
    base = singles(rng, requests=80)
    chosen = [rng.choice(groups) for _ in base]
    asked = [question(rng) for _ in base]

    def put(row, number, parts):
        row["messages"][1]["content"] = f"{write(parts)}\n\nQuestion: {asked[number]}"

    rows = edited(base, lambda row, n: put(row, n, rng.sample(chosen[n], 5)))
    check(rows, edited(base, lambda row, n: put(row, n, chosen[n])), "piece_order", "messages[1]")


def middle(row, text):
    content = row["messages"][0]["content"]
    at = content.index("\n", 300) + 1
    row["messages"][0]["content"] = content[:at] + text + content[at:]


@pytest.mark.parametrize(
    ("cause", "is_new"), [("ab_test", lambda n: n % 2), ("rollout", lambda n: n > 50)]
)
def test_a_sentence_that_some_prompts_have(cause, is_new):
    rng = random.Random(f"styles {cause}")
    base = singles(rng, documents=9, requests=100)
    more = sentence(rng, 12) + "\n"
    rows = edited(base, lambda row, n: middle(row, more if is_new(n) else ""))
    check(rows, None, cause, "messages[0]")


def test_a_version_number_is_no_host():
    rng = random.Random("styles version")
    base = singles(rng, documents=9, requests=100)
    rows = edited(base, lambda row, n: middle(row, f"Prompt v2.{4 + (n > 40)}\n"))
    result = check(rows, None, "rollout", "messages[0]")
    assert "rolled out once at 2026-" in result.findings[0].evidence


def test_a_window_behind_a_pinned_document():
    rng = random.Random("styles pinned")

    def slide(row, _):
        turns = (len(row["messages"]) - 2) // 2
        if turns > 3:
            del row["messages"][2 : 2 + 2 * (turns - 3)]

    result = check(edited(chats(rng, turns=10), slide), None, "window", "messages[2]")
    assert (result.findings[0].proved_tokens or 0) > 0


def test_prose_that_overlaps_is_no_list_to_be_sorted():
    rng = random.Random("styles prose")
    lines = [sentence(rng, 12) for _ in range(300)]
    rows = singles(rng, requests=80)
    for row in rows:
        row["messages"] = [{"role": "user", "content": "\n".join(rng.sample(lines, 45))}]
    assert audit(reading_of(rows), "prose", AuditOptions()).findings == []


def test_token_ids_without_a_tokenizer_show_where_and_prove():
    rng = random.Random("styles ids")
    head = [rng.randrange(50_000) for _ in range(60)]
    documents = [[rng.randrange(50_000) for _ in range(700)] for _ in range(4)]
    rows = [
        {
            "timestamp": 1_790_000_000 + n,
            "prompt_token_ids": [
                *head,
                60_000 + n,
                *rng.choice(documents),
                *rng.sample(range(50_000), 20),
            ],
        }
        for n in range(60)
    ]
    result = audit(reading_of(rows), "ids", AuditOptions())
    assert result.input.kind == "ids"
    assert result.totals.input_tokens == 60 * 781
    assert result.totals.reused_tokens == 59 * 48
    first = result.findings[0]
    assert first.cause == "request_id"
    assert first.position_p50 == 60
    assert (first.proved_tokens or 0) > 0.8 * 56 * 700


def test_a_large_log_of_token_ids_gives_the_same_in_portions(monkeypatch):
    rng = random.Random("styles large")
    head = [rng.randrange(50_000) for _ in range(60)]
    documents = [[rng.randrange(50_000) for _ in range(300)] for _ in range(4)]
    rows = [
        {
            "timestamp": 1_790_000_000 + n,
            "prompt_token_ids": [
                *head,
                60_000 + n,
                *rng.choice(documents),
                *rng.sample(range(50_000), 20),
            ],
        }
        for n in range(150)
    ]
    whole = audit(reading_of(rows), "ids", AuditOptions())
    monkeypatch.setattr("kvdepot.audit.run._IDS_AS_TEXT", 1000)
    monkeypatch.setattr("kvdepot.audit.idlogs._SAMPLE_TOKENS", 1000)
    monkeypatch.setattr("kvdepot.audit.idlogs._PORTION_TOKENS", 5000)
    large = audit(reading_of(rows), "ids", AuditOptions())
    assert large.totals == whole.totals
    assert large.waterfall == whole.waterfall
    assert large.grains == whole.grains
    for ours, theirs in zip(large.findings, whole.findings, strict=True):
        assert (ours.cause, ours.proved_tokens, ours.alone_tokens) == (
            theirs.cause,
            theirs.proved_tokens,
            theirs.alone_tokens,
        )
        assert "told from 50 requests" in ours.evidence


def test_json_is_sorted_in_its_own_style():
    assert with_sorted_json('x {"b": 1, "a": {"d": 2, "c": "some text here"}}') == (
        'x {"a": {"c": "some text here", "d": 2}, "b": 1}'
    )
    assert (
        with_sorted_json('{"b":1,"a":[1,2,3,4,5,6,7,8,9,10]}')
        == '{"a":[1,2,3,4,5,6,7,8,9,10],"b":1}'
    )
    indented = '{\n  "b": "\\u00e9",\n  "a": "a longer text"\n}'
    assert with_sorted_json(indented) == '{\n  "a": "a longer text",\n  "b": "\\u00e9"\n}'
