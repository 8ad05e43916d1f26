"""`kvdepot pool ...`: look at a pool from outside. Nothing here changes a file or takes a lease."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
from cyclopts import App, Parameter

from kvdepot.errors import ConfigError
from kvdepot.units import format_bytes
from kvdepot.urls import PoolUrl

if TYPE_CHECKING:  # these draw in numpy, which takes longer to import than all the rest
    from kvdepot.io.localdisk import LocalDisk
    from kvdepot.pool.survey import NamespaceSurvey, PoolSurvey, SegmentCheck

__all__ = ["app", "explain", "info", "verify", "why"]

app = App(name="pool", help="Look at a pool: what it holds, and whether every byte verifies.")

Json = Annotated[bool, Parameter(name="--json", negative="")]


@app.command
def info(url: str, /, *, json: Json = False) -> int:
    """Say what a pool holds: format, limits, and blocks, segments and bytes per namespace.

    Args:
        url: Where the pool is: file:///path, fs:///path or a path.
        json: Print one JSON object.
    """
    from kvdepot.pool.survey import survey

    root = PoolUrl.parse(url)
    disk = _open(root)
    found = survey(disk)
    if json:
        print(_json(_info_fields(found, disk.direct_reason)))
        return 0
    print(root.describe())
    for name, value in _info_lines(found, disk.direct_reason):
        print(f"  {name:<13} {value}")
    for namespace in found.namespaces:
        print(_namespace_line(namespace))
    return 0


@app.command
def verify(url: str, /, *, json: Json = False) -> int:
    """Read every segment and check every checksum; exit status 1 if anything is bad.

    Bad blocks do no harm: a reader refuses them and computes. This finds storage that loses bytes.

    Args:
        url: Where the pool is: file:///path, fs:///path or a path.
        json: Print one JSON object per segment, then one with the sums.
    """
    from kvdepot.pool.survey import scrub

    root = PoolUrl.parse(url)
    disk = _open(root)
    sums = {"segments": 0, "blocks": 0, "payload_bytes": 0, "bad_segments": 0, "bad_blocks": 0}
    for check in _with_progress(scrub(disk)):
        sums["segments"] += 1
        sums["blocks"] += check.blocks
        sums["payload_bytes"] += check.payload_bytes
        sums["bad_segments"] += bool(check.problem)
        sums["bad_blocks"] += check.bad_blocks
        if json:
            print(_json(check))
        elif not check.is_sound:
            print(f"bad: {check.path}: {check.problem or _bad_blocks(check)}")
    is_sound = not sums["bad_segments"] and not sums["bad_blocks"]
    if json:
        print(_json({**sums, "is_sound": is_sound}))
    else:
        print(
            f"{'sound' if is_sound else 'BAD'}: {sums['segments']} segments, {sums['blocks']} blocks,"
            f" {format_bytes(sums['payload_bytes'])} read; {sums['bad_segments']} segments"
            f" and {sums['bad_blocks']} blocks do not verify"
        )
    return 0 if is_sound else 1


@app.command
def explain(url: str, a: str, b: str, /, *, json: Json = False) -> int:
    """Name the fields in which two namespaces differ: why one cannot use the other's blocks.

    Args:
        url: Where the pool is: file:///path, fs:///path or a path.
        a: The first digits of a namespace's digest, as `kvdepot pool info` lists it.
        b: The first digits of another's.
        json: Print one JSON object.
    """
    from kvdepot.identity import differences
    from kvdepot.pool.survey import survey

    namespaces = survey(_open(PoolUrl.parse(url))).namespaces
    ours, theirs = _chosen(namespaces, a), _chosen(namespaces, b)
    if ours.identity is None or theirs.identity is None:
        lost = ours if ours.identity is None else theirs
        raise ConfigError(f"the manifest of namespace {lost.digest} is missing or damaged")
    found = differences(ours.identity, theirs.identity)
    if json:
        fields = [{"field": name, "a": mine, "b": other} for name, mine, other in found]
        print(_json({"a": ours.digest, "b": theirs.digest, "differences": fields}))
    elif not found:
        print("the two namespaces are equal in every field")
    for name, mine, other in [] if json else found:
        print(
            f"{name}: {_json(mine)} in {ours.digest[:12]}, {_json(other)} in {theirs.digest[:12]}"
        )
    return 0


@app.command
def why(
    url: str,
    prompt: str,
    /,
    *,
    model: str | None = None,
    namespace: str = "",
    salt: str | None = None,
    json: Json = False,
) -> int:
    """Say how far a prompt is in the pool, and why no further; exit status 1 if not all of it is there.

    Looks at the pool alone. Why a running engine computed what is there (cost, deadline, breaker, host
    buffer) is in its counters `reuse_ended_..._total` and in its log at debug level.

    Args:
        url: Where the pool is: file:///path, fs:///path or a path.
        prompt: Token ids, as in 12,345,6; or a text, with --model.
        model: Folder or hub id of the model whose tokenizer reads the text.
        namespace: The first digits of the namespace that was expected to have it.
        salt: The tenant's salt, if requests carry one.
        json: Print one JSON object per namespace.
    """
    from kvdepot.pool.why import why as look

    tokens = _token_ids(prompt, model)
    answers = look(_open(PoolUrl.parse(url)), tokens, namespace=namespace, salt=salt)
    if not answers:
        raise ConfigError(
            f"no namespace begins with {namespace!r}" if namespace else "an empty pool"
        )
    for answer in answers:
        if json:
            print(_json(answer))
            continue
        print(f"{answer.digest[:12]} {answer.model_name}: {answer.found} of {answer.blocks} blocks")
        if answer.reason is not None:
            token = answer.found * answer.block_tokens
            print(f"  ends at block {answer.found}, token {token}: {answer.reason.value}")
            for text in filter(None, (answer.detail, answer.advice)):
                print(f"  {text}")
    return 0 if answers[0].reason is None else 1


def _token_ids(prompt: str, model: str | None) -> list[int]:
    """Ids as they are written, or those of a text."""
    if model is None:
        try:
            return [int(part) for part in prompt.replace(",", " ").split()]
        except ValueError as error:
            raise ConfigError(
                "the prompt is no list of token ids",
                hint="give --model with the model that the text is for",
            ) from error
    from kvdepot.io.models import token_ids

    return token_ids(prompt, model)


def _open(root: PoolUrl) -> LocalDisk:
    from kvdepot.io.localdisk import LocalDisk

    return LocalDisk(root.path, is_read_only=True)


def _info_fields(found: PoolSurvey, direct_reason: str) -> dict[str, Any]:
    fields: dict[str, Any] = msgspec.to_builtins(found)
    return {**fields, "space": found.space._asdict(), "direct_reason": direct_reason}


def _info_lines(found: PoolSurvey, direct_reason: str) -> list[tuple[str, str]]:
    space = found.space
    inodes = "" if space.free_inodes is None else f", {space.free_inodes:,} inodes"
    return [
        ("format", f"version {found.pool.version}"),
        ("pool id", found.pool.pool_id),
        ("capacity", f"{format_bytes(found.pool.capacity_bytes)} (as pool.json says)"),
        ("used", f"{format_bytes(found.used_bytes)} in {_segments(found)} segments"),
        ("unfinished", f"{found.unfinished} files, up to {format_bytes(found.unfinished_bytes)}"),
        ("free space", f"{format_bytes(space.free_bytes)}{inodes}"),
        ("direct I/O", f"{'yes' if found.is_direct else 'no'}, {direct_reason}"),
        ("namespaces", str(len(found.namespaces))),
    ]


def _segments(found: PoolSurvey) -> int:
    return sum(namespace.segments for namespace in found.namespaces)


def _namespace_line(namespace: NamespaceSurvey) -> str:
    identity = namespace.identity
    if identity is None:
        model = "no readable manifest"
    else:
        model = (
            f"{identity.model_name}, {identity.engine} {identity.engine_version},"
            f" {identity.kv_dtype}, {identity.block_tokens} tokens a block"
        )
    bad = f", {namespace.bad_segments} BAD" if namespace.bad_segments else ""
    return (
        f"  {namespace.digest[:12]}  {namespace.blocks} blocks in {namespace.segments} segments{bad},"
        f" {format_bytes(namespace.segment_bytes)}: {model}"
    )


def _chosen(namespaces: Sequence[NamespaceSurvey], start: str) -> NamespaceSurvey:
    """The one namespace whose digest begins so."""
    found = [each for each in namespaces if start and each.digest.startswith(start.lower())]
    if len(found) == 1:
        return found[0]
    listed = ", ".join(each.digest[:12] for each in namespaces) or "none"
    how_many = "no namespace begins" if not found else f"{len(found)} namespaces begin"
    raise ConfigError(f"{how_many} with {start!r}", hint=f"the pool has: {listed}")


def _bad_blocks(check: SegmentCheck) -> str:
    return f"{check.bad_blocks} of {check.blocks} blocks do not verify"


def _with_progress(checks: Iterable[SegmentCheck]) -> Iterable[SegmentCheck]:
    """Show a counter on stderr while segments are read, if a person is there to see it."""
    if not sys.stderr.isatty():
        yield from checks
        return
    from rich.console import Console

    with Console(stderr=True).status("reading segments") as status:
        for number, check in enumerate(checks, start=1):
            status.update(f"reading segments: {number}")
            yield check


def _json(value: Any) -> str:
    return msgspec.json.encode(value).decode()
