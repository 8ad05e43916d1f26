"""demo.json and demo.html: every field that was promised, one version, and nothing that is not text."""

from __future__ import annotations

import io
import json

import msgspec
import pytest
from rich.console import Console

from kvdepot.demo.arms import ARMS
from kvdepot.demo.messages import Step
from kvdepot.demo.page import format_ratio, format_seconds, result_page
from kvdepot.demo.result import decode_result, encode_result
from kvdepot.demo.show import TerminalShow, print_result
from tests.demo_samples import answered, arm, result, reusing
from tests.test_report import EVIL, loads_nothing

PROMISED = {
    "name",
    "ttft_s",
    "prompt_tokens",
    "computed_tokens",
    "reused_tokens",
    "bytes_read",
    "bytes_written",
    "answer",
}


def test_the_file_has_what_was_promised_for_every_arm():
    found = json.loads(encode_result(result()))
    assert [each["name"] for each in found["arms"]] == [
        "recompute",
        "first_ask",
        "follow_up",
        "other_instance",
        "changed_first_line",
    ]
    assert all(set(each) >= PROMISED for each in found["arms"])
    assert found["speedup_follow_up_vs_recompute"] == 53.3
    assert (found["schema"], found["schema_version"]) == ("kvdepot-demo", 1)
    assert found["arms"][2]["reused_tokens"] == {"device": 0, "host": 0, "disk": 4232}


def test_the_file_is_read_back_and_another_version_is_not():
    written = encode_result(result())
    assert decode_result(written) == result()
    for other in (b'"schema_version": 2', b'"schema_version": "1"'):
        with pytest.raises(msgspec.ValidationError):
            decode_result(written.replace(b'"schema_version": 1', other))


def test_the_page_shows_the_numbers_the_answers_and_the_sentence():
    tree = loads_nothing(result_page(result()))
    for word in (
        "53x",
        "150 ms",
        "18 computed, 4232 reused",
        "186 MiB",
        "In /var/lock.",
        "Because keys are chained.",
        "file:///srv/pool",
        "a CPU",
    ):
        assert word in tree.words, word
    assert all(plan.name in tree.words for plan in ARMS)


def test_whatever_a_model_a_file_or_a_user_says_stays_text():
    wild = result(
        arms=tuple(
            each_arm(plan.name, answer=EVIL, question=EVIL)
            for plan, each_arm in zip(ARMS, (arm, arm, reusing, reusing, arm), strict=True)
        ),
        problems=(EVIL,),
        environment={EVIL: EVIL},
    )
    tree = loads_nothing(result_page(wild))
    assert tree.words.count(EVIL) >= 2 * len(ARMS) + 3
    assert "script" not in tree.seen


def test_problems_stand_out():
    assert "did not go" not in result_page(result())
    page = result_page(result(problems=("follow_up: nothing was reused",)))
    assert 'class="bad">follow_up: nothing was reused<' in page


def test_equal_and_other_answers_are_told_apart():
    page = result_page(result())
    assert page.count("The same answer as recompute") == 1
    other = result(
        arms=(
            *result().arms[:2],
            reusing("follow_up", same_answer_as_recompute=False),
            *result().arms[3:],
        )
    )
    assert "Another answer than recompute" in result_page(other)


@pytest.mark.parametrize(
    ("seconds", "text"), [(8.512, "8.51 s"), (1.0, "1 s"), (0.1534, "153 ms"), (0.0009, "0.9 ms")]
)
def test_seconds_for_people(seconds, text):
    assert format_seconds(seconds) == text


@pytest.mark.parametrize(("ratio", "text"), [(53.3, "53x"), (9.94, "9.9x"), (0.98, "0.98x")])
def test_ratios_for_people(ratio, text):
    assert format_ratio(ratio) == text


# --- the terminal


def test_the_table_goes_to_standard_output_with_all_arms():
    console = Console(file=(written := io.StringIO()), width=140)
    print_result(result(problems=("something",)), console)
    said = written.getvalue()
    assert all(plan.name in said for plan in ARMS)
    assert "53x" in said
    assert "4232" in said
    assert "Because keys are chained." in said
    assert "problem: something" in said
    assert "In /var/lock." in said


def test_the_table_fits_into_80_columns():
    console = Console(file=(written := io.StringIO()), width=80)
    print_result(result(), console)
    lines = written.getvalue().splitlines()
    assert any("changed_first_line" in line and "4250" in line for line in lines)
    assert any("follow_up" in line and "186 MiB" in line and "53x" in line for line in lines)
    assert "…" not in written.getvalue()


def test_answers_are_not_taken_for_markup():
    console = Console(file=(written := io.StringIO()), width=140)
    print_result(
        result(arms=(arm("recompute", answer="[bold]x[/bold] [/]"), *result().arms[1:])), console
    )
    assert "[bold]x[/bold] [/]" in written.getvalue()


def test_progress_in_a_terminal_is_a_bar_and_elsewhere_a_line():
    console = Console(file=(written := io.StringIO()), force_terminal=True, width=100)
    with TerminalShow(console) as show:
        show.fetching("downloading the model", 5, 10)
        show.step("recompute", Step("reading the document", 100, 400))
        show.step("recompute", Step("reading the document", 400, 400))
        show.step("recompute", Step("writing the answer", 1, 0))
        show.finished(ARMS[0], answered())
    assert "reading the document" in written.getvalue()
    plain = Console(file=(lines := io.StringIO()), width=100)
    with TerminalShow(plain) as show:
        for done in range(5):
            show.step("recompute", Step("reading the document", done, 5))
        show.finished(ARMS[0], answered())
    assert lines.getvalue().splitlines() == [
        "recompute: reading the document",
        "recompute: first token after 8 s, 4250 tokens computed, 0 reused",
    ]
