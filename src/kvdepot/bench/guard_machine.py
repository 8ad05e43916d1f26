"""G10: nothing else used the machine, and it stayed what it was. Pure, over windows.

What the bench itself has started, noises and second engines too, is no stranger.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from kvdepot.bench.ceilings import Ceilings
from kvdepot.bench.guards import Finding, note
from kvdepot.bench.windows import Window
from kvdepot.units import format_bytes

__all__ = ["check_machine"]

#: of what the pool's device gives in the window's time
_FOREIGN_MAX = 0.02
#: of all processors' time
_FOREIGN_CPU_MAX = 0.05


def check_machine(
    where: str, arm: str, windows: Sequence[Window], ceilings: Ceilings | None
) -> Iterator[Finding]:
    """What was noticed beside the engine, window by window.

    Args:
        where: the round or load.
        arm: of the windows.
        windows: of all runs.
        ceilings: of the arm's pool; None: they were not measured.
    """
    for window in windows:
        for reason in _reasons(window, ceilings):
            yield note("G10", where, arm, reason)
    engines = list(dict.fromkeys(window.engine for window in windows if window.engine))
    if len(engines) > 1:
        yield note("G10", where, arm, f"the engine was not the same: {', '.join(engines)}")


def _reasons(window: Window, ceilings: Ceilings | None) -> Iterator[str]:
    before, after = window.begin.host, window.end.host
    swapped = (after.swapped_pages or 0) - (before.swapped_pages or 0)
    if swapped > 0:
        yield f"the machine swapped {swapped:,} pages"
    throttles = (after.throttles or 0) - (before.throttles or 0)
    if before.throttles is not None and throttles > 0:
        yield f"processors were slowed down {throttles:,} times because they were hot"
    yield from _foreign_bytes(window, ceilings)
    share = window.foreign_cpu_share()
    if share is not None and share > _FOREIGN_CPU_MAX:
        yield f"others had {share:.0%} of the processors' time"


def _foreign_bytes(window: Window, ceilings: Ceilings | None) -> Iterator[str]:
    foreign = window.foreign_bytes()
    if foreign is None:
        # a window without an edge on this host has nothing to say, one with a pool here has
        if window.page_residency is not None:
            yield "not evaluated: foreign I/O (the pool's device or the engine's own bytes are not known)"
        return
    most = None if ceilings is None else ceilings.read_rate
    if most is not None and window.span_s > 0:
        share, of = sum(foreign) / (most * window.span_s), "what it gives in that time"
    elif ours := window.device_read_bytes():
        share, of = sum(foreign) / ours, "what the engine read"
    else:
        return
    if share > _FOREIGN_MAX:
        read, written = map(format_bytes, foreign)
        yield f"others read {read} from the pool's device and wrote {written} to it, {share:.1%} of {of}"
