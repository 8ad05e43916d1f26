"""Storage that refuses: another user's, read-only, tiny, out of inodes, limited, or full in mid-write.

Each time: loads are served where they can be, stores are dropped where they must be, nobody sees an
exception, nothing is left in tmp, and the pool works again once the storage does.
"""

from __future__ import annotations

import errno
import os
import subprocess
from contextlib import contextmanager
from pathlib import Path

import pytest

from kvdepot.errors import PoolDenied
from kvdepot.io.localdisk import LocalDisk
from kvdepot.pool.tier import PoolTier
from kvdepot.testing.faults import FaultDisk, FaultPlan
from kvdepot.testing.toy import ToyEngine
from kvdepot.tiers import Outcome
from kvdepot.units import KIB, MIB
from tests.children import run_python
from tests.pool_rig import ask, pool_config, put, segment_files, tmp_files
from tests.tries import eventually

DONE, MISS, DROPPED, FAILED = Outcome.DONE, Outcome.MISS, Outcome.DROPPED, Outcome.FAILED
NOBODY = 65534


@pytest.fixture
def engine():
    return ToyEngine((4096,))


def filled(root, engine, *, prompts=4, **settings):
    """A pool of a few prompts, closed."""
    with PoolTier.open(pool_config(root, **settings), engine.identity) as tier:
        for seed in range(prompts):
            assert set(put(tier, engine, engine.prompt(seed, 6))) == {DONE}


# permissions

CHILD = """
import os, sys
from kvdepot.errors import KvdepotError
from kvdepot.pool.tier import PoolTier
from kvdepot.testing.toy import ToyEngine
from tests.pool_rig import ask, pool_config, put

def names(outcomes):
    return "+".join(sorted({outcome.name for outcome in outcomes}))

root, read_only = sys.argv[1], sys.argv[2] == "ro"
import encodings.ascii  # nobody may not be able to read the interpreter's own files
os.setgroups([])
os.setgid(65534)
os.setuid(65534)
engine = ToyEngine((4096,))
try:
    tier = PoolTier.open(pool_config(root, read_only=read_only, lease_s=0.1), engine.identity)
except KvdepotError as error:
    print("refused", type(error).__name__)
    sys.exit()
with tier:
    loads = [names(ask(tier, engine, engine.prompt(seed, 6))) for seed in range(4)]
    stored = names(put(tier, engine, engine.prompt(9, 6)))
    tier.tick()
print(",".join(loads), stored)
"""


@pytest.fixture
def shared(engine):
    """A pool that belongs to root in a folder that everybody can reach."""
    if os.geteuid() != 0:
        pytest.skip("needs to change users")
    folder = Path(subprocess.check_output(["mktemp", "-d"], text=True).strip())
    folder.chmod(0o755)
    filled(folder / "pool", engine, segment_bytes=64 * KIB)
    yield folder / "pool"
    subprocess.check_call(["rm", "-rf", str(folder)])


def as_nobody(root, mode="rw"):
    child = run_python(CHILD, str(root), mode)
    assert child.returncode == 0, child.stderr
    assert "Traceback" not in child.stderr
    return child.stdout.strip()


@pytest.mark.root
def test_a_pool_of_another_user_can_be_read_but_not_written(shared):
    assert as_nobody(shared) == "refused PoolDenied"
    assert as_nobody(shared, "ro") == "DONE,DONE,DONE,DONE DROPPED"


@pytest.mark.root
def test_a_segment_without_permissions_is_a_miss_and_the_others_are_served(shared):
    segment_files(shared)[1].chmod(0)
    loads, stored = as_nobody(shared, "ro").split()
    assert sorted(loads.split(",")) == ["DONE", "DONE", "DONE", "MISS"]
    assert stored == "DROPPED"


@pytest.mark.root
@pytest.mark.parametrize("name", ["", "ns", "pool.json"])
def test_what_may_not_be_entered_is_refused(shared, name):
    (shared / name).chmod(0)
    assert as_nobody(shared, "ro") == "refused PoolDenied"
    assert as_nobody(shared) == "refused PoolDenied"


@pytest.mark.root
@pytest.mark.parametrize("name", ["ns/*", "tmp"])
def test_a_folder_that_may_not_be_written_stops_stores_only(shared, name):
    for path in [shared, *shared.rglob("*")]:
        os.chown(path, NOBODY, NOBODY)
    for path in shared.glob(name):
        for folder in [path, *path.glob("*")]:
            if folder.is_dir():
                folder.chmod(0o555)
    loads, stored = as_nobody(shared).split()
    assert loads == "DONE,DONE,DONE,DONE"
    assert stored in ("DROPPED", "FAILED", "DONE")
    assert tmp_files(shared) == []


# file systems: small, read-only, limited


@contextmanager
def mounted(folder, options):
    """A tmpfs of its own, or a skip where that may not be."""
    folder.mkdir()
    made = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(folder)],
        capture_output=True,
        text=True,
        check=False,
    )
    if made.returncode:
        pytest.skip(f"tmpfs cannot be mounted here: {made.stderr.strip()}")
    try:
        yield folder
    finally:
        subprocess.check_call(["umount", "-l", str(folder)])


@pytest.mark.root
@pytest.mark.parametrize(
    "settings",
    [
        {"capacity_bytes": 64 * MIB, "segment_bytes": 64 * KIB},
        {"capacity_bytes": None, "segment_bytes": 64 * KIB},
        {"capacity_bytes": 64 * MIB, "segment_bytes": MIB},
        {"capacity_bytes": 64 * MIB, "segment_bytes": 64 * KIB, "free_bytes_min": 256 * KIB},
    ],
    ids=["capacity-lies", "defaults", "segment-as-large-as-the-disk", "floor"],
)
def test_a_file_system_of_one_mebibyte(tmp_path, engine, settings):
    with mounted(tmp_path / "small", "size=1m") as folder:
        root = folder / "pool"
        with PoolTier.open(pool_config(root, **settings), engine.identity) as tier:
            free_min = settings.get("free_bytes_min", 0)
            for seed in range(60):
                outcomes = put(tier, engine, engine.prompt(seed, 12))
                assert set(outcomes) <= {DONE, DROPPED, FAILED}
                ask(tier, engine, engine.prompt(seed, 12))
                status = os.statvfs(folder)
                assert status.f_bavail * status.f_frsize >= free_min
            served = sum(tier.lookup(engine.keys(engine.prompt(seed, 12))) for seed in range(60))
            if settings["segment_bytes"] < MIB:
                assert served > 24, "a small disk must hold something"
        assert tmp_files(root) == []
        with PoolTier.open(pool_config(root, **settings), engine.identity) as tier:
            for seed in range(60):
                ask(tier, engine, engine.prompt(seed, 12))


@pytest.mark.root
def test_a_file_system_of_32_inodes(tmp_path, engine):
    with mounted(tmp_path / "small", "size=64m,nr_inodes=32") as folder:
        root = folder / "pool"
        config = pool_config(root, segment_bytes=64 * KIB, free_inodes_min=2)
        with PoolTier.open(config, engine.identity) as tier:
            for seed in range(80):
                assert set(put(tier, engine, engine.prompt(seed, 12))) <= {DONE, DROPPED, FAILED}
                assert os.statvfs(folder).f_favail >= 1
            fresh = [engine.prompt(seed, 12) for seed in range(75, 80)]
            assert sum(set(ask(tier, engine, tokens)) == {DONE} for tokens in fresh) >= 4
            assert tier.counters.snapshot()["segments_evicted_total"] > 40
        assert tmp_files(root) == []


@pytest.mark.root
def test_a_disk_that_others_fill_is_given_back(tmp_path, engine):
    """The floor holds against other programs too: the pool shrinks when they take the space."""
    with mounted(tmp_path / "small", "size=4m") as folder:
        config = pool_config(
            folder / "pool", capacity_bytes=3 * MIB, segment_bytes=64 * KIB, free_bytes_min=512 * KIB,
            lease_s=0.1, discover_interval_s=0.02,
        )  # fmt: skip
        with PoolTier.open(config, engine.identity) as tier:
            for seed in range(40):
                put(tier, engine, engine.prompt(seed, 14))
            assert tier.usage().used_bytes > 2 * MIB
            status = os.statvfs(folder)
            room = status.f_bavail * status.f_frsize - 128 * KIB
            assert room > 0
            (folder / "other program").write_bytes(bytes(room))

            def is_given_back():
                status = os.statvfs(folder)
                return status.f_bavail * status.f_frsize >= 512 * KIB

            assert eventually(is_given_back)
            assert tier.usage().used_bytes > MIB
            assert set(put(tier, engine, engine.prompt(99, 6))) == {DONE}


@pytest.mark.root
def test_a_read_only_file_system(tmp_path, engine):
    with mounted(tmp_path / "disk", "size=16m") as folder:
        root = folder / "pool"
        filled(root, engine)
        subprocess.check_call(["mount", "-o", "remount,ro", str(folder)])
        with pytest.raises(PoolDenied, match="EROFS"):
            PoolTier.open(pool_config(root), engine.identity)
        with PoolTier.open(pool_config(root, read_only=True), engine.identity) as reader:
            assert set(ask(reader, engine, engine.prompt(1, 6))) == {DONE}
            assert set(put(reader, engine, engine.prompt(9, 6))) == {DROPPED}
            reader.tick()
        subprocess.check_call(["mount", "-o", "remount,rw", str(folder)])
        with PoolTier.open(pool_config(root), engine.identity) as tier:
            assert set(put(tier, engine, engine.prompt(9, 6))) == {DONE}


@pytest.mark.parametrize("code", [errno.EROFS, errno.EIO, errno.ENOSPC, errno.EDQUOT, errno.EACCES])
def test_storage_that_refuses_all_changes_for_a_while(tmp_path, engine, code):
    root = tmp_path / "pool"
    filled(root, engine)
    plan = FaultPlan()
    disk = FaultDisk(LocalDisk(root), plan)
    with PoolTier.open(pool_config(root), engine.identity, disks=[disk]) as tier:
        for verb in ("create", "write", "truncate", "publish", "remove", "touch", "lock", "beat"):
            plan.fail(verb, code)
        assert set(ask(tier, engine, engine.prompt(0, 6))) == {DONE}
        assert set(put(tier, engine, engine.prompt(9, 6))) <= {DROPPED, FAILED}
        tier.tick()
        assert set(ask(tier, engine, engine.prompt(1, 6))) == {DONE}
        plan.clear()
        # a root that refused is left alone for a second
        assert eventually(lambda: set(put(tier, engine, engine.prompt(9, 6))) == {DONE})
        assert set(ask(tier, engine, engine.prompt(9, 6))) == {DONE}
    assert tmp_files(root) == []


LIMITED = """
import resource, sys
from kvdepot.pool.tier import PoolTier
from kvdepot.testing.toy import ToyEngine
from tests.pool_rig import ask, pool_config, put

engine = ToyEngine((4096,))
tier = PoolTier.open(pool_config(sys.argv[1]), engine.identity)
resource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv[2]), resource.RLIM_INFINITY))
with tier:
    outcomes = put(tier, engine, engine.prompt(9, 12))
    loads = ask(tier, engine, engine.prompt(0, 6))
print("+".join(sorted({o.name for o in outcomes})), "+".join(sorted({o.name for o in loads})))
"""


@pytest.mark.parametrize(
    ("limit", "stored"), [(0, "DROPPED"), (4096, "DROPPED"), (64 * KIB, "DROPPED"), (MIB, "DONE")]
)
def test_a_file_size_limit_drops_stores_and_serves_loads(tmp_path, engine, limit, stored):
    root = tmp_path / "pool"
    filled(root, engine)
    before = segment_files(root)
    child = run_python(LIMITED, str(root), str(limit))
    assert child.returncode == 0, child.stderr
    assert child.stdout.split() == [stored, "DONE"]
    assert tmp_files(root) == []
    assert len(segment_files(root)) == len(before) + (stored == "DONE")


def test_a_full_disk_in_the_middle_of_a_segment(tmp_path, engine):
    """ENOSPC at each write of a segment's life in turn; torn bytes are never published."""
    root = tmp_path / "pool"
    for at in range(1, 5):
        plan = FaultPlan()
        disk = FaultDisk(LocalDisk(root), plan)
        with PoolTier.open(pool_config(root), engine.identity, disks=[disk]) as tier:
            plan.short("write", at=at, code=errno.ENOSPC)
            tokens = engine.prompt(at, 6)
            assert set(put(tier, engine, tokens)) <= {DONE, DROPPED, FAILED}
            plan.clear()
            ask(tier, engine, tokens)
        assert tmp_files(root) == []
        with PoolTier.open(pool_config(root), engine.identity) as tier:
            ask(tier, engine, tokens)
            assert set(put(tier, engine, tokens)) == {DONE}
            assert set(ask(tier, engine, tokens)) == {DONE}
