"""What an engine counts about itself, in one form whatever the engine.

Counters only grow; what a window saw is the difference of two scrapes, and a counter that became
smaller says that the engine was started anew inside.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import TypeVar

import msgspec

__all__ = ["SOURCES", "Counts", "counts_of", "difference", "samples_of"]

#: where a prompt's tokens can come from; ``external`` is what vLLM does not split into host and disk
SOURCES = ("computed", "device", "host", "disk", "external")

_SAMPLE = re.compile(
    r"^([A-Za-z_:][A-Za-z0-9_:]*)(?:\{(.*)\})?\s+([-+0-9.eE]+|NaN|[-+]?Inf)", re.MULTILINE
)
_LABEL = re.compile(r'([A-Za-z_][A-Za-z0-9_]*)="((?:[^"\\]|\\.)*)"')
#: of the embedded engine's metrics of seconds
_OURS = ("queue", "load", "ttft")
_VLLM_SOURCES = {
    "local_compute": "computed",
    "local_cache_hit": "device",
    "external_kv_transfer": "external",
}


class Counts(msgspec.Struct, frozen=True, kw_only=True):
    """Sums since the engine's start. None is what the engine does not say."""

    #: prompt tokens by source; empty when the engine does not say
    tokens: dict[str, int] = {}
    #: payload bytes that the tier read and wrote
    load_bytes: int | None = None
    store_bytes: int | None = None
    #: of KV for a token, by the model's config
    token_bytes: int | None = None
    block_tokens: int | None = None
    #: where the engine's KV memory is, as torch calls it
    device: str | None = None
    #: loads that were given up, in blocks
    given_up_blocks: int | None = None
    corrupt_blocks: int | None = None
    dropped_blocks: int | None = None
    preemptions: int | None = None
    #: seconds of all requests, up to their first tokens: waiting in the queue, waiting for loads,
    #: computing. An engine that counts loads as waiting gives them in `queue_s`, and no `load_s`
    queue_s: float | None = None
    load_s: float | None = None
    compute_s: float | None = None

    @property
    def prompt_tokens(self) -> int:
        """Of all sources."""
        return sum(self.tokens.values())


_SPANS = ("queue_s", "load_s", "compute_s")
_Number = TypeVar("_Number", int, float)

Samples = Mapping[tuple[str, frozenset[tuple[str, str]]], float]


def samples_of(page: str) -> dict[tuple[str, frozenset[tuple[str, str]]], float]:
    """Samples of a page in Prometheus' text format; comments and what is no sample are passed over."""
    return {
        (match[1], frozenset(_LABEL.findall(match[2] or ""))): float(match[3])
        for match in _SAMPLE.finditer(page)
    }


def counts_of(page: str | None) -> Counts:
    """The counts in a page of metrics; all unknown where there is none."""
    samples = samples_of(page or "")
    tokens: dict[str, int] = {}
    for (name, labels), value in samples.items():
        source = dict(labels).get("source", "")
        if name == "kvdepot_engine_prompt_tokens_total":
            tokens[source] = tokens.get(source, 0) + int(value)
        elif name == "vllm:prompt_tokens_by_source_total" and source in _VLLM_SOURCES:
            ours = _VLLM_SOURCES[source]
            tokens[ours] = tokens.get(ours, 0) + int(value)

    def total(*names: str) -> int | None:
        """Of the first name that is there: an engine may count the same thing under two."""
        for wanted in names:
            found = [v for (name, _), v in samples.items() if name.endswith(wanted)]
            if found:
                return int(sum(found))
        return None

    def seconds(name: str) -> float | None:
        found = [value for (each, _), value in samples.items() if each == name]
        return sum(found) if found else None

    def together(*names: str) -> int | None:
        found = [count for name in names if (count := total(name)) is not None]
        return sum(found) if found else None

    queue_s, load_s, compute_s = (seconds(f"kvdepot_engine_{n}_seconds_total") for n in _OURS)
    if compute_s is None:
        queue_s = seconds("vllm:request_queue_time_seconds_sum")
        compute_s = seconds("vllm:request_prefill_time_seconds_sum")
    elif load_s is not None:
        # ours counts up to the first token, loads included
        compute_s -= load_s
    return Counts(
        tokens=tokens,
        queue_s=queue_s,
        load_s=load_s,
        compute_s=compute_s,
        load_bytes=total("kvdepot_load_bytes_total", "kv_offload_tiering_read_bytes_total"),
        store_bytes=total("kvdepot_store_bytes_total", "kv_offload_tiering_write_bytes_total"),
        token_bytes=total("kvdepot_engine_kv_token_bytes"),
        block_tokens=total("kvdepot_engine_block_tokens") or _vllm_block(samples),
        device=_label(samples, "kvdepot_engine_info", "device"),
        given_up_blocks=together(
            "kvdepot_load_given_up_blocks_total", "kvdepot_load_late_blocks_total"
        ),
        corrupt_blocks=total("kvdepot_corrupt_blocks_total"),
        dropped_blocks=together(
            "kvdepot_dropped_queue_full_total",
            "kvdepot_dropped_pool_full_total",
            "kvdepot_dropped_error_total",
        ),
        preemptions=total("vllm:num_preemptions_total"),
    )


def _vllm_block(samples: Samples) -> int | None:
    """vLLM tells its block size in a label; it reuses whole blocks."""
    size = _label(samples, "vllm:cache_config_info", "block_size")
    return int(size) if size and size.isdigit() else None


def _label(samples: Samples, metric: str, label: str) -> str | None:
    """What a metric says in a label."""
    found = (dict(labels).get(label) for name, labels in samples if name == metric)
    return next((value for value in found if value), None)


def difference(after: Counts, before: Counts) -> Counts | None:
    """What happened between two scrapes; None when a counter went back: the engine was restarted."""

    def change(now: _Number | None, then: _Number | None) -> _Number | None:
        return None if now is None else now - (then or 0)

    changes = {
        name: change(after.tokens[name], before.tokens.get(name, 0)) for name in after.tokens
    }
    tokens = {name: value for name, value in changes.items() if value is not None}
    summed = (
        "load_bytes",
        "store_bytes",
        "given_up_blocks",
        "corrupt_blocks",
        "dropped_blocks",
        "preemptions",
    )
    fields = {name: change(getattr(after, name), getattr(before, name)) for name in summed}
    spans = {n: change(getattr(after, n), getattr(before, n)) for n in _SPANS}
    if any(value < 0 for value in [*tokens.values(), *fields.values()] if value is not None):
        return None
    return Counts(
        tokens=tokens,
        token_bytes=after.token_bytes,
        block_tokens=after.block_tokens,
        device=after.device,
        **fields,
        **spans,
    )
