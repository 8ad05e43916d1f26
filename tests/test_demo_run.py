"""The whole demo: checks before anything starts, phases, problems; and once for real, with a tiny model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from kvdepot.cli.main import run as cli
from kvdepot.demo import run as demo_run
from kvdepot.demo.arms import ARMS, PHASES, changed_first_line, question_of
from kvdepot.demo.document import Document
from kvdepot.demo.result import decode_result
from kvdepot.demo.run import DemoSettings, run_demo
from kvdepot.errors import ConfigError, KvdepotError
from kvdepot.io.models import ModelFiles
from tests.demo_samples import FACTS, READY, answered, result
from tests.tries import in_one_try_of

TEXT = "The crane lifts 12 t. The hook is red. Inspect it every 90 days.\n" * 25


class Show:
    def __init__(self):
        self.events: list[tuple[str, str]] = []

    def step(self, arm, step):
        self.events.append((arm, step.what))

    def finished(self, plan, _answered):
        self.events.append((plan.name, "finished"))


class Fakes:
    """In place of arms' processes: they answer from a table, and what happens is noted."""

    def __init__(self):
        self.answers: dict[str, Any] = {}
        self.log: list[tuple[str, str]] = []
        self.jobs: dict[str, Any] = {}
        self.ready = READY

    def start(self, job, _log):
        self.jobs[job.arm] = job
        self.log.append((job.arm, "start"))
        return FakeArm(self, job.arm)


class FakeArm:
    def __init__(self, fakes, name):
        self.fakes, self.name = fakes, name

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.fakes.log.append((self.name, "end"))

    def wait_ready(self, _on_step):
        self.fakes.log.append((self.name, "ready"))
        return self.fakes.ready

    def ask(self, _on_step):
        self.fakes.log.append((self.name, "ask"))
        found = self.fakes.answers[self.name]
        if isinstance(found, Exception):
            raise found
        return found


@pytest.fixture
def fake(monkeypatch):
    disk = {"device": 0, "host": 0, "disk": 4232}
    reused = answered(ttft_s=0.16, computed_tokens=18, reused_tokens=disk, bytes_read=100)
    fakes = Fakes()
    fakes.answers = {
        "recompute": answered(),
        "first_ask": answered(bytes_written=100),
        "follow_up": reused,
        "other_instance": reused,
        "changed_first_line": answered(),
    }
    monkeypatch.setattr(demo_run, "ArmProcess", fakes.start)
    return fakes


@pytest.fixture
def model(tmp_path):
    """As much of a model as is looked at before anything starts."""
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text('{"max_position_embeddings": 2048, "layers": 3}')
    return ModelFiles(folder, "tiny")


def settings(model, **changes):
    pytest.importorskip("tokenizers")
    fields: dict[str, Any] = {
        "document": Document("crane.txt", TEXT, "a crane"),
        "questions": ("What?", "Where?", "When?"),
        "model": model,
        "dtype": "float32",
        "pool_url": None,
        "block_tokens": None,
        "max_new_tokens": 8,
    }
    return DemoSettings(**{**fields, **changes})


# --- the plan


def test_every_arm_runs_once_and_follow_up_only_when_first_ask_has_ended():
    order = [name for phase in PHASES for name in phase]
    assert sorted(order) == sorted(plan.name for plan in ARMS)
    phase_of = {name: index for index, phase in enumerate(PHASES) for name in phase}
    assert phase_of["other_instance"] == phase_of["first_ask"] < phase_of["follow_up"]
    assert PHASES[phase_of["first_ask"]].index("first_ask") == 0


def test_recompute_answers_the_question_of_follow_up_so_that_answers_can_be_compared():
    plans = {plan.name: plan for plan in ARMS}

    def asked_of(count):
        questions = [f"q{index}" for index in range(count)]
        return {name: question_of(plan, questions) for name, plan in plans.items()}

    for count in (1, 2, 3, 4):
        asked = asked_of(count)
        assert asked["recompute"] == asked["follow_up"] == asked["changed_first_line"]
    asked = asked_of(3)
    assert asked["first_ask"] != asked["follow_up"] != asked["other_instance"]


def test_only_the_first_line_is_changed():
    assert changed_first_line("7").startswith("Request 7. ")
    assert changed_first_line("7") != changed_first_line("8")


# --- one run


def test_processes_of_a_phase_live_together_and_answer_one_at_a_time(fake, model):
    show = Show()
    found = run_demo(settings(model), show)
    assert found.problems == ()
    assert [arm.name for arm in found.arms] == [plan.name for plan in ARMS]
    log = fake.log
    for earlier, later in (
        (("recompute", "end"), ("first_ask", "start")),
        (("first_ask", "ready"), ("other_instance", "start")),
        (("other_instance", "ready"), ("first_ask", "ask")),
        (("first_ask", "ask"), ("other_instance", "ask")),
        (("other_instance", "ask"), ("first_ask", "end")),
        (("first_ask", "end"), ("follow_up", "start")),
        (("follow_up", "end"), ("changed_first_line", "start")),
    ):
        assert log.index(earlier) < log.index(later), (earlier, later)
    assert show.events[0] == ("recompute", "starting the engine")
    assert [name for name, what in show.events if what == "finished"] == [
        name for phase in PHASES for name in phase
    ]


def test_jobs_differ_only_in_what_the_arm_is_about(fake, model):
    run_demo(settings(model), Show())
    jobs = fake.jobs
    assert jobs["recompute"].pool_url is None
    assert len({jobs[name].pool_url for name in jobs if name != "recompute"}) == 1
    assert len({job.run_id for job in jobs.values()}) == 1
    assert [name for name, job in jobs.items() if job.awaits_blocks] == ["other_instance"]
    plain = jobs["follow_up"].instruction
    assert {name for name, job in jobs.items() if job.instruction != plain} == {
        "changed_first_line"
    }
    assert jobs["changed_first_line"].instruction.endswith(plain)
    assert len({(job.document, job.max_new_tokens, job.stop) for job in jobs.values()}) == 1


def test_two_runs_share_nothing(fake, model, tmp_path):
    seen = set()
    for _ in range(2):
        run_demo(settings(model, pool_url=str(tmp_path / "pool")), Show())
        job = fake.jobs["changed_first_line"]
        seen.add((job.run_id, job.instruction))
        assert not job.is_own_pool
    assert len({run_id for run_id, _ in seen}) == len({line for _, line in seen}) == 2


def test_the_own_pool_is_gone_afterwards(fake, model):
    found = run_demo(settings(model), Show())
    pool = Path(fake.jobs["first_ask"].pool_url)
    assert found.pool.url.endswith(str(pool))
    assert not pool.parent.exists()
    fake.answers["first_ask"] = KvdepotError("no")
    with pytest.raises(KvdepotError):
        run_demo(settings(model), Show())
    assert not Path(fake.jobs["first_ask"].pool_url).parent.exists()
    assert fake.log[-1][1] == "end"


def test_numbers_are_the_arms_own(fake, model):
    found = run_demo(settings(model), Show())
    follow_up = found.arm("follow_up")
    assert follow_up.speedup == found.speedup_follow_up_vs_recompute == 8.0 / 0.16
    assert follow_up.same_answer_as_recompute is True
    assert found.arm("recompute").same_answer_as_recompute is None
    assert found.arm("other_instance").same_answer_as_recompute is None
    assert found.arm("changed_first_line").same_answer_as_recompute is None
    assert found.pool.block_tokens == FACTS.block_tokens
    assert found.environment["torch"] == "2.13"
    assert int(found.environment["cores"]) >= 1


PROBLEMS: dict[str, tuple[str, dict[str, Any]]] = {
    "the answer differs": ("follow_up", {"answer": "Elsewhere.", "reused_tokens": {"disk": 4232}}),
    "nothing was reused": ("other_instance", {"computed_tokens": 4250}),
    "none should be": (
        "changed_first_line",
        {"computed_tokens": 4242, "reused_tokens": {"disk": 8}},
    ),
    "do not make the prompt": ("first_ask", {"computed_tokens": 4249}),
    "dropped_pool_full_total: 7": ("first_ask", {"dropped_blocks": {"dropped_pool_full_total": 7}}),
}


@pytest.mark.parametrize("problem", PROBLEMS)
def test_what_goes_wrong_is_said(fake, model, problem):
    name, changes = PROBLEMS[problem]
    fake.answers[name] = answered(**changes)
    found = run_demo(settings(model), Show())
    assert any(problem in each and name in each for each in found.problems)


def test_a_pool_in_memory_is_said_to_be_none(fake, model, monkeypatch):
    monkeypatch.setattr(demo_run, "file_system_of", lambda _path: "tmpfs")
    found = run_demo(settings(model, pool_url="/dev/shm/kvdepot-demo"), Show())
    assert any("tmpfs, which is memory" in each for each in found.problems)


def test_buffered_reads_are_said_to_be_so(fake, model):
    facts = msgspec.structs.replace(FACTS, is_direct=False)
    fake.ready = msgspec.structs.replace(READY, pool=facts)
    assert "dropped before each question" in run_demo(settings(model), Show()).pool.page_cache


# --- before anything starts


def refused(fake, chosen, message):
    with pytest.raises(ConfigError, match=message):
        run_demo(chosen, Show())
    assert fake.log == []


def test_bad_settings_are_refused_before_anything_starts(fake, model, monkeypatch):
    long = Document("long.txt", TEXT * 10, "x")
    absent = ModelFiles(model.folder / "absent", "x")
    refused(fake, settings(model, document=long), r"long.txt has \d{4} tokens.* 2048 tokens")
    refused(fake, settings(model, max_new_tokens=0), "max_new_tokens")
    refused(fake, settings(model, questions=("What?", " ")), "question is empty")
    refused(fake, settings(model, questions=()), "question is empty")
    refused(fake, settings(absent), "holds no model")
    monkeypatch.setattr(demo_run, "free_bytes_of", lambda _place: 1 << 20)
    refused(fake, settings(model), "1 MiB free; the demo needs 1 GiB")


# --- the command


@pytest.fixture
def quick(monkeypatch):
    monkeypatch.setattr("kvdepot.cli.demo._need_extra", lambda: None)
    asked = []

    def run_quickly(chosen, _show):
        asked.append(chosen)
        return result()

    monkeypatch.setattr(demo_run, "run_demo", run_quickly)
    return asked


def test_the_command_writes_both_files_and_prints_the_table(quick, model, tmp_path, capsys):
    out = tmp_path / "a" / "out"
    arguments = ["demo", "--model", str(model.folder), "--out", str(out)]
    assert cli(arguments) == 0
    assert decode_result((out / "demo.json").read_bytes()) == result()
    assert (out / "demo.html").read_text(encoding="utf-8").startswith("<!doctype html>")
    said = capsys.readouterr()
    assert "follow_up" in said.out
    assert "demo.html" in said.out
    assert json.loads((out / "demo.json").read_text())["arms"]
    assert quick[0].questions[1] == "Where must device lock files be placed?"


def test_the_command_takes_the_user_s_own(quick, model, tmp_path):
    (tmp_path / "own.txt").write_text("A tender.")
    arguments = ["demo", "--model", str(model.folder), "--out", str(tmp_path / "out")]
    arguments += ["--document", str(tmp_path / "own.txt"), "--question", "Who?"]
    arguments += ["--question", "Why?", "--pool", str(tmp_path / "pool"), "--block-tokens", "16"]
    arguments += ["--max-new-tokens", "9", "--dtype", "bfloat16"]
    assert cli(arguments) == 0
    chosen = quick[0]
    assert chosen.questions == ("Who?", "Why?")
    assert chosen.document.text == "A tender."
    assert (chosen.block_tokens, chosen.max_new_tokens, chosen.dtype) == (16, 9, "bfloat16")
    assert chosen.pool_url == str(tmp_path / "pool")


def test_a_problem_is_in_the_exit_status(quick, model, tmp_path, monkeypatch):
    monkeypatch.setattr(demo_run, "run_demo", lambda *_: result(problems=("x",)))
    assert cli(["demo", "--model", str(model.folder), "--out", str(tmp_path / "out")]) == 1
    assert (tmp_path / "out" / "demo.html").exists()


@pytest.fixture
def own_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("own.txt").write_text("x")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--document", "absent.txt", "--question", "x"], "absent.txt cannot be read"),
        (["--document", "own.txt"], "needs a question"),
        (["--pool", "s3://bucket/x"], "s3"),
        (["--model", "absent"], "no such model folder"),
        (["--out", "own.txt/out"], "cannot write into"),
        (["--max-new-tokens", "many"], "many"),
    ],
)
def test_bad_arguments_end_with_one_line_before_anything_starts(
    quick, own_folder, capsys, arguments, message
):
    assert cli(["demo", *arguments]) == 2
    said = capsys.readouterr()
    assert message in said.err
    assert said.err.count("error:") == 1
    assert "Traceback" not in said.err
    assert quick == []


# --- for real


@pytest.mark.slow
@pytest.mark.engine
@pytest.mark.timeout(400)
@in_one_try_of(3)
def test_the_demo_runs_with_real_processes_and_a_tiny_model(tmp_path, monkeypatch, capsys):
    from tests.tiny_models import save_tiny, tiny_config

    # large enough that computing the document takes longer than loading it
    config = tiny_config(
        hidden_size=256, intermediate_size=1024, num_hidden_layers=8, max_position_embeddings=2048
    )
    folder = save_tiny(tmp_path / "model", config=config)
    (tmp_path / "crane.txt").write_text(TEXT)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    arguments = ["demo", "--model", str(folder), "--out", str(tmp_path / "out")]
    arguments += ["--document", str(tmp_path / "crane.txt"), "--max-new-tokens", "4"]
    arguments += ["--pool", str(tmp_path / "pool")]
    for question in ("What does it lift?", "What is red?", "How often?"):
        arguments += ["--question", question]
    status = cli(arguments)
    said = capsys.readouterr()
    found = decode_result((tmp_path / "out" / "demo.json").read_bytes())
    assert found.problems == (), said.err
    assert status == 0
    for arm in found.arms:
        assert arm.computed_tokens + arm.reused_total == arm.prompt_tokens
        assert arm.ttft_s > 0
    shared = found.arm("follow_up").reused_tokens["disk"]
    assert shared >= len(TEXT) - 2 * found.pool.block_tokens
    assert found.arm("follow_up").bytes_read == shared * found.pool.token_bytes
    assert found.arm("other_instance").reused_tokens["disk"] == shared
    first = found.arm("first_ask")
    blocks = first.prompt_tokens // found.pool.block_tokens
    assert first.bytes_written == blocks * sum(found.pool.block_bytes)
    assert found.arm("recompute").bytes_written == 0
    assert found.arm("changed_first_line").computed_tokens > len(TEXT)
    assert found.arm("follow_up").same_answer_as_recompute is True
