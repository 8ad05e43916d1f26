"""`kvdepot bench`: measure an engine with and without a tier, compare results, import others'."""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from cyclopts import App, Parameter

from kvdepot.errors import ConfigError
from kvdepot.units import parse_bytes

if TYPE_CHECKING:
    from kvdepot.bench.plan import Arm, Plan
    from kvdepot.bench.summary import Summary

__all__ = ["Target", "app", "compare", "import_", "plan_", "report", "run"]

app = App(
    name="bench",
    help="Measure what a KV-cache tier brings: rounds, peak, contention; compare and import results.",
    help_format="plaintext",
)

_Lang = Literal["en", "zh"]
_Part = Literal["rounds", "peak", "contention"]
_POOL = "pool"
#: intervals of fewer runs are too narrow to decide by
_RUNS_MIN = 5


def _positive(_: type, value: float | None) -> None:
    if value is not None and value <= 0:
        raise ValueError("must be above zero")


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class Target:
    """What is measured."""

    engine: Literal["auto", "embedded", "vllm"] = "auto"
    """What to start when no endpoint is given: auto is vLLM if it is installed and a model is named."""

    url: str | None = None
    """Base URL of an endpoint with the tier; it is not restarted unless --by-hand."""

    recompute_url: str = ""
    """Base URL of an endpoint without the tier."""

    by_hand: bool = False
    """Ask on the terminal to restart the engine where the plan wants it."""

    salt: Literal["field", "nonce"] = "field"
    """How an endpoint keeps repetitions apart: the field cache_salt, or a nonce before the prompt."""

    arms: Path | None = None
    """A TOML file with arms: names, roles, commands that start engines."""

    model: str = ""
    """A model folder or hub id; the embedded engine has a small model of its own."""

    pool: Path | None = None
    """Folder for the tier's pool; by default in the output folder. It grows by what is stored."""

    path: Annotated[tuple[str, ...], Parameter(negative="")] = ()
    """NAME=FOLDER_OR_URL: one more pool of kvdepot with an arm of its own, for an engine that is started."""

    host_bytes: str = "1GiB"
    """Memory between engine and pool, for engines that are started."""

    vllm_argument: Annotated[tuple[str, ...], Parameter(negative="")] = ()
    """For vLLM, in all arms; give it several times."""


@app.command
def run(
    *,
    plan: str = "quick",
    document: Path | None = None,
    out: Path = Path("out/bench"),
    runs: int | None = None,
    only: Annotated[list[_Part] | None, Parameter(negative="")] = None,
    lang: _Lang = "en",
    target: Target = Target(),
) -> int:
    """Measure a plan's rounds, and its peak and contention tests, and write the report.

    Without an endpoint, an engine is started: vLLM if it is installed and a model is named, else the
    embedded engine with a small model. What was measured stays; the same command goes on with it. The key
    of an endpoint is taken from OPENAI_API_KEY. Exit status 1 if the result is INVALID.

    Args:
        plan: A preset (quick, quick-vllm, standard, article-a, article-b) or a TOML file.
        document: A UTF-8 text to ask about; by default a text that is shipped.
        out: Folder for the results.
        runs: In place of the plan's.
        only: Parts of the plan to run; by default all.
        lang: Language of the report.
        target: What is measured.
    """
    from kvdepot.bench.prompts import read_material, shipped_material
    from kvdepot.bench.run import measure
    from kvdepot.cli.benchshow import BenchShow, print_summary

    chosen = _parts(_plan(plan, runs), only)
    material = shipped_material() if document is None else read_material(str(document))
    with BenchShow() as show:
        summary = measure(
            chosen,
            _arms(target, (target.pool or out / _POOL).resolve()),
            material,
            out,
            tell=show.tell,
            ask_person=_ask_person if sys.stdin.isatty() else None,
            api_key=os.environ.get("OPENAI_API_KEY", ""),
        )
    _write_page(summary, out, lang)
    print_summary(summary)
    return 1 if summary.verdict == "INVALID" else 0


@app.command(name="plan")
def plan_(
    plan: str = "quick",
    /,
    *,
    engine: Literal["embedded", "vllm"] = "embedded",
    arms: Path | None = None,
    runs: int | None = None,
    start_s: Annotated[float | None, Parameter(validator=_positive)] = None,
    prefill_rate: Annotated[float | None, Parameter(validator=_positive)] = None,
    output_s: Annotated[float | None, Parameter(validator=_positive)] = None,
) -> int:
    """Show what a plan does in each phase, and how long that takes; nothing is started.

    The times are of requests one after the other. The default rates were seen on two quiet cores with the
    small model; give those of your engine.

    Args:
        plan: A preset (quick, quick-vllm, standard, article-a, article-b) or a TOML file.
        engine: Whose arms, and whose default rates.
        arms: A TOML file with arms, in place of the engine's.
        runs: In place of the plan's.
        start_s: Seconds until an engine that was started takes requests.
        prefill_rate: Prompt tokens that it computes in a second.
        output_s: Seconds for each output token.
    """
    import msgspec

    from kvdepot.bench.budget import budget_of
    from kvdepot.bench.targets import TYPICAL
    from kvdepot.cli.benchshow import print_budget

    chosen = _plan(plan, runs)
    given = {"start_s": start_s, "prefill_rate": prefill_rate, "output_s": output_s}
    costs = TYPICAL[engine]._replace(**{k: v for k, v in given.items() if v is not None})
    phases = budget_of(chosen, _planned_arms(engine, arms), costs)
    if sys.stdout.isatty():
        print_budget(chosen.name, phases, costs)
    else:
        print(msgspec.json.format(msgspec.json.encode(phases), indent=1).decode())
    return 0


@app.command
def report(result: Path, /, *, lang: _Lang = "en") -> int:
    """Make summary and report of a result folder again, also of one that is not finished.

    Args:
        result: A folder that kvdepot bench run has written.
        lang: Language of the report.
    """
    from kvdepot.bench.run import summarise_folder
    from kvdepot.cli.benchshow import print_summary

    summary = summarise_folder(result)
    _write_page(summary, result, lang)
    print_summary(summary)
    return 1 if summary.verdict == "INVALID" else 0


@app.command
def compare(first: Path, /, *others: Path, invalid: bool = False) -> int:
    """Compare results with the first one: ratios of TTFT with intervals over runs.

    What is not comparable is refused, with the reason. JSON goes to stdout when it is not a terminal.

    Args:
        first: A result folder, or its summary.json.
        others: Results to be laid beside it.
        invalid: Also compare results that a guard has declared INVALID.
    """
    import msgspec

    from kvdepot.bench.compare import compare as compared
    from kvdepot.bench.summary import decode_summary
    from kvdepot.cli.benchshow import print_comparison
    from kvdepot.io.results import read_whole

    results = []
    for path in (first, *others):
        file = path / "summary.json" if path.is_dir() else path
        results.append((str(path), decode_summary(read_whole(file), str(file))))
    comparison = compared(results, allows_invalid=invalid)
    if sys.stdout.isatty():
        print_comparison(comparison)
    else:
        print(msgspec.json.format(msgspec.json.encode(comparison), indent=1).decode())
    return 0


@app.command(name="import")
def import_(
    source: Path,
    /,
    *,
    out: Path,
    tool: Literal["", "vllm bench serve", "AIPerf", "GuideLLM", "lmcache bench engine"] = "",
    lang: _Lang = "en",
) -> int:
    """Read another tool's result into the same report.

    Args:
        source: JSON of vllm bench serve (--save-detailed), AIPerf's profile_export.jsonl, GuideLLM's
            benchmarks.json, or the CSV of lmcache bench engine.
        out: Folder for rows, summary and report.
        tool: Which; by default it is found out.
        lang: Language of the report.
    """
    from kvdepot import __version__
    from kvdepot.bench.importing import import_result
    from kvdepot.cli.benchshow import print_summary

    summary = import_result(source, out, version=__version__, tool=tool)
    _write_page(summary, out, lang)
    print_summary(summary)
    return 0


def _write_page(summary: Summary, out: Path, lang: _Lang) -> None:
    from kvdepot.bench.page import result_page
    from kvdepot.bench.run import samples_of_folder

    samples = samples_of_folder(out, summary)
    page = result_page(summary, lang=lang, samples=samples)
    (out / "report.html").write_text(page, encoding="utf-8")
    print(f"wrote {out / 'summary.json'} and {out / 'report.html'}", file=sys.stderr)


def _plan(name: str, runs: int | None) -> Plan:
    import msgspec

    from kvdepot.bench.plan import PRESETS, preset, read_plan
    from kvdepot.io.results import read_whole

    chosen = preset(name) if name in PRESETS else read_plan(read_whole(name), name)
    if runs is None:
        return chosen
    is_indicative = chosen.is_indicative or runs < _RUNS_MIN
    return msgspec.structs.replace(chosen, runs=runs, is_indicative=is_indicative)


def _planned_arms(engine: str, arms: Path | None) -> list[Arm]:
    """Arms by name and role: what a budget goes by. Their commands are of no use."""
    from kvdepot.bench.targets import embedded_arms, read_arms, vllm_arms
    from kvdepot.io.results import read_whole

    if arms is not None:
        return read_arms(read_whole(arms), str(arms))
    if engine == "embedded":
        return embedded_arms(model="", pool=_POOL, host_bytes=0)
    return vllm_arms(model="", serve=(), pool=_POOL, fs_pool=_POOL, host_bytes=0, fs_spec={})


def _parts(plan: Plan, only: list[_Part] | None) -> Plan:
    import msgspec

    if not only:
        return plan
    if "rounds" not in only:
        plan = msgspec.structs.replace(plan, rounds=(), calibrate_tokens=())
    if "peak" not in only:
        plan = msgspec.structs.replace(plan, peak=None)
    if "contention" not in only:
        plan = msgspec.structs.replace(plan, contention=None)
    return plan


def _arms(target: Target, pool: Path) -> list[Arm]:
    import importlib.util

    from kvdepot.bench.targets import embedded_arms, read_arms, url_arms
    from kvdepot.io.results import read_whole

    if target.arms is not None:
        return read_arms(read_whole(target.arms), str(target.arms))
    if target.url is not None:
        return url_arms(
            url=target.url,
            recompute_url=target.recompute_url,
            model=target.model,
            pool=str(pool) if target.pool is not None else "",
            is_by_hand=target.by_hand,
            salt=target.salt,
        )
    host_bytes = parse_bytes(target.host_bytes)
    has_vllm = importlib.util.find_spec("vllm") is not None
    _make(pool)
    if target.engine == "embedded" or not (target.engine == "vllm" or (has_vllm and target.model)):
        return embedded_arms(
            model=target.model, pool=str(pool), host_bytes=host_bytes, paths=_paths(target.path)
        )
    if not target.model:
        raise ConfigError("vLLM needs a model", hint="name it: --model FOLDER_OR_ID")
    return _vllm_arms(target, pool, host_bytes)


def _vllm_arms(target: Target, pool: Path, host_bytes: int) -> list[Arm]:
    from kvdepot.bench.targets import vllm_arms
    from kvdepot.engines.vllm import CPU_SPEC
    from kvdepot.engines.vllm.arguments import VllmArguments
    from kvdepot.engines.vllm.cpudefaults import cpu_defaults, equal_cores
    from kvdepot.engines.vllm.installed import need_vllm
    from kvdepot.io.machine import this_machine

    vllm = need_vllm()
    fs_pool = pool.with_name(pool.name + "-fs")
    _make(fs_pool)
    fs_spec: dict[str, object] = {"spec_name": "TieringOffloadingSpec"}
    arguments, environment = target.vllm_argument, {}
    if vllm.is_cpu:
        if not VllmArguments(arguments).has("dtype"):
            # in 16 bits, other roundings of a prompt that is computed in two parts make other answers, with
            # any tier and with none, and no answer could be held against recomputing (G7)
            arguments = (*arguments, "--dtype", "float32")
        # what kvdepot serve would choose for its own arm holds for all: same type, same threads
        given = VllmArguments(arguments)
        chosen = cpu_defaults(given, os.environ, this_machine(), request_bytes=0)
        arguments = (*arguments, *chosen.arguments)
        environment = {**equal_cores(given, os.environ), **chosen.environment}
        fs_spec = {"spec_name": CPU_SPEC[0], "spec_module_path": CPU_SPEC[1]}
    return vllm_arms(
        model=target.model,
        serve=vllm.command(target.model),
        pool=str(pool),
        fs_pool=str(fs_pool),
        host_bytes=host_bytes,
        fs_spec=fs_spec,
        arguments=arguments,
        environment=environment,
        paths=_paths(target.path),
    )


def _paths(given: tuple[str, ...]) -> dict[str, str]:
    """Pools by name; folders are made, and URLs stay as they are."""
    found: dict[str, str] = {}
    for each in given:
        name, is_named, at = each.partition("=")
        if not is_named or not name or not at or name in found:
            raise ConfigError(
                f"--path {each} names no path of its own",
                hint="for example --path nvme=/mnt/nvme/kv",
            )
        if "://" not in at:
            folder = Path(at).resolve()
            _make(folder)
            at = str(folder)
        found[name] = at
    return found


def _make(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"cannot make {folder}: {error.strerror}") from error


def _ask_person(text: str) -> None:
    print(text, file=sys.stderr)
    input()
