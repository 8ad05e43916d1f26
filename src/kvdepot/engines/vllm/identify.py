"""The identity of what a vLLM engine stores, from its settings, its workers and the model's files.

A field that cannot be determined is `UNDETERMINED` and switches sharing off; nothing is left out and
nothing is guessed. Reading the model's files takes seconds, so this runs on a thread of the tier's own.
"""

from __future__ import annotations

import hashlib
import logging
import os
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import torch
import vllm
from vllm.v1.core.kv_cache_utils import DEFAULT_NONE_HASH_SEED
from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    KVCacheSpec,
    MambaSpec,
    SlidingWindowSpec,
    UniformTypeKVCacheSpecs,
)
from vllm.v1.kv_offload.config import OffloadingConfig, OffloadingGroupConfig

from kvdepot.engines.vllm.facts import Engine, WorkerFacts
from kvdepot.errors import UnsupportedModel
from kvdepot.identity import UNDETERMINED, CacheGroup, Identity
from kvdepot.io.modelfolder import file_states, local_model_folder, plain_model_name
from kvdepot.io.weights import weights_fingerprint

__all__ = [
    "ADAPTER_VERSION",
    "check_supported",
    "files_of",
    "group_kind",
    "group_kinds",
    "identity_of",
    "weights_of",
]

log = logging.getLogger(__name__)

#: raised when the content of rows or the making of keys changes
ADAPTER_VERSION = 1
#: kinds of groups whose chunks can be kept and given back
_KINDS = frozenset({"full", "window"})
#: these load what lies in the model's folder; other formats load what we cannot see
_FOLDER_FORMATS = frozenset(
    {
        "auto",
        "bitsandbytes",
        "fastsafetensors",
        "hf",
        "instanttensor",
        "mistral",
        "npcache",
        "pt",
        "runai_streamer",
        "safetensors",
    }
)
#: of these, those that take other files of the folder than the others do
_OTHER_FILES = frozenset({"mistral", "npcache", "pt"})
#: settings of images, sound and video that change what the model sees; vLLM's ids of images lack them
_MULTIMODAL = (
    "media_io_kwargs",
    "mm_device_do_normalize",
    "mm_encoder_attn_backend",
    "mm_encoder_attn_dtype",
    "mm_hasher_algorithm",
    "mm_processor_kwargs",
    "video_pruning_method",
    "video_pruning_rate",
)
#: says where a config came from, not what it is
_CONFIG_ORIGIN = frozenset({"_name_or_path", "transformers_version", "_commit_hash"})
#: these give the same positions whatever the longest prompt is
_STEADY_ROPE = frozenset({"default", "linear", "llama3", "mrope", "yarn", "proportional"})
_CRYPTOGRAPHIC = ("sha256", "sha256_cbor")


def check_supported(engine: Engine, kinds: Mapping[int, str]) -> None:
    """Whether chunks of this model can be kept and given back.

    Args:
        engine: the engine.
        kinds: of its groups, by `group_kinds`.

    Raises:
        UnsupportedModel: they cannot.
    """
    other = {number: kind for number, kind in kinds.items() if kind not in _KINDS}
    if other:
        named = ", ".join(f"group {number} is {kind}" for number, kind in other.items())
        raise UnsupportedModel(
            f"only full attention and sliding windows can be kept yet, and {named}"
        )
    if engine.vllm_config.model_config.is_encoder_decoder:
        raise UnsupportedModel("the KV of an encoder-decoder model depends on its encoder's input")


def identity_of(
    engine: Engine,
    offloading: OffloadingConfig,
    *,
    row_bytes: int,
    facts: Sequence[WorkerFacts],
) -> Identity:
    """The identity of one engine. Blocks on reading the model's files. Never raises.

    Args:
        engine: what its connector was given.
        offloading: what vLLM's tiers are given.
        row_bytes: bytes of one row of the host region, which holds a chunk of all ranks.
        facts: one for each worker process, in order of rank.
    """
    settings = engine.vllm_config
    model = settings.model_config
    parallel = offloading.parallel
    is_complete = len(facts) == parallel.world_size
    chunk_blocks = offloading.cache.blocks_per_chunk

    def agreed(what: Callable[[WorkerFacts], object]) -> str:
        found = {str(what(of_one)) for of_one in facts}
        return found.pop() if is_complete and len(found) == 1 else UNDETERMINED

    field = _determined
    return Identity(
        model_name=field("model_name", lambda: plain_model_name(model.model)),
        weights_fingerprint=field("weights_fingerprint", lambda: weights_of(settings)),
        model_dtype=field("model_dtype", lambda: _model_dtype(model)),
        kv_dtype=field("kv_dtype", lambda: _kv_dtype(engine)),
        kv_scale_digest=field("kv_scale_digest", lambda: _kv_scales(settings.cache_config)),
        kv_layout=field(
            "kv_layout", lambda: _layout(offloading, agreed(lambda of: ", ".join(of.layout)))
        ),
        groups=tuple(_group(engine, group, row_bytes) for group in offloading.groups),
        block_tokens=offloading.groups[0].tokens_per_block * chunk_blocks,
        tensor_parallel_size=parallel.tp_size,
        pipeline_parallel_size=parallel.pp_size,
        context_parallel_size=parallel.pcp_size * parallel.dcp_size,
        rank_content=field("rank_content", lambda: _ranks(offloading, facts)),
        attention=field("attention", lambda: agreed(lambda of: ", ".join(of.attention))),
        engine=field("engine", lambda: _engine(settings)),
        engine_version=field(
            "engine_version",
            lambda: _known(
                agreed(lambda of: of.device),
                lambda device: f"vllm {vllm.__version__}, torch {torch.__version__}, {device}",
            ),
        ),
        adapter_version=ADAPTER_VERSION,
        hash_scheme=field("hash_scheme", lambda: _hash_scheme(settings, offloading)),
        hash_seed=field("hash_seed", lambda: _hash_seed(settings.cache_config)),
    )


def weights_of(settings: Any) -> str:
    """Fingerprint of what decides which KV the model computes: its files, and its settings in use.

    Raises:
        PoolError: a file cannot be read.
    """
    model, loading = settings.model_config, settings.load_config
    if str(loading.load_format) not in _FOLDER_FORMATS or model.model_weights:
        return UNDETERMINED
    if settings.weight_transfer_config is not None:
        return UNDETERMINED  # a trainer sends other weights while the engine runs
    drafter = getattr(settings.speculative_config, "draft_model_config", None)
    total = hashlib.sha256(b"kvdepot vllm weights v2\n")
    total.update(f"{_file_choice(loading)} {_overrides(model)}\n".encode())
    for part in (model,) if drafter is None else (model, drafter):
        folder = _folder(part, loading)
        if folder is None:
            return UNDETERMINED
        files = weights_fingerprint(folder)
        config = _config_digest(part)
        if UNDETERMINED in (files, config):
            return UNDETERMINED
        total.update(f"{files} {config}\n".encode())
    return total.hexdigest()


def files_of(settings: Any) -> object:
    """Equal as long as nobody changes the model's files. Blocks on looking at them.

    Raises:
        PoolError: a folder cannot be listed.
    """
    drafter = getattr(settings.speculative_config, "draft_model_config", None)
    folders = [
        _folder(part, settings.load_config)
        for part in (settings.model_config, drafter)
        if part is not None
    ]
    return [None if folder is None else file_states(folder) for folder in folders]


# one field each


def _file_choice(loading: Any) -> str:
    """What decides which of a folder's files are loaded, where it has several sets of them."""
    name = str(loading.load_format)
    kind = name if name in _OTHER_FILES else "usual"
    return f"{kind} without {loading.ignore_patterns!r}"


def _overrides(model: Any) -> str:
    """What the command line changes in how the model computes, beside its config."""
    multimodal = model.multimodal_config
    used = {name: getattr(multimodal, name, None) for name in _MULTIMODAL} if multimodal else None
    found = repr([model.model_class_overrides, used])
    scales = getattr(multimodal, "mm_encoder_fp8_scale_path", None)
    if scales or " at 0x" in found:
        raise ValueError("scales of an image encoder, or code, that lie elsewhere")
    return hashlib.sha256(found.encode()).hexdigest()


def _config_digest(model: Any) -> str:
    """The model's config as it is used, with what the command line changed in it."""
    config = {
        name: value
        for name, value in model.hf_config.to_dict().items()
        if name not in _CONFIG_ORIGIN
    }
    longest = None
    if not _rope_types(config) <= _STEADY_ROPE:
        longest = model.max_model_len
    used = [config, longest, str(model.quantization), repr(model.quantization_config)]
    plain = msgspec.to_builtins(used, str_keys=True, enc_hook=str)
    text = msgspec.json.encode(plain, order="sorted")
    if b" at 0x" in text:
        return UNDETERMINED  # the address of a function: it changes, and says nothing
    return hashlib.sha256(text).hexdigest()


def _rope_types(value: object) -> set[str]:
    """All kinds of position encoding that a config names, wherever it names them."""
    found: set[str] = set()
    if isinstance(value, Mapping):
        for name, inner in value.items():
            if name in ("rope_type", "type") and isinstance(inner, str):
                found.add(inner)
            found |= _rope_types(inner) if name != "text" else set()
    return found


def _model_dtype(model: Any) -> str:
    name = _dtype_name(model.dtype)
    return name if model.quantization is None else f"{name}, {model.quantization}"


def _kv_dtype(engine: Engine) -> str:
    kinds = {
        _dtype_name(spec.dtype)
        for group in engine.kv_cache_config.kv_cache_groups
        for spec in _layer_specs(group.kv_cache_spec)
        if hasattr(spec, "dtype")
    }
    wanted = str(engine.vllm_config.cache_config.cache_dtype)
    stored = ", ".join(sorted(kinds))
    if not stored:
        return UNDETERMINED
    # 8-bit caches are stored as plain bytes, so the setting must say which kind they are
    return stored if wanted == "auto" else f"{stored} as {wanted}"


def _kv_scales(cache: Any) -> str:
    if getattr(cache, "calculate_kv_scales", False):
        return UNDETERMINED  # made anew by each process
    skipped = ",".join(sorted(cache.kv_cache_dtype_skip_layers))
    return f"skipping {skipped}" if skipped else ""


def _layout(offloading: OffloadingConfig, in_memory: str) -> str:
    if in_memory == UNDETERMINED or offloading.kv_cache_layout is None:
        return UNDETERMINED
    kind = "canonical" if offloading.canonical_layout else "direct"
    return f"{kind} {offloading.kv_cache_layout} {in_memory}"


def _ranks(offloading: OffloadingConfig, facts: Sequence[WorkerFacts]) -> str:
    if offloading.replicated_layout:
        return "replicated"
    # vLLM's own list of a group's layers is that of the first pipeline stage alone
    layers = repr([of_one.layers for of_one in facts]).encode()
    held = hashlib.sha256(layers).hexdigest()[:16]
    return f"all of {offloading.parallel.world_size}, in order of rank, layers {held}"


def _engine(settings: Any) -> str:
    runner = "v2" if settings.use_v2_model_runner else "v1"
    drafting = settings.speculative_config
    method = "" if drafting is None else f", drafting by {drafting.method}"
    return f"vllm {settings.model_config.architecture}, runner {runner}{method}"


def _hash_scheme(settings: Any, offloading: OffloadingConfig) -> str:
    name = settings.cache_config.prefix_caching_hash_algo
    # without cbor, vLLM hashes tokens in a form of Python's own, which is Python's to change
    form = "" if name.endswith("cbor") else " of python {}.{}".format(*sys.version_info)
    return f"vllm {name}{form}, {offloading.cache.tokens_per_hash} tokens"


def _hash_seed(cache: Any) -> str:
    seed = os.environ.get("PYTHONHASHSEED")
    if seed is None:
        if cache.prefix_caching_hash_algo not in _CRYPTOGRAPHIC:
            return UNDETERMINED  # vLLM draws another one in each process
        seed = DEFAULT_NONE_HASH_SEED
    return hashlib.sha256(seed.encode()).hexdigest()[:16]


def _group(engine: Engine, group: OffloadingGroupConfig, row_bytes: int) -> CacheGroup:
    spec = engine.kv_cache_config.kv_cache_groups[group.group_id].kv_cache_spec
    specs = _layer_specs(spec)
    first = specs[0] if specs else spec
    # everything that vLLM says of the layers, so that no property of a cache is left out
    whole = f"{group.tokens_per_block} {group.layer_names!r} {specs!r}"
    digest = hashlib.sha256(whole.encode()).hexdigest()[:16]
    key_dim = getattr(first, "head_size", 0)
    return CacheGroup(
        name=UNDETERMINED if " at 0x" in whole else f"{group.group_id} {digest}",
        kind=group_kind(spec),
        layers=tuple(_layer_number(name) for name in group.layer_names),
        kv_heads=getattr(first, "num_kv_heads", 0),
        key_dim=key_dim,
        value_dim=getattr(first, "head_size_v", key_dim),
        block_bytes=row_bytes,
    )


def group_kinds(engine: Engine, offloading: OffloadingConfig) -> dict[int, str]:
    """The kind of each group that vLLM offloads, by its number."""
    groups = engine.kv_cache_config.kv_cache_groups
    numbers = [group.group_id for group in offloading.groups]
    return {number: group_kind(groups[number].kv_cache_spec) for number in numbers}


def group_kind(spec: KVCacheSpec) -> str:
    """``full``, ``window`` or ``state``; `UNDETERMINED` for what this adapter does not know."""
    kinds = {_layer_kind(one) for one in _layer_specs(spec)}
    return kinds.pop() if len(kinds) == 1 else UNDETERMINED


# below


def _folder(model: Any, loading: Any) -> Path | None:
    return local_model_folder(model.model, revision=model.revision, cache_dir=loading.download_dir)


def _layer_kind(spec: KVCacheSpec) -> str:
    if isinstance(spec, SlidingWindowSpec | ChunkedLocalAttentionSpec):
        return "window"
    if isinstance(spec, MambaSpec):
        return "state"
    return "full" if isinstance(spec, FullAttentionSpec) else UNDETERMINED


def _layer_specs(spec: KVCacheSpec) -> list[KVCacheSpec]:
    if isinstance(spec, UniformTypeKVCacheSpecs):
        return [spec.kv_cache_specs[name] for name in sorted(spec.kv_cache_specs)]
    return [spec]


def _layer_number(name: str) -> int:
    numbers = re.findall(r"\d+", name)
    return int(numbers[0]) if numbers else 0


def _dtype_name(dtype: Any) -> str:
    return str(dtype).removeprefix("torch.")


def _known(value: str, make: Callable[[str], str]) -> str:
    return value if value == UNDETERMINED else make(value)


def _determined(name: str, find: Callable[[], str]) -> str:
    """A field's value; `UNDETERMINED` where finding it fails, which is said once, here."""
    try:
        return find()
    except Exception as error:  # noqa: BLE001 (whatever it is, the server goes on without sharing)
        log.warning("identity field %s: %s: %s", name, type(error).__name__, error)
        return UNDETERMINED
