"""From what a person asks for to what vLLM gets: arguments, environment, JSON. No vLLM is needed."""

from __future__ import annotations

import json
import shlex
import sys
from importlib.metadata import PackageNotFoundError

import pytest

from kvdepot.config import PoolConfig
from kvdepot.engines.vllm import installed
from kvdepot.engines.vllm.arguments import VllmArguments
from kvdepot.engines.vllm.cpudefaults import cpu_defaults, equal_cores
from kvdepot.engines.vllm.installed import InstalledVllm
from kvdepot.engines.vllm.launch import Wishes, pool_config, prepare
from kvdepot.errors import ConfigError, PoolUrlError
from kvdepot.io.machine import Machine, this_machine
from kvdepot.units import GIB
from tests import vllm_configs as models

MACHINE = Machine(
    cpu_flags=frozenset({"avx2"}),
    cores=8,
    numa_nodes=1,
    memory_free_bytes=64 * GIB,
    shared_memory_free_bytes=32 * GIB,
)
FAST = MACHINE._replace(cpu_flags=frozenset({"avx512f", "avx512_bf16"}))


def launch(
    *given, config=models.LLAMA_3_8B, machine=MACHINE, environment=None, device="gpu", **wishes
):
    options = {"model": "m", "pools": ("/data/kv",), "device": device, **wishes}
    return prepare(
        Wishes(**options, given=VllmArguments(given)),
        config=config,
        machine=machine,
        environment=environment or {},
    )


# --- the arguments of the user


def test_arguments_are_read_in_all_their_spellings():
    given = VllmArguments(
        ["--max_model_len=8k", "-tp", "2", "--block-size", "32", "--enforce-eager", "--seed", "-1"]
    )
    assert given.number("max-model-len") == 8000
    assert given.number("tensor-parallel-size") == 2
    assert given.number("block-size") == 32
    assert given.has("enforce-eager")
    assert given.text("seed", "") == "-1"
    assert given.number("pipeline-parallel-size") is None
    assert given.text("dtype", "auto") == "auto"


@pytest.mark.parametrize(
    ("written", "expected"), [("8K", 8192), ("1M", 1 << 20), ("1.5k", 1500), ("auto", None)]
)
def test_counts_are_read_as_vllm_reads_them(written, expected):
    assert VllmArguments(["--max-model-len", written]).number("max-model-len") == expected


def test_a_negation_counts_as_given():
    given = VllmArguments(["--no-enable-prompt-tokens-details"])
    assert given.has("enable-prompt-tokens-details")


@pytest.mark.parametrize(
    "conflict",
    [
        ["--kv-transfer-config", "{}"],
        ["--kv_transfer_config={}"],
        ["--kv-transfer-config.kv_connector", "X"],
        ["--kv-offloading-size", "4"],
        ["--model", "other"],
        ["--nnodes", "2"],
    ],
)
def test_what_contradicts_the_pool_is_refused_with_the_way_out(conflict):
    with pytest.raises(ConfigError, match="cannot be given here") as caught:
        launch("--seed", "1", *conflict)
    assert caught.value.hint


# --- what vLLM gets


def test_the_json_on_a_gpu():
    found = json.loads(launch(capacity="64GiB", host_bytes=8 * GIB).json)
    extra = found.pop("kv_connector_extra_config")
    assert found == {
        "kv_connector": "KvdepotConnector",
        "kv_connector_module_path": "kvdepot.engines.vllm.connector",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
    }
    assert extra == {
        "spec_name": "TieringOffloadingSpec",
        "cpu_bytes_to_use": 8 * GIB,
        "blocks_per_chunk": 1,
        "secondary_tiers": [
            {
                "type": "KvdepotTier",
                "module_path": "kvdepot.engines.vllm.tier",
                "urls": ["file:///data/kv"],
                "capacity": "64GiB",
            }
        ],
    }


def test_the_json_on_a_cpu_names_the_spec_with_the_other_copy_worker():
    extra = json.loads(launch(device="cpu").json)["kv_connector_extra_config"]
    assert extra["spec_name"] == "CpuTieringSpec"
    assert extra["spec_module_path"] == "kvdepot.engines.vllm.cpu_spec"


def test_the_users_arguments_come_last_and_unchanged():
    given = ("--dtype", "half", "--api-key", "a b", "--lora-modules", "x=y", "z=w")
    found = launch(*given, device="cpu")
    assert tuple(found.arguments[-len(given) :]) == given
    assert found.arguments[0] == "--kv-transfer-config"
    assert found.arguments[1] == found.json
    assert found.arguments.count("--dtype") == 1


def test_cached_tokens_are_reported_unless_the_user_says_otherwise():
    name = "--enable-prompt-tokens-details"
    assert name in launch().arguments
    assert launch(name).arguments.count(name) == 1
    assert name not in launch("--no-enable-prompt-tokens-details").arguments


def test_a_gpu_gets_no_defaults_of_the_cpu():
    found = launch()
    assert found.environment == {}
    assert "--dtype" not in found.arguments


def test_block_and_tensor_parallel_sizes_of_the_user_change_the_block():
    def blocks(*given, **options):
        return launch(*given, **options).connector["kv_connector_extra_config"]["blocks_per_chunk"]

    assert blocks(config=models.SMOLLM2_135M) == 3
    assert blocks("--block-size", "32", config=models.SMOLLM2_135M) == 2
    assert blocks("--dtype", "float32", config=models.SMOLLM2_135M) == 2
    assert blocks("-tp", "9", config=models.SMOLLM2_135M) == 1
    assert blocks(block_tokens=160, config=models.SMOLLM2_135M) == 10


def test_the_type_that_a_cpu_is_told_counts_for_the_block():
    # 48 KiB a token in 32 bits, 24 in 16
    slow = launch("--block-size", "16", device="cpu", config=models.SMOLLM2_135M)
    fast = launch("--block-size", "16", device="cpu", config=models.SMOLLM2_135M, machine=FAST)
    assert "blocks of 32 tokens" in slow.notes[0]
    assert "blocks of 48 tokens" in fast.notes[0]


def test_a_small_host_tier_is_warned_of():
    assert launch(host_bytes=8 * GIB).warnings == []
    (warning,) = launch(host_bytes=GIB // 2).warnings
    assert "1 GiB" in warning
    assert launch("--max-model-len", "2048", host_bytes=GIB // 2).warnings == []


def test_the_plain_command_is_one_that_a_shell_reads_back():
    found = launch("--served-model-name", "it's mine", device="cpu")
    vllm = InstalledVllm("vllm", "0.32.0+cpu")
    words = shlex.split(found.plain_command(vllm, "org/m"))
    assignments = [word for word in words if word.startswith("VLLM_CPU")]
    assert words == [*assignments, "vllm", "serve", "org/m", *found.arguments]
    assert json.loads(words[words.index("--kv-transfer-config") + 1]) == found.connector


def test_relative_pools_mean_the_same_wherever_vllm_runs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    wishes = Wishes(model="m", pools=("kv", "./more"), device="gpu")
    assert pool_config(wishes).urls == (f"file://{tmp_path}/kv", f"file://{tmp_path}/more")


@pytest.mark.parametrize("pools", [("fs://tmp/kv",), ("/a", "/a/"), ("/a", "/a/b")])
def test_wrong_pools_are_refused(pools):
    with pytest.raises(PoolUrlError):
        launch(pools=pools)


def test_a_wrong_capacity_is_refused():
    with pytest.raises(ConfigError, match="not a size"):
        launch(capacity="much")


def test_a_config_file_of_vllm_is_said_not_to_be_looked_at():
    assert "--config" in launch("--config", "x.yaml").warnings[0]


# --- the CPU build


def defaults(*given, environment=None, machine=MACHINE, request_bytes=GIB):
    return cpu_defaults(
        VllmArguments(given), environment or {}, machine, request_bytes=request_bytes
    )


def test_what_a_cpu_without_16_bit_instructions_is_told():
    found = defaults()
    assert found.arguments == ("--dtype", "float32", "--enforce-eager")
    assert found.environment == {"VLLM_CPU_KVCACHE_SPACE": "2"}


def test_a_cpu_with_them_computes_in_the_models_type():
    assert "--dtype" not in defaults(machine=FAST).arguments


def test_the_user_wins():
    given = ("--dtype=bfloat16", "--no-enforce-eager", "--kv-cache-memory-bytes", "4G")
    assert defaults(*given) == ((), {})
    assert defaults(environment={"VLLM_CPU_KVCACHE_SPACE": "9"}).environment == {}


def test_engines_that_are_compared_compute_on_as_many_cores():
    reserved = "VLLM_CPU_NUM_OF_RESERVED_CPU"
    # what vLLM keeps free where there is a connector, in all of them
    assert equal_cores(VllmArguments(()), {}) == {reserved: "2"}
    assert equal_cores(VllmArguments(("--tensor-parallel-size", "2")), {}) == {reserved: "4"}
    assert equal_cores(VllmArguments(()), {reserved: "0"}) == {}
    assert equal_cores(VllmArguments(()), {"VLLM_CPU_OMP_THREADS_BIND": "0-3"}) == {}


@pytest.mark.parametrize(("given", "dtype"), [((), "float32"), (("--dtype=bfloat16",), "bfloat16")])
def test_answers_of_engines_that_are_compared_do_not_depend_on_how_a_prompt_is_cut(
    tmp_path, monkeypatch, given, dtype
):
    from kvdepot.cli.bench import Target, _vllm_arms

    monkeypatch.setattr(installed, "need_vllm", lambda: InstalledVllm("vllm-cpu", "0.32.0"))
    arms = _vllm_arms(Target(model="m", vllm_argument=given), tmp_path / "pool", GIB)
    assert len(arms) == 3
    for arm in arms:
        command = [part for each in arm.command for part in each.split("=", 1)]
        assert command.count("--dtype") == 1
        assert command[command.index("--dtype") + 1] == dtype


def test_the_kv_cache_takes_a_quarter_of_the_memory_at_most_and_a_gib_at_least():
    space = "VLLM_CPU_KVCACHE_SPACE"
    assert defaults(request_bytes=100 * GIB).environment[space] == "16"
    assert defaults(request_bytes=0).environment[space] == "1"


def test_a_request_larger_than_the_kv_cache_is_warned_of_before_the_start():
    long = {**models.LLAMA_3_8B, "max_position_embeddings": 131_072}
    found = launch(device="cpu", config=long, machine=FAST, host_bytes=17 * GIB)
    assert not any("refuse to start" in warning for warning in found.warnings)
    tight = FAST._replace(memory_free_bytes=40 * GIB)
    found = launch(device="cpu", config=long, machine=tight, host_bytes=17 * GIB)
    assert "refuse to start" in found.warnings[-1]


def test_more_workers_than_numa_nodes_are_not_bound():
    found = defaults("-tp", "2").environment
    assert found["VLLM_CPU_OMP_THREADS_BIND"] == "nobind"
    assert found["OMP_NUM_THREADS"] == "4"
    assert "OMP_NUM_THREADS" not in defaults("-tp", "2", environment={"OMP_NUM_THREADS": "1"})[1]
    two_nodes = MACHINE._replace(numa_nodes=2)
    assert "OMP_NUM_THREADS" not in defaults("-tp", "2", machine=two_nodes).environment


# --- what is installed, and where


@pytest.mark.parametrize(
    ("versions", "expected", "is_cpu"),
    [
        ({"vllm": "0.32.0"}, ("vllm", "0.32.0"), False),
        ({"vllm": "0.32.1+cpu"}, ("vllm", "0.32.1+cpu"), True),
        ({"vllm-cpu": "0.32.0"}, ("vllm-cpu", "0.32.0"), True),
    ],
)
def test_the_installed_vllm_says_what_it_computes_on(monkeypatch, versions, expected, is_cpu):
    def version(name):
        if name in versions:
            return versions[name]
        raise PackageNotFoundError(name)

    monkeypatch.setattr(installed, "version", version)
    found = installed.find_vllm()
    assert (found, found.is_cpu) == (expected, is_cpu)
    assert found.command("m")[0] == sys.executable
    assert found.command("m")[-1] == "m"


def test_a_missing_vllm_says_how_to_get_it(monkeypatch):
    def version(name):
        raise PackageNotFoundError(name)

    monkeypatch.setattr(installed, "version", version)
    with pytest.raises(ConfigError, match="not installed") as caught:
        installed.need_vllm()
    assert "pip install" in caught.value.hint


def test_this_machine_has_something():
    found = this_machine()
    assert found.cores >= 1
    assert found.numa_nodes >= 1
    assert found.memory_free_bytes > 0


def test_a_pool_config_is_made_of_the_wishes():
    wishes = Wishes(model="m", pools=("/data/kv",), device="gpu", capacity="1GiB")
    assert pool_config(wishes) == PoolConfig(urls=("file:///data/kv",), capacity_bytes=GIB)
