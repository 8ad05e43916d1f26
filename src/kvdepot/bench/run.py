"""From a plan to a summary: the rounds, then the peak test, then the contention test."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import msgspec

from kvdepot import __version__
from kvdepot.bench.conduct import Conductor
from kvdepot.bench.contention import contend
from kvdepot.bench.launch import AskPerson, CommandLauncher
from kvdepot.bench.peaktest import LoadRunner
from kvdepot.bench.plan import Arm, Plan
from kvdepot.bench.prompts import Material
from kvdepot.bench.rig import Rig, Tell
from kvdepot.bench.session import Session, open_session, read_session
from kvdepot.bench.summary import Summary, summarise
from kvdepot.bench.windows import HostProbe
from kvdepot.clock import SystemClock
from kvdepot.io.results import ResultFolder

__all__ = ["measure", "samples_of_folder", "summarise_folder"]

_SUMMARY = "summary.json"


def measure(
    plan: Plan,
    arms: Sequence[Arm],
    material: Material,
    out: Path,
    *,
    tell: Tell,
    ask_person: AskPerson | None,
    api_key: str = "",
) -> Summary:
    """Measure what the folder does not have yet, and write its summary. Blocks for long.

    Raises:
        ConfigError: the folder holds another plan's result, or an arm cannot be started.
        KvdepotError: an engine ended.
    """
    clock = SystemClock()
    with ResultFolder(out) as folder:
        session = open_session(
            folder, plan, arms, material, version=__version__, wall_s=clock.wall_s()
        )
        launcher = CommandLauncher(folder.sub_folder("logs"), ask_person=ask_person, clock=clock)
        second = CommandLauncher(folder.sub_folder("logs-second"), ask_person=None, clock=clock)
        rig = Rig(session, material, launcher, HostProbe(), clock, tell, api_key, second)
        Conductor(rig).run()
        LoadRunner(rig).peak()
        contend(rig)
        return _written(session)


def summarise_folder(out: Path) -> Summary:
    """The summary of a folder again, from its rows.

    Raises:
        ConfigError: it holds no result.
    """
    with ResultFolder(out) as folder:
        return _written(read_session(folder))


def _written(session: Session) -> Summary:
    summary = summarise(session)
    content = msgspec.json.format(msgspec.json.encode(summary), indent=1)
    session.folder.write(_SUMMARY, content)
    return summary


def samples_of_folder(out: Path, summary: Summary) -> dict[str, list[float]]:
    """All TTFTs of each round and arm, and of the classes at each load, for their distributions."""
    samples: dict[str, list[float]] = {}
    names = {(each.round, each.arm) for each in summary.rounds}
    with ResultFolder(out) as folder:
        for row in read_session(folder).rows():
            if row.kind != "measured" or not row.is_ok or row.ttft_s is None:
                continue
            if row.load and row.ask_class in ("F", "U") and row.round == "peak":
                name = f"{row.load} {row.arm} {row.ask_class}"
            elif (row.round, row.arm) in names and not row.load:
                name = f"{row.round} {row.arm}"
            else:
                continue
            samples.setdefault(name, []).append(row.ttft_s)
    return samples
