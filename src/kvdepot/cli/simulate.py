"""`kvdepot simulate`: a trace through the same policies that serve, without an engine and without a disk."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import msgspec
from cyclopts import Parameter

from kvdepot.cli.admission import Admit
from kvdepot.errors import ConfigError
from kvdepot.units import format_bytes, parse_bytes

if TYPE_CHECKING:
    from kvdepot.sim.result import Percentiles, SimResult
    from kvdepot.sim.settings import SimSettings

__all__ = ["Engine", "Store", "simulate"]


@Parameter(name="*")
@dataclass(frozen=True)
class Engine:
    """The simulated engines.

    Attributes:
        prefill: Prompt tokens that one engine computes in a second, short ones.
        prefill_at_100k: How many times slower a token is behind 100,000 others, by attention.
        instances: Engines that share the pool.
        token_bytes: KV bytes of one token.
        block_tokens: Tokens of one block id in the trace.
        device: KV memory of one engine's device.
        host: Host buffer of one engine; 0 is none.
        meet: Compute the front of a prefix while its back is read.
    """

    prefill: float = 10_000.0
    prefill_at_100k: float = 3.0
    instances: int = 1
    token_bytes: int = 131_072
    block_tokens: int = 512
    device: str = "64GiB"
    host: str = "0"
    meet: bool = False


@Parameter(name="*")
@dataclass(frozen=True)
class Store:
    """The simulated storage.

    Attributes:
        disk: Capacity of the pool.
        read: Bytes a second that the storage reads, for all engines together.
        latency: Seconds until the first byte.
        fault: How the storage does over time: 100:0.01,130:1 is a hundredth of it from second 100 to 130.
    """

    disk: str = "4TiB"
    read: str = "6GB"
    latency: float = 0.002
    fault: str = ""


def simulate(
    trace: Path,
    /,
    *,
    engine: Engine = Engine(),
    store: Store = Store(),
    admit: Admit = Admit(),
    policies: Literal["on", "load_all", "off"] = "on",
    load: float = 1.0,
    requests: int = 0,
    json: Annotated[bool, Parameter(name="--json", negative="")] = False,
) -> int:
    """Replay a trace and print what each request waited, what was reused, read and written.

    Args:
        trace: JSON lines in Mooncake's format.
        engine: The simulated engines.
        store: The simulated storage.
        admit: What is written.
        policies: on; load_all: load every hit, with no deadline; off: no storage.
        load: How many times as many requests a second as the trace has.
        requests: Repeat the trace until there are so many; 0 takes it as it is.
        json: Print one JSON object.
    """
    from kvdepot.sim.trace import read_trace, repeated, rescaled
    from kvdepot.sim.world import simulate as run

    settings = _settings(engine, store, admit, policies)
    settings.check()
    if load <= 0:
        raise ConfigError(f"the load must be positive, not {load}")
    try:
        with trace.open("rb") as lines:
            found = list(read_trace(lines, block_tokens=engine.block_tokens))
    except OSError as error:
        raise ConfigError(f"{trace}: {error.strerror}") from error
    if not found:
        raise ConfigError(f"{trace} holds no request")
    source = repeated(found, requests) if requests else iter(found)
    result = run(rescaled(source, 1.0 / load), settings)
    if json:
        print(msgspec.json.encode(result).decode())
    else:
        _show(result)
    return 0


def _settings(
    engine: Engine, store: Store, admit: Admit, policies: Literal["on", "load_all", "off"]
) -> SimSettings:
    from kvdepot.sim.settings import Prefill, SimSettings

    if engine.prefill <= 0 or engine.prefill_at_100k < 1:
        raise ConfigError("prefill takes time, and later tokens take no less than early ones")
    token_s = 1.0 / engine.prefill
    # the derivative of b n + c n^2 at n = 100,000 is so many times b
    pair_s = token_s * (engine.prefill_at_100k - 1.0) / 200_000
    return SimSettings(
        prefill=Prefill(0.0, token_s, pair_s),
        block_tokens=engine.block_tokens,
        token_bytes=engine.token_bytes,
        instances=engine.instances,
        device_bytes=parse_bytes(engine.device),
        host_bytes=parse_bytes(engine.host),
        disk_bytes=parse_bytes(store.disk),
        read_bytes_per_s=float(parse_bytes(store.read)),
        read_latency_s=store.latency,
        factors=_factors(store.fault),
        policies=policies,
        can_meet=engine.meet,
        admission=admit.settings(),
    )


def _factors(text: str) -> tuple[tuple[float, float], ...]:
    found = []
    for part in filter(None, text.split(",")):
        at_s, _, factor = part.partition(":")
        try:
            found.append((float(at_s), float(factor)))
        except ValueError as error:
            raise ConfigError(
                f"not a fault: {part!r}", hint="write second:factor, for example 100:0,130:1"
            ) from error
    return tuple(found)


def _show(result: SimResult) -> None:
    print(f"{result.requests} requests in {result.span_s:.0f} s")
    print(f"  {'TTFT, seconds':<16}{'p50':>9}{'p90':>9}{'p95':>9}{'p99':>9}{'requests':>11}")
    for name, found in (
        ("first asks", result.first_ask_ttft_s),
        ("follow-ups", result.follow_up_ttft_s),
        ("all", result.ttft_s),
    ):
        print(f"  {name:<16}{_row(found)}{found.count:>11}")
    reused = ", ".join(f"{tokens:,} {tier}" for tier, tokens in result.reused_tokens.items())
    lines = [
        ("token share", f"{result.token_share:.1%} of {result.prompt_tokens:,} ({reused})"),
        (
            "computed",
            f"{result.computed_tokens:,} tokens, {result.amplification:.2f} x what was new",
        ),
        (
            "read, written",
            f"{format_bytes(result.read_bytes)}, {format_bytes(result.written_bytes)}",
        ),
        ("evicted", f"{result.evicted_blocks:,} blocks of the pool"),
        ("busy", f"engines {result.engine_busy:.0%}, storage {result.storage_busy:.0%}"),
        ("decisions", _counts(result.modes)),
        ("reuse ended by", _counts(result.reasons)),
        ("waiting", f"{result.saved_s:.1f} s saved, {result.lost_s:.1f} s lost"),
    ]
    for name, text in lines:
        print(f"  {name:<16}{text}")
    for text in filter(None, (result.host_advice, result.write_only)):
        print(f"  {text}")


def _row(found: Percentiles) -> str:
    return "".join(f"{value:>9.3f}" for value in (found.p50, found.p90, found.p95, found.p99))


def _counts(counts: dict[str, int]) -> str:
    ranked = sorted(counts.items(), key=lambda item: -item[1])
    return ", ".join(f"{count:,} {name}" for name, count in ranked if count) or "-"
