"""Blocks: their geometry, and that cutting and pasting are each other's inverse, byte for byte."""

from __future__ import annotations

import pytest

pytestmark = pytest.mark.engine
pytest.importorskip("torch")
pytest.importorskip("transformers")

import torch  # noqa: E402

from kvdepot.engines.transformers.blocks import (  # noqa: E402
    PrefixLoad,
    PrefixTooShort,
    cutter,
    plan_blocks,
)
from kvdepot.engines.transformers.memory import KvMemory, KvShape  # noqa: E402
from kvdepot.errors import ConfigError  # noqa: E402
from kvdepot.units import KIB, round_up  # noqa: E402

SMALL_MODEL = KvShape(30, 3, 64, torch.float32)
SHAPE = KvShape(5, 2, 8, torch.float32)
TOKENS = 4


class Rows:
    """A restore that has already happened: per group, the rows and how many of them are good."""

    def __init__(self, groups, blocks, cut, *, good=None, run_blocks=3, page=4096):
        self.blocks = blocks
        self.waited = []
        self._run_blocks = run_blocks
        self._good = good or [blocks] * len(groups)
        self._row_bytes = [round_up(group.block_bytes, page) for group in groups]
        self._rows = [bytearray(row * blocks) for row in self._row_bytes]
        for index, group in enumerate(groups):
            for block in range(blocks):
                start = block * self._row_bytes[index]
                row = memoryview(self._rows[index])[start : start + group.block_bytes]
                cut(index, block, row)

    def runs(self, group):
        self.waited.append(group)
        row = self._row_bytes[group]
        for first in range(0, self._good[group], self._run_blocks):
            count = min(self._run_blocks, self._good[group] - first)
            yield first, count, memoryview(self._rows[group])[first * row : (first + count) * row]


def filled(dtype=torch.float32, tokens=40):
    memory = KvMemory(SHAPE._replace(dtype=dtype), tokens)
    memory.tensor.copy_(
        torch.randn(memory.tensor.shape, generator=torch.Generator().manual_seed(3))
    )
    return memory


@pytest.mark.parametrize("layers", [1, 2, 3, 4, 5, 7, 30, 80])
def test_groups_cover_all_layers_once_and_in_order(layers):
    shape = SHAPE._replace(layers=layers)
    for count in range(1, min(layers, 9) + 1):
        plan = plan_blocks(shape, block_tokens=TOKENS, group_count=count)
        assert [layer for group in plan.groups for layer in group.layers] == list(range(layers))
        assert all(group.layers for group in plan.groups)
        assert sum(group.block_bytes for group in plan.groups) == shape.token_bytes * TOKENS
        sizes = [len(group.layers) for group in plan.groups]
        assert sizes[0] == min(sizes)


def test_the_small_model_gets_small_blocks_of_whole_pages_and_a_small_first_group():
    plan = plan_blocks(SMALL_MODEL)
    assert SMALL_MODEL.token_bytes == 46_080
    assert plan.block_tokens == 8
    assert [len(group.layers) for group in plan.groups] == [6, 10, 14]
    assert [group.block_bytes for group in plan.groups] == [73_728, 122_880, 172_032]
    assert all(group.block_bytes % 4096 == 0 for group in plan.groups)
    assert sum(group.block_bytes for group in plan.groups) >= 3 * 96 * KIB
    assert "8 tokens" in plan.reason
    assert "whole pages" in plan.reason
    half = plan_blocks(SMALL_MODEL._replace(dtype=torch.bfloat16))
    assert half.block_tokens == 16
    large = plan_blocks(KvShape(32, 8, 128, torch.bfloat16))
    assert large.block_tokens == 8


def test_given_numbers_are_taken_or_refused():
    plan = plan_blocks(SMALL_MODEL, block_tokens=7, group_count=2)
    assert plan.block_tokens == 7
    assert len(plan.groups) == 2
    assert "as asked" in plan.reason
    for wrong in ({"block_tokens": 0}, {"group_count": 0}, {"group_count": 31}):
        with pytest.raises(ConfigError):
            plan_blocks(SMALL_MODEL, **wrong)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("run_blocks", [1, 3, 100])
@pytest.mark.parametrize("group_count", [1, 2, 5])
def test_what_is_cut_is_pasted_back_byte_for_byte(dtype, run_blocks, group_count):
    source = filled(dtype)
    groups = plan_blocks(source.shape, block_tokens=TOKENS, group_count=group_count).groups
    rows = Rows(groups, 7, cutter(source, groups, TOKENS), run_blocks=run_blocks)
    target = KvMemory(source.shape, 30)
    gate = PrefixLoad(rows, target, groups, TOKENS)
    for layer in range(SHAPE.layers):
        gate(layer)
    as_bytes = torch.int32 if dtype is torch.float32 else torch.int16
    assert torch.equal(
        target.tensor[:, :, :, :28].contiguous().view(as_bytes),
        source.tensor[:, :, :, :28].contiguous().view(as_bytes),
    )
    assert not target.tensor[:, :, :, 28:].any()


def test_a_block_is_laid_out_as_the_identity_says():
    source = filled()
    groups = plan_blocks(SHAPE, block_tokens=TOKENS, group_count=2).groups
    row = bytearray(groups[1].block_bytes)
    cutter(source, groups, TOKENS)(1, 2, memoryview(row))
    layers = groups[1].layers
    expected = source.tensor[layers[0] : layers[-1] + 1, :, :, 8:12]
    assert bytes(row) == expected.contiguous().numpy().tobytes()


def test_groups_are_waited_for_when_their_first_layer_is_reached_and_only_once():
    source = filled()
    groups = plan_blocks(SHAPE, block_tokens=TOKENS, group_count=2).groups
    rows = Rows(groups, 3, cutter(source, groups, TOKENS))
    gate = PrefixLoad(rows, KvMemory(SHAPE, 40), groups, TOKENS)
    waited = []
    for layer in range(SHAPE.layers):
        gate(layer)
        waited.append(list(rows.waited))
    assert waited == [[0], [0], [0, 1], [0, 1], [0, 1]]
    # a second part of the same prompt passes the gate again
    for layer in range(SHAPE.layers):
        gate(layer)
    assert rows.waited == [0, 1]


@pytest.mark.parametrize(
    ("good", "expected"),
    [([5, 7, 7], 5), ([7, 2, 7], 2), ([7, 7, 0], 0), ([6, 4, 5], 4), ([0, 0, 0], 0)],
)
def test_a_short_group_ends_the_pass_and_says_what_all_groups_have(good, expected):
    source = filled()
    groups = plan_blocks(SHAPE, block_tokens=TOKENS, group_count=3).groups
    target = KvMemory(SHAPE, 40)
    rows = Rows(groups, 7, cutter(source, groups, TOKENS), good=good)
    gate = PrefixLoad(rows, target, groups, TOKENS)

    def whole_pass():
        for layer in range(SHAPE.layers):
            gate(layer)

    with pytest.raises(PrefixTooShort) as short:
        whole_pass()
    assert short.value.good_blocks == expected
    assert rows.waited == [0, 1, 2]
    tokens = expected * TOKENS
    assert torch.equal(target.tensor[:, :, :, :tokens], source.tensor[:, :, :, :tokens])
