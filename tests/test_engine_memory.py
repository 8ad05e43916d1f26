"""The KV memory and the cache over it: the same KV as the stock cache, in place, and it may grow."""

from __future__ import annotations

import pytest

pytestmark = pytest.mark.engine
pytest.importorskip("torch")
pytest.importorskip("transformers")

import torch  # noqa: E402
from transformers.cache_utils import DynamicCache  # noqa: E402

from kvdepot.engines.transformers.memory import (  # noqa: E402
    KvMemory,
    KvShape,
    PreallocCache,
)
from kvdepot.engines.transformers.support import cache_argument  # noqa: E402
from tests.tiny_models import SMALL, prompt_of, tiny_model  # noqa: E402

SHAPE = KvShape(SMALL["num_hidden_layers"], 2, 8, torch.float32)


def run(model, cache, ids, parts):
    start = 0
    logits = None
    with torch.inference_mode():
        for size in parts:
            part = torch.tensor([ids[start : start + size]])
            memory = {cache_argument(model): cache}
            logits = model(input_ids=part, use_cache=True, **memory).logits[0, -1]
            start += size
    return logits


@pytest.mark.parametrize("parts", [(40,), (16, 24), (30, 1, 1, 8), (1,) * 40])
def test_the_cache_holds_what_the_stock_cache_holds(parts):
    model, ids = tiny_model(), prompt_of(40)
    stock = DynamicCache(config=model.config)
    ours = PreallocCache(KvMemory(SHAPE, 64))
    expected = run(model, stock, ids, parts)
    found = run(model, ours, ids, parts)
    assert torch.equal(found, expected)
    for index, layer in enumerate(stock.layers):
        assert torch.equal(ours.memory.tensor[index, 0, :, :40], layer.keys[0])
        assert torch.equal(ours.memory.tensor[index, 1, :, :40], layer.values[0])
    assert ours.get_seq_length() == 40


def test_memory_grows_geometrically_and_keeps_what_is_in_it():
    model, ids = tiny_model(), prompt_of(100)
    roomy, tight = PreallocCache(KvMemory(SHAPE, 128)), PreallocCache(KvMemory(SHAPE, 3))
    capacities = set()
    for cache in (roomy, tight):
        for start in range(0, 100, 10):
            run(model, cache, ids[start : start + 10], (10,))
            capacities.add(cache.memory.capacity_tokens)
    assert torch.equal(tight.memory.tensor[:, :, :, :100], roomy.memory.tensor[:, :, :, :100])
    # 3 grows to 10, then doubles: 20, 40, 80, 160
    assert capacities == {128, 10, 20, 40, 80, 160}


def test_appending_does_not_move_what_is_there():
    cache = PreallocCache(KvMemory(SHAPE, 64))
    run(tiny_model(), cache, prompt_of(20), (20,))
    address = cache.layers[0].keys.data_ptr()
    run(tiny_model(), cache, prompt_of(20), (10, 1, 1))
    assert cache.layers[0].keys.data_ptr() == address


def test_every_page_is_touched_and_zero_at_the_start():
    memory = KvMemory(SHAPE, 1000)
    assert memory.tensor.shape == (4, 2, 2, 1000, 8)
    assert not memory.tensor.any()
    assert memory.tensor.numel() * 4 == 1000 * SHAPE.token_bytes


def test_begin_says_how_much_is_there_and_the_gate_sees_every_layer_once():
    cache = PreallocCache(KvMemory(SHAPE, 64))
    seen: list[int] = []
    cache.begin(16, seen.append)
    assert cache.get_seq_length() == 16
    assert cache.get_mask_sizes(4, 0) == (20, 0)
    run(tiny_model(), cache, prompt_of(4), (4,))
    assert seen == [0, 1, 2, 3]
    cache.end_gate()
    run(tiny_model(), cache, prompt_of(1), (1,))
    assert seen == [0, 1, 2, 3]
    assert cache.get_seq_length() == 21


def test_crop_and_reset_forget_tokens():
    cache = PreallocCache(KvMemory(SHAPE, 64))
    run(tiny_model(), cache, prompt_of(20), (20,))
    cache.crop(-5)
    assert cache.get_seq_length() == 15
    cache.reset()
    assert cache.get_seq_length() == 0


def test_batches_are_refused():
    cache = PreallocCache(KvMemory(SHAPE, 8))
    with pytest.raises(NotImplementedError, match="one sequence"):
        cache.layers[0].reorder_cache(torch.tensor([0]))
    with pytest.raises(NotImplementedError):
        cache.batch_repeat_interleave(2)
