"""One arm in this process: what it says, what it waits for, and the prompt it makes."""

from __future__ import annotations

import io

import pytest

pytestmark = pytest.mark.engine
pytest.importorskip("torch")
pytest.importorskip("transformers")

import msgspec  # noqa: E402

from kvdepot.clock import SystemClock  # noqa: E402
from kvdepot.demo import arm as arm_module  # noqa: E402
from kvdepot.demo.arm import Arm, prompt_text  # noqa: E402
from kvdepot.demo.messages import Answered, Ready, Step, decode_message  # noqa: E402
from kvdepot.engines.transformers import EmbeddedEngine  # noqa: E402
from tests.demo_samples import JOB  # noqa: E402
from tests.tiny_models import save_tiny, tiny_config  # noqa: E402

DOCUMENT = "The hook is red. " * 20


@pytest.fixture(autouse=True)
def _patience(monkeypatch):
    # a tiny model computes faster than a busy machine wakes a thread
    monkeypatch.setattr(arm_module, "_LOAD_SHARE", 1e9)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    # large enough that computing takes longer than loading
    config = tiny_config(
        hidden_size=256, intermediate_size=1024, num_hidden_layers=8, max_position_embeddings=2048
    )
    return save_tiny(tmp_path_factory.mktemp("model"), config=config)


def job_of(folder, pool, **changes):
    fields = {
        "model_folder": str(folder),
        "pool_url": None if pool is None else str(pool),
        "document": DOCUMENT,
        "question": "What is red?",
        "host_tokens": 600,
        "block_tokens": 16,
    }
    return msgspec.structs.replace(JOB, **{**fields, **changes})


def started(job):
    output = io.BytesIO()
    return Arm(job, output, SystemClock()), output


def said(output):
    return [decode_message(line) for line in output.getvalue().splitlines()]


def asked(job):
    arm, output = started(job)
    arm.answer()
    arm.close()
    return said(output)


def test_nothing_is_said_beside_a_short_timing(folder, monkeypatch):
    monkeypatch.setattr(arm_module, "_STEP_INTERVAL_S", 100.0)
    assert [type(each) for each in asked(job_of(folder, None))] == [Ready, Answered]


def test_an_arm_says_that_it_is_ready_and_then_answers(folder, tmp_path, monkeypatch):
    monkeypatch.setattr(arm_module, "_STEP_INTERVAL_S", 0.0)
    messages = asked(job_of(folder, tmp_path / "pool"))
    [ready] = [each for each in messages if isinstance(each, Ready)]
    assert messages[0] == ready
    assert ready.pool is not None
    assert ready.pool.groups == 3
    assert set(ready.environment) >= {"python", "torch", "transformers", "threads"}
    answered = messages[-1]
    assert isinstance(answered, Answered)
    assert answered.prompt_tokens == ready.prompt_tokens == answered.computed_tokens
    blocks = answered.prompt_tokens // ready.pool.block_tokens
    # by the tier's own count, after everything was published
    assert answered.bytes_written == blocks * sum(ready.pool.block_bytes)
    assert answered.dropped_blocks == {}
    steps = {each.what for each in messages if isinstance(each, Step)}
    assert "reading the document" in steps


def test_without_a_pool_there_is_no_depot(folder):
    messages = asked(job_of(folder, None))
    assert messages[-1].bytes_written == 0
    assert next(each for each in messages if isinstance(each, Ready)).pool is None


def test_another_run_s_blocks_are_not_found(folder, tmp_path):
    pool = tmp_path / "pool"
    asked(job_of(folder, pool, run_id="one"))
    assert asked(job_of(folder, pool, run_id="two"))[-1].reused_tokens["disk"] == 0
    assert asked(job_of(folder, pool, run_id="one"))[-1].reused_tokens["disk"] > 0


def test_an_arm_waits_for_the_blocks_of_the_document_and_not_of_the_question(folder, tmp_path):
    pool = tmp_path / "pool"
    first, output = started(job_of(folder, pool))
    other, _ = started(job_of(folder, pool, question="How many hooks?", awaits_blocks=True))
    first.answer()
    other.answer()
    [answered] = [each for each in said(other._output) if isinstance(each, Answered)]
    assert 0 < answered.awaited_s < 10
    assert answered.reused_tokens["disk"] >= len(DOCUMENT) - 16
    assert said(output)[-1].awaited_s == 0.0
    for arm in (first, other):
        arm.close()


def test_blocks_that_never_come_are_not_waited_for_for_ever(folder, tmp_path, monkeypatch):
    monkeypatch.setattr(arm_module, "_AWAIT_S", 0.1)
    messages = asked(job_of(folder, tmp_path / "pool", awaits_blocks=True))
    assert messages[-1].awaited_s >= 0.1
    assert messages[-1].reused_tokens["disk"] == 0


@pytest.mark.parametrize("has_direct", [True, False])
def test_storage_alone_answers(folder, tmp_path, monkeypatch, has_direct):
    pool = tmp_path / "pool"
    if not has_direct:
        monkeypatch.setattr("kvdepot.io.localdisk.O_DIRECT", 0)
    first = asked(job_of(folder, pool))[-1]
    second = asked(job_of(folder, pool))[-1]
    assert (first.settled_files, second.settled_files) == (0, len(list(pool.rglob("*.kvseg"))))
    assert second.settled_files >= 1
    assert second.reused_tokens["disk"] > 0
    assert asked(job_of(folder, None))[-1].settled_files == 0


def test_what_changes_comes_last_in_the_prompt(folder):
    with EmbeddedEngine.open(folder) as engine:
        one = prompt_text(engine, job_of(folder, None))
        two = prompt_text(engine, job_of(folder, None, question="Why?"))
        assert one.startswith("<system>Answer.\n<user>" + DOCUMENT)
        assert one.endswith("Question: What is red?\n<assistant>")
        assert one.split("Question:")[0] == two.split("Question:")[0]
        # a template without system messages has the instruction in front of the document
        engine.tokenizer.chat_template = (
            "{% for m in messages %}{% if m['role'] == 'system' %}{{ raise_exception('no') }}"
            "{% endif %}<{{ m['role'] }}>{{ m['content'] }}{% endfor %}"
        )
        assert prompt_text(engine, job_of(folder, None)).startswith("<user>Answer.\n\n" + DOCUMENT)
        engine.tokenizer.chat_template = None
        plain = prompt_text(engine, job_of(folder, None))
        assert plain.startswith("Answer.\n\n" + DOCUMENT)
        assert plain.endswith("Question: What is red?\nAnswer:")


def test_the_process_ends_with_one_message_when_it_cannot_start(folder, tmp_path):
    from kvdepot.demo.process import ArmProcess
    from kvdepot.errors import KvdepotError

    job = job_of(folder, tmp_path / "pool", model_folder=str(tmp_path / "absent"))
    with (
        ArmProcess(job, tmp_path / "log") as process,
        pytest.raises(KvdepotError, match="no such model folder"),
    ):
        process.wait_ready(lambda _: None)
