"""The whole demo: what is checked first, the phases, and what comes of them."""

from __future__ import annotations

import os
import platform
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import NamedTuple, Protocol

import msgspec

from kvdepot import __version__
from kvdepot.clock import Clock, SystemClock
from kvdepot.demo.arms import (
    ARMS,
    INSTRUCTION,
    PHASES,
    WHY_NOTHING_IS_REUSED,
    ArmPlan,
    changed_first_line,
    question_of,
)
from kvdepot.demo.document import Document, check_length
from kvdepot.demo.messages import Answered, Job, PoolFacts, Ready, Step
from kvdepot.demo.process import ArmProcess, StepSeen
from kvdepot.demo.result import ArmResult, DemoResult, DocumentFacts, ModelFacts, PoolResult
from kvdepot.errors import ConfigError
from kvdepot.io.filesystem import MEMORY_FILE_SYSTEMS, file_system_of, free_bytes_of
from kvdepot.io.models import ModelFiles, cache_folder
from kvdepot.units import GIB, format_bytes
from kvdepot.urls import PoolUrl

__all__ = ["DemoSettings", "Show", "run_demo"]

_PLANS = {plan.name: plan for plan in ARMS}
#: the document's KV twice (the changed first line stores it again), with room to spare
_FREE_BYTES_MIN = GIB
#: more than the instruction, the question and the template take
_PROMPT_EXTRA_TOKENS = 512
#: an answer to a question of fact is one paragraph
_STOP = ("\n\n",)


class DemoSettings(NamedTuple):
    """What the user chose."""

    document: Document
    questions: Sequence[str]
    model: ModelFiles
    dtype: str
    #: None: a temporary folder, removed afterwards
    pool_url: str | None
    block_tokens: int | None
    max_new_tokens: int


class Show(Protocol):
    """Where the demo's progress goes."""

    def step(self, arm: str, step: Step) -> None:
        """An arm is doing something that takes time."""

    def finished(self, plan: ArmPlan, answered: Answered) -> None:
        """An arm has its answer."""


class _Run(NamedTuple):
    """What all arms of one run share."""

    settings: DemoSettings
    pool_url: str
    #: names this run: its blocks are its own, also in a pool that holds those of earlier runs
    run_id: str
    host_tokens: int
    logs: Path
    show: Show
    clock: Clock


class _Outcome(NamedTuple):
    """What one arm said."""

    plan: ArmPlan
    #: from the start of the process to its being ready
    start_s: float
    ready: Ready
    answered: Answered


def run_demo(settings: DemoSettings, show: Show, clock: Clock | None = None) -> DemoResult:
    """Run all arms, one timing at a time. Takes minutes.

    Raises:
        ConfigError: something is wrong with the settings; said before anything starts where possible.
        KvdepotError: an arm failed; the message is its own.
    """
    clock = clock or SystemClock()
    started_s = clock.monotonic_s()
    tokens = _check_document(settings)
    with ExitStack() as stack:
        logs = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="kvdepot-demo-log-")))
        pool_url = settings.pool_url or stack.enter_context(_own_pool())
        place = PoolUrl.parse(pool_url).path
        _check_space(place)
        run = _Run(settings, pool_url, os.urandom(6).hex(), tokens, logs, show, clock)
        outcomes: dict[str, _Outcome] = {}
        for phase in PHASES:
            outcomes |= _run_phase(run, phase)
        file_system = file_system_of(place)
    return _result(run, outcomes, file_system, clock, started_s)


def _run_phase(run: _Run, names: Sequence[str]) -> dict[str, _Outcome]:
    """Start the processes of a phase, one when the one before is ready; then ask them in turn."""
    found: dict[str, _Outcome] = {}
    with ExitStack() as stack:
        processes: dict[str, ArmProcess] = {}
        ready: dict[str, tuple[float, Ready]] = {}
        for name in names:
            # said here, because the arm is busy importing for seconds before it can say anything
            run.show.step(name, Step("starting the engine", 0, 0))
            started_s = run.clock.monotonic_s()
            process = ArmProcess(_job(run, _PLANS[name]), run.logs / f"{name}.log")
            processes[name] = stack.enter_context(process)
            said = process.wait_ready(_steps_of(run, name))
            ready[name] = (run.clock.monotonic_s() - started_s, said)
        for name, process in processes.items():
            answered = process.ask(_steps_of(run, name))
            found[name] = _Outcome(_PLANS[name], *ready[name], answered)
            run.show.finished(_PLANS[name], answered)
    return found


def _steps_of(run: _Run, name: str) -> StepSeen:
    return lambda step: run.show.step(name, step)


def _job(run: _Run, plan: ArmPlan) -> Job:
    settings = run.settings
    number = f"{int(run.run_id, 16) % 10**8:08d}"
    return Job(
        arm=plan.name,
        model_folder=str(settings.model.folder),
        model_name=settings.model.name,
        dtype=settings.dtype,
        block_tokens=settings.block_tokens,
        pool_url=run.pool_url if plan.has_pool else None,
        is_own_pool=settings.pool_url is None,
        run_id=run.run_id,
        host_tokens=run.host_tokens,
        instruction=changed_first_line(number) if plan.has_changed_first_line else INSTRUCTION,
        document=settings.document.text,
        question=question_of(plan, settings.questions),
        max_new_tokens=settings.max_new_tokens,
        stop=_STOP,
        awaits_blocks=plan.awaits_blocks,
    )


# before anything starts


def _check_document(settings: DemoSettings) -> int:
    """Refuse a document that is too long; give the tokens that the host tier should hold."""
    if not settings.questions or not all(each.strip() for each in settings.questions):
        raise ConfigError("a question is empty")
    if settings.max_new_tokens < 1:
        raise ConfigError(f"max_new_tokens must be positive, not {settings.max_new_tokens}")
    tokens, context = _token_count(settings), _context_tokens(settings.model.folder)
    if context is not None:
        check_length(
            settings.document,
            tokens=tokens,
            answer_tokens=settings.max_new_tokens,
            context=context,
        )
        return min(tokens + _PROMPT_EXTRA_TOKENS, context)
    return tokens + _PROMPT_EXTRA_TOKENS


def _token_count(settings: DemoSettings) -> int:
    """Tokens of the document; without torch, by the model's own tokenizer where it has the usual file."""
    from tokenizers import Tokenizer  # noqa: PLC0415 - of the demo extra

    file = settings.model.folder / "tokenizer.json"
    if not file.is_file():
        return len(settings.document.text) // 3
    tokenizer = Tokenizer.from_file(str(file))
    return len(tokenizer.encode(settings.document.text, add_special_tokens=False).ids)


class _ModelConfig(msgspec.Struct):
    """The one field of a model's config that matters before it is loaded."""

    max_position_embeddings: int | None = None


def _context_tokens(folder: Path) -> int | None:
    try:
        text = (folder / "config.json").read_bytes()
        return msgspec.json.decode(text, type=_ModelConfig).max_position_embeddings
    except (OSError, msgspec.MsgspecError) as error:
        raise ConfigError(f"{folder} holds no model: config.json: {error}") from error


@contextmanager
def _own_pool() -> Iterator[str]:
    """A folder for the pool that is gone afterwards; on storage, if the usual place is memory."""
    place = Path(tempfile.gettempdir())
    if file_system_of(place) in MEMORY_FILE_SYSTEMS:
        place = cache_folder()
        place.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="kvdepot-demo-pool-", dir=place) as folder:
        yield str(Path(folder) / "pool")


def _check_space(place: str) -> None:
    free = free_bytes_of(place)
    if free < _FREE_BYTES_MIN:
        raise ConfigError(
            f"{place} has {format_bytes(free)} free; the demo needs {format_bytes(_FREE_BYTES_MIN)}",
            hint="name another place: --pool URL",
        )


# afterwards


def _result(
    run: _Run,
    outcomes: dict[str, _Outcome],
    file_system: str,
    clock: Clock,
    started_s: float,
) -> DemoResult:
    base = outcomes["recompute"]
    arms = tuple(_arm_result(run, outcomes[plan.name], base) for plan in ARMS)
    follow_up = next(arm for arm in arms if arm.name == "follow_up")
    document = run.settings.document
    return DemoResult(
        kvdepot_version=__version__,
        finished_at=datetime.fromtimestamp(clock.wall_s(), UTC).isoformat(timespec="seconds"),
        wall_s=clock.monotonic_s() - started_s,
        environment={**_environment(), **base.ready.environment},
        model=ModelFacts(
            name=run.settings.model.name,
            dtype=run.settings.dtype,
            attention=base.ready.attention,
            context_tokens=base.ready.context_tokens,
        ),
        document=DocumentFacts(name=document.name, source=document.source, sha256=document.sha256),
        pool=_pool_result(run, outcomes["first_ask"].ready.pool, file_system),
        arms=arms,
        speedup_follow_up_vs_recompute=follow_up.speedup,
        why_changed_first_line_reuses_nothing=WHY_NOTHING_IS_REUSED,
        problems=tuple(_problems(arms, file_system)),
    )


def _arm_result(run: _Run, outcome: _Outcome, base: _Outcome) -> ArmResult:
    plan, answered = outcome.plan, outcome.answered
    question = question_of(plan, run.settings.questions)
    is_comparable = (
        question == question_of(base.plan, run.settings.questions)
        and not plan.has_changed_first_line
        and plan != base.plan
    )
    return ArmResult(
        name=plan.name,
        what=plan.what,
        question=question,
        ttft_s=answered.ttft_s,
        prompt_tokens=answered.prompt_tokens,
        computed_tokens=answered.computed_tokens,
        reused_tokens=answered.reused_tokens,
        bytes_read=answered.bytes_read,
        bytes_written=answered.bytes_written,
        answer=answered.answer,
        answer_tokens=answered.answer_tokens,
        total_s=answered.total_s,
        start_s=outcome.start_s,
        awaited_s=answered.awaited_s,
        speedup=base.answered.ttft_s / answered.ttft_s,
        same_answer_as_recompute=(
            answered.answer == base.answered.answer if is_comparable else None
        ),
        dropped_blocks=answered.dropped_blocks,
    )


def _pool_result(run: _Run, facts: PoolFacts | None, file_system: str) -> PoolResult:
    assert facts is not None, "first_ask has a pool"
    return PoolResult(
        url=PoolUrl.parse(run.pool_url).url,
        file_system=file_system,
        is_direct=facts.is_direct,
        direct_reason=facts.direct_reason,
        page_cache=(
            "O_DIRECT: reads and writes go past it"
            if facts.is_direct
            else "buffered: the segments' cached pages are dropped before each question"
        ),
        block_tokens=facts.block_tokens,
        block_reason=facts.block_reason,
        groups=facts.groups,
        block_bytes=facts.block_bytes,
        token_bytes=facts.token_bytes,
    )


def _problems(arms: Sequence[ArmResult], file_system: str) -> Iterator[str]:
    """What did not go as it should."""
    if file_system in MEMORY_FILE_SYSTEMS:
        yield f"the pool is on {file_system}, which is memory: these times say nothing about storage"
    for arm in arms:
        if arm.computed_tokens + arm.reused_total != arm.prompt_tokens:
            yield f"{arm.name}: computed and reused tokens do not make the prompt"
        if arm.dropped_blocks:
            reasons = ", ".join(f"{name}: {count}" for name, count in arm.dropped_blocks.items())
            yield f"{arm.name}: blocks were not stored ({reasons})"
        if arm.same_answer_as_recompute is False:
            yield f"{arm.name}: the answer differs from recompute's"
        is_reusing = arm.name in ("follow_up", "other_instance")
        if is_reusing and not arm.reused_total:
            yield f"{arm.name}: nothing was reused"
        if not is_reusing and arm.reused_total:
            yield f"{arm.name}: {arm.reused_total} tokens were reused, and none should be"


def _environment() -> dict[str, str]:
    uname = platform.uname()
    return {
        "system": f"{uname.system} {uname.release} {uname.machine}",
        "cpu": _cpu_name(),
        "cores": str(len(os.sched_getaffinity(0))),
    }


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return "unknown"
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else "unknown"
