"""vLLM itself over a pool: ask, end the process, start another one, ask again.

The connector is kvdepot.engines.vllm.connector, the spec kvdepot.engines.vllm.cpu_spec.
"""

from __future__ import annotations

import json
from typing import Any

import pytest

import tests.needs_vllm  # noqa: F401  # isort: skip

import torch
from safetensors.torch import save_file
from transformers import Gemma3TextConfig

from kvdepot.testing.damage import flip_byte
from tests.pool_rig import segment_files
from tests.tiny_models import SMALL, save_tiny, tiny_config
from tests.vllm_engines import run_engine

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    config = tiny_config(**{**SMALL, "max_position_embeddings": 4096, "head_dim": 32})
    return save_tiny(tmp_path_factory.mktemp("model"), config=config)


@pytest.mark.parametrize(
    ("block", "per_chunk", "engine"),
    [
        (32, 1, {}),
        (32, 2, {"enable_prefix_caching": False}),
        (128, 1, {"max_num_batched_tokens": 256, "enable_chunked_prefill": True}),
    ],
)
def test_what_one_process_computed_the_next_one_reads(tmp_path, model, block, per_chunk, engine):
    settings: dict[str, Any] = {
        "model": str(model),
        "pool": str(tmp_path / "pool"),
        "extra": {"blocks_per_chunk": per_chunk},
        "engine": {"block_size": block, **engine},
    }
    asks = [{"seed": 1, "length": 700}, {"seed": 2, "length": 400}]
    first = run_engine(tmp_path, asks=asks, **settings)
    assert [answer.cached for answer in first.answers] == [0, 0]
    chunk = block * per_chunk
    assert len(first.stored) == 700 // chunk + 400 // chunk
    then = run_engine(tmp_path, asks=[*asks, {"seed": 3, "length": 100}], **settings)
    assert [answer.cached for answer in then.answers] == [
        700 // chunk * chunk,
        400 // chunk * chunk,
        0,
    ]
    assert [answer.tokens for answer in then.answers[:2]] == [a.tokens for a in first.answers]
    assert then.loaded == first.stored, "rows came back other than they were stored"
    assert then.counters["load_blocks_total"] == len(first.stored)
    cached = sum(answer.cached for answer in then.answers)
    assert then.metrics["vllm:prompt_tokens_cached_by_source_total disk"] == cached
    assert then.errors == {}


def test_two_workers_fill_and_read_the_same_rows(tmp_path, model):
    settings: dict[str, Any] = {
        "model": str(model),
        "pool": str(tmp_path / "pool"),
        "engine": {"block_size": 32, "tensor_parallel_size": 2},
        "env": {"VLLM_CPU_OMP_THREADS_BIND": "0|1"},
    }
    asks = [{"seed": 1, "length": 300}]
    first = run_engine(tmp_path, asks=asks, **settings)
    then = run_engine(tmp_path, asks=asks, **settings)
    assert [answer.cached for answer in (*first.answers, *then.answers)] == [0, 288]
    assert then.answers[0].tokens == first.answers[0].tokens
    assert then.loaded == first.stored
    assert then.identity is not None
    assert then.identity["tensor_parallel_size"] == 2
    assert then.identity["rank_content"].startswith("all of 2, in order of rank, layers ")
    alone = {**settings, "engine": {"block_size": 32}}
    other = run_engine(tmp_path, asks=asks, **alone)
    assert other.answers[0].cached == 0, "one worker's rows are not two workers'"


def test_tenants_adapters_and_revisions_never_share(tmp_path):
    config = tiny_config(**{**SMALL, "max_position_embeddings": 4096, "head_dim": 32})
    model = save_tiny(tmp_path / "model", config=config)
    adapter = save_adapter(tmp_path / "adapter", config, seed=1)
    lora = {"name": "style", "id": 1, "path": str(adapter)}
    settings: dict[str, Any] = {
        "model": str(model),
        "pool": str(tmp_path / "pool"),
        "engine": {"block_size": 32, "enable_lora": True, "max_lora_rank": 8},
    }
    plain = {"seed": 1, "length": 200}
    salted = {**plain, "salt": "tenant a"}
    styled = {**plain, "lora": lora}
    # the first request with an adapter may come before anybody has read its files, and is not kept then
    warm = {**styled, "seed": 9, "pause_s": 1.0}
    first = run_engine(tmp_path, asks=[plain, salted, warm, styled], **settings)
    assert [answer.cached for answer in first.answers] == [0, 0, 0, 0]
    assert first.answers[3].tokens != first.answers[0].tokens, "the adapter does something"
    again = run_engine(
        tmp_path, asks=[plain, salted, {**plain, "salt": "tenant b"}, warm, styled], **settings
    )
    cached = [answer.cached for answer in again.answers]
    assert cached[:3] + cached[4:] == [192, 192, 0, 192]
    assert [again.answers[index].tokens for index in (0, 1, 4)] == [
        first.answers[index].tokens for index in (0, 1, 3)
    ]
    save_adapter(tmp_path / "adapter", config, seed=2)
    other = run_engine(tmp_path, asks=[warm, styled, plain], **settings)
    assert [answer.cached for answer in other.answers] == [0, 0, 192]
    assert other.answers[1].tokens != first.answers[3].tokens
    weights = next(model.glob("*.safetensors"))
    flip_byte(weights, weights.stat().st_size - 1)
    revised = run_engine(tmp_path, asks=[plain, salted, warm, styled], **settings)
    assert [answer.cached for answer in revised.answers] == [0, 0, 0, 0]


def save_adapter(folder, config, *, seed):
    """A LoRA adapter with random weights, in the form of the peft library."""
    folder.mkdir(exist_ok=True)
    generator = torch.Generator().manual_seed(seed)
    width = config.hidden_size
    out = config.num_attention_heads * config.head_dim
    weights = {}
    for layer in range(config.num_hidden_layers):
        name = f"base_model.model.model.layers.{layer}.self_attn.q_proj"
        for part, shape in (("lora_A", (4, width)), ("lora_B", (out, 4))):
            weights[f"{name}.{part}.weight"] = torch.randn(shape, generator=generator)
    save_file(weights, folder / "adapter_model.safetensors")
    settings = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": ["q_proj"]}
    (folder / "adapter_config.json").write_text(json.dumps(settings))
    return folder


def test_a_host_tier_smaller_than_a_request_and_than_the_working_set(tmp_path, model):
    row_bytes = 32 * 4 * 2 * 2 * 32 * 4  # tokens, layers, K and V, heads, dimensions, float32
    settings: dict[str, Any] = {
        "model": str(model),
        "pool": str(tmp_path / "pool"),
        "engine": {"block_size": 32, "max_num_batched_tokens": 256},
    }
    asks = [{"seed": seed, "length": 1000, "pause_s": 0.3} for seed in (1, 2, 3)]
    first = run_engine(tmp_path, asks=asks, **settings)
    assert len(first.stored) == 3 * 31
    small = {**settings, "extra": {"cpu_bytes_to_use": 12 * row_bytes}}
    less = run_engine(tmp_path, asks=asks, **small)
    assert [answer.tokens for answer in less.answers] == [a.tokens for a in first.answers]
    assert [answer.cached for answer in less.answers] == [12 * 32] * 3, "the part that fits"
    assert less.counters["reuse_ended_host_full_total"] == 3
    one_and_a_half = {**settings, "extra": {"cpu_bytes_to_use": 46 * row_bytes}}
    turns = run_engine(tmp_path, asks=[*asks, *asks], **one_and_a_half)
    assert [answer.tokens for answer in turns.answers[:3]] == [a.tokens for a in first.answers]
    assert [answer.cached for answer in turns.answers[:3]] == [992] * 3
    assert set(less.loaded.items()) <= set(first.stored.items())
    assert turns.loaded == first.stored


def test_a_request_aborted_in_mid_load_leaves_no_trace(tmp_path, model):
    settings: dict[str, Any] = {
        "model": str(model),
        "pool": str(tmp_path / "pool"),
        "engine": {"block_size": 32},
        "tier": {"io": "threads"},
    }
    ask = {"seed": 1, "length": 600}
    first = run_engine(tmp_path, asks=[ask], **settings)
    aborted = {**ask, "abort_after_s": 0.2}
    then = run_engine(tmp_path, asks=[aborted, ask, {"seed": 2, "length": 600}], **settings)
    assert [answer.cached for answer in then.answers] == [576, 0]
    assert then.answers[0].tokens == first.answers[0].tokens
    assert set(then.loaded.items()) == set(first.stored.items())


def test_late_and_damaged_storage_costs_time_and_nothing_else(tmp_path, model):
    settings: dict[str, Any] = {
        "model": str(model),
        "pool": str(tmp_path / "pool"),
        "engine": {"block_size": 32},
        "tier": {"io": "threads"},
    }
    asks = [{"seed": seed, "length": 600} for seed in (1, 2)]
    first = run_engine(tmp_path, asks=asks, **settings)
    hung = {**settings, "read_s": 25.0, "tier": {"io": "threads", "load_deadline_s": 0.2}}
    late = run_engine(tmp_path, asks=asks, **hung)
    assert [answer.cached for answer in late.answers] == [0, 0]
    assert max(answer.took_s for answer in late.answers) < 20, "a request waited for hung storage"
    assert [answer.tokens for answer in late.answers] == [a.tokens for a in first.answers]
    for segment in segment_files(tmp_path / "pool"):
        flip_byte(segment, segment.stat().st_size // 2)
    then = run_engine(tmp_path, asks=asks, **settings)
    assert [answer.tokens for answer in then.answers] == [a.tokens for a in first.answers]
    assert then.counters["corrupt_blocks_total"] + then.counters["corrupt_segments_total"] > 0
    assert min(answer.cached for answer in then.answers) < 576
    assert set(then.loaded.items()) <= set(first.stored.items())
    assert late.errors == then.errors == {}


def test_layers_with_sliding_windows_come_back_too(tmp_path):
    kinds = ["sliding_attention", "sliding_attention", "full_attention"]
    config = Gemma3TextConfig(
        **{**SMALL, "num_hidden_layers": 6, "head_dim": 32, "max_position_embeddings": 4096},
        sliding_window=64,
        layer_types=kinds * 2,
    )
    settings: dict[str, Any] = {
        "model": str(save_tiny(tmp_path / "model", config=config)),
        "pool": str(tmp_path / "pool"),
        "engine": {"block_size": 32},
    }
    asks = [{"seed": 1, "length": 700}]
    first = run_engine(tmp_path, asks=asks, **settings)
    then = run_engine(tmp_path, asks=[*asks, {"seed": 2, "length": 300}], **settings)
    assert then.identity is not None
    assert [group["kind"] for group in then.identity["groups"]].count("window") == 2
    assert [answer.cached for answer in then.answers] == [672, 0]
    assert then.answers[0].tokens == first.answers[0].tokens
    assert then.loaded.items() <= first.stored.items()
    assert then.errors == {}


def test_requests_that_are_preempted_and_come_back_get_the_right_answers(tmp_path, model):
    settings: dict[str, Any] = {
        "model": str(model),
        "pool": str(tmp_path / "pool"),
        "engine": {"block_size": 32, "enable_prefix_caching": False, "max_model_len": 512},
        "tokens": 90,
    }
    asks = [{"seed": seed, "length": 300} for seed in (1, 2, 3)]
    alone = run_engine(tmp_path, asks=asks, **settings)
    # room on the device for two of them and a half
    cramped = {**settings, "engine": {**settings["engine"], "num_gpu_blocks_override": 30}}
    together = [{"seed": 1, "length": 300, "beside": [2, 3]}] * 2
    then = run_engine(tmp_path, asks=together, **cramped)
    tokens = [answer.tokens for answer in alone.answers]
    assert [answer.tokens for answer in then.answers] == tokens * 2
    assert sum(answer.cached for answer in then.answers[:3]) == 3 * 288
    assert then.metrics["vllm:num_preemptions_total"] > 0
    assert then.loaded.items() >= alone.stored.items()
    assert then.errors == {}
