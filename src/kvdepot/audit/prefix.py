"""Pass 1: exact prefix reuse, from a polynomial hash of every prefix without a Python step per token.

The hash of the first n tokens is the sum of ``(token + 1) * base**position`` modulo two primes below
2**31, so it is exact in 64-bit integers and the 62 bits together make a chance collision unlikely
(about 1e-5 over ten million blocks). Each reported hit is compared with its donor's tokens anyway.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np

from kvdepot.audit.blocklog import BlockLog, block_log
from kvdepot.audit.tokenlog import Ids, Ints, TokenLog

__all__ = ["blocks_of", "common_length", "exact_hits", "mismatches"]

_PRIMES = (2_147_483_647, 2_147_483_629)
_BASES = (1_103_515_245, 1_664_525_123)
_MIX = 0x9E3779B97F4A7C15
_DONORS = 4


@lru_cache(maxsize=2)
def _powers(length: int) -> tuple[Ints, Ints]:
    """Powers of both bases for positions below `length`, by doubling."""
    made = []
    for prime, base in zip(_PRIMES, _BASES, strict=True):
        powers = np.ones(max(length, 1), np.int64)
        done, step = 1, base % prime
        while done < length:
            take = min(done, length - done)
            powers[done : done + take] = powers[:take] * step % prime
            done += take
            step = step * step % prime
        made.append(powers)
    return made[0], made[1]


def blocks_of(log: TokenLog, block_tokens: int, *, with_extras: bool = True) -> BlockLog:
    """Cut prompts into full blocks.

    Args:
        log: in the order of time.
        block_tokens: the engine's block, at least 1.
        with_extras: whether salt, adapter and model separate equal tokens, as in an engine.
    """
    counts = log.lengths // block_tokens
    starts = np.zeros(log.requests + 1, np.int64)
    np.cumsum(counts, out=starts[1:])
    keys = np.empty(int(starts[-1]), np.int64)
    powers = _powers(1 << max(4, int(log.lengths.max(initial=1)) - 1).bit_length())
    salts = _salts(log.extras) if with_extras else np.zeros(log.requests, np.int64)
    for request in range(log.requests):
        count = int(counts[request])
        if count:
            tokens = log.prompt(request)[: count * block_tokens]
            keys[starts[request] : starts[request + 1]] = (
                _prefix_keys(tokens, block_tokens, powers) ^ salts[request]
            )
    sizes = np.full(len(keys), block_tokens, np.int64)
    return block_log(
        keys,
        starts,
        tokens=sizes,
        lengths=log.lengths,
        times_s=log.times_s,
        sessions=log.sessions,
    )


def _salts(extras: Ints) -> Ints:
    mixed = (extras.astype(np.uint64) * np.uint64(_MIX)) >> np.uint64(2)
    return mixed.astype(np.int64)


def _prefix_keys(tokens: Ids, block_tokens: int, powers: tuple[Ints, Ints]) -> Ints:
    values = tokens.astype(np.int64) + 1
    halves = []
    for prime, power in zip(_PRIMES, powers, strict=True):
        products = values * power[: len(values)]
        sums = _block_sums(products, block_tokens, prime)
        # at most 2**32 blocks of less than 2**31 each
        halves.append(np.cumsum(sums) % prime)
    keys: Ints = (halves[0] << 31) | halves[1]
    return keys


def _block_sums(products: Ints, block_tokens: int, prime: int) -> Ints:
    """Sums of the blocks' products modulo the prime; never more than 16 products unreduced."""
    if block_tokens <= 16:
        sums: Ints = products.reshape(-1, block_tokens).sum(axis=1) % prime
        return sums
    reduced: Ints = (products % prime).reshape(-1, block_tokens).sum(axis=1) % prime
    return reduced


def common_length(left: Ids, right: Ids) -> int:
    """How many tokens two prompts have in common from the first on."""
    most = min(len(left), len(right))
    done, step = 0, 64
    while done < most:
        end = min(done + step, most)
        differs = left[done:end] != right[done:end]
        if differs.any():
            return done + int(differs.argmax())
        done, step = end, step * 4
    return most


def _previous_touches(blocks: BlockLog) -> Ints:
    """(touches,): the touch before of the same block, -1 for the first."""
    order = np.argsort(blocks.blocks, kind="stable")
    ordered = blocks.blocks[order]
    previous = np.full(len(order), -1, np.int64)
    is_same = ordered[1:] == ordered[:-1]
    previous[order[1:][is_same]] = order[:-1][is_same]
    return previous


def exact_hits(log: TokenLog, blocks: BlockLog) -> tuple[Ints, Ints]:
    """Hits to the token, against the last few requests that had the last hit block.

    Returns:
        (requests,) tokens equal to the best donor's, and (requests,) that donor, -1 for none.
    """
    hits = blocks.hit_blocks()
    previous = _previous_touches(blocks)
    tokens = np.zeros(log.requests, np.int64)
    donors = np.full(log.requests, -1, np.int64)
    for request in range(log.requests):
        ours = log.prompt(request)
        for donor in _donors(blocks, previous, request, int(hits[request])):
            if log.extras[donor] != log.extras[request]:
                continue
            same = common_length(ours, log.prompt(donor))
            if same > tokens[request] or donors[request] < 0:
                tokens[request], donors[request] = same, donor
    return tokens, donors


def _donors(blocks: BlockLog, previous: Ints, request: int, hit: int) -> list[int]:
    if hit == 0:
        return list(range(request - 1, max(-1, request - 1 - _DONORS), -1))
    touch = int(previous[blocks.starts[request] + hit - 1])
    found: list[int] = []
    while touch >= 0 and len(found) < _DONORS:
        found.append(int(blocks.requests_of[touch]))
        touch = int(previous[touch])
    return found


def mismatches(log: TokenLog, blocks: BlockLog) -> int:
    """Requests whose reported hit is not equal to the donor's tokens: hash collisions, so 0."""
    hits = blocks.hit_tokens()
    last = blocks.starts[:-1] + blocks.hit_blocks() - 1
    bad = 0
    for request in np.flatnonzero(hits):
        touch = blocks.first_touch[blocks.blocks[last[request]]]
        donor = int(blocks.requests_of[touch])
        count = int(hits[request])
        bad += not np.array_equal(log.prompt(int(request))[:count], log.prompt(donor)[:count])
    return bad
