"""What is computed of rows: times with their intervals, and the account of tokens."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from kvdepot.bench.quantiles import Quantile, quantile
from kvdepot.bench.rows import Row
from kvdepot.bench.runstats import median
from kvdepot.bench.scrape import Counts

__all__ = ["Parts", "Times", "Tokens", "parts_of", "per_run_median", "times_of", "tokens_of"]


class Times(msgspec.Struct, frozen=True, kw_only=True):
    """Quantiles of a set of times, in seconds."""

    n: int
    p50: Quantile
    p95: Quantile
    p99: Quantile


class Tokens(msgspec.Struct, frozen=True, kw_only=True):
    """The account of prompt tokens: computed and reused by source make all of them."""

    prompt: int
    output: int
    #: computed, and reused by source; ``cached`` where the server does not say from where
    by_source: dict[str, int]
    oracle: int
    #: requests with any reuse; a footnote, because nearly all have some
    requests_with_reuse: int
    requests: int

    @property
    def reused(self) -> int:
        """Of all sources."""
        return sum(self.by_source.values()) - self.by_source.get("computed", 0)

    @property
    def share(self) -> float:
        """Reused of all prompt tokens: the token share."""
        return self.reused / self.prompt if self.prompt else 0.0

    @property
    def oracle_share(self) -> float:
        """What an endless cache would reuse."""
        return self.oracle / self.prompt if self.prompt else 0.0

    @property
    def capture(self) -> float | None:
        """Token share over oracle share; None where there is nothing to reuse."""
        return self.share / self.oracle_share if self.oracle else None

    @property
    def amplification(self) -> float | None:
        """Tokens computed over those that had to be."""
        least = 1 - self.oracle_share
        return (1 - self.share) / least if least > 0 else None


class Parts(msgspec.Struct, frozen=True, kw_only=True):
    """What a TTFT is made of: means over requests, in seconds. Together they are the client's mean TTFT."""

    #: None where the engine counts it as `load_s`
    queue_s: float | None
    #: lookup and load, as far as computing did not hide it
    load_s: float
    compute_s: float
    #: in none of these: the server's front, the network, the client
    rest_s: float

    @property
    def total_s(self) -> float:
        """The client's mean TTFT."""
        return (self.queue_s or 0.0) + self.load_s + self.compute_s + self.rest_s


def parts_of(rows: Sequence[Row], counts: Sequence[Counts]) -> Parts | None:
    """The parts of requests' TTFT; None where the engine does not tell them.

    Args:
        rows: all requests of some windows.
        counts: what the engine counted in these windows.
    """
    ttfts = [row.ttft_s for row in rows if row.is_ok and row.ttft_s is not None]
    queue = _all([each.queue_s for each in counts])
    compute = _all([each.compute_s for each in counts])
    # a request that failed is in the engine's sums or not, who knows
    if queue is None or compute is None or not ttfts or len(ttfts) < len(rows):
        return None
    load = _all([each.load_s for each in counts])
    n = len(ttfts)
    rest = sum(ttfts) - queue - compute - (load or 0.0)
    return Parts(
        queue_s=None if load is None else queue / n,
        load_s=(queue if load is None else load) / n,
        compute_s=compute / n,
        rest_s=rest / n,
    )


def _all(values: Sequence[float | None]) -> float | None:
    """Their sum; None when one is missing."""
    known = [value for value in values if value is not None]
    return sum(known) if known and len(known) == len(values) else None


def times_of(values: Sequence[float]) -> Times | None:
    """Quantiles of times; None of none."""
    if not values:
        return None
    return Times(
        n=len(values),
        p50=quantile(values, 0.5),
        p95=quantile(values, 0.95),
        p99=quantile(values, 0.99),
    )


def tokens_of(rows: Sequence[Row]) -> Tokens:
    """The account of answered requests that have a usage."""
    known = [row for row in rows if row.prompt_tokens is not None]
    by_source: dict[str, int] = {"computed": 0}
    for row in known:
        reused = row.reused
        if reused is None:
            reused = {"cached": row.cached_tokens or 0}
        for source, count in reused.items():
            by_source[source] = by_source.get(source, 0) + count
        by_source["computed"] += (row.prompt_tokens or 0) - sum(reused.values())
    return Tokens(
        prompt=sum(row.prompt_tokens or 0 for row in known),
        output=sum(row.output_tokens or 0 for row in known),
        by_source={name: count for name, count in by_source.items() if count or name == "computed"},
        oracle=sum(row.oracle_tokens for row in known),
        requests_with_reuse=sum(
            bool(row.cached_tokens or sum((row.reused or {}).values())) for row in known
        ),
        requests=len(known),
    )


def per_run_median(rows: Sequence[Row]) -> list[float]:
    """Median TTFT of each run."""
    return [median(times) for times in _ttft_by_run(rows).values()]


def _ttft_by_run(rows: Sequence[Row]) -> dict[int, list[float]]:
    runs: dict[int, list[float]] = {}
    for row in sorted(rows, key=lambda each: each.run):
        if row.ttft_s is not None and row.is_ok:
            runs.setdefault(row.run, []).append(row.ttft_s)
    return runs
