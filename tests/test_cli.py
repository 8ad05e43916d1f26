"""kvdepot.cli.main and kvdepot.cli.pool: quick help, data on stdout, errors with hints on stderr."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys

import pytest

import kvdepot
from kvdepot.cli import main as cli_main
from kvdepot.config import PoolConfig
from kvdepot.errors import ConfigError, KvdepotError
from kvdepot.io.buffers import aligned_bytes
from kvdepot.keys import block_keys, root_key
from kvdepot.pool.tier import PoolTier
from kvdepot.tiers import Write
from tests.children import SOURCE, run_cli, run_python
from tests.identities import IDENTITY, replaced

OTHER = replaced(IDENTITY, "kv_dtype", "float16")
BLOCKS = 10


def fill(root, identity):
    keys = block_keys(identity.digest(), list(range(16 * BLOCKS)), 16)
    parents = [root_key(identity.digest()), *keys]
    config = PoolConfig.of(str(root), capacity="64MiB")
    with PoolTier.open(config, identity) as tier:
        writes = []
        for number, (key, parent) in enumerate(zip(keys, parents, strict=False)):
            row = aligned_bytes(1024)
            row[:] = bytes([number + 1]) * 1024
            writes.append(Write(key, parent, row, 16))
        tier.store(writes)
        assert tier.drain(30)


@pytest.fixture
def pool(tmp_path):
    root = tmp_path / "pool"
    fill(root, IDENTITY)
    fill(root, OTHER)
    return root


def run(capsys, *arguments):
    """Run a command in this process: exit status, stdout, stderr."""
    status = cli_main.run([str(argument) for argument in arguments])
    out, err = capsys.readouterr()
    return status, out, err


def segments(root):
    return sorted(root.rglob("*.kvseg"))


# --- the command as a whole


def test_version_and_help_come_quickly_and_without_heavy_imports():
    child = run_python(
        """
import sys
from kvdepot.cli.main import run
for arguments in (["--version"], ["--help"], ["pool", "--help"], ["pool", "info", "--help"]):
    assert run(arguments) == 0, arguments
heavy = {"numpy", "torch", "transformers", "kvdepot.cli.demo", "kvdepot.pool.tier"}
print("imported:", sorted(heavy & set(sys.modules)))
"""
    )
    assert child.returncode == 0, child.stderr
    lines = child.stdout.splitlines()
    assert lines[0] == kvdepot.__version__
    assert lines[-1] == "imported: []"
    assert child.stderr == ""
    for word in ("demo", "pool", "info", "verify", "explain", "Usage: kvdepot COMMAND"):
        assert word in child.stdout


def test_the_demo_s_help_needs_no_torch():
    # a finder that forbids the extra's libraries stands for a machine that lacks them
    child = run_python(
        """
import sys
class Missing:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("torch", "transformers", "gguf", "accelerate"):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
sys.meta_path.insert(0, Missing())
from kvdepot.cli.main import run
assert run(["demo", "--help"]) == 0
import pkgutil, importlib, kvdepot
for package in ("kvdepot", "kvdepot.pool", "kvdepot.io", "kvdepot.cli", "kvdepot.testing"):
    for module in pkgutil.iter_modules(importlib.import_module(package).__path__, package + "."):
        if not module.name.endswith("__main__"):
            importlib.import_module(module.name)
print("torch" in sys.modules)
"""
    )
    assert child.returncode == 0, child.stderr
    assert child.stdout.splitlines()[-1] == "False"
    assert "--document" in child.stdout


def test_python_dash_m_is_the_command():
    child = run_cli("--version")
    assert (child.returncode, child.stdout, child.stderr) == (0, kvdepot.__version__ + "\n", "")


@pytest.mark.parametrize(
    "arguments",
    [
        ("no-such-command",),
        ("pool", "no-such-command"),
        ("pool", "info"),
        ("pool", "info", "/a", "/b"),
        ("pool", "info", "--no-such-option", "/a"),
        ("pool", "explain", "/a", "0"),
    ],
)
def test_a_wrong_command_line_is_an_error_with_a_hint(capsys, arguments):
    status, out, err = run(capsys, *arguments)
    assert status == 2
    assert out == ""
    first, second = err.splitlines()
    assert first.startswith("error: ")
    assert second == "hint: add --help to see what a command takes"


def test_errors_of_the_tree_are_two_lines_and_status_2():
    child = run_cli("pool", "info", "fs://tmp/kv")
    assert child.returncode == 2
    assert child.stdout == ""
    assert child.stderr.splitlines() == [
        "error: 'fs://tmp/kv' names a host, 'tmp', where a folder's URL has none",
        "hint: for the folder /tmp/kv write fs:///tmp/kv; for /kv write fs:///kv",
    ]


@pytest.mark.parametrize("error", [ConfigError("bad", hint="do this"), KvdepotError("bad")])
def test_the_hint_is_printed_where_there_is_one(capsys, monkeypatch, error):
    def fail(*args, **kwargs):
        raise error

    monkeypatch.setattr(cli_main, "app", fail)
    status, _, err = run(capsys, "pool")
    assert status == 2
    assert err == "error: bad\n" + (f"hint: {error.hint}\n" if error.hint else "")


def _lacking(name, *, is_wrapped):
    def fail(*args, **kwargs):
        try:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
        except ModuleNotFoundError as error:
            if is_wrapped:  # as the command-line library does for a command's module
                raise ImportError("cannot import") from error
            raise

    return fail


@pytest.mark.parametrize("is_wrapped", [False, True])
def test_a_missing_extra_is_named_and_other_bugs_are_not_hidden(capsys, monkeypatch, is_wrapped):
    monkeypatch.setattr(cli_main, "app", _lacking("torch", is_wrapped=is_wrapped))
    status, _, err = run(capsys, "demo")
    assert status == 2
    assert err == "error: this command needs torch\nhint: pip install 'kvdepot[demo]'\n"
    monkeypatch.setattr(cli_main, "app", _lacking("kvdepot.typo", is_wrapped=is_wrapped))
    with pytest.raises(ImportError):
        cli_main.run(["demo"])


def test_an_interrupt_is_quiet(capsys, monkeypatch):
    def interrupt(*args, **kwargs):
        raise KeyboardInterrupt

    monkeypatch.setattr(cli_main, "app", interrupt)
    assert run(capsys, "pool") == (130, "", "")


def test_a_reader_that_leaves_early_is_no_error(pool):
    # as in: kvdepot pool verify --json POOL | head -1
    child = subprocess.run(
        [
            "bash",
            "-c",
            '"$0" -m kvdepot pool verify --json "$1" | true; echo "${PIPESTATUS[0]}"',
            sys.executable,
            str(pool),
        ],
        env={**os.environ, "PYTHONPATH": str(SOURCE)},
        capture_output=True,
        text=True,
    )
    assert (child.stdout, child.stderr) == ("0\n", "")


def test_no_colour_codes_without_a_terminal_or_with_no_color(pool):
    for env in ({}, {"NO_COLOR": "1"}, {"NO_COLOR": "1", "TERM": "xterm-256color"}):
        for arguments in (["--help"], ["pool", "info", str(pool)], ["pool", "info", "nowhere"]):
            child = run_cli(*arguments, env=env)
            assert "\x1b[" not in child.stdout + child.stderr


# --- pool info


def test_info_says_what_a_pool_holds(capsys, pool):
    status, out, err = run(capsys, "pool", "info", pool)
    assert (status, err) == (0, "")
    assert f"pool {pool} is the folder {pool}" in out
    words = ("version 1", "64 MiB", "2 segments", "0 files", "direct I/O", "toy/tiny", "float16")
    for word in words:
        assert word in out
    for identity in (IDENTITY, OTHER):
        assert f"{identity.digest().hex()[:12]}  {BLOCKS} blocks in 1 segments" in out


def test_info_as_json_is_one_object(capsys, pool):
    status, out, _ = run(capsys, "pool", "info", f"fs://{pool}", "--json")
    assert status == 0
    found = json.loads(out)
    assert found["pool"]["version"] == 1
    assert found["pool"]["capacity_bytes"] == 64 << 20
    assert found["used_bytes"] == sum(path.stat().st_size for path in segments(pool))
    assert found["space"]["free_bytes"] > 0
    assert found["direct_reason"]
    by_digest = {namespace["digest"]: namespace for namespace in found["namespaces"]}
    assert set(by_digest) == {IDENTITY.digest().hex(), OTHER.digest().hex()}
    assert by_digest[OTHER.digest().hex()]["identity"]["kv_dtype"] == "float16"
    assert all(namespace["blocks"] == BLOCKS for namespace in by_digest.values())


def test_info_changes_nothing(capsys, pool):
    before = sorted((path, path.lstat().st_mtime_ns) for path in [pool, *pool.rglob("*")])
    run(capsys, "pool", "info", pool)
    run(capsys, "pool", "verify", pool)
    after = sorted((path, path.lstat().st_mtime_ns) for path in [pool, *pool.rglob("*")])
    assert after == before


def test_a_folder_without_a_pool_is_an_error_and_stays_as_it_is(capsys, tmp_path):
    for command in ("info", "verify"):
        for place in (tmp_path, tmp_path / "nowhere"):
            status, out, err = run(capsys, "pool", command, place)
            assert (status, out) == (2, "")
            assert "holds no pool" in err
    assert list(tmp_path.iterdir()) == []


def test_a_pool_of_another_version_is_refused_with_both_versions(capsys, pool):
    file = pool / "pool.json"
    file.write_text(file.read_text().replace('"version": 1', '"version": 7'))
    for command in ("info", "verify"):
        status, _, err = run(capsys, "pool", command, pool)
        assert status == 2
        assert "version 7" in err
        assert "version 1" in err


# --- pool verify


def test_verify_of_a_sound_pool(capsys, pool):
    status, out, err = run(capsys, "pool", "verify", pool)
    assert (status, err) == (0, "")
    assert (
        out == "sound: 2 segments, 20 blocks, 20 KiB read; 0 segments and 0 blocks do not verify\n"
    )
    status, out, _ = run(capsys, "pool", "verify", pool, "--json")
    *checks, sums = map(json.loads, out.splitlines())
    assert status == 0
    assert [check["path"] for check in checks] == [
        str(path.relative_to(pool)) for path in segments(pool)
    ]
    assert sums == {
        "segments": 2,
        "blocks": 20,
        "payload_bytes": 20_480,
        "bad_segments": 0,
        "bad_blocks": 0,
        "is_sound": True,
    }


def flip(path, offset):
    data = bytearray(path.read_bytes())
    data[offset] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize(
    ("offset", "bad_segments", "bad_blocks"),
    [
        (0, 1, 0),  # header
        (4096 + 5, 0, 1),  # a payload
        (-4000, 1, 0),  # the footer
        (-1, 1, 0),  # the trailer
    ],
)
def test_verify_finds_one_flipped_bit(capsys, pool, offset, bad_segments, bad_blocks):
    victim = segments(pool)[0]
    flip(victim, offset)
    status, out, _ = run(capsys, "pool", "verify", pool)
    assert status == 1
    assert f"bad: {victim.relative_to(pool)}: " in out
    assert "BAD: 2 segments, " in out
    status, out, _ = run(capsys, "pool", "verify", pool, "--json")
    sums = json.loads(out.splitlines()[-1])
    assert status == 1
    assert not sums["is_sound"]
    assert (sums["bad_segments"], sums["bad_blocks"]) == (bad_segments, bad_blocks)


def test_verify_finds_a_segment_of_another_namespace(capsys, pool):
    a, b = segments(pool)
    b.write_bytes(a.read_bytes())
    status, out, _ = run(capsys, "pool", "verify", pool)
    assert status == 1
    assert "another segment" in out


# --- pool explain


def test_explain_names_the_field(capsys, pool):
    a, b = IDENTITY.digest().hex(), OTHER.digest().hex()
    status, out, err = run(capsys, "pool", "explain", pool, a[:6], b[:6].upper())
    assert (status, err) == (0, "")
    assert out == f'kv_dtype: "bfloat16" in {a[:12]}, "float16" in {b[:12]}\n'
    status, out, _ = run(capsys, "pool", "explain", pool, a, b, "--json")
    assert json.loads(out) == {
        "a": a,
        "b": b,
        "differences": [{"field": "kv_dtype", "a": "bfloat16", "b": "float16"}],
    }
    status, out, _ = run(capsys, "pool", "explain", pool, a, a)
    assert (status, out) == (0, "the two namespaces are equal in every field\n")


def test_explain_wants_one_namespace_each(capsys, pool):
    a = IDENTITY.digest().hex()
    for start in ("", "zz", "?"):
        status, _, err = run(capsys, "pool", "explain", pool, a, start)
        assert status == 2
        assert f"no namespace begins with {start!r}" in err
        assert a[:12] in err
    # both digests begin with this digit
    status, _, err = run(capsys, "pool", "explain", pool, "a", a)
    assert status == 2
    assert "2 namespaces begin with 'a'" in err


def test_explain_says_whose_manifest_is_lost(capsys, pool):
    a, b = IDENTITY.digest().hex(), OTHER.digest().hex()
    (pool / "ns" / b / "identity.json").write_text("{}")
    status, _, err = run(capsys, "pool", "explain", pool, a, b)
    assert status == 2
    assert f"manifest of namespace {b} is missing or damaged" in err
    _, out, _ = run(capsys, "pool", "info", pool)
    assert "no readable manifest" in out


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.mark.parametrize("stream", [io.StringIO, Terminal])
def test_progress_is_for_people_only(capsys, pool, monkeypatch, stream):
    shown = stream()
    monkeypatch.setattr(sys, "stderr", shown)
    assert cli_main.run(["pool", "verify", str(pool)]) == 0
    assert ("reading segments" in shown.getvalue()) == shown.isatty()
    assert capsys.readouterr().out.startswith("sound: 2 segments")
