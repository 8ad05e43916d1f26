"""Style as a test: what a reviewer would say every time is said here once, with what to do instead.

Import direction is import-linter's, formatting and naming are ruff's; this file has what neither knows.
"""

from __future__ import annotations

import ast
import importlib
import re
import subprocess
import warnings
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import msgspec
import pytest

import kvdepot
from kvdepot.config import PoolConfig
from kvdepot.identity import CacheGroup, Identity
from kvdepot.metrics import METRICS

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "src" / "kvdepot"
MODULES = sorted(PACKAGE.rglob("*.py"))
TESTS = sorted((ROOT / "tests").rglob("*.py"))
BENCHMARKS = sorted((ROOT / "benchmarks").rglob("*.py"))
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])

MODULE_LINES_MAX = 400
TEST_LINES_MAX = 700
FUNCTION_LINES_MAX = 70


def name_of(path: Path) -> str:
    parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


NAMES = [name_of(path) for path in MODULES]
#: import an extra's library at their head
NEED_EXTRAS = (
    "kvdepot.cli",
    "kvdepot.demo",
    "kvdepot.engines",
    "kvdepot.io.models",
    "kvdepot.recording",
    "kvdepot.serving",
)
by_module = pytest.mark.parametrize("path", MODULES, ids=NAMES)


@cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text(), str(path))


def is_in(path: Path, *places: str) -> bool:
    name = name_of(path)
    return any(name == place or name.startswith(place + ".") for place in places)


def dotted(node: ast.expr) -> str:
    """``os.path.exists`` for an attribute chain over a name; empty for anything else."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute):
        head = dotted(node.value)
        return f"{head}.{node.attr}" if head else f".{node.attr}"
    return ""


def calls_of(path: Path) -> Iterator[tuple[int, str]]:
    for node in ast.walk(tree_of(path)):
        if isinstance(node, ast.Call):
            yield node.lineno, dotted(node.func)


def functions_of(path: Path) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    for node in ast.walk(tree_of(path)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node


# --- sizes


@pytest.mark.parametrize("path", [*MODULES, *TESTS, *BENCHMARKS], ids=lambda path: path.name)
def test_files_are_small(path):
    lines = len(path.read_text().splitlines())
    most = TEST_LINES_MAX if path in TESTS else MODULE_LINES_MAX
    assert lines <= most, f"{path.name} has {lines} lines; split it by what its parts hold"


@by_module
def test_functions_are_short(path):
    long = {
        f"{node.name} (line {node.lineno})": (node.end_lineno or 0) - node.lineno + 1
        for node in functions_of(path)
    }
    too_long = {name: lines for name, lines in long.items() if lines > FUNCTION_LINES_MAX}
    assert not too_long, f"longer than {FUNCTION_LINES_MAX} lines; name the steps: {too_long}"


# --- calls with a place of their own

_FILE_VERBS = [
    "access",
    "chmod",
    "chown",
    "close",
    "fallocate",
    "fdatasync",
    "fsync",
    "ftruncate",
    "fstat",
    "ftruncate",
    "link",
    "listdir",
    "lstat",
    "makedirs",
    "mkdir",
    "mkfifo",
    "open",
    "posix_fallocate",
    "pread",
    "preadv",
    "pwrite",
    "pwritev",
    "read",
    "readlink",
    "readv",
    "remove",
    "removedirs",
    "rename",
    "renames",
    "replace",
    "rmdir",
    "scandir",
    "sendfile",
    "stat",
    "statvfs",
    "symlink",
    "truncate",
    "unlink",
    "utime",
    "walk",
    "write",
    "writev",
]
_FILE_CALLS = {
    "open",
    *(f"os.{verb}" for verb in _FILE_VERBS),
    *(
        f"os.path.{verb}"
        for verb in ["exists", "isfile", "isdir", "islink", "getsize", "getmtime", "realpath"]
    ),
}
_PATH_METHODS = re.compile(
    r"\.(read_text|read_bytes|write_text|write_bytes|iterdir|rglob|mkdir|expanduser|is_file|is_dir)$"
)

#: what is banned: a predicate on the call's dotted name, where it is allowed, and what to do instead
BANS = {
    "file calls": (
        lambda call: (
            call in _FILE_CALLS
            or call.startswith(("shutil.", "tempfile."))
            or _PATH_METHODS.search(call) is not None
        ),
        ("kvdepot.io", "kvdepot.testing", "kvdepot.demo", "kvdepot.cli"),
        "go through kvdepot.io",
    ),
    "clocks": (
        lambda call: (
            re.fullmatch(
                r"time\.(time|monotonic|perf_counter)(_ns)?|datetime\.(datetime\.)?(now|utcnow|today)",
                call,
            )
            is not None
        ),
        ("kvdepot.clock", "kvdepot.testing"),
        "take a kvdepot.clock.Clock, so that tests own the time",
    ),
    "print": (
        lambda call: call == "print",
        ("kvdepot.cli",),
        "log, or give the text back to the command line",
    ),
    "hash()": (
        lambda call: call == "hash",
        (),
        "hash() differs between processes; use hashlib or xxhash",
    ),
    "code in data": (
        lambda call: (
            re.match(r"(pickle|cPickle|dill|marshal|shelve|joblib)\.|torch\.(load|save)$", call)
            or call in ("eval", "exec")
        ),
        (),
        "stored bytes are data: headers and raw bytes, msgspec or safetensors",
    ),
}


@by_module
@pytest.mark.parametrize("what", BANS)
def test_calls_stay_in_their_place(path, what):
    is_banned, places, instead = BANS[what]
    if is_in(path, *places):
        return
    found = [f"{call} (line {line})" for line, call in calls_of(path) if is_banned(call)]
    assert not found, f"{name_of(path)}: {what}: {', '.join(found)}; {instead}"


@pytest.mark.parametrize("path", [*MODULES, *BENCHMARKS], ids=lambda path: path.name)
def test_nothing_imports_a_loader_that_runs_code(path):
    imported = {
        alias.name.split(".")[0]
        for node in ast.walk(tree_of(path))
        if isinstance(node, ast.Import | ast.ImportFrom)
        for alias in node.names
    } | {
        (node.module or "").split(".")[0]
        for node in ast.walk(tree_of(path))
        if isinstance(node, ast.ImportFrom)
    }
    assert not imported & {"pickle", "cPickle", "dill", "marshal", "shelve", "joblib"}


def test_the_bans_find_what_they_are_for(tmp_path, monkeypatch):
    # each ban must bite, or it is decoration
    sample = PACKAGE / "sample.py"
    code = (
        "import os, time, pickle\nopen('x')\nos.path.exists('x')\np.read_text()\ntime.time()\n"
        "time.monotonic_ns()\ndatetime.datetime.now()\nprint('x')\nhash('x')\npickle.loads(b'')\n"
        "torch.load('x')\n"
    )
    monkeypatch.setattr("tests.test_tidy.tree_of", lambda path: ast.parse(code))
    for what in BANS:
        with pytest.raises(AssertionError, match=re.escape(what)):
            test_calls_stay_in_their_place(sample, what)
    with pytest.raises(AssertionError):
        test_nothing_imports_a_loader_that_runs_code(sample)


# --- words


@by_module
def test_modules_say_what_they_are_for(path):
    is_empty = not path.read_text().strip()
    if path.name == "__init__.py" and is_empty:
        return
    assert ast.get_docstring(tree_of(path)), f"{name_of(path)} has no docstring"


@cache
def _documented_methods() -> dict[str, set[str]]:
    """Class name -> its methods with docstrings; protocols are gathered under the name ``Protocol``."""
    found: dict[str, set[str]] = {"Protocol": set()}
    for path in MODULES:
        for node in ast.walk(tree_of(path)):
            if isinstance(node, ast.ClassDef):
                methods = {
                    method.name
                    for method in node.body
                    if isinstance(method, ast.FunctionDef) and ast.get_docstring(method)
                }
                found.setdefault(node.name, set()).update(methods)
                if any(dotted(base).endswith("Protocol") for base in node.bases):
                    found["Protocol"] |= methods
    return found


def _public_things(
    path: Path,
) -> Iterator[tuple[ast.ClassDef | None, str, ast.FunctionDef | ast.ClassDef]]:
    """Top-level functions and classes, and the classes' methods, as far as they are public."""
    for node in tree_of(path).body:
        if not isinstance(node, ast.FunctionDef | ast.ClassDef) or node.name.startswith("_"):
            continue
        yield None, node.name, node
        for method in node.body if isinstance(node, ast.ClassDef) else []:
            # in the conformance kit, a check's name says what it checks
            if isinstance(method, ast.FunctionDef) and not method.name.startswith(("_", "test_")):
                assert isinstance(node, ast.ClassDef)
                yield node, method.name, method


@by_module
def test_public_things_have_docstrings(path):
    """A method may have its docstring on a protocol, or on the class that it overrides."""
    documented = _documented_methods()
    missing = []
    for owner, name, node in _public_things(path):
        bases = [dotted(base).rpartition(".")[2] for base in owner.bases] if owner else []
        elsewhere = [documented.get(base, set()) for base in (*bases, "Protocol")]
        is_inherited = owner is not None and any(name in methods for methods in elsewhere)
        if not is_inherited and not ast.get_docstring(node):
            missing.append(f"{owner.name}.{name}" if owner else name)
    assert not missing, f"{name_of(path)}: no docstring: {', '.join(missing)}"


@by_module
def test_what_is_left_to_do_is_in_the_issues(path):
    words = re.compile(r"\b(TODO|FIXME|XXX|HACK)\b")
    assert not words.search(path.read_text()), "file an issue; the code says what is"


# --- names


@by_module
def test_public_names_are_listed_and_exist(path):
    if path.name == "__init__.py" and len(tree_of(path).body) <= 1:
        return  # nothing, or a docstring alone
    module = importlib.import_module(name_of(path)) if _is_importable(path) else None
    assigned = [
        node
        for node in tree_of(path).body
        if isinstance(node, ast.Assign | ast.AnnAssign)
        and any(
            dotted(target) == "__all__"
            for target in (node.targets if isinstance(node, ast.Assign) else [node.target])
        )
    ]
    assert assigned, f"{name_of(path)} has no __all__"
    if module is None:
        return
    listed = set(module.__all__)
    missing = {name for name in listed if not hasattr(module, name)}
    assert not missing, f"{name_of(path)}.__all__ lists what does not exist: {missing}"
    defined = {
        node.name
        for node in tree_of(path).body
        if isinstance(node, ast.FunctionDef | ast.ClassDef) and not node.name.startswith("_")
    }
    assert defined <= listed, f"{name_of(path)}: public and not in __all__: {defined - listed}"


def _is_importable(path: Path) -> bool:
    """Adapters import their engine, which may not be installed, and may warn of itself."""
    try:
        with warnings.catch_warnings():
            if is_in(path, "kvdepot.engines"):
                warnings.simplefilter("ignore")
            importlib.import_module(name_of(path))
    except ModuleNotFoundError:
        if not is_in(path, *NEED_EXTRAS):
            raise  # the base dependencies must do for everything else
        return False
    return True


def test_the_public_api_exists_and_is_lazy():
    assert set(kvdepot.__all__) <= set(dir(kvdepot))
    for name in kvdepot.__all__:
        assert getattr(kvdepot, name) is not None
    with pytest.raises(AttributeError, match="no_such_name"):
        kvdepot.no_such_name  # noqa: B018


@by_module
def test_every_module_is_named_in_a_test(path):
    if path.name in ("__init__.py", "__main__.py"):
        return
    package, _, last = name_of(path).rpartition(".")
    wanted = re.compile(
        rf"{re.escape(name_of(path))}\b|from {re.escape(package)} import [^\n]*\b{last}\b"
    )
    assert any(wanted.search(test.read_text()) for test in TESTS), f"no test names {name_of(path)}"


# --- files and pages


def tracked_files() -> list[Path]:
    done = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True)
    if done.returncode:  # an unpacked source distribution
        return [path for path in ROOT.rglob("*") if path.is_file() and ".venv" not in path.parts]
    return [ROOT / name for name in done.stdout.split("\0") if name and (ROOT / name).is_file()]


def test_no_file_names_a_developer_s_machine():
    places = re.compile(
        rb"/wor" + rb"k/|/tmp/" + rb"w/|/roo" + rb"t/|/home/(?!ada|grace)[a-z]+/|/Use" + rb"rs/"
    )
    found = []
    for path in tracked_files():
        for number, line in enumerate(path.read_bytes().splitlines(), start=1):
            if places.search(line):
                found.append(f"{path.relative_to(ROOT)}:{number}")
    assert not found


def test_no_file_is_large():
    large = {
        str(path.relative_to(ROOT)): path.stat().st_size
        for path in tracked_files()
        if path.stat().st_size > 512 * 1024
    }
    assert not large, "large files belong into a cache folder, fetched and checked"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_in_pages_lead_somewhere(page):
    text = re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)
    targets = re.findall(r"\]\(([^)#\s]+)(?:#[^)]*)?\)", text)
    local = [target for target in targets if not re.match(r"[a-z]+:", target)]
    lost = [target for target in local if not (page.parent / target).exists()]
    assert not lost


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_pages_begin_with_a_title(page):
    assert page.read_text().startswith("# ")


def _documented(page: str) -> set[str]:
    return set(
        re.findall(r"^\| `([a-z0-9_.]+)` \|", (ROOT / "docs" / page).read_text(), re.MULTILINE)
    )


def test_every_setting_is_in_the_reference():
    assert _documented("settings.md") == set(PoolConfig.__struct_fields__)


def test_the_reference_says_the_true_defaults():
    text = (ROOT / "docs" / "settings.md").read_text()
    for field in msgspec.structs.fields(PoolConfig):
        row = re.search(rf"^\| `{field.name}` \| ([^|]*) \|", text, re.MULTILINE)
        assert row
        if field.default in (msgspec.NODEFAULT, None):
            continue
        written = row[1].strip().strip("`")
        assert written in (str(field.default), _size(field.default)), field.name


def _size(value: object) -> str:
    from kvdepot.units import format_bytes

    return format_bytes(value) if isinstance(value, int) else str(value)


def test_every_metric_is_in_the_reference():
    assert _documented("metrics.md") == set(METRICS)


def test_every_identity_field_is_in_the_reference():
    fields = set(Identity.__struct_fields__)
    fields |= {f"groups.{name}" for name in CacheGroup.__struct_fields__}
    assert _documented("identity.md") == fields


def test_the_changelog_has_this_version_and_known_groups():
    text = (ROOT / "CHANGELOG.md").read_text()
    assert re.search(rf"^## \[?{re.escape(kvdepot.__version__)}\b", text, re.MULTILINE)
    groups = set(re.findall(r"^### (.+)$", text, re.MULTILINE))
    assert groups <= {"Safety", "Speed", "Features", "Fixes", "Format"}


def test_the_decisions_are_numbered_without_gaps():
    pages = sorted((ROOT / "docs" / "adr").glob("[0-9]*.md"))
    assert [int(page.name[:4]) for page in pages] == list(range(1, len(pages) + 1))
    index = (ROOT / "docs" / "index.md").read_text()
    assert all(page.name in index for page in pages)
