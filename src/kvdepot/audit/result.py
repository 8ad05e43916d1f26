"""The audit's result, as it is written to JSON. Fields are only ever added within a schema version."""

from __future__ import annotations

import msgspec

from kvdepot.errors import ConfigError

__all__ = [
    "SCHEMA",
    "AppRow",
    "AuditResult",
    "Capacity",
    "Considered",
    "Example",
    "Finding",
    "Fleet",
    "Grain",
    "Input",
    "Keeping",
    "Revisits",
    "Strip",
    "Totals",
    "VerdictLine",
    "WaterfallBar",
    "decode_audit",
    "encode_audit",
]

SCHEMA = "kvdepot.audit/1"


class Input(msgspec.Struct, frozen=True, kw_only=True):
    """What was read."""

    name: str
    kind: str
    lines: int
    requests: int
    span_s: float
    order: str
    broken_lines: int
    duplicate_rows: int
    cut_prompts: int
    #: texts with line numbers, the first ones
    problems: list[str]
    #: what this kind of input can tell, and what it cannot
    answers: list[str]
    cannot_answer: list[str]
    tokenizer: str
    tokenizer_error: str
    template: str
    #: requests that log their tokens, and how many of those differ from ours
    usage_logged: int
    usage_differs: int


class Totals(msgspec.Struct, frozen=True, kw_only=True):
    """Tokens of the whole traffic in a cache that keeps everything."""

    requests: int
    input_tokens: int
    reused_tokens: int
    computed_tokens: int
    #: equal to the token with an earlier request, whatever the block
    exact_tokens: int
    #: behind the break, and held by an earlier request; an estimate in both directions
    copied_tokens: int
    token_share: float
    block_tokens: int
    #: follow-ups extend an earlier request to its last full block
    follow_up_requests: int
    follow_up_reused_tokens: int
    first_ask_reused_tokens: int


class Strip(msgspec.Struct, frozen=True, kw_only=True):
    """One prompt in shares: what is hit, the break, the shared body behind it, what is new."""

    hit_tokens: int
    gap_tokens: int
    body_tokens: int
    new_tokens: int


class Example(msgspec.Struct, frozen=True, kw_only=True):
    """One real request; values masked unless asked for."""

    line: int
    donor_line: int
    values: list[str]
    #: unified diff of the prompt before and after the edit
    diff: str
    strip: Strip | None = None


class Finding(msgspec.Struct, frozen=True, kw_only=True):
    """One place at which reuse is lost, and what an edit proves."""

    cause: str
    #: its number in the table of causes
    number: int
    title: str
    place: str
    evidence: str
    advice: str
    hint: str
    #: whether the prompts are at fault; else the engine, the capacity or the routing
    is_prompt_fault: bool
    #: whether the edit changes what is shared with whom, or what the model answers
    needs_decision: bool
    requests: int
    users: int
    sessions: int
    distinct_values: int
    #: tokens before the break
    position_p50: int
    position_p95: int
    estimate_tokens: int
    #: None where no edit of the prompts was tried
    proved_tokens: int | None
    proved_points: float | None
    #: the same edit without those before it
    alone_tokens: int | None
    input_tokens_added: int
    computed_tokens_saved: int
    prefill_seconds_saved: float
    edit: str
    example: Example | None = None


class WaterfallBar(msgspec.Struct, frozen=True, kw_only=True):
    """Where the traffic stands after an edit."""

    name: str
    input_tokens: int
    reused_tokens: int


class Considered(msgspec.Struct, frozen=True, kw_only=True):
    """A site whose edit did not prove enough, or that was masked to the end."""

    cause: str
    place: str
    estimate_tokens: int
    evidence: str


class Grain(msgspec.Struct, frozen=True, kw_only=True):
    """Reuse at one block size."""

    block_tokens: int
    reused_tokens: int
    lost_tokens: int


class Revisits(msgspec.Struct, frozen=True, kw_only=True):
    """Seconds between two uses of the same tokens, by tokens."""

    p50_s: float
    p90_s: float
    p95_s: float
    p99_s: float


class Keeping(msgspec.Struct, frozen=True, kw_only=True):
    """A point of the keep-time curve."""

    keep_s: float
    reused_tokens: int


class Capacity(msgspec.Struct, frozen=True, kw_only=True):
    """A point of the capacity curve."""

    capacity_tokens: int
    #: None where the KV bytes of a token are unknown
    capacity_bytes: int | None
    lru_tokens: int
    #: the same after the edits; None without edits
    edited_lru_tokens: int | None
    #: what knowing the future would give; None where it was not computed
    bound_tokens: int | None


class Fleet(msgspec.Struct, frozen=True, kw_only=True):
    """Reuse of several instances."""

    instances: int
    capacity_tokens: int
    shared_capacity_tokens: int
    random_private_tokens: int
    sticky_private_tokens: int
    shared_tokens: int
    sticky_load: float


class AppRow(msgspec.Struct, frozen=True, kw_only=True):
    """One application of a mixed log."""

    name: str
    requests: int
    input_tokens: int
    reused_tokens: int


class VerdictLine(msgspec.Struct, frozen=True, kw_only=True):
    """One of four answers, with its number."""

    #: reorder, route, cache or more_gpus
    what: str
    points: float
    tokens: int
    prefill_seconds: float
    text: str


class AuditResult(msgspec.Struct, frozen=True, kw_only=True):
    """Everything."""

    schema: str
    kvdepot_version: str
    input: Input
    is_trustworthy: bool
    distrust: list[str]
    totals: Totals
    findings: list[Finding]
    waterfall: list[WaterfallBar]
    considered: list[Considered]
    grains: list[Grain]
    apps: list[AppRow]
    revisits: Revisits | None
    keep_curve: list[Keeping]
    capacity_curve: list[Capacity]
    fleet: list[Fleet]
    verdict: list[VerdictLine]
    prefill_tokens_per_s: float
    kv_bytes_per_token: int | None

    @property
    def proved_points(self) -> float:
        """Percentage points of token share that edits of the prompts prove."""
        return sum(each.proved_points or 0.0 for each in self.findings if each.is_prompt_fault)


def encode_audit(result: AuditResult) -> bytes:
    """Indented JSON."""
    return msgspec.json.format(msgspec.json.encode(result), indent=1)


def decode_audit(data: bytes, name: str) -> AuditResult:
    """Read a result back.

    Raises:
        ConfigError: it is none, or of another schema.
    """
    try:
        result = msgspec.json.decode(data, type=AuditResult)
    except msgspec.MsgspecError as error:
        raise ConfigError(f"{name} is no result of kvdepot audit --json: {error}") from error
    if result.schema != SCHEMA:
        raise ConfigError(f"{name} has schema {result.schema}, and not {SCHEMA}")
    return result
