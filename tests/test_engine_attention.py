"""Attention without copies gives the very numbers of the stock attention, for every shape of pass."""

from __future__ import annotations

import pytest

pytestmark = pytest.mark.engine
pytest.importorskip("torch")
pytest.importorskip("transformers")

import torch  # noqa: E402
from transformers import MistralConfig, Qwen3Config  # noqa: E402
from transformers.cache_utils import DynamicCache  # noqa: E402
from transformers.integrations.sdpa_attention import sdpa_attention_forward  # noqa: E402

from kvdepot.engines.transformers import attention  # noqa: E402
from kvdepot.engines.transformers.attention import (  # noqa: E402
    ATTENTION_NAME,
    additive_mask,
    attend,
    use_shared_heads,
)
from tests.tiny_models import SMALL, prompt_of, tiny_config, tiny_model  # noqa: E402


class Module(torch.nn.Module):
    is_causal = True

    def __init__(self, groups):
        super().__init__()
        self.num_key_value_groups = groups


def mask_of(query_tokens, tokens):
    return additive_mask(
        batch_size=1,
        q_length=query_tokens,
        kv_length=tokens,
        q_offset=tokens - query_tokens,
        device="cpu",
    )


@pytest.mark.parametrize("kv_heads", [1, 2, 3])
@pytest.mark.parametrize("groups", [1, 2, 3])
@pytest.mark.parametrize(
    ("query_tokens", "tokens"), [(1, 50), (8, 50), (24, 300), (40, 41), (64, 64), (300, 300)]
)
def test_equal_to_the_stock_function_bit_for_bit(kv_heads, groups, query_tokens, tokens):
    torch.manual_seed(0)
    query = torch.randn(1, kv_heads * groups, query_tokens, 16)
    # views into a larger memory, as the cache gives them
    memory = torch.randn(2, kv_heads, tokens + 30, 16)
    key, value = memory[0, :, :tokens].unsqueeze(0), memory[1, :, :tokens].unsqueeze(0)
    mask = mask_of(query_tokens, tokens)
    assert (mask is None) == (query_tokens in (1, tokens))
    module = Module(groups)
    expected, _ = sdpa_attention_forward(module, query, key, value, mask, scaling=0.2)
    found, weights = attend(module, query, key, value, mask, scaling=0.2)
    assert weights is None
    assert found.shape == (1, query_tokens, kv_heads * groups, 16)
    assert torch.equal(found, expected)


def test_the_mask_hides_exactly_the_later_tokens():
    mask = mask_of(3, 7)
    assert mask.shape == (1, 1, 3, 7)
    for row in range(3):
        assert torch.equal(mask[0, 0, row, : 5 + row], torch.zeros(5 + row))
        assert torch.isinf(mask[0, 0, row, 5 + row :]).all()


def test_padding_keeps_the_boolean_mask_that_can_hide_a_whole_row():
    padding = torch.tensor([[False, True, True, True]])
    mask = additive_mask(
        batch_size=1, q_length=4, kv_length=4, attention_mask=padding, device="cpu"
    )
    assert mask is not None
    assert mask.dtype == torch.bool
    assert not mask[0, 0, 0].any()


@pytest.mark.parametrize(
    "special", [{"softcap": 5.0}, {"position_bias": torch.zeros(1)}, {"output_attentions": True}]
)
def test_more_than_plain_attention_goes_to_the_stock_function(monkeypatch, special):
    called = []
    monkeypatch.setattr(
        attention, "sdpa_attention_forward", lambda *_args, **kwargs: called.append(kwargs)
    )
    heads = torch.zeros(1, 4, 8, 16)
    attend(Module(2), heads, heads[:, :2], heads[:, :2], None, **special)
    assert called
    assert all(called[0][name] is value for name, value in special.items())


CONFIGS = {
    "llama": tiny_config(),
    "qwen3": Qwen3Config(**SMALL),
    "mistral without a window": MistralConfig(**SMALL, sliding_window=None),
    "no groups": tiny_config(num_key_value_heads=4),
    "one kv head": tiny_config(num_key_value_heads=1),
}


@pytest.mark.parametrize("name", CONFIGS)
def test_a_model_gives_equal_logits_with_it(name):
    model, ids = tiny_model(CONFIGS[name]), torch.tensor([prompt_of(90)])

    def logits():
        cache = DynamicCache(config=model.config)
        with torch.inference_mode():
            return [
                model(input_ids=part, use_cache=True, cache=cache).logits
                for part in (ids[:, :50], ids[:, 50:89], ids[:, 89:])
            ]

    expected = logits()
    assert use_shared_heads(model) == ATTENTION_NAME
    assert model.config._attn_implementation == ATTENTION_NAME
    for ours, stock in zip(logits(), expected, strict=True):
        assert torch.equal(ours, stock)


def test_a_model_with_another_attention_keeps_it():
    model = tiny_model()
    model.set_attn_implementation("eager")
    assert use_shared_heads(model) == "eager"
