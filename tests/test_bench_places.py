"""Results name no folders of the machine that they come from."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

pytest.importorskip("aiohttp")

from kvdepot.bench.places import without_folders
from kvdepot.bench.plan import Arm, Contention, Noise, Peak, Plan, Traffic
from kvdepot.bench.prompts import shipped_material
from kvdepot.bench.session import open_session, read_session
from kvdepot.bench.windows import compile_lines
from kvdepot.errors import ConfigError
from kvdepot.io.results import ResultFolder

EXAMPLES = Path(__file__).parents[1] / "docs" / "bench"


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("/data/out", "{out}"),
        ("/data/out/pool/a", "{out}/pool/a"),
        ("/data/output/pool", ".../pool"),
        ("--model=/mnt/nvme/models/big/", "--model=.../big"),
        ('{"urls":["file:///data/out/pool"],"n":1}', '{"urls":["file://{out}/pool"],"n":1}'),
        ('{"root_dir":"/mnt/x/fs"}', '{"root_dir":".../fs"}'),
        ("LD_PRELOAD=/opt/lib/a.so:/opt/lib/b.so", "LD_PRELOAD=.../a.so:.../b.so"),
        ("in /usr/lib/x.py, line 3", "in .../x.py, line 3"),
        # these name no folder of a machine
        ("http://127.0.0.1:8000/v1/models", "http://127.0.0.1:8000/v1/models"),
        ("http://{host}/v1/models", "http://{host}/v1/models"),
        ("org/model-7b/rev", "org/model-7b/rev"),
        ("{pool}/ns/x", "{pool}/ns/x"),
        ("a/b and 1/2/3", "a/b and 1/2/3"),
        ("/drain", "/drain"),
    ],
)
def test_a_folder_is_told_by_its_role_or_its_last_name(text, shown):
    assert without_folders(text, Path("/data/out")) == shown
    # what is told is not told again in other words
    assert without_folders(shown, Path("/data/out")) == shown


def plan_and_arms(tmp_path, pool="pool"):
    folder = str(tmp_path / "data")
    plan = Plan(
        name="test",
        peak=Peak(traffic=Traffic(trace=f"{folder}/trace.jsonl", trace_format="mooncake")),
        contention=Contention(noises=(Noise(name="C3", kind="read", folder=folder),)),
    )
    arms = [
        Arm(
            name="kvdepot",
            role="tier",
            command=("{python}", "-m", "x", f'{{"pool":["{tmp_path}/out/{pool}"]}}'),
            environment={"CACHE": f"file://{folder}/cache"},
            pool=f"{tmp_path}/out/{pool}",
            model=f"{folder}/model",
        )
    ]
    return plan, arms


def opened(folder, plan, arms):
    return open_session(folder, plan, arms, shipped_material(), version="1", wall_s=0.0)


def test_plan_and_arms_are_kept_without_and_carried_out_with_folders(tmp_path):
    plan, arms = plan_and_arms(tmp_path)
    with ResultFolder(tmp_path / "out") as folder:
        session = opened(folder, plan, arms)
        assert (session.plan, session.arms) == (plan, tuple(arms))
        kept = (tmp_path / "out" / "plan.json").read_text()
        assert str(tmp_path) not in kept
        assert session.state.arms[0].pool == "{out}/pool"
        assert session.state.arms[0].model == ".../model"
        assert read_session(folder).state == session.state
        # and it goes on with the same folders only
        assert opened(folder, plan, arms).arms == tuple(arms)
        moved = [Arm(name="kvdepot", role="tier", model="/elsewhere/model")]
        with pytest.raises(ConfigError, match="another plan"):
            opened(folder, plan, moved)
        twin = str(tmp_path / "other" / "model")
        with pytest.raises(ConfigError, match="elsewhere"):
            opened(folder, plan, [msgspec.structs.replace(arms[0], model=twin)])


def test_lines_of_an_engines_log_are_kept_without_folders():
    log = b"compiling /usr/lib/python3/site/kernel.py\nready\n"
    assert compile_lines(log) == ("compiling .../kernel.py",)


@pytest.mark.parametrize(
    "path", sorted(EXAMPLES.rglob("*.json*")), ids=lambda path: f"{path.parent.name}-{path.name}"
)
def test_the_examples_in_the_documents_name_no_folders(path):
    lines = path.read_bytes().splitlines() if path.suffix == ".jsonl" else [path.read_bytes()]
    for line in lines:
        row = msgspec.json.decode(line)
        row.pop("output", None)  # what a model says is about folders of its document
        text = msgspec.json.encode(row).decode()
        assert without_folders(text) == text
