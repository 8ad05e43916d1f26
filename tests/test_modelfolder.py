"""Where a model's files are, and whether somebody changed them."""

from __future__ import annotations

import os

import pytest

from kvdepot.errors import PoolError
from kvdepot.io.modelfolder import file_states, local_model_folder, plain_model_name


def test_a_folder_is_itself(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "model").mkdir()
    for name in (str(tmp_path / "model"), "~/model"):
        assert local_model_folder(name, revision=None, cache_dir=None) == tmp_path / "model"


def test_what_is_not_here_is_none(tmp_path):
    assert local_model_folder("no/such", revision="x", cache_dir=str(tmp_path)) is None


def test_a_snapshot_of_the_hub_s_cache_is_found_without_a_network(tmp_path):
    pytest.importorskip("huggingface_hub")
    commit = "c" * 40
    repo = tmp_path / "models--org--model"
    snapshot = repo / "snapshots" / commit
    snapshot.mkdir(parents=True)
    (repo / "refs").mkdir()
    (repo / "refs" / "main").write_text(commit)
    (snapshot / "config.json").write_text("{}")
    assert local_model_folder("org/model", revision=None, cache_dir=str(tmp_path)) == snapshot
    assert plain_model_name(str(snapshot)) == "org/model"


def test_names_say_nothing_of_the_place(tmp_path):
    (tmp_path / "Tiny").mkdir()
    assert plain_model_name(str(tmp_path / "Tiny")) == "Tiny"
    assert plain_model_name("org/model") == "org/model"


def test_any_change_of_a_file_is_seen(tmp_path):
    file = tmp_path / "adapter.safetensors"
    file.write_bytes(b"one")
    states = [file_states(tmp_path)]
    file.write_bytes(b"four")
    states.append(file_states(tmp_path))
    os.utime(file, ns=(1, 1))
    states.append(file_states(tmp_path))
    other = tmp_path / "other"
    other.write_bytes(b"four")
    os.utime(other, ns=(1, 1))
    other.replace(file)
    states.append(file_states(tmp_path))
    assert len(set(states)) == len(states)
    assert file_states(tmp_path) == states[-1]


def test_a_folder_that_is_gone_is_an_error_of_ours(tmp_path):
    with pytest.raises(PoolError):
        file_states(tmp_path / "gone")
