"""The plan: what is asked of which arm in which round, as data. It is hashed before the first run.

Presets are plans that come with the package: `quick`, `quick-vllm`, `standard`, `article-a`, `article-b`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from importlib import resources
from typing import Annotated, Literal

import msgspec

from kvdepot.bench.client import Api
from kvdepot.errors import ConfigError

__all__ = [
    "PRESETS",
    "Arm",
    "Contention",
    "Limits",
    "Load",
    "Noise",
    "Peak",
    "Plan",
    "Role",
    "Round",
    "Traffic",
    "plan_digest",
    "preset",
    "read_plan",
]

PRESETS = ("quick", "quick-vllm", "standard", "article-a", "article-b")

Role = Literal["recompute", "tier", "dram", "reader"]
_Positive = Annotated[int, msgspec.Meta(ge=1)]
_Count = Annotated[int, msgspec.Meta(ge=0)]
_PositiveFloat = Annotated[float, msgspec.Meta(gt=0)]


class _Data(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Plan data: a key that is misspelt is refused."""


class Arm(_Data, frozen=True, kw_only=True):
    """One engine in one configuration, and how it is started."""

    name: str
    role: Role
    #: a command with {port}, {pool}, {model}, {out} and {python} in it; empty: the engine runs already, or is
    #: started by hand
    command: tuple[str, ...] = ()
    environment: dict[str, str] = {}
    #: without /v1; with {port} when the command has it
    url: str = "http://127.0.0.1:{port}"
    model: str = ""
    #: asked for by a prompt on the terminal whenever the plan wants a restart
    is_started_by_hand: bool = False
    #: folder under the tier: its free space, its device and its cached pages are looked at
    pool: str = ""
    #: orders (POST) that empty the engine's own caches
    resets: tuple[str, ...] = ()
    #: orders (POST) that wait until what was stored is visible
    settles: tuple[str, ...] = ()
    ready_s: _PositiveFloat = 600.0
    salt: Literal["field", "nonce"] = "field"
    #: tokens that the engine's cache is cut by
    block_tokens: _Positive = 16


class Round(_Data, frozen=True, kw_only=True):
    """One round of one arm."""

    name: str
    role: Role
    #: ``fresh``: never used before; ``stored``: those of the round in `of`; ``never``: fresh, and to
    #: show that the round finds nothing by itself
    salts: Literal["fresh", "stored", "never"] = "fresh"
    of: str = ""
    #: what must come out, or the isolation has failed
    expects: Literal["computed", "storage", "host", "any"] = "any"
    #: the engine is started anew before it
    restarts: bool = False
    #: the pages of the pool's files leave the page cache before it
    drops_pages: bool = False
    #: requests; 0: as many as the plan has
    requests: _Count = 0


class Limits(_Data, frozen=True, kw_only=True):
    """What a request must keep to count as good."""

    #: of first asks, in units of the solo TTFT without a cache
    first_ask_ttft_factor: _PositiveFloat = 3.0
    #: of follow-ups: the larger of these two
    follow_up_ttft_s: _PositiveFloat = 1.0
    follow_up_ttft_factor: _PositiveFloat = 0.25
    tpot_s: _PositiveFloat = 0.05


class Traffic(_Data, frozen=True, kw_only=True):
    """Sessions of a peak test: a document each, and some turns that ask about it."""

    sessions: _Positive = 8
    turns: _Positive = 3
    #: of a session's document
    document_tokens: _Positive = 1024
    #: that all sessions begin with
    common_tokens: _Count = 0
    #: of a turn
    turn_tokens: _Positive = 64
    output_tokens: _Positive = 16
    think_s: float = 0.0
    #: 0: every document once; above: documents are drawn by Zipf's law
    zipf: float = 0.0
    #: a file of a trace; then it says what is asked, and when
    trace: str = ""
    trace_format: Literal["", "mooncake", "bailian", "weka", "ragpulse", "azure"] = ""
    #: multiplies the trace's times
    time_scale: _PositiveFloat = 1.0
    #: requests of a trace; 0: all
    requests: _Count = 0
    #: prompts of a trace are cut there, for small engines; 0: not at all
    input_tokens_max: _Count = 0


class Load(_Data, frozen=True, kw_only=True):
    """One load point."""

    name: str
    kind: Literal["closed", "open", "storm", "trace", "saturation"]
    connections: _Positive = 1
    #: requests a second; 0 with a share
    rate: float = 0.0
    #: of the saturation rate found by a load of that kind before
    share: float = 0.0
    #: of the gaps between arrivals: 1 is Poisson
    variation: float = 1.0
    #: requests; 0: all that the traffic has
    requests: _Count = 0


class Peak(_Data, frozen=True, kw_only=True):
    """The peak test."""

    roles: tuple[Role, ...] = ("recompute", "tier")
    runs: _Positive = 1
    traffic: Traffic = Traffic()
    loads: tuple[Load, ...] = ()
    limits: Limits = Limits()


class Noise(_Data, frozen=True, kw_only=True):
    """Foreign work on the same path.

    Of kind ``engine``: a second engine of the same arm, one request after the other; or what `begin` and
    `end` say.
    """

    name: str
    kind: Literal["none", "read", "write", "network", "engine", "command"]
    #: of the rate that was measured for it alone
    share: Annotated[float, msgspec.Meta(ge=0, le=1)] = 0.5
    #: folder for reads and writes; the user names it
    folder: str = ""
    #: host:port of a sink for network traffic; the user names it, and it is the loopback by default
    address: str = ""
    #: begins and ends a degraded path; {pool} stands for the pool
    begin: tuple[str, ...] = ()
    end: tuple[str, ...] = ()
    block_bytes: _Positive = 1 << 20


class Contention(_Data, frozen=True, kw_only=True):
    """The contention test: the same load with noise of different kinds, in random order."""

    roles: tuple[Role, ...] = ("tier",)
    noises: tuple[Noise, ...] = ()
    load: Load = Load(name="contention", kind="closed", connections=2)
    traffic: Traffic = Traffic()


class Plan(_Data, frozen=True, kw_only=True):
    """Everything that is decided before anything is measured."""

    version: Literal[1] = 1
    name: str
    #: too short to decide by: few runs, few requests
    is_indicative: bool = False
    seed: int = 1
    runs: _Positive = 5
    order: Literal["abba", "random"] = "abba"
    api: Api = "chat"
    #: a round is repeated for each of these lengths
    document_tokens: tuple[_Positive, ...] = (1024,)
    question_tokens: _Positive = 64
    output_tokens: Annotated[int, msgspec.Meta(ge=2)] = 128
    #: of a round, one after the other
    requests: _Positive = 10
    #: of the same length, discarded, after each start
    warmup_requests: _Positive = 3
    #: prompt lengths of the calibration in R0; none: no R0
    calibrate_tokens: tuple[_Positive, ...] = ()
    rounds: tuple[Round, ...] = ()
    peak: Peak | None = None
    contention: Contention | None = None

    def __post_init__(self) -> None:
        names = [each.name for each in self.rounds]
        if len(set(names)) < len(names):
            raise ConfigError(f"two rounds have one name: {', '.join(names)}")
        for index, each in enumerate(self.rounds):
            before = {other.name for other in self.rounds[:index] if other.salts == "fresh"}
            if each.salts == "stored" and each.of not in before:
                raise ConfigError(
                    f"round {each.name} reads what round {each.of or '(none)'} stored, which does "
                    "not come before it"
                )


def preset(name: str) -> Plan:
    """A plan that comes with the package.

    Raises:
        ConfigError: there is none of that name.
    """
    if name not in PRESETS:
        raise ConfigError(f"no preset {name!r}", hint=f"there are: {', '.join(PRESETS)}")
    file = resources.files("kvdepot.bench").joinpath("presets", f"{name}.toml")
    with file.open("rb") as opened:
        return read_plan(opened.read(), name)


def read_plan(content: bytes, source: str) -> Plan:
    """A plan from TOML.

    Raises:
        ConfigError: not TOML, an unknown key, a wrong value; names the place.
    """
    try:
        return msgspec.toml.decode(content, type=Plan)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise ConfigError(f"plan {source}: {error}") from error


def plan_digest(plan: Plan, arms: Sequence[Arm], material: str) -> str:
    """What the report prints, so that nobody can change the plan behind the results.

    Args:
        plan: the plan.
        arms: that it is run with.
        material: digest of the document.
    """
    content = msgspec.json.encode([plan, list(arms), material], order="deterministic")
    return hashlib.sha256(content).hexdigest()
