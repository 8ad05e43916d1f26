"""Sizes chosen for vLLM: of a block by the model's KV, and of the host tier by the machine."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvdepot.engines.vllm.chunks import BLOCK_TOKENS_MAX, choose_block
from kvdepot.engines.vllm.hostbytes import choose_host_bytes
from kvdepot.engines.vllm.kvsize import KvSize, kv_element_bytes, kv_size, longest_request
from kvdepot.errors import ConfigError
from kvdepot.io.machine import Machine
from kvdepot.units import GIB, KIB, MIB
from tests import vllm_configs as models

MACHINE = Machine(
    cpu_flags=frozenset(),
    cores=8,
    numa_nodes=1,
    memory_free_bytes=64 * GIB,
    shared_memory_free_bytes=32 * GIB,
)


# --- a token's KV


@pytest.mark.parametrize(
    ("config", "element_bytes", "token_bytes"),
    [
        (models.LLAMA_3_8B, 2, 131_072),
        (models.QWEN3_30B_A3B, 2, 98_304),
        (models.QWEN3_30B_A3B, 1, 49_152),
        (models.DEEPSEEK_V3, 2, 70_272),
        (models.SMOLLM2_135M, 2, 23_040),
        (models.SMOLLM2_135M, 4, 46_080),
        (models.GEMMA_3_4B, 2, 139_264),
        (models.GPT_OSS_20B, 2, 49_152),
        (models.GPT2, 2, 36_864),
        (models.FALCON_7B, 2, 8_192),
        (models.QWEN3_NEXT_80B, 2, 24_576),
    ],
    ids=lambda value: value.get("model_type") if isinstance(value, dict) else str(value),
)
def test_a_tokens_kv_in_real_models(config, element_bytes, token_bytes):
    assert kv_size(config, element_bytes=element_bytes).token_bytes == token_bytes


@pytest.mark.parametrize(
    ("config", "group_layers"),
    [
        (models.LLAMA_3_8B, 32),
        (models.GEMMA_3_4B, 5),  # the rarer kind's layers make a group
        (models.GPT_OSS_20B, 12),
        (models.QWEN3_NEXT_80B, 12),
    ],
    ids=lambda value: value.get("model_type") if isinstance(value, dict) else str(value),
)
def test_layers_of_a_group_in_models_that_mix_kinds(config, group_layers):
    assert kv_size(config, element_bytes=2).group_layers == group_layers


def test_kinds_of_about_equal_number_are_padded_into_one_size():
    config = {**models.GPT_OSS_20B, "layer_types": ["a_attention"] * 13 + ["b_attention"] * 12}
    assert kv_size(config, element_bytes=2).group_layers == 13


def test_fewer_heads_than_ranks_are_repeated_and_a_latent_is_not():
    assert kv_size(models.LLAMA_3_8B, element_bytes=2, tensor_parallel=8).token_bytes == 131_072
    assert kv_size(models.LLAMA_3_8B, element_bytes=2, tensor_parallel=16).token_bytes == 262_144
    assert kv_size(models.DEEPSEEK_V3, element_bytes=2, tensor_parallel=8).token_bytes == 70_272


@pytest.mark.parametrize("config", [{}, {"num_hidden_layers": 4}, {"text_config": {}}])
def test_a_config_that_does_not_tell_is_not_guessed_at(config):
    assert kv_size(config, element_bytes=2) is None
    assert longest_request(config) == 0


def test_a_model_of_state_alone_has_no_kv():
    config = {**models.LLAMA_3_8B, "layer_types": ["mamba"] * 32}
    assert kv_size(config, element_bytes=2) is None


@pytest.mark.parametrize(
    ("dtype", "kv_cache_dtype", "expected"),
    [
        ("auto", "auto", 2),
        ("float32", "auto", 4),
        ("half", "auto", 2),
        ("float32", "fp8_e4m3", 1),
        ("float32", "bfloat16", 2),
    ],
)
def test_bytes_of_a_number_in_the_kv_cache(dtype, kv_cache_dtype, expected):
    assert (
        kv_element_bytes(models.LLAMA_3_8B, dtype=dtype, kv_cache_dtype=kv_cache_dtype) == expected
    )


def test_a_checkpoint_may_bring_a_quantised_kv_cache():
    config = {"quantization_config": {"kv_cache_scheme": {"num_bits": 8, "type": "float"}}}
    assert kv_element_bytes(config, dtype="auto", kv_cache_dtype="auto") == 1
    assert kv_element_bytes(config, dtype="auto", kv_cache_dtype="bfloat16") == 2


def test_the_longest_request():
    assert longest_request(models.LLAMA_3_8B) == 8192
    assert longest_request(models.GEMMA_3_4B) == 131_072
    assert longest_request(models.DEEPSEEK_V3) == 163_840
    assert longest_request(models.GPT2) == 1024


# --- a block


@pytest.mark.parametrize(
    ("config", "element_bytes", "engine_block", "tokens"),
    [
        (models.LLAMA_3_8B, 2, 16, 16),  # 2 MiB
        (models.QWEN3_30B_A3B, 2, 16, 16),  # 1.5 MiB
        (models.QWEN3_30B_A3B, 1, 16, 32),  # 1.5 MiB
        (models.DEEPSEEK_V3, 2, 64, 64),  # 4.3 MiB
        (models.SMOLLM2_135M, 2, 16, 48),  # 1.05 MiB
        (models.SMOLLM2_135M, 4, 16, 32),  # 1.4 MiB
        (models.SMOLLM2_135M, 2, 128, 128),
        (models.GEMMA_3_4B, 2, 16, 16),  # larger ones would be stored in part
        (models.GPT_OSS_20B, 2, 16, 16),
        (models.FALCON_7B, 2, 16, 128),  # 1 MiB exactly
        (models.QWEN3_NEXT_80B, 2, 16, 16),  # vLLM makes its own blocks large
    ],
    ids=lambda value: value.get("model_type") if isinstance(value, dict) else str(value),
)
def test_a_block_of_real_models(config, element_bytes, engine_block, tokens):
    size = kv_size(config, element_bytes=element_bytes)
    found = choose_block(size, engine_block)
    assert found.tokens == tokens
    assert found.engine_blocks * engine_block == tokens
    assert found.block_bytes == tokens * size.group_token_bytes
    if not size.has_state and not size.has_window:
        assert found.block_bytes >= MIB


@pytest.mark.parametrize(
    ("text", "has_window"),
    [
        ({}, False),
        ({"sliding_window": None}, False),
        ({"sliding_window": 4096}, True),
        ({"sliding_window": 4096, "use_sliding_window": False}, False),
        ({"sliding_window": 4096, "layer_types": ["full_attention"] * 32}, False),
        ({"layer_types": ["full_attention", "chunked_attention"] * 16}, True),
        ({"sliding_window_pattern": 6}, True),
    ],
    ids=str,
)
def test_a_window_is_seen_where_there_is_one(text, has_window):
    size = kv_size({**models.LLAMA_3_8B, **text}, element_bytes=2)
    assert size.has_window is has_window


sizes = st.builds(
    KvSize,
    layers=st.integers(1, 200),
    group_layers=st.integers(1, 200),
    layer_token_bytes=st.integers(1, 64 * KIB),
    has_state=st.booleans(),
    has_window=st.booleans(),
    is_latent=st.booleans(),
)


@given(sizes, st.integers(1, 2048))
def test_a_block_is_a_multiple_and_as_small_as_the_aim_allows(size, engine_block):
    found = choose_block(size, engine_block)
    assert found.tokens % engine_block == 0
    assert found.tokens >= engine_block
    assert found.tokens <= max(BLOCK_TOKENS_MAX, engine_block)
    if found.engine_blocks > 1:  # one engine block less would have missed the aim
        assert (found.tokens - engine_block) * size.group_token_bytes < MIB


def test_short_prompts_limit_the_size_of_a_block():
    size = KvSize(2, 2, 64, has_state=False, has_window=False, is_latent=False)
    found = choose_block(size, 16)
    assert found.tokens == BLOCK_TOKENS_MAX
    assert "short prompts" in found.describe()


def test_an_explicit_block_wins_and_must_fit():
    size = kv_size(models.LLAMA_3_8B, element_bytes=2)
    assert choose_block(size, 16, explicit_tokens=512).engine_blocks == 32
    with pytest.raises(ConfigError, match="no multiple") as caught:
        choose_block(size, 16, explicit_tokens=24)
    assert "take 32" in caught.value.hint
    with pytest.raises(ConfigError):
        choose_block(size, 16, explicit_tokens=0)


def test_an_unknown_model_gets_a_block_that_does_for_most():
    found = choose_block(None, 16)
    assert (found.tokens, found.engine_blocks, found.block_bytes) == (256, 16, 0)
    assert "not known" in found.describe()


# --- the host tier


def choose(**changes):
    options = {
        "explicit": None,
        "machine": MACHINE,
        "request_bytes": GIB,
        "block_bytes": MIB,
        **changes,
    }
    return choose_host_bytes(**options)


def test_the_host_tier_is_a_tenth_of_the_free_memory():
    found = choose()
    assert found.size_bytes == 64 * GIB // 10 // MIB * MIB
    assert not found.warning


def test_it_holds_two_of_the_longest_requests():
    assert choose(request_bytes=5 * GIB).size_bytes == 10 * GIB


def test_it_takes_at_most_half_and_then_warns_with_the_number():
    found = choose(request_bytes=20 * GIB)
    assert found.size_bytes == 16 * GIB
    assert "takes 20 GiB" in found.warning
    assert "beginning that fits" in found.warning
    assert "--host-bytes 40GiB" in found.warning


def test_replicas_share_the_machine():
    assert choose(request_bytes=MIB, replicas=4).size_bytes == 64 * GIB // 10 // 4 // MIB * MIB
    with pytest.raises(ConfigError, match="does not fit"):
        choose(explicit=10 * GIB, replicas=4)


def test_an_explicit_size_wins_and_is_warned_of_when_small():
    found = choose(explicit=2 * GIB)
    assert (found.size_bytes, found.warning) == (2 * GIB, "")
    assert "beginning that fits" in choose(explicit=512 * MIB).warning
    assert "is not kept" in choose(explicit=GIB).warning
    assert "--host-bytes 2GiB" in choose(explicit=GIB).warning


def test_shared_memory_of_a_container_is_too_small():
    small = MACHINE._replace(shared_memory_free_bytes=64 * MIB)
    with pytest.raises(ConfigError, match="does not fit into /dev/shm") as caught:
        choose(machine=small, explicit=GIB)
    assert "--shm-size" in caught.value.hint
    assert choose(machine=small).size_bytes == 32 * MIB


@pytest.mark.parametrize("explicit", [0, 1000])
def test_a_host_tier_holds_at_least_a_block(explicit):
    with pytest.raises(ConfigError, match="cannot hold one block"):
        choose(explicit=explicit)


def test_another_machine_s_memory_is_not_guessed_at():
    assert choose(machine=None).size_bytes == 4 * GIB
