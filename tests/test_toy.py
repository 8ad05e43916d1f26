"""The oracle itself: it must know right from wrong before anything is judged by it."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest

from kvdepot.keys import RequestExtras, group_key
from kvdepot.testing.memorytier import MemoryTier
from kvdepot.testing.toy import POISON, Asked, ToyEngine, ToyServer, toy_identity
from kvdepot.tiers import Outcome
from tests.children import run_python

DONE, MISS = Outcome.DONE, Outcome.MISS


@dataclass
class Variant:
    """An engine that differs from the plain one in one thing."""

    name: str
    engine: ToyEngine = field(repr=False)


VARIANTS = [
    Variant("weights", ToyEngine(identity=toy_identity(weights_fingerprint="other"))),
    Variant("kv dtype", ToyEngine(identity=toy_identity(kv_dtype="float16"))),
    Variant("rank", ToyEngine(identity=toy_identity(rank_content="shard 1 of 2"))),
    Variant("salt", ToyEngine(extras=RequestExtras(tenant_salt="a"))),
    Variant("empty salt", ToyEngine(extras=RequestExtras(tenant_salt=""))),
    Variant("lora", ToyEngine(extras=RequestExtras(lora_digest=b"a" * 32))),
]


def test_block_length_is_the_geometrys():
    engine = ToyEngine((1024, 4096, 128))
    tokens = engine.prompt(1, 2)
    assert [len(engine.block(tokens, 1, group)) for group in range(3)] == [1024, 4096, 128]


@pytest.mark.parametrize("length", [0, 64, 1000, -128])
def test_impossible_block_lengths_are_refused(length):
    with pytest.raises(ValueError, match="multiples of 128"):
        toy_identity((length,))


def test_prompts_and_blocks_are_equal_in_every_process():
    script = (
        "from kvdepot.testing.toy import ToyEngine\n"
        "e = ToyEngine((1024, 2048)); t = e.prompt(7, 3)\n"
        "print(e.block(t, 2, 1).hex(), e.keys(t, 1)[2].hex())"
    )
    runs = {run_python(script, env={"PYTHONHASHSEED": seed}).stdout for seed in ("1", "2")}
    engine = ToyEngine((1024, 2048))
    tokens = engine.prompt(7, 3)
    assert runs == {f"{engine.block(tokens, 2, 1).hex()} {engine.keys(tokens, 1)[2].hex()}\n"}


def test_a_block_depends_on_every_token_before_its_end_and_on_none_after():
    engine = ToyEngine()
    tokens = engine.prompt(1, 3)
    right = engine.block(tokens, 1)
    for place in range(2 * engine.block_tokens):
        changed = list(tokens)
        changed[place] += 1
        assert engine.block(changed, 1) != right
    changed = list(tokens)
    changed[2 * engine.block_tokens] += 1
    assert engine.block(changed, 1) == right


@pytest.mark.parametrize("variant", VARIANTS, ids=lambda variant: variant.name)
def test_engines_that_differ_in_one_field_differ_in_every_byte_run_and_key(variant):
    plain = ToyEngine()
    tokens = plain.prompt(1, 2)
    other = variant.engine
    assert other.block(tokens, 1) != plain.block(tokens, 1)
    assert not set(other.keys(tokens)) & set(plain.keys(tokens))


def test_blocks_of_two_groups_differ():
    engine = ToyEngine((1024, 1024))
    tokens = engine.prompt(1, 1)
    assert engine.block(tokens, 0, 0) != engine.block(tokens, 0, 1)
    assert engine.keys(tokens, 1) == [group_key(engine.keys(tokens)[0], 1)]


def test_a_partial_block_has_no_bytes():
    engine = ToyEngine()
    tokens = engine.prompt(1, 1, extra_tokens=5)
    assert len(engine.keys(tokens)) == 1
    with pytest.raises(IndexError, match="no block 1"):
        engine.block(tokens, 1)
    with pytest.raises(IndexError, match="no block -1"):
        engine.block(tokens, -1)


@pytest.mark.parametrize("skew_bytes", [0, 1, 512])
def test_writes_hold_the_right_bytes_in_chain_order(skew_bytes):
    engine = ToyEngine((1024, 2048))
    tokens = engine.prompt(3, 2)
    writes = engine.writes(tokens, skew_bytes=skew_bytes)
    first, second = engine.keys(tokens, 0), engine.keys(tokens, 1)
    assert [write.key for write in writes] == [first[0], second[0], first[1], second[1]]
    roots = [engine.root, group_key(engine.root, 1)]
    assert [write.parent for write in writes] == [*roots, first[0], second[0]]
    assert bytes(writes[3].data) == engine.block(tokens, 1, 1)
    assert [write.key for write in engine.writes(tokens, first=1)] == [first[1], second[1]]


def test_check_accepts_right_bytes_and_ignores_rows_that_are_not_done():
    engine = ToyEngine()
    tokens = engine.prompt(1, 3)
    reads = engine.reads(tokens)
    assert all(set(read.into) == {POISON} for read in reads)
    reads[0].into[:] = engine.block(tokens, 0)
    engine.check(reads, [DONE, MISS, Outcome.CORRUPT])


def _swap(rows, right):
    rows[1][:] = right[0]


def _flip(rows, right):
    rows[1][:] = right[1]
    rows[1][500] ^= 1


def _zero_tail(rows, right):
    rows[1][:] = right[1][:512] + bytes(512)


def _leave(rows, right):
    """The row is called DONE although nothing was put there."""


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (_swap, "are other bytes"),
        (_flip, "1 of 1024 bytes, from 500 to 500"),
        (_zero_tail, "are zeros"),
        (_leave, "were never written"),
    ],
)
def test_check_names_the_kind_of_wrong_bytes(spoil, message):
    engine = ToyEngine()
    tokens = engine.prompt(1, 2)
    reads = engine.reads(tokens)
    right = [engine.block(tokens, index) for index in range(2)]
    reads[0].into[:] = right[0]
    spoil([read.into for read in reads], right)
    with pytest.raises(AssertionError, match=message) as caught:
        engine.check(reads, [DONE, DONE])
    assert "read 1 (block 1 of group 0" in str(caught.value)


def test_check_counts_outcomes():
    engine = ToyEngine()
    with pytest.raises(AssertionError, match="2 reads have 1 outcomes"):
        engine.check(engine.reads(engine.prompt(1, 2)), [MISS])


def test_server_reuses_what_it_stored_and_computes_the_rest():
    engine = ToyEngine((1024, 2048))
    with MemoryTier() as tier:
        server = ToyServer(engine, tier)
        tokens = engine.prompt(1, 4)
        assert server.ask(tokens) == Asked(blocks=8, reused=0, computed=8, unstored=0)
        assert server.ask(tokens) == Asked(blocks=8, reused=8, computed=0, unstored=0)
        longer = tokens + engine.prompt(2, 2)
        assert server.ask(longer) == Asked(blocks=12, reused=8, computed=4, unstored=0)
        assert server.ask(engine.prompt(3, 1)) == Asked(blocks=2, reused=0, computed=2, unstored=0)


def test_server_finds_wrong_bytes():
    engine = ToyEngine()
    tokens = engine.prompt(1, 2)
    with MemoryTier() as tier:
        writes = engine.writes(tokens)
        writes[1].data[7] ^= 1
        assert tier.store(writes).wait_settled(10)
        with pytest.raises(AssertionError, match="wrong bytes: read 1"):
            ToyServer(engine, tier).ask(tokens)
