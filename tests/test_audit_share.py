"""kvdepot.audit.export and kvdepot.audit.stable: a log without its text, and a helper for tests."""

from __future__ import annotations

import json
import random
import re

import pytest

from kvdepot.audit.export import Pseudonyms, shared_rows
from kvdepot.audit.run import AuditOptions, audit
from kvdepot.audit.sanity import in_order
from kvdepot.audit.sources import read_log
from kvdepot.audit.stable import assert_prefix_stable, prefix_shares
from kvdepot.audit.tokens import FallbackEncoder, PieceMemo
from kvdepot.audit.traffic import Traffic
from kvdepot.cli import main as cli_main
from tests.audit_planted import planted
from tests.audit_traffic import WORDS, passage
from tests.test_audit_planted import reading_of


def names(salt=b"s" * 32):
    return Pseudonyms(salt, PieceMemo(FallbackEncoder()))


def shared(rows, salt=b"s" * 32):
    reading = reading_of(rows)
    traffic = Traffic.of(in_order(reading).records)
    return list(shared_rows(traffic.records, traffic.bodies, names(salt)))


#: kinds of evidence: fields, tools, values of every look, writing, order, histories, pictures, engine
CASES = [
    "clean_singles",
    "salt_per_user",
    "tools_in_any_order",
    "tool_keys_in_any_order",
    "time_in_system",
    "date_of_the_day",
    "uuid_in_system",
    "user_profile_in_system",
    "working_folder_in_system",
    "rolled_out_once",
    "two_starts_of_text",
    "line_ends_of_two_clients",
    "two_unicode_forms",
    "json_keys_in_a_message",
    "passages_in_any_order",
    "numbered_memories_in_any_order",
    "question_before_document",
    "window_of_four_turns",
    "reasoning_kept_once",
    "arguments_written_again",
    "results_cut_later",
    "picture_encoded_again",
    "engine_forgets",
]


@pytest.mark.parametrize("name", CASES)
def test_the_trace_tells_what_the_log_tells(name):
    case = planted(name)
    result = audit(reading_of(shared(case.rows)), name, AuditOptions(**case.options))
    assert result.input.kind == "audit trace"
    assert result.totals.requests == len(case.rows)
    if case.cause == "none":
        assert result.findings == []
        return
    first = result.findings[0]
    assert (first.cause, first.place[: len(case.place)]) == (case.cause, case.place)
    log = audit(reading_of(case.rows), name, AuditOptions(**case.options))
    assert result.totals.token_share == pytest.approx(log.totals.token_share, abs=0.04)
    if log.findings[0].proved_points is not None:
        assert first.proved_points == pytest.approx(log.findings[0].proved_points, rel=0.15)


def test_no_word_of_the_log_is_in_the_trace():
    case = planted("tool_keys_in_any_order")
    text = json.dumps(shared(case.rows), ensure_ascii=False)
    seen = set(re.findall(r"[a-z]{6,}", text))
    secret = {word for word in WORDS if len(word) >= 6}
    assert not seen & secret
    for row in case.rows:
        assert row["user"] not in text
        assert row["request_id"] not in text


def test_another_salt_gives_other_words_and_the_same_result():
    rows = planted("passages_in_any_order").rows
    one, other = shared(rows), shared(rows, b"t" * 32)
    assert one != other
    assert one == shared(rows)
    results = [audit(reading_of(each), "x", AuditOptions()) for each in (one, other)]
    assert results[0].findings[0].cause == results[1].findings[0].cause == "piece_order"


def test_the_same_text_has_the_same_words_wherever_it_stands():
    body = passage(random.Random(1), 200)
    pseudo = names()
    alone, behind = pseudo.text(body), pseudo.text(f"Other words before it.\n{body}")
    assert behind.endswith(alone)
    assert pseudo.text("") == ""
    tokens = len(PieceMemo(FallbackEncoder()).prompts([body])[0])
    said = sum(int(each) for each in re.findall(r"~[0-9a-f]+~(\d+)", alone)) + alone.count("\n")
    assert said == pytest.approx(tokens, rel=0.02)


def test_json_stays_json_of_the_same_shape():
    value = {
        "name": "Ada",
        "items": [1, 2.5, True, None, {"deep": "text of some words"}],
        "big": 10**20,
    }
    pseudo = names()
    for text in (json.dumps(value), json.dumps(value, indent=2)):
        made = pseudo.text(f"Facts: {text} end")
        found = json.loads(made[made.index("{") : made.rindex("}") + 1])
        assert "Ada" not in made
        assert [type(each) for each in next(v for v in found.values() if isinstance(v, list))] == [
            int, float, bool, type(None), dict,
        ]  # fmt: skip
        assert ("\n" in made) == ("\n" in text)


def test_the_command_writes_a_trace_that_it_reads(tmp_path, capsys):
    log, out = tmp_path / "log.jsonl", tmp_path / "trace.jsonl"
    log.write_text("\n".join(json.dumps(row) for row in planted("time_in_system").rows))
    assert cli_main.run(["audit", "export", str(log), str(out)]) == 0
    assert "wrote 120 requests" in capsys.readouterr().out
    assert cli_main.run(["audit", str(out), "--fail-on", "time"]) == 2
    assert "[time]" in capsys.readouterr().out
    assert read_log(out).kind == "audit trace"
    ids = tmp_path / "ids.jsonl"
    ids.write_text(json.dumps({"prompt_token_ids": [1, 2, 3]}))
    assert cli_main.run(["audit", "export", str(ids), str(out)]) == 1
    assert "no text" in capsys.readouterr().err
    assert cli_main.run(["audit", "export", str(tmp_path / "none"), str(out)]) == 1


# --- the helper for tests of an application


def test_a_stable_builder_passes_and_an_unstable_one_is_named():
    document = passage(random.Random(2), 100)

    def good(user, asked):
        return [
            {"role": "system", "content": document},
            {"role": "user", "content": f"{asked}\n(for {user})"},
        ]

    def bad(user, asked):
        return {
            "messages": [
                {"role": "system", "content": f"For {user}.\n{document}"},
                *good(user, asked)[1:],
            ]
        }

    cases = [("ada", "Why?"), ("bob", "How?"), ("cy", "When?")]
    assert_prefix_stable(good, cases, at_least=0.8)
    with pytest.raises(
        AssertionError, match=r"case 1 shares .* in messages\[0\] \(system\)"
    ) as caught:
        assert_prefix_stable(bad, cases)
    assert "'bob" in str(caught.value)
    assert "'ada" in str(caught.value)
    assert [each.case for each in prefix_shares(good, cases)] == [1, 2]


def test_turns_of_a_conversation_and_rendered_prompts():
    turns = ["one", "two", "three"]

    def chat(count):
        return [{"role": "user", "content": text} for text in turns[:count]]

    assert_prefix_stable(chat, [(1,), (2,), (3,)], at_least=0.4)
    shares = prefix_shares(
        lambda text: text, [("same head, a",), ("same head, b",), ("same head, b",)]
    )
    assert [each.characters for each in shares] == [11, 12]
    assert shares[1].place == "the end"
    assert shares[1].share == 1.0
