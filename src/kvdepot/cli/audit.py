"""`kvdepot audit`: where the prefix of prompts breaks, why, and what the fix brings."""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import App, Parameter

from kvdepot.errors import ConfigError, KvdepotError

if TYPE_CHECKING:
    from kvdepot.audit.result import AuditResult
    from kvdepot.audit.run import AuditOptions

__all__ = ["Engine", "Limits", "Output", "app", "audit", "export"]

app = App(name="audit", help_format="plaintext")


@Parameter(name="*")
@dataclasses.dataclass(frozen=True)
class Engine:
    """What serves."""

    model: str | None = None
    """Folder or hub id of the model: its tokenizer and chat template are used."""
    block_tokens: int = 16
    """The engine's block."""
    prefill_rate: float = 10_000.0
    """Tokens per second, to turn tokens into seconds."""
    instances: int | None = None
    """Engines behind one address, for the verdict."""
    capacity_tokens: int = 1_000_000
    """Tokens that each engine's own cache holds."""
    shared_tokens: int | None = None
    """Tokens of one cache for all; by default eight times that."""
    kv_bytes_per_token: int | None = None
    """By default from the model's config."""


@Parameter(name="*")
@dataclasses.dataclass(frozen=True)
class Output:
    """What is written."""

    json: Annotated[Path | None, Parameter(allow_leading_hyphen=True)] = None
    """Write the whole result there; - for standard output instead of the summary."""
    html: Path | None = None
    """Write a page there."""
    language: str = "en"
    """Of summary and page: en or zh."""
    show_values: Annotated[bool, Parameter(negative="")] = False
    """Show real values and texts; by default they are masked."""


@Parameter(name="*")
@dataclasses.dataclass(frozen=True)
class Limits:
    """What makes the exit status 2."""

    fail_under: float | None = None
    """Least share of input tokens that must be reusable, 0 to 1."""
    fail_on: Annotated[tuple[str, ...], Parameter(negative="")] = ()
    """Causes that must not be found (or any); may be given several times."""
    baseline: Path | None = None
    """An earlier JSON result to compare with."""
    max_regress: str | None = None
    """Percentage points that may be lost against it, such as 2pp."""


@app.default
def audit(
    log: Annotated[str, Parameter(allow_leading_hyphen=True)],
    /,
    *,
    engine: Engine = Engine(),
    output: Output = Output(),
    limits: Limits = Limits(),
    sample: int = 2000,
) -> int:
    """Say where the prefix of prompts breaks, why, and what the fix brings.

    Reads OpenAI request logs (also of LiteLLM, Langfuse, Azure and OpenTelemetry), rendered prompts, token
    ids, vLLM's debug logs and KV events, public traces and audit traces; plain, gzip or zstd.

    Exit status: 0 clean, 1 the input cannot be read, 2 a limit of yours is exceeded, 3 the result cannot
    be trusted.

    Args:
        log: The file; - for standard input.
        engine: What serves.
        output: What is written.
        limits: What makes the exit status 2.
        sample: Larger logs are searched in a sample of so many requests, and proved in full.
    """
    from kvdepot.audit.gates import INPUT_ERROR

    try:
        return _audit(log, engine, output, limits, sample)
    except KvdepotError as error:
        return _refuse(error, INPUT_ERROR)


@app.command
def export(
    log: Annotated[str, Parameter(allow_leading_hyphen=True)],
    out: Path,
    /,
    *,
    model: str | None = None,
) -> int:
    """Write an audit trace: the log without its text, to be given to others.

    Words become salted hashes with their token counts; the salt is not kept. Everything but quoted text
    works on it: kvdepot audit OUT. Times, token counts and which texts are equal remain visible.

    Args:
        log: The file; - for standard input.
        out: The trace.
        model: Folder or hub id of the model that serves, to count tokens.
    """
    from kvdepot.audit.gates import INPUT_ERROR

    try:
        count = _export(log, out, model)
    except KvdepotError as error:
        return _refuse(error, INPUT_ERROR)
    print(f"wrote {count} requests to {out}")
    return 0


def _export(log: str, out: Path, model: str | None) -> int:
    import json
    import secrets

    from kvdepot.audit.export import Pseudonyms, shared_rows
    from kvdepot.audit.model import load_model
    from kvdepot.audit.sanity import in_order
    from kvdepot.audit.sources import read_log
    from kvdepot.audit.tokens import PieceMemo
    from kvdepot.audit.traffic import Traffic

    reading = read_log(log)
    if any(each.body is None and each.prompt is None for each in reading.records):
        raise ConfigError(
            f"{log} is a {reading.kind} and has no text that must be left out",
            hint="give it away as it is",
        )
    traffic = Traffic.of(in_order(reading).records)
    names = Pseudonyms(secrets.token_bytes(32), PieceMemo(load_model(model).encoder))
    rows = shared_rows(traffic.records, traffic.bodies, names)
    _write(out, "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))
    return traffic.requests


def _refuse(error: KvdepotError, status: int) -> int:
    print(f"error: {error}", file=sys.stderr)
    if error.hint:
        print(f"hint: {error.hint}", file=sys.stderr)
    return status


def _audit(log: str, engine: Engine, output: Output, limits: Limits, sample: int) -> int:
    from kvdepot.audit.gates import check_causes, exit_status, parse_points
    from kvdepot.audit.render import clean_text
    from kvdepot.audit.result import decode_audit
    from kvdepot.audit.run import audit as run_audit
    from kvdepot.audit.sources import read_log
    from kvdepot.audit.words import LANGUAGES

    # wrong arguments are told before the minutes, not after them
    if output.language not in LANGUAGES:
        raise ConfigError(
            f"no such language: {output.language}", hint=f"one of {', '.join(LANGUAGES)}"
        )
    check_causes(limits.fail_on)
    path = limits.baseline
    before = decode_audit(_bytes_of(path), str(path)) if path is not None else None
    lost = parse_points(limits.max_regress) if limits.max_regress else None
    # a file's name may be no text
    name = "standard input" if log == "-" else clean_text(Path(log).name)
    result = run_audit(read_log(log), name, _options(engine, output, sample), tell=_tell)
    status, reasons = exit_status(
        result,
        fail_under=limits.fail_under,
        fail_on=limits.fail_on,
        baseline=before,
        max_regress=lost,
    )
    _show(result, output)
    for reason in reasons:
        print(f"failed: {reason}", file=sys.stderr)
    return status


def _options(engine: Engine, output: Output, sample: int) -> AuditOptions:
    from kvdepot.audit.run import AuditOptions

    return AuditOptions(
        model=engine.model,
        block_tokens=engine.block_tokens,
        prefill_tokens_per_s=engine.prefill_rate,
        capacity_tokens=engine.capacity_tokens,
        shared_tokens=engine.shared_tokens,
        instances=engine.instances,
        kv_bytes_per_token=engine.kv_bytes_per_token,
        show_values=output.show_values,
        sample_requests=sample,
    )


def _show(result: AuditResult, output: Output) -> None:
    from kvdepot.audit.page import audit_page
    from kvdepot.audit.result import encode_audit
    from kvdepot.audit.summary import summary

    if output.html is not None:
        _write(output.html, audit_page(result, output.language))
    if output.json is not None and str(output.json) == "-":
        print(encode_audit(result).decode())
        return
    if output.json is not None:
        _write(output.json, encode_audit(result).decode())
    print(summary(result, output.language), end="")


def _tell(what: str) -> None:
    if sys.stderr.isatty():
        print(f"... {what}", file=sys.stderr)


def _bytes_of(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from error


def _write(path: Path, text: str) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error.strerror}") from error
