"""The demo and the processes of its arms: what they say, and what becomes of one that says nothing right."""

from __future__ import annotations

import os
import time

import pytest

from kvdepot.demo import process
from kvdepot.demo.messages import (
    Answered,
    Failed,
    Ready,
    Step,
    decode_job,
    decode_message,
    encode,
)
from kvdepot.demo.process import ArmProcess
from kvdepot.errors import KvdepotError
from tests.demo_samples import JOB, READY, answered


@pytest.mark.parametrize(
    "message", [Step("reading", 1, 2), READY, answered(), Failed("it went wrong", "do better")]
)
def test_messages_come_back_from_one_line(message):
    line = encode(message)
    assert line.count(b"\n") == 1
    assert decode_message(line) == message


def test_a_job_comes_back():
    assert decode_job(encode(JOB)) == JOB


# --- a stand-in for the arm: a few lines of Python that write what the test says

PRELUDE = "import sys, os, time\nread = sys.stdin.buffer.readline\njob = read()\n"


def say(message):
    return f"sys.stdout.buffer.write({encode(message)!r}); sys.stdout.flush()\n"


@pytest.fixture
def run(monkeypatch, tmp_path):
    started = []

    def start(code):
        monkeypatch.setattr(process, "_COMMAND", ("-c", PRELUDE + code))
        started.append(ArmProcess(JOB, tmp_path / "arm.log"))
        return started[-1]

    yield start
    for each in started:
        each.end()


def is_running(pid):
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def test_an_arm_is_started_asked_and_ended(run):
    code = say(Step("starting", 0, 0)) + say(READY) + "assert read() == b'ask\\n'\n"
    code += say(Step("reading", 1, 2)) + say(answered()) + "assert read() == b'end\\n'\n"
    steps: list[Step] = []
    with run(code) as arm:
        assert arm.wait_ready(steps.append) == READY
        assert arm.ask(steps.append) == answered()
    assert [step.what for step in steps] == ["starting", "reading"]
    assert not is_running(arm.pid)
    assert arm._process.returncode == 0


def test_the_job_reaches_the_arm_whole(run):
    code = f"assert job == {encode(JOB)!r}\n" + say(READY) + "read()\n"
    assert isinstance(run(code).wait_ready(lambda _: None), Ready)


def test_many_messages_at_once_and_one_in_pieces_are_told_apart(run):
    half = len(encode(READY)) // 2
    code = (say(Step("x", 1, 1)) * 500) + (
        f"sys.stdout.buffer.write({encode(READY)[:half]!r}); sys.stdout.flush(); time.sleep(0.1)\n"
        f"sys.stdout.buffer.write({encode(READY)[half:] + encode(answered())!r}); sys.stdout.flush()\n"
        "read()\n"
    )
    steps: list[Step] = []
    arm = run(code)
    assert arm.wait_ready(steps.append) == READY
    assert isinstance(arm.ask(steps.append), Answered)
    assert len(steps) == 500


def test_an_arm_s_own_error_is_the_demo_s_error(run):
    arm = run(say(Failed("no such pool", "name another")))
    with pytest.raises(KvdepotError, match="arm first_ask: no such pool") as failed:
        arm.wait_ready(lambda _: None)
    assert failed.value.hint == "name another"


def test_an_arm_that_dies_leaves_its_last_words(run):
    arm = run("print('the reason', file=sys.stderr)\nsys.exit(3)\n")
    with pytest.raises(KvdepotError, match="ended without an answer: exit status 3: the reason"):
        arm.wait_ready(lambda _: None)


def test_an_arm_that_is_killed_is_told_from_one_that_ends(run):
    arm = run(say(READY) + "read()\nos.kill(os.getpid(), 9)\n")
    arm.wait_ready(lambda _: None)
    with pytest.raises(KvdepotError, match="exit status -9"):
        arm.ask(lambda _: None)


def test_an_arm_that_is_gone_before_it_is_asked_is_an_error_and_no_crash(run):
    arm = run(say(READY))
    arm.wait_ready(lambda _: None)
    arm._process.wait()
    with pytest.raises(KvdepotError, match="ended without an answer"):
        arm.ask(lambda _: None)


def test_an_arm_that_hangs_is_given_up_and_killed(run, monkeypatch):
    monkeypatch.setattr(process, "_SILENCE_S", 0.2)
    monkeypatch.setattr(process, "_END_S", 0.2)
    arm = run("time.sleep(600)\n")
    with pytest.raises(KvdepotError, match="silent"):
        arm.wait_ready(lambda _: None)
    started_s = time.monotonic()
    arm.end()
    assert time.monotonic() - started_s < 60
    assert not is_running(arm.pid)


@pytest.mark.parametrize(
    ("code", "message"),
    [("print('hello', flush=True)\n", "said something else"), (say(answered()), "out of turn")],
)
def test_what_makes_no_sense_is_an_error(run, code, message):
    with pytest.raises(KvdepotError, match=message):
        run(code + "read()\n").wait_ready(lambda _: None)


def test_ending_twice_is_ending_once(run):
    arm = run(say(READY) + "read()\n")
    arm.wait_ready(lambda _: None)
    arm.end()
    arm.end()
    assert not is_running(arm.pid)
