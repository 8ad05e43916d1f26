"""What is shipped: the wheel's content and metadata, and a clean environment that has nothing else."""

from __future__ import annotations

import email
import os
import re
import subprocess
import sys
import tarfile
import tomllib
import venv
import zipfile
from pathlib import Path

import pytest

import kvdepot
from tests.children import ROOT, SOURCE, run_python

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())


def name_of(requirement):
    match = re.match(r"[A-Za-z0-9._-]+", requirement)
    assert match, requirement
    return match[0].lower()


def requirements(name):
    lines = (ROOT / "requirements" / name).read_text().splitlines()
    return [line for line in lines if line.strip() and not line.startswith("#")]


def run(*command, **options):
    done = subprocess.run(
        [str(part) for part in command], capture_output=True, text=True, timeout=300, **options
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """Wheel and source distribution, the wheel built from the unpacked source distribution."""
    out = tmp_path_factory.mktemp("dist")
    run(sys.executable, "-m", "build", "--no-isolation", "--outdir", out, ROOT)
    (wheel,) = out.glob("*.whl")
    (sdist,) = out.glob("*.tar.gz")
    return wheel, sdist


@pytest.mark.slow
def test_the_wheel_holds_every_module_and_nothing_else(built):
    with zipfile.ZipFile(built[0]) as wheel:
        names = set(wheel.namelist())
    info = f"kvdepot-{kvdepot.__version__}.dist-info"
    package = {name for name in names if not name.startswith(info)}
    sources = {
        str(path.relative_to(SOURCE))
        for path in (SOURCE / "kvdepot").rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    assert package == sources
    assert "kvdepot/py.typed" in package
    assert f"{info}/licenses/LICENSE" in names


@pytest.mark.slow
def test_the_wheel_s_metadata(built):
    with zipfile.ZipFile(built[0]) as wheel:
        info = f"kvdepot-{kvdepot.__version__}.dist-info"
        metadata = email.message_from_bytes(wheel.read(f"{info}/METADATA"))
        entry_points = wheel.read(f"{info}/entry_points.txt").decode()
    assert metadata["Name"] == "kvdepot"
    assert metadata["Version"] == kvdepot.__version__
    assert metadata["Requires-Python"] == ">=3.11"
    assert metadata["License-Expression"] == "Apache-2.0"
    assert "kvdepot = kvdepot.cli.main:main" in entry_points
    needed = metadata.get_all("Requires-Dist")
    base = {name_of(each) for each in needed if "extra" not in each}
    assert base == {"cyclopts", "msgspec", "numpy", "rich", "xxhash"}


@pytest.mark.slow
def test_the_source_distribution_can_be_tested(built):
    with tarfile.open(built[1]) as sdist:
        names = {name.partition("/")[2] for name in sdist.getnames()}
    for wanted in ("Makefile", "README.md", "LICENSE", "pyproject.toml", "tests/test_packaging.py"):
        assert wanted in names
    assert {"requirements/dev.txt", "docs/index.md", "tests/data/keys-v1.json"} <= names
    unwanted = [name for name in names if re.search(r"(^|/)(\.git|\.venv|out|__pycache__)/", name)]
    assert not unwanted


@pytest.mark.slow
def test_a_clean_environment_needs_no_torch(built, tmp_path):
    """The wheel with its base dependencies alone: the guard against a dependency that is not declared."""
    venv.create(tmp_path / "venv", with_pip=True)
    python = tmp_path / "venv" / "bin" / "python"
    command = tmp_path / "venv" / "bin" / "kvdepot"
    env = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    options = {"env": env, "cwd": tmp_path}
    run(python, "-m", "pip", "install", "--quiet", built[0], **options)
    assert run(command, "--version", **options) == kvdepot.__version__ + "\n"
    assert "pool" in run(command, "--help", **options)
    assert "--document" in run(command, "demo", "--help", **options)
    run(python, "-m", "pip", "check", **options)
    code = "import importlib.util, kvdepot.depot; print(importlib.util.find_spec('torch'))"
    assert run(python, "-c", code, **options) == "None\n"
    demo = subprocess.run([str(command), "demo"], capture_output=True, text=True, **options)
    assert demo.returncode == 2
    assert "pip install 'kvdepot[demo]'" in demo.stderr
    assert "Traceback" not in demo.stderr


def test_the_readme_s_example_runs(tmp_path):
    (code,) = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    child = run_python(code, env={"HOME": str(tmp_path)}, cwd=tmp_path)
    assert child.returncode == 0, child.stderr
    assert child.stdout.startswith("1 (<Outcome.DONE")
    assert (tmp_path / "kv" / "pool.json").is_file()


def test_tools_and_the_demo_s_libraries_are_pinned_exactly():
    for file in ("dev.txt", "demo.txt"):
        assert requirements(file)
        assert all(re.fullmatch(r"[A-Za-z0-9._-]+==[0-9.]+", line) for line in requirements(file))
    extra = PROJECT["project"]["optional-dependencies"]["demo"]
    assert {name_of(each) for each in extra} == {name_of(each) for each in requirements("demo.txt")}
    assert "torch==2.13.0" in requirements("demo.txt")


def test_the_base_has_floors_and_one_ceiling():
    ceilings = [each for each in PROJECT["project"]["dependencies"] if re.search(r"<|==|~=", each)]
    assert ceilings == ["cyclopts>=5,<6"]
    assert all(">=" in each for each in PROJECT["project"]["dependencies"])


def test_the_oldest_python_is_the_same_everywhere():
    assert PROJECT["project"]["requires-python"] == ">=3.11"
    assert PROJECT["tool"]["ruff"]["target-version"] == "py311"
    assert PROJECT["tool"]["mypy"]["python_version"] == "3.11"
    classified = [
        line.rpartition(" ")[2]
        for line in PROJECT["project"]["classifiers"]
        if line.startswith("Programming Language :: Python :: 3.")
    ]
    assert classified[0] == "3.11"


def test_ci_runs_what_people_run():
    script = (ROOT / ".ci" / "run").read_text()
    assert script.rstrip().endswith("make test")
    assert os.access(ROOT / ".ci" / "run", os.X_OK)


def test_an_old_python_is_told_what_to_do(tmp_path):
    # a stand-in that fails the version check, as Python 3.10 would
    old = tmp_path / "python3"
    old.write_text("#!/bin/sh\n[ \"$1\" = -V ] && echo 'Python 3.10.1' && exit 0\nexit 1\n")
    old.chmod(0o755)
    for make in (["make", f"PYTHON={old}", "demo"], ["make", "PYTHON=no-such-python", "test"]):
        done = subprocess.run(
            [*make, "VENV=" + str(tmp_path / "venv")], cwd=ROOT, capture_output=True, text=True
        )
        assert done.returncode == 2
        assert "error: kvdepot needs Python 3.11 or newer" in done.stderr
        assert (
            f"hint: name a newer one, for example: make PYTHON=python3.12 {make[-1]}" in done.stderr
        )
        assert "Traceback" not in done.stderr
    assert not Path(tmp_path / "venv").exists()
