"""Models whose cache cannot be cut are refused with the reason; the others are not."""

from __future__ import annotations

import pytest

pytestmark = pytest.mark.engine
pytest.importorskip("torch")
pytest.importorskip("transformers")

import torch  # noqa: E402
import transformers  # noqa: E402

from kvdepot.engines.transformers.attention import use_shared_heads  # noqa: E402
from kvdepot.engines.transformers.memory import PreallocLayer  # noqa: E402
from kvdepot.engines.transformers.support import (  # noqa: E402
    cache_argument,
    probe,
    refuse_config,
)
from kvdepot.errors import UnsupportedModel  # noqa: E402
from tests.tiny_models import SMALL, tiny_config, tiny_model  # noqa: E402

DYNAMIC_ROPE = {"rope_type": "dynamic", "rope_theta": 10_000.0, "factor": 2.0}
LONG_ROPE = {
    "rope_type": "longrope",
    "rope_theta": 10_000.0,
    "short_factor": [1.0] * 4,
    "long_factor": [2.0] * 4,
    "original_max_position_embeddings": 128,
}
PER_KIND_ROPE = {"full_attention": DYNAMIC_ROPE}


def layers_of(*kinds):
    return {"layer_types": list(kinds), "num_hidden_layers": len(kinds)}


REFUSED = {
    "sliding window": (lambda: transformers.MistralConfig(**SMALL, sliding_window=64), "64 tokens"),
    "some sliding layers": (
        lambda: transformers.Qwen3Config(
            **{**SMALL, **layers_of("full_attention", "sliding_attention")}, sliding_window=16
        ),
        "sliding_attention",
    ),
    "gemma 2": (lambda: transformers.Gemma2Config(**SMALL), "sliding_attention"),
    "gemma 3": (lambda: transformers.Gemma3TextConfig(**SMALL), "sliding_attention"),
    "mamba": (lambda: transformers.MambaConfig(hidden_size=32, num_hidden_layers=2), "recurrent"),
    "mamba 2": (
        lambda: transformers.Mamba2Config(hidden_size=32, num_heads=4, head_dim=16),
        "recurrent",
    ),
    "jamba": (lambda: transformers.JambaConfig(**SMALL), "linear_attention"),
    "zamba": (transformers.ZambaConfig, "hybrid"),
    "encoder-decoder": (transformers.T5Config, "encoder-decoder"),
    "no cache": (transformers.AlbertConfig, "use_cache"),
    "not causal": (lambda: tiny_config(is_causal=False), "not causal"),
    "dynamic rope": (lambda: tiny_config(rope_parameters=DYNAMIC_ROPE), "dynamic"),
    "long rope": (lambda: tiny_config(rope_parameters=LONG_ROPE), "longrope"),
    "chunked": (lambda: tiny_config(attention_chunk_size=32), "chunks of 32"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_config_that_says_so_is_refused_with_the_reason(name):
    make, reason = REFUSED[name]
    with pytest.raises(UnsupportedModel, match=reason) as refused:
        refuse_config(make())
    assert refused.value.hint


def test_a_length_dependent_rope_in_one_kind_of_layer_is_found():
    config = tiny_config()
    config.rope_parameters = PER_KIND_ROPE
    with pytest.raises(UnsupportedModel, match="dynamic"):
        refuse_config(config)


ACCEPTED = {
    "llama": tiny_config,
    "qwen 3": lambda: transformers.Qwen3Config(**SMALL),
    "qwen 2 with the window off": lambda: transformers.Qwen2Config(
        **SMALL, use_sliding_window=False, sliding_window=16
    ),
    "mistral without a window": lambda: transformers.MistralConfig(**SMALL, sliding_window=None),
    "gpt 2": lambda: transformers.GPT2Config(
        n_embd=32, n_layer=4, n_head=4, vocab_size=300, n_positions=512
    ),
    "olmo 2": lambda: transformers.Olmo2Config(**SMALL),
}


@pytest.mark.parametrize("name", ACCEPTED)
def test_full_attention_models_pass_both_checks(name):
    config = ACCEPTED[name]()
    refuse_config(config)
    model = tiny_model(config)
    use_shared_heads(model)
    shape = probe(model)
    assert shape.layers == 4
    assert shape.dtype == torch.float32
    assert shape.head_dim == 8


def test_the_cache_argument_is_found_by_its_name():
    model = tiny_model()
    assert cache_argument(model) in ("cache", "past_key_values")
    with pytest.raises(UnsupportedModel, match="no KV cache"):
        cache_argument(torch.nn.Linear(2, 2))


PROBED = {
    "recurrent layers": (
        lambda: transformers.MambaConfig(hidden_size=32, num_hidden_layers=2, vocab_size=300),
        "LinearAttentionLayer|no keys|no KV cache",
    ),
    "sliding layers": (
        lambda: transformers.MistralConfig(**SMALL, sliding_window=4),
        "DynamicSlidingWindowLayer",
    ),
    "latent attention": (
        lambda: transformers.DeepseekV3Config(
            **{**SMALL, "num_key_value_heads": 4, "num_hidden_layers": 1},
            qk_nope_head_dim=8,
            qk_rope_head_dim=8,
            v_head_dim=8,
            kv_lora_rank=24,
            q_lora_rank=8,
            first_k_dense_replace=1,
        ),
        "latent|shape",
    ),
}


@pytest.mark.parametrize("name", PROBED)
def test_what_a_model_really_does_is_looked_at_whatever_its_config_says(name):
    make, reason = PROBED[name]
    with pytest.raises(UnsupportedModel, match=reason):
        probe(tiny_model(make()))


def test_a_model_that_computes_other_kv_in_two_parts_is_refused(monkeypatch):
    # as a model does whose positions restart, or that looks at the whole prompt
    update = PreallocLayer.update

    def shifted(self, keys, values, *args, **kwargs):
        return update(self, keys + self.get_seq_length(), values, *args, **kwargs)

    monkeypatch.setattr(PreallocLayer, "update", shifted)
    with pytest.raises(UnsupportedModel, match="in two parts"):
        probe(tiny_model())
