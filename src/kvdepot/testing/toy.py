"""ToyEngine, the oracle: it can recompute the right bytes of any block from scratch.

The payload of block i of a prompt is SHAKE-256 over the whole identity, the request's extras, the
tokens from the first to the end of the block, and the cache group, stretched to the block's length.
Nothing of it comes from `kvdepot.keys` or from `Identity.digest`, so a wrong reuse of any kind (a
field left out of the identity, two prompts under one key, a swapped, torn or stale block) shows as a
byte that differs. No model is needed.
"""

from __future__ import annotations

import hashlib
import random
import struct
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from kvdepot.identity import CacheGroup, Identity
from kvdepot.io.buffers import ALIGNMENT, aligned_bytes
from kvdepot.keys import BlockKey, RequestExtras, block_keys, group_key, root_key
from kvdepot.tiers import Outcome, Read, Tier, Write
from kvdepot.units import round_up

__all__ = ["POISON", "TOY_BLOCK_BYTES", "Asked", "ToyEngine", "ToyServer", "toy_identity"]

#: What rows hold before a load: a block that is served without being read shows as a run of these.
POISON = 0xAA
#: 2 layers x K and V x 1 head x dim 8 x bf16 x 16 tokens
TOY_BLOCK_BYTES = 1024

_LAYERS = 2
_BLOCK_TOKENS = 16
_VOCABULARY = 50_000
#: bytes of a block for each element of a head vector
_BYTES_PER_DIM = _LAYERS * 2 * 2 * _BLOCK_TOKENS


def toy_identity(
    block_bytes: Sequence[int] = (TOY_BLOCK_BYTES,),
    *,
    block_tokens: int = _BLOCK_TOKENS,
    **fields: Any,
) -> Identity:
    """An identity of the toy geometry with one cache group for each entry of `block_bytes`.

    Args:
        block_bytes: bytes of one block per group, each a positive multiple of 128 (with 16 tokens).
        block_tokens: tokens in a block.
        **fields: other fields of `Identity`, to differ in.

    Raises:
        ValueError: a block length does not belong to any geometry.
    """
    per_dim = _BYTES_PER_DIM * block_tokens // _BLOCK_TOKENS
    groups = []
    for index, length in enumerate(block_bytes):
        if length < per_dim or length % per_dim:
            raise ValueError(f"toy blocks come in multiples of {per_dim} bytes, not {length}")
        groups.append(
            CacheGroup(
                name=f"toy{index}",
                kind="full",
                layers=tuple(range(index * _LAYERS, (index + 1) * _LAYERS)),
                kv_heads=1,
                key_dim=length // per_dim,
                value_dim=length // per_dim,
                block_bytes=length,
            )
        )
    defaults: dict[str, Any] = {
        "model_name": "toy",
        "weights_fingerprint": "toy-weights-1",
        "model_dtype": "bfloat16",
        "kv_dtype": "bfloat16",
        "kv_layout": "layer,kv,head,token,dim",
        "attention": "toy",
        "engine": "toy",
        "engine_version": "1",
        "adapter_version": 1,
    }
    return Identity(**{**defaults, **fields}, groups=tuple(groups), block_tokens=block_tokens)


class ToyEngine:
    """Makes prompts, keys, stores and loads of one identity, and knows the right bytes of each.

    Two engines with equal arguments agree in everything, in any process. Thread-safe.

    Args:
        block_bytes: bytes of one block per cache group; ignored when `identity` is given.
        identity: what to be; by default `toy_identity(block_bytes)`.
        extras: tenant salt, LoRA digest and images of every request of this engine.
    """

    def __init__(
        self,
        block_bytes: Sequence[int] = (TOY_BLOCK_BYTES,),
        *,
        identity: Identity | None = None,
        extras: RequestExtras = RequestExtras(),
    ) -> None:
        self.identity = identity or toy_identity(block_bytes)
        self.extras = extras
        self.digest = self.identity.digest()
        self.root: BlockKey = root_key(self.digest, extras)
        self.block_tokens = self.identity.block_tokens
        self.groups = len(self.identity.groups)
        # the whole identity as text, apart from the product's own digest
        self._whole = repr((self.identity, extras)).encode()
        #: what each key handed out by `reads` stands for
        self._asked: dict[BlockKey, tuple[tuple[int, ...], int]] = {}

    # prompts and keys

    def prompt(self, seed: int, blocks: int, *, extra_tokens: int = 0) -> list[int]:
        """Token ids of `blocks` full blocks and `extra_tokens` more; the same for the same seed."""
        source = random.Random(seed)
        count = blocks * self.block_tokens + extra_tokens
        return [source.randrange(_VOCABULARY) for _ in range(count)]

    def keys(self, tokens: Sequence[int], group: int = 0) -> list[BlockKey]:
        """Keys of the prompt's full blocks in one cache group, in order."""
        chain = block_keys(self.digest, tokens, self.block_tokens, self.extras)
        return [group_key(key, group) for key in chain]

    # the oracle

    def block(self, tokens: Sequence[int], index: int, group: int = 0) -> bytes:
        """The right bytes of block `index` of the prompt, recomputed from scratch."""
        end = (index + 1) * self.block_tokens
        if not 0 < end <= len(tokens):
            raise IndexError(f"a prompt of {len(tokens)} tokens has no block {index}")
        encoded = np.asarray(tokens[:end], dtype="<u4").tobytes()
        fields = (self._whole, encoded, struct.pack("<I", group))
        state = hashlib.shake_256()
        for field in fields:
            state.update(struct.pack("<Q", len(field)) + field)
        return state.digest(self.identity.groups[group].block_bytes)

    # stores and loads

    def writes(self, tokens: Sequence[int], *, first: int = 0, skew_bytes: int = 0) -> list[Write]:
        """Stores of the prompt's blocks from `first` on, all groups of a block together.

        Each block lies in fresh memory that the caller owns, `skew_bytes` behind a page boundary.
        """
        found = []
        places = self._places(tokens, first)
        rows = self._rows([group for _, group, _, _ in places], skew_bytes)
        for (index, group, key, parent), row in zip(places, rows, strict=True):
            row[:] = self.block(tokens, index, group)
            found.append(Write(key, parent, row, self.block_tokens))
        return found

    def reads(self, tokens: Sequence[int], *, first: int = 0, skew_bytes: int = 0) -> list[Read]:
        """Loads of the prompt's blocks from `first` on, in the order of `writes`.

        Each row is fresh memory filled with `POISON`, `skew_bytes` behind a page boundary.
        """
        found = []
        places = self._places(tokens, first)
        rows = self._rows([group for _, group, _, _ in places], skew_bytes)
        for (index, group, key, _), row in zip(places, rows, strict=True):
            row[:] = bytes([POISON]) * len(row)
            self._asked[key] = (tuple(tokens[: (index + 1) * self.block_tokens]), group)
            found.append(Read(key, row))
        return found

    def check(self, reads: Sequence[Read], outcomes: Sequence[Outcome]) -> None:
        """Compare every row whose outcome is DONE with the oracle.

        The reads must come from this engine's `reads`.

        Raises:
            AssertionError: a row that was called DONE does not hold the block's right bytes, or the
                number of outcomes is not the number of reads.
        """
        if len(reads) != len(outcomes):
            raise AssertionError(f"{len(reads)} reads have {len(outcomes)} outcomes")
        for place, (read, outcome) in enumerate(zip(reads, outcomes, strict=True)):
            if outcome is not Outcome.DONE:
                continue
            prefix, group = self._asked[read.key]
            index = len(prefix) // self.block_tokens - 1
            right = self.block(prefix, index, group)
            if bytes(read.into) != right:
                raise AssertionError(
                    f"wrong bytes: read {place} (block {index} of group {group}, key "
                    f"{read.key.hex()[:16]}) is DONE but {_difference(bytes(read.into), right)}"
                )

    def _places(
        self, tokens: Sequence[int], first: int
    ) -> list[tuple[int, int, BlockKey, BlockKey]]:
        """(block, group, key, parent) of every block from `first` on, in chain order."""
        chains = [self.keys(tokens, group) for group in range(self.groups)]
        parents = [[group_key(self.root, group), *chain] for group, chain in enumerate(chains)]
        return [
            (index, group, chains[group][index], parents[group][index])
            for index in range(first, len(chains[0]))
            for group in range(self.groups)
        ]

    def _rows(self, groups: Sequence[int], skew_bytes: int) -> Iterator[memoryview]:
        """One row for each entry, cut from one buffer, so that long prompts need one mapping."""
        lengths = [self.identity.groups[group].block_bytes for group in groups]
        steps = [round_up(length + skew_bytes, ALIGNMENT) for length in lengths]
        slab = aligned_bytes(sum(steps))
        start = skew_bytes
        for length, step in zip(lengths, steps, strict=True):
            yield slab[start : start + length]
            start += step


class Asked(NamedTuple):
    """What one request of `ToyServer` came to. Counts are of blocks over all groups."""

    blocks: int
    #: leading blocks that the tier served, verified against the oracle
    reused: int
    #: blocks that had to be computed
    computed: int
    #: computed blocks whose store was refused or failed
    unstored: int


class ToyServer:
    """The smallest engine loop over a tier: look up, load, compute the rest, store it.

    Args:
        engine: makes the keys and computes the blocks.
        tier: where blocks are kept; the caller closes it.
        deadline_s: deadline of each load, seconds.
        patience_s: how long to wait for a job to let go of its rows before the test has failed.
    """

    def __init__(
        self,
        engine: ToyEngine,
        tier: Tier,
        *,
        deadline_s: float | None = None,
        patience_s: float = 60.0,
    ) -> None:
        self.engine = engine
        self.tier = tier
        self.deadline_s = deadline_s
        self.patience_s = patience_s

    def ask(self, tokens: Sequence[int]) -> Asked:
        """Serve one prompt; wrong bytes raise AssertionError."""
        engine = self.engine
        hit = min(self.tier.lookup(engine.keys(tokens, group)) for group in range(engine.groups))
        wanted = engine.reads(tokens[: hit * engine.block_tokens])
        load = self.tier.load(wanted, deadline_s=self.deadline_s)
        load.wait(self.patience_s)
        engine.check(wanted, load.outcomes)
        reused = load.leading_done // engine.groups
        if not load.wait_settled(self.patience_s):
            raise AssertionError(f"a load did not settle in {self.patience_s} s")
        writes = engine.writes(tokens, first=reused)
        store = self.tier.store(writes)
        if not store.wait_settled(self.patience_s):
            raise AssertionError(f"a store did not settle in {self.patience_s} s")
        return Asked(
            blocks=len(engine.keys(tokens)) * engine.groups,
            reused=reused * engine.groups,
            computed=len(writes),
            unstored=sum(outcome is not Outcome.DONE for outcome in store.outcomes),
        )


def _difference(found: bytes, right: bytes) -> str:
    """How two blocks differ, in words that point to the cause."""
    if len(found) != len(right):
        return f"has {len(found)} bytes instead of {len(right)}"
    bad = [place for place, (a, b) in enumerate(zip(found, right, strict=True)) if a != b]
    run = found[bad[0] : bad[-1] + 1]
    what = "are other bytes"
    if run == bytes([POISON]) * len(run):
        what = "were never written"
    elif not any(run):
        what = "are zeros"
    return f"{len(bad)} of {len(right)} bytes, from {bad[0]} to {bad[-1]}, {what}"
