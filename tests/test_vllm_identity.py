"""The identity of a vLLM engine: every setting that changes the KV changes it, what is unknown stops it."""

from __future__ import annotations

import copy
import dataclasses
from typing import Any

import pytest

import tests.needs_vllm  # noqa: F401  # isort: skip

import torch
from vllm.config.multimodal import MultiModalConfig
from vllm.engine.arg_utils import EngineArgs
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    SlidingWindowSpec,
)
from vllm.v1.kv_offload.config import OffloadingGroupConfig

from kvdepot.engines.vllm.facts import Engine, WorkerFacts, gather_facts
from kvdepot.engines.vllm.identify import group_kind, identity_of
from kvdepot.identity import UNDETERMINED
from kvdepot.testing.damage import flip_byte
from tests.tiny_models import save_tiny
from tests.vllm_rig import ROW_BYTES, offloading_config

pytestmark = pytest.mark.vllm

FACTS = WorkerFacts(("CPU_ATTN",), ("float32 1x2x16x16 by 0123",), "cpu", ("model.layers.0",))
LAYERS = ["model.layers.0", "model.layers.1"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save_tiny(tmp_path_factory.mktemp("tiny") / "model")


def spec_of(**changes):
    fields = {"block_size": 16, "num_kv_heads": 2, "head_size": 8, "dtype": torch.float32}
    return FullAttentionSpec(**{**fields, **changes})


def cache_of(spec):
    return KVCacheConfig(10, [], [KVCacheGroupSpec(LAYERS, spec)])


@pytest.fixture(scope="module")
def engine(folder):
    settings = EngineArgs(model=str(folder), dtype="float32", enforce_eager=True)
    return Engine(settings.create_engine_config(), cache_of(spec_of()))


@pytest.fixture(autouse=True)
def _no_seed(monkeypatch):
    monkeypatch.delenv("PYTHONHASHSEED", raising=False)


def identify(engine, *, offloading=None, row_bytes=ROW_BYTES, facts=(FACTS,)):
    return identity_of(engine, offloading or offloading_config(), row_bytes=row_bytes, facts=facts)


def altered(engine, path, value):
    """The engine with one attribute of its settings changed."""
    settings = copy.copy(engine.vllm_config)
    holder = settings
    *places, name = path.split(".")
    for place in places:
        inner = copy.copy(getattr(holder, place))
        object.__setattr__(holder, place, inner)
        holder = inner
    object.__setattr__(holder, name, value)
    return engine._replace(vllm_config=settings)


def test_all_is_determined_and_the_same_each_time(engine):
    identity = identify(engine)
    assert identity.undetermined == ()
    assert identity == identify(engine)
    assert identity.model_name == "model"
    assert identity.kv_dtype == identity.model_dtype == "float32"
    assert identity.block_tokens == 32
    assert identity.groups[0].kind == "full"
    assert identity.groups[0].layers == (0, 1)


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("model_config.dtype", torch.float16),
        ("model_config.quantization", "fp8"),
        ("model_config.quantization_config", {"ignore": ["lm_head"]}),
        ("model_config.model_class_overrides", {"LlamaForCausalLM": "mine:Llama"}),
        ("model_config.multimodal_config", MultiModalConfig()),
        ("load_config.load_format", "pt"),
        ("load_config.ignore_patterns", ["model-*.safetensors"]),
        ("cache_config.cache_dtype", "fp8_e4m3"),
        ("cache_config.kv_cache_dtype_skip_layers", ["0"]),
        ("cache_config.prefix_caching_hash_algo", "sha256_cbor"),
    ],
)
def test_a_setting_alone_makes_another_identity(engine, path, value):
    other = identify(altered(engine, path, value))
    assert other.undetermined == ()
    assert other.digest() != identify(engine).digest()


@pytest.mark.parametrize(
    "changes",
    [
        {"block_size": 32},
        {"num_kv_heads": 4},
        {"head_size": 16},
        {"head_size_v": 4},
        {"dtype": torch.bfloat16},
        {"page_size_padded": 8192},
        {"sliding_window": 64},
    ],
    ids=lambda changes: next(iter(changes)),
)
def test_a_property_of_the_cache_alone_makes_another_identity(engine, changes):
    other = identify(engine._replace(kv_cache_config=cache_of(spec_of(**changes))))
    assert other.digest() != identify(engine).digest()


@pytest.mark.parametrize(
    "changes",
    [
        {"groups": (OffloadingGroupConfig(32, tuple(LAYERS), 0),)},
        {"groups": (OffloadingGroupConfig(16, (*LAYERS, "model.layers.2"), 0),)},
        {"groups": (OffloadingGroupConfig(16, ("model.layers.0", "draft.layers.1"), 0),)},
        {"kv_cache_layout": "BLHNC"},
        {"canonical_layout": True},
        {"replicated_layout": True},
        {"cache": dataclasses.replace(offloading_config().cache, tokens_per_hash=8)},
        {"cache": dataclasses.replace(offloading_config().cache, blocks_per_chunk=4)},
    ],
    ids=str,
)
def test_what_tiers_are_told_makes_another_identity(engine, changes):
    other = identify(engine, offloading=offloading_config(**changes))
    assert other.undetermined == ()
    assert other.digest() != identify(engine).digest()


@pytest.mark.parametrize("name", ["tp_size", "pp_size", "pcp_size", "dcp_size"])
def test_each_parallel_size_makes_another_identity(engine, name):
    parallel = dataclasses.replace(offloading_config().parallel, **{name: 2}, world_size=2)
    other = identify(engine, offloading=offloading_config(parallel=parallel), facts=(FACTS, FACTS))
    assert other.undetermined == ()
    assert other.digest() != identify(engine).digest()


@pytest.mark.parametrize(
    "changes",
    [
        {"mm_processor_kwargs": {"num_crops": 4}},
        {"media_io_kwargs": {"video": {"num_frames": 8}}},
        {"mm_device_do_normalize": False},
        {"mm_encoder_attn_dtype": "fp8"},
        {"video_pruning_rate": 0.5},
    ],
    ids=lambda changes: next(iter(changes)),
)
def test_what_the_engine_does_to_images_makes_another_identity(engine, changes):
    """vLLM's ids of images hold what a request asks for, and not what the command line says."""
    usual = altered(engine, "model_config.multimodal_config", MultiModalConfig())
    other = altered(engine, "model_config.multimodal_config", MultiModalConfig(**changes))
    assert identify(other).undetermined == ()
    assert identify(other).digest() != identify(usual).digest()


def test_pipeline_stages_with_other_layers_make_another_identity(engine):
    parallel = dataclasses.replace(offloading_config().parallel, pp_size=3, world_size=3)
    offloading = offloading_config(parallel=parallel)

    def split(*counts):
        numbers = iter(range(sum(counts)))
        stages = [tuple(f"model.layers.{next(numbers)}" for _ in range(count)) for count in counts]
        facts = [dataclasses.replace(FACTS, layers=stage) for stage in stages]
        return identify(engine, offloading=offloading, facts=facts)

    assert split(2, 3, 2).digest() != split(2, 2, 3).digest()
    assert split(2, 3, 2).undetermined == ()


@pytest.mark.parametrize("name", ["attention", "layout", "device", "layers"])
def test_each_fact_of_a_worker_makes_another_identity(engine, name):
    value: Any = "other" if name == "device" else ("other",)
    facts = dataclasses.replace(FACTS, **{name: value})
    assert identify(engine, facts=(facts,)).digest() != identify(engine).digest()


def test_row_bytes_make_another_identity(engine):
    assert identify(engine, row_bytes=2 * ROW_BYTES).digest() != identify(engine).digest()


def test_one_byte_of_the_weights_makes_another_identity(engine, folder, tmp_path):
    before = identify(engine).digest()
    weights = next(folder.glob("*.safetensors"))
    flip_byte(weights, weights.stat().st_size - 1)
    try:
        assert identify(engine).digest() != before
    finally:
        flip_byte(weights, weights.stat().st_size - 1)
    assert identify(engine).digest() == before


def test_an_override_of_the_config_makes_another_identity(engine, folder):
    def with_theta(theta):
        settings = EngineArgs(
            model=str(folder), dtype="float32", hf_overrides={"rope_parameters": theta}
        )
        return engine._replace(vllm_config=settings.create_engine_config())

    one = identify(with_theta({"rope_type": "default", "rope_theta": 1e4}))
    other = identify(with_theta({"rope_type": "default", "rope_theta": 1e5}))
    assert one.undetermined == other.undetermined == ()
    assert one.digest() != other.digest()


def test_the_seed_of_hashes_takes_part(engine, monkeypatch):
    before = identify(engine)
    monkeypatch.setenv("PYTHONHASHSEED", "0")
    other = identify(engine)
    assert other.digest() != before.digest()
    assert other.undetermined == ()
    random = altered(engine, "cache_config.prefix_caching_hash_algo", "xxhash")
    assert identify(random).undetermined == (), "a seed that is set makes hashes alike"
    monkeypatch.delenv("PYTHONHASHSEED")
    assert identify(random).undetermined == ("hash_seed",)


@pytest.mark.parametrize(
    ("path", "value", "field"),
    [
        ("load_config.load_format", "dummy", "weights_fingerprint"),
        ("load_config.load_format", "tensorizer", "weights_fingerprint"),
        ("model_config.model", "no/such-model", "weights_fingerprint"),
        ("model_config.model_weights", "s3://bucket/model", "weights_fingerprint"),
        ("weight_transfer_config", object(), "weights_fingerprint"),
        ("cache_config.calculate_kv_scales", True, "kv_scale_digest"),
    ],
)
def test_what_is_not_known_is_not_guessed(engine, path, value, field):
    assert identify(altered(engine, path, value)).undetermined == (field,)


def test_workers_that_say_nothing_or_disagree_stop_sharing(engine):
    parallel = dataclasses.replace(offloading_config().parallel, tp_size=2, world_size=2)
    offloading = offloading_config(parallel=parallel)
    other = dataclasses.replace(FACTS, attention=("OTHER",))
    for facts in ((FACTS,), (), (FACTS, other)):
        assert "attention" in identify(engine, offloading=offloading, facts=facts).undetermined


def test_what_breaks_while_looking_is_undetermined_and_named(engine, caplog):
    broken = altered(engine, "cache_config", None)
    fields = set(identify(broken).undetermined)
    assert {"kv_dtype", "kv_scale_digest", "hash_scheme", "hash_seed"} <= fields
    assert "hash_seed" in caplog.text


def test_kinds_of_groups():
    window = SlidingWindowSpec(
        block_size=16, num_kv_heads=2, head_size=8, dtype=torch.float32, sliding_window=32
    )
    assert group_kind(spec_of()) == "full"
    assert group_kind(window) == "window"
    assert group_kind(object()) == UNDETERMINED


def test_a_worker_looks_at_its_caches():
    class Layer:
        def get_attn_backend(self):
            return self

        def get_name(self):
            return "SOME_ATTN"

    class Settings:
        class compilation_config:  # noqa: N801
            static_forward_context = dict.fromkeys(LAYERS, Layer())

    lying = torch.zeros(10, 2, 16, 8).transpose(1, 2)
    facts = gather_facts(Engine(Settings, cache_of(spec_of())), dict.fromkeys(LAYERS, lying))
    layers = tuple(sorted(LAYERS))
    assert facts == WorkerFacts(("SOME_ATTN",), ("float32 1x16x2x8 by 0213",), "cpu", layers)
