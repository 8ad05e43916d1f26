"""Results of other tools as rows of ours, so that one report shows them all.

What those tools do not record stays unknown: no guard is passed by silence.
"""

from __future__ import annotations

import csv
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from kvdepot.bench.plan import Arm, Load, Peak, Plan
from kvdepot.bench.prompts import Material
from kvdepot.bench.rows import Row
from kvdepot.bench.scrape import Counts
from kvdepot.bench.session import open_session
from kvdepot.bench.summary import Summary, summarise
from kvdepot.bench.windows import Edge, Window
from kvdepot.errors import ConfigError
from kvdepot.io.hostcounters import HostCounters
from kvdepot.io.results import ResultFolder, read_whole

__all__ = ["TOOLS", "import_result", "rows_of_tool", "tool_of"]

_NOTE = (
    "imported: prompts, isolation and the engine's counters are not known, so first asks and "
    "follow-ups cannot be told apart"
)


class _Record(NamedTuple):
    """One request of any tool; None is what it does not say."""

    begin_s: float
    ttft_s: float | None
    latency_s: float | None
    input_tokens: int | None
    output_tokens: int | None
    cached_tokens: int | None = None
    error: str = ""
    gaps_s: tuple[float, ...] = ()
    session: str = ""
    turn: int = 0


def import_result(source: Path, out: Path, *, version: str, tool: str = "") -> Summary:
    """Read another tool's result into a result folder of ours, and summarise it.

    Args:
        source: its file.
        out: folder for ours; another import may not be in it.
        version: of kvdepot.
        tool: which; empty: found out by the file's content.

    Raises:
        ConfigError: not a result of a known tool, or one without requests.
    """
    content = read_whole(source)
    tool = tool or tool_of(content, str(source))
    rows = rows_of_tool(content, tool, str(source))
    plan = Plan(
        name=f"{tool}: {source.name}",
        is_indicative=True,
        runs=1,
        peak=Peak(loads=(Load(name=tool, kind="closed"),)),
    )
    arm = Arm(name=source.stem, role="tier")
    named = [msgspec.structs.replace(row, arm=arm.name) for row in rows]
    material = Material(source.name, content.decode(errors="replace"))
    with ResultFolder(out) as folder:
        session = open_session(folder, plan, [arm], material, version=version, wall_s=0.0)
        if not session.windows:
            for row in named:
                session.add_row(row)
            session.add_window(_window(named, arm, tool))
        summary = summarise(session, tool=tool)
        content = msgspec.json.format(msgspec.json.encode(summary), indent=1)
        folder.write("summary.json", content)
        return summary


def tool_of(content: bytes, source: str) -> str:
    """Which tool wrote this.

    Raises:
        ConfigError: none that is known.
    """
    head = content.lstrip()[:1]
    if head != b"{":
        first = content.split(b"\n", 1)[0].decode(errors="replace").split(",")
        if {"request_id", "ttft", "submit_time"} <= {name.strip() for name in first}:
            return "lmcache bench engine"
    else:
        try:
            body = msgspec.json.decode(content)
        except msgspec.MsgspecError:
            body = _first_line(content)
        if isinstance(body, dict):
            for tool, mark in (
                ("vllm bench serve", "ttfts"),
                ("GuideLLM", "benchmarks"),
                ("AIPerf", "metrics"),
            ):
                if mark in body:
                    return tool
    raise ConfigError(
        f"{source} is no result that can be imported",
        hint="vllm bench serve with --save-result --save-detailed, AIPerf's profile_export.jsonl, "
        "GuideLLM's benchmarks.json, or the CSV of lmcache bench engine",
    )


def rows_of_tool(content: bytes, tool: str, source: str) -> list[Row]:
    """Rows of a tool's result.

    Raises:
        ConfigError: it is not of that tool, or has no requests.
    """
    reader = TOOLS.get(tool)
    if reader is None:
        raise ConfigError(f"unknown tool {tool!r}", hint=f"there are: {', '.join(TOOLS)}")
    try:
        records = list(reader(content))
    except (LookupError, TypeError, ValueError, msgspec.MsgspecError) as error:
        raise ConfigError(
            f"{source} is not a result of {tool}: {type(error).__name__}: {error}"
        ) from error
    if not records:
        raise ConfigError(f"{source} has no requests")
    return [_row(index, record, tool) for index, record in enumerate(records)]


def _row(seq: int, record: _Record, tool: str) -> Row:
    begin_s = record.begin_s
    end_s = begin_s + (record.latency_s or record.ttft_s or 0.0)
    is_ok = not record.error and record.ttft_s is not None
    return Row(
        run=0,
        round="peak",
        arm="",
        seq=seq,
        load=tool,
        session=record.session,
        turn=record.turn,
        ask_class="M",
        scheduled_s=begin_s,
        sent_s=begin_s,
        first_s=begin_s + (record.ttft_s or 0.0) if is_ok else None,
        last_s=end_s if is_ok else None,
        ended_s=end_s,
        prompt_tokens=record.input_tokens,
        output_tokens=record.output_tokens,
        cached_tokens=record.cached_tokens,
        error=record.error if is_ok or record.error else "no first token",
        gaps_s=list(record.gaps_s),
    )


def _window(rows: list[Row], arm: Arm, tool: str) -> Window:
    def edge(at_s: float) -> Edge:
        return Edge(at_s=at_s, wall_s=at_s, counts=Counts(), host=HostCounters())

    return Window(
        run=0,
        round="peak",
        arm=arm.name,
        role=arm.role,
        attempt=0,
        load=tool,
        begin=edge(min(row.scheduled_s for row in rows)),
        end=edge(max(row.ended_s for row in rows)),
        planned=len(rows),
        connections=0,
        notes=(_NOTE,),
    )


# tools


def _vllm(content: bytes) -> Iterable[_Record]:
    body = msgspec.json.decode(content)
    count = len(body["ttfts"])
    begins = body.get("start_times") or [0.0] * count
    errors = body.get("errors") or [""] * count
    gaps = body.get("itls") or [[]] * count
    for index in range(count):
        error = errors[index] or ""
        between = tuple(gaps[index])
        ttft_s = body["ttfts"][index]
        yield _Record(
            begin_s=begins[index],
            ttft_s=None if error else ttft_s,
            latency_s=ttft_s + sum(between),
            input_tokens=body["input_lens"][index],
            output_tokens=body["output_lens"][index],
            error=error,
            gaps_s=between,
        )


def _aiperf(content: bytes) -> Iterable[_Record]:
    for line in content.splitlines():
        if not line.strip():
            continue
        body = msgspec.json.decode(line)
        about = body.get("metadata", {})
        if about.get("benchmark_phase", "profiling") != "profiling":
            continue
        metrics = body.get("metrics", {})
        error = body.get("error")
        yield _Record(
            begin_s=about["request_start_ns"] / 1e9,
            ttft_s=_seconds(metrics, "time_to_first_token"),
            latency_s=_seconds(metrics, "request_latency"),
            input_tokens=_count(metrics, "usage_prompt_tokens", "input_sequence_length"),
            output_tokens=_count(metrics, "usage_completion_tokens", "output_sequence_length"),
            cached_tokens=_count(metrics, "usage_prompt_cache_read_tokens"),
            error=str(error.get("message", error) if isinstance(error, dict) else error or ""),
            session=str(about.get("x_correlation_id") or about.get("conversation_id") or ""),
            turn=int(about.get("turn_index") or 0),
        )


def _seconds(metrics: dict[str, Any], name: str) -> float | None:
    entry = metrics.get(name)
    if not isinstance(entry, dict) or entry.get("value") is None:
        return None
    units = {"ns": 1e-9, "us": 1e-6, "ms": 1e-3, "s": 1.0, "sec": 1.0, "seconds": 1.0}
    return float(entry["value"]) * units[str(entry.get("unit", "ms"))]


def _count(metrics: dict[str, Any], *names: str) -> int | None:
    for name in names:
        entry = metrics.get(name)
        value = entry.get("value") if isinstance(entry, dict) else entry
        if value is not None:
            return int(value)
    return None


def _guidellm(content: bytes) -> Iterable[_Record]:
    for benchmark in msgspec.json.decode(content)["benchmarks"]:
        requests = benchmark["requests"]
        for name in ("successful", "incomplete", "errored"):
            for body in requests.get(name) or []:
                yield _guidellm_record(body, is_ok=name == "successful", name=name)


def _guidellm_record(body: dict[str, Any], *, is_ok: bool, name: str) -> _Record:
    timings = (body.get("info") or {}).get("timings") or {}
    begin_s = body.get("request_start_time", body.get("start_time", timings.get("request_start")))
    ttft_ms = body.get("time_to_first_token_ms")
    return _Record(
        begin_s=float(begin_s or 0.0),
        ttft_s=ttft_ms / 1000 if is_ok and ttft_ms is not None else None,
        latency_s=body.get("request_latency"),
        input_tokens=body.get("prompt_tokens"),
        output_tokens=body.get("output_tokens"),
        cached_tokens=body.get("cached_tokens"),
        error="" if is_ok else str(body.get("error") or name),
    )


def _lmcache(content: bytes) -> Iterable[_Record]:
    for body in csv.DictReader(content.decode().splitlines()):
        is_ok = body["successful"].strip().lower() == "true"
        yield _Record(
            begin_s=float(body["submit_time"]),
            ttft_s=float(body["ttft"]) if is_ok else None,
            latency_s=float(body["request_latency"]),
            input_tokens=int(body["num_input_tokens"]),
            output_tokens=int(body["num_output_tokens"]),
            error="" if is_ok else body["error"] or "failed",
        )


def _first_line(content: bytes) -> Any:
    try:
        return msgspec.json.decode(content.lstrip().split(b"\n", 1)[0])
    except msgspec.MsgspecError:
        return None


TOOLS: dict[str, Callable[[bytes], Iterable[_Record]]] = {
    "vllm bench serve": _vllm,
    "AIPerf": _aiperf,
    "GuideLLM": _guidellm,
    "lmcache bench engine": _lmcache,
}
