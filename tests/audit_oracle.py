"""Brute force for the audit: what a prefix cache does, said in the plainest way."""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
SHARED = ROOT.parent / "shared"


def shared_file(name: str) -> Path:
    """A file of the folder that is laid beside the checkout; skips where it is not there."""
    path = SHARED / name
    if not path.exists():
        pytest.skip(f"{path} is not there: the folder of examples is not part of the repository")
    return path


def _chain(prompt: Sequence[int], block: int, extra: object) -> list[bytes]:
    """A digest for each full block's end, of everything before it."""
    digest = hashlib.sha256(repr(extra).encode()).digest()
    made = []
    for end in range(block, len(prompt) + 1, block):
        digest = hashlib.sha256(digest + repr(prompt[end - block : end]).encode()).digest()
        made.append(digest)
    return made


def reused(prompts: Sequence[Sequence[int]], block: int, extras: Sequence[object]) -> list[int]:
    """Tokens of each prompt that an earlier one with the same extra has, in full blocks."""
    seen: set[bytes] = set()
    found = []
    for prompt, extra in zip(prompts, extras, strict=True):
        chain = _chain(list(prompt), block, extra)
        hits = 0
        while hits < len(chain) and chain[hits] in seen:
            hits += 1
        found.append(hits * block)
        seen.update(chain)
    return found


def chained_reuse(
    scopes: Sequence[object], ids: Sequence[Sequence[int]], tokens: Sequence[Sequence[int]]
) -> int:
    """Tokens reused where an id stands for one piece and reuse is of whole prefixes."""
    seen: set[bytes] = set()
    total = 0
    for scope, pieces, sizes in zip(scopes, ids, tokens, strict=True):
        chain = _chain(list(pieces), 1, scope)
        hits = 0
        while hits < len(chain) and chain[hits] in seen:
            hits += 1
        total += sum(sizes[:hits])
        seen.update(chain)
    return total


def lru(chains: Sequence[Sequence[int]], capacity: int) -> int:
    """Blocks reused by an LRU cache of `capacity` blocks; the root is the most recent of a request."""
    held: OrderedDict[int, None] = OrderedDict()
    hits = 0
    for chain in chains:
        for block in chain:
            if block not in held:
                break
            hits += 1
        for block in reversed(chain):
            held[block] = None
            held.move_to_end(block)
        while len(held) > capacity:
            held.popitem(last=False)
    return hits
