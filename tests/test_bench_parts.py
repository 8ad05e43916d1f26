"""Parts of the instrument: plans, prompts, oracle, metrics, windows, launcher, host counters."""

from __future__ import annotations

import asyncio
import os
import sys

import msgspec
import pytest

pytest.importorskip("aiohttp")

from kvdepot.bench.asking import settled_counts
from kvdepot.bench.launch import CommandLauncher
from kvdepot.bench.loadfigures import load_figures
from kvdepot.bench.oracle import Expected, Shadow, class_of
from kvdepot.bench.plan import PRESETS, Arm, plan_digest, preset, read_plan
from kvdepot.bench.prompts import (
    NEEDLE_QUESTION,
    Material,
    document_of,
    read_material,
    shipped_material,
    units_of,
)
from kvdepot.bench.scrape import Counts, counts_of, difference
from kvdepot.bench.targets import embedded_arms, read_arms, url_arms, vllm_arms
from kvdepot.bench.windows import Edge, HostProbe, Window, compile_lines, decode_windows
from kvdepot.clock import SystemClock
from kvdepot.errors import ConfigError, KvdepotError
from kvdepot.io.filesystem import drop_cached_pages
from kvdepot.io.hostcounters import (
    HostCounters,
    device_of,
    environment,
    host_counters,
    page_residency,
    process_bytes,
)
from kvdepot.io.results import ResultFolder, read_whole
from kvdepot.testing.fakeserver import FakeServer
from tests.bench_rig import with_client


@pytest.mark.parametrize("name", PRESETS)
def test_presets_are_plans(name):
    plan = preset(name)
    assert plan.name == name
    assert plan.rounds
    assert plan.warmup_requests >= 3
    assert plan.is_indicative == name.startswith("quick")


def test_a_wrong_plan_is_refused_with_its_place():
    with pytest.raises(ConfigError, match="`rnus`"):
        read_plan(b'name = "x"\nrnus = 3', "x.toml")
    with pytest.raises(ConfigError, match=r"\$\.runs"):
        read_plan(b'name = "x"\nruns = 0', "x.toml")
    with pytest.raises(ConfigError, match="does not come before"):
        read_plan(
            b'name = "x"\n[[rounds]]\nname = "R2"\nrole = "tier"\nsalts = "stored"\nof = "R1b"', "x"
        )
    with pytest.raises(ConfigError, match="no preset"):
        preset("none")


def test_the_plan_s_digest_is_of_everything_that_is_decided():
    plan, arms = preset("quick"), [Arm(name="a", role="tier")]
    digest = plan_digest(plan, arms, "m")
    assert digest == plan_digest(preset("quick"), list(arms), "m")
    assert digest != plan_digest(msgspec.structs.replace(plan, runs=4), arms, "m")
    assert digest != plan_digest(plan, [Arm(name="a", role="tier", pool="/p")], "m")
    assert digest != plan_digest(plan, arms, "other")


def test_a_document_is_cut_to_its_tokens_and_has_its_needle():
    material = shipped_material()

    async def by_bytes(text):
        return list(text.encode())[::3]

    prompts = asyncio.run(document_of(material, 3000, by_bytes))
    assert len(prompts.text(1).encode()) / 3 == pytest.approx(3000, rel=0.003)
    assert material.needle in prompts.document[: len(prompts.document) * 3 // 5]
    assert "code word" in prompts.question(NEEDLE_QUESTION)
    assert prompts.text(1).startswith(prompts.document)
    # questions have one length, within some tokens
    lengths = [len(prompts.question(index)) for index in range(30)]
    assert max(lengths) - min(lengths) < 40

    async def unknown(text):
        return None

    longer = asyncio.run(document_of(material, 20_000, unknown))
    assert "Part 2" in longer.document
    with pytest.raises(ConfigError, match="too few"):
        asyncio.run(document_of(material, 20, by_bytes))
    assert len(units_of(None, "x" * 40)) == 10
    assert units_of([1, 2], "") == [1, 2]


def test_a_user_s_document(tmp_path):
    path = tmp_path / "text.txt"
    path.write_text("A text.\n")
    assert read_material(str(path)) == Material("text.txt", "A text.")
    for content in (b"", b"\xff\xfe", b"a\0b"):
        path.write_bytes(content)
        with pytest.raises(ConfigError):
            read_material(str(path))
    with pytest.raises(ConfigError, match="cannot be read"):
        read_whole(tmp_path / "none")


def test_the_oracle_knows_prefixes_in_whole_blocks_under_one_salt():
    shadow = Shadow(4, common=[1, 2, 3, 4])
    tokens = list(range(1, 15))
    assert shadow.expect("s", tokens) == Expected(0, 0)
    shadow.add("s", tokens)
    # 14 tokens are three blocks; the last token is computed anyway
    assert shadow.expect("s", tokens) == Expected(12, 4)
    assert shadow.expect("s", tokens[:12]) == Expected(11, 4)
    assert shadow.expect("other", tokens).tokens == 0
    assert shadow.expect("s", [9, *tokens]).tokens == 0
    assert shadow.expect("s", [*tokens[:5], 99, 98, 97]) == Expected(4, 4)


def test_classes_go_by_the_oracle():
    def of(turn, tokens, common=0):
        return class_of(turn=turn, prompt_tokens=100, expected=Expected(tokens, common))

    assert of(0, 0) == "F"
    # the system prompt that all have in common makes no follow-up
    assert of(1, 60, common=45) == "F"
    assert of(1, 60) == "U"
    # somebody else's document
    assert of(0, 90) == "M"
    assert of(1, 30) == "M"


PAGE = """# TYPE vllm:prompt_tokens_by_source_total counter
vllm:prompt_tokens_by_source_total{model_name="m",source="local_compute"} 100.0
vllm:prompt_tokens_by_source_total{model_name="m",source="local_cache_hit"} 20.0
vllm:prompt_tokens_by_source_total{model_name="m",source="external_kv_transfer"} 1e3
vllm:prompt_tokens_by_source_created{model_name="m",source="local_compute"} 1.7e9
vllm:kvdepot_load_bytes_total{tier="kvdepot"} 4096.0
vllm:kv_offload_tiering_read_bytes_total{tier="kvdepot"} 5000.0
kvdepot_corrupt_blocks_total 2
vllm:cache_config_info{block_size="64",cache_dtype="auto"} 1.0
"""


def test_engines_metrics_become_one_form():
    found = counts_of(PAGE)
    assert found.tokens == {"computed": 100, "device": 20, "external": 1000}
    # two names for one thing are not added up
    assert found.load_bytes == 4096
    assert found.corrupt_blocks == 2
    assert found.store_bytes is None
    assert found.block_tokens == 64
    assert counts_of(None) == Counts()
    embedded = counts_of('kvdepot_engine_prompt_tokens_total{source="disk"} 7.0\n')
    assert embedded.tokens == {"disk": 7}


def test_a_window_is_a_difference_and_a_restart_shows():
    before = Counts(tokens={"computed": 10}, load_bytes=5)
    after = Counts(tokens={"computed": 30, "disk": 4}, load_bytes=9)
    assert difference(after, before) == Counts(tokens={"computed": 20, "disk": 4}, load_bytes=4)
    assert difference(before, after) is None


def edge(at_s, **values):
    return Edge(at_s=at_s, wall_s=at_s, counts=Counts(), host=HostCounters(), **values)


def test_windows_tell_device_bytes_apart_from_foreign_ones():
    begin, end = edge(1.0, process_bytes=(100, 0)), edge(3.0, process_bytes=(600, 0))
    window = Window(run=0, round="R2", arm="a", role="tier", attempt=0, begin=begin, end=end)
    assert (window.span_s, window.device_read_bytes()) == (2.0, 500)
    line = msgspec.json.encode(window)
    assert list(decode_windows([line, line[:-5]])) == [window]
    with pytest.raises(ConfigError):
        list(decode_windows([line[:-5], line]))
    assert compile_lines(b"ok\nCapturing CUDA graphs\n") == ("Capturing CUDA graphs",)
    assert load_figures([], [], preset("quick")) == []


def test_this_host_says_something(tmp_path):
    found = host_counters(tmp_path)
    assert found.load_average is not None
    assert found.cpu_busy_s is not None
    assert environment()["cores"]
    assert device_of(tmp_path / "not" / "there") == device_of(tmp_path)
    moved = process_bytes(os.getpid())
    assert moved is not None
    assert HostProbe().process(None) is None
    assert HostProbe().residency("") is None
    assert HostProbe().log("") == b""
    path = tmp_path / "file"
    path.write_bytes(os.urandom(1 << 20))
    assert page_residency(tmp_path) == 1.0
    drop_cached_pages(tmp_path, "*")
    # a file system in memory keeps its pages
    assert page_residency(tmp_path) in (0.0, 1.0)
    assert page_residency(tmp_path / "none") is None


def test_a_result_folder(tmp_path):
    with ResultFolder(tmp_path / "out") as folder:
        folder.append("rows", b"one")
        with (tmp_path / "out" / "rows").open("ab") as file:
            file.write(b"cut o")
    with ResultFolder(tmp_path / "out") as folder:
        folder.append("rows", b"two")
        assert folder.lines("rows") == [b"one", b"cut o", b"two"]
        folder.write("whole", b"x")
        assert folder.read("whole") == b"x"
        assert folder.read("none") is None
        assert folder.lines("none") == []
        assert folder.sub_folder("logs").is_dir()
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(ConfigError, match="cannot write"):
        ResultFolder(tmp_path / "file")


_SERVER = """
import sys, time
from kvdepot.testing.fakeserver import FakeServer
server = FakeServer()
loop_create = server._loop.create_server
server._loop.create_server = lambda make, host, port: loop_create(make, host, int(sys.argv[1]))
print("hello from", sys.argv[2], flush=True)
with server:
    time.sleep(60)
"""


def test_a_command_is_started_waited_for_and_ended(tmp_path):
    arm = Arm(
        name="a",
        role="tier",
        command=(sys.executable, "-c", _SERVER, "{port}", "{pool}"),
        pool=str(tmp_path),
        ready_s=30,
    )
    launcher = CommandLauncher(tmp_path, ask_person=None, clock=SystemClock())
    try:
        running = launcher.start(arm, is_fresh=True)
        assert running.is_new
        assert b"hello from " + str(tmp_path).encode() in read_whole(running.log)
        assert not launcher.start(arm, is_fresh=False).is_new
        again = launcher.start(arm, is_fresh=True)
        assert again.pid != running.pid
    finally:
        launcher.stop()
    assert again.pid is not None
    with pytest.raises(ProcessLookupError):
        os.kill(again.pid, 0)


def test_a_command_that_ends_says_why(tmp_path):
    launcher = CommandLauncher(tmp_path, ask_person=None, clock=SystemClock())
    code = "import sys; print('no such model'); sys.exit(3)"
    arm = Arm(name="a", role="tier", command=(sys.executable, "-c", code))
    with pytest.raises(KvdepotError, match="ended with status 3: no such model"):
        launcher.start(arm, is_fresh=True)
    with pytest.raises(ConfigError, match="No such file"):
        launcher.start(Arm(name="a", role="tier", command=("/no/such",)), is_fresh=True)


def test_an_engine_that_is_started_by_hand(tmp_path):
    asked: list[str] = []
    with FakeServer() as server:
        arm = Arm(name="a", role="tier", url=server.url, is_started_by_hand=True)
        launcher = CommandLauncher(tmp_path, ask_person=asked.append, clock=SystemClock())
        assert launcher.start(arm, is_fresh=True).is_new
        there = Arm(name="b", role="tier", url=server.url + "/")
        assert not launcher.start(there, is_fresh=True).is_new
        launcher.stop()
        with pytest.raises(ConfigError, match="no terminal"):
            CommandLauncher(tmp_path, ask_person=None, clock=SystemClock()).start(
                arm, is_fresh=True
            )

        async def counts(client):
            return await settled_counts(client)

        assert with_client(server.url, counts).tokens == {}
    assert len(asked) == 1


def test_every_path_has_an_arm_of_its_own():
    paths = {"nvme": "/n", "s3": "s3://bucket/kv"}
    arms = embedded_arms(model="m", pool="/p", host_bytes=1, paths=paths)
    tiers = {arm.name: arm for arm in arms if arm.role == "tier"}
    assert list(tiers) == ["kvdepot", "kvdepot-nvme", "kvdepot-s3"]
    # what is not on this host has neither pages nor a device here
    assert [arm.pool for arm in tiers.values()] == ["/p", "/n", ""]
    assert '"pool":["s3://bucket/kv"]' in tiers["kvdepot-s3"].command[-1]
    arms = vllm_arms(
        model="m", serve=["vllm"], pool="/p", fs_pool="", host_bytes=7, fs_spec={}, paths=paths
    )
    assert [arm.name for arm in arms] == ["recompute", *tiers]
    assert [arm.command[arm.command.index("--pool") + 1] for arm in arms[1:]] == [
        "/p", "/n", "s3://bucket/kv",
    ]  # fmt: skip


def test_the_usual_arms():
    recompute, tier, memory = embedded_arms(model="m", pool="/p", host_bytes=1)
    assert "pool" not in recompute.command[-1]
    assert '"memory_only":true' in memory.command[-1]
    assert tier.command[-1].replace("{port}", "80").endswith('"port":80}')
    msgspec.json.decode(tier.command[-1].replace("{port}", "80"))
    spec = {"spec_name": "S"}
    arms = vllm_arms(
        model="m", serve=["vllm", "m"], pool="/p", fs_pool="/f", host_bytes=7, fs_spec=spec,
        arguments=["--dtype", "float32"], environment={"A": "1"},
    )  # fmt: skip
    assert [arm.name for arm in arms] == ["recompute", "kvdepot", "vllm-fs"]
    # all with the same arguments, and the account of cached tokens on
    for arm in arms:
        assert {"--dtype", "float32", "--enable-prompt-tokens-details"} <= set(arm.command)
        assert arm.environment == {"A": "1"}
    assert '"root_dir":"/f"' in arms[2].command[-1]
    (only,) = url_arms(
        url="http://h:1/v1/", recompute_url="", model="", pool="", is_by_hand=False, salt="nonce"
    )
    assert (only.url, only.salt) == ("http://h:1", "nonce")
    with pytest.raises(ConfigError, match="salt"):
        url_arms(url="u", recompute_url="", model="", pool="", is_by_hand=False, salt="x")
    arms = read_arms(b'[[arms]]\nname = "a"\nrole = "tier"\ncommand = ["x"]', "arms.toml")
    assert arms == [Arm(name="a", role="tier", command=("x",))]
    with pytest.raises(ConfigError, match="two of one name"):
        read_arms(b"arms = []", "arms.toml")
    with pytest.raises(ConfigError, match="colour"):
        read_arms(b'[[arms]]\nname = "a"\nrole = "tier"\ncolour = 1', "arms.toml")
