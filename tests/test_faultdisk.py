"""The misbehaving disk does what its plan says, to the calls that the plan chose, and counts them.

Covers kvdepot.testing.faults, kvdepot.testing.faultplan, kvdepot.testing.damage and the clock.
"""

from __future__ import annotations

import errno
import signal
import threading
import time
from types import SimpleNamespace

import pytest

from kvdepot.errors import PoolDenied, PoolFull, PoolUnavailable
from kvdepot.testing.damage import DAMAGES, Spot
from kvdepot.testing.faults import DEATH_POINTS, FaultDisk, FaultPlan, dying_disk
from kvdepot.testing.simclock import FakeClock
from kvdepot.testing.simdisk import SimDisk
from tests.children import run_python


def view(data: bytes) -> memoryview:
    return memoryview(bytearray(data))


@pytest.fixture
def rig():
    inner = SimDisk()
    inner.plant("file", bytes(range(200)))
    plan = FaultPlan(seed=1)
    return SimpleNamespace(inner=inner, plan=plan, disk=FaultDisk(inner, plan))


# errors


@pytest.mark.parametrize(
    ("code", "error"),
    [
        (errno.EIO, PoolUnavailable),
        (errno.ESTALE, PoolUnavailable),
        (errno.ENOSPC, PoolFull),
        (errno.EDQUOT, PoolFull),
        (errno.EACCES, PoolDenied),
        (errno.EROFS, PoolDenied),
    ],
)
def test_an_errno_arrives_as_the_pool_error_it_means(rig, code, error):
    rig.plan.fail("open", code)
    with pytest.raises(error, match=errno.errorcode[code]):
        rig.disk.open("file")


@pytest.mark.parametrize(
    ("verb", "call"),
    [
        ("create", lambda d: d.create("new", 0)),
        ("open", lambda d: d.open("file")),
        ("read_small", lambda d: d.read_small("file")),
        ("publish", lambda d: d.publish("file", "other")),
        ("remove", lambda d: d.remove("file")),
        ("files", lambda d: d.files(".")),
        ("touch", lambda d: d.touch("file")),
        ("space", lambda d: d.space()),
        ("lock", lambda d: d.lock("lock", b"")),
        ("read", lambda d: d.open("file").read(0, [view(b"..")])),
        ("write", lambda d: d.open("file").write(0, [view(b"..")])),
        ("truncate", lambda d: d.open("file").truncate(1)),
        ("sync", lambda d: d.open("file").sync()),
        ("beat", lambda d: d.lock("lock", b"").beat(b"x")),
        ("release", lambda d: d.lock("lock", b"").release()),
    ],
)
def test_every_verb_can_fail_leaves_all_as_it_was_and_is_counted(rig, verb, call):
    rig.plan.fail(verb)
    before = rig.inner.content("file")
    with pytest.raises(PoolUnavailable):
        call(rig.disk)
    assert rig.plan.counts[verb] == 1
    assert rig.inner.content("file") == before
    assert "new" not in rig.inner.names()
    rig.plan.clear()
    # a new process: the lock that the first call took went with the old one
    rig.inner.kill()
    call(FaultDisk(rig.inner.attach(), rig.plan))
    assert rig.plan.counts[verb] == 2


def test_only_the_nth_call_fails(rig):
    rig.plan.fail("touch", at=3)
    results = []
    for _ in range(5):
        try:
            results.append(rig.disk.touch("file"))
        except PoolUnavailable:
            results.append("failed")
    assert results == [True, True, "failed", True, True]


def test_a_predicate_chooses_and_at_counts_what_it_chose(rig):
    rig.inner.plant("other", b"")
    rig.plan.fail("touch", at=2, when=lambda call: call.name == "other")
    assert rig.disk.touch("file")
    assert rig.disk.touch("other")
    assert rig.disk.touch("file")
    with pytest.raises(PoolUnavailable):
        rig.disk.touch("other")
    assert rig.disk.touch("other")


def test_a_share_of_the_calls_fails_the_same_ones_for_the_same_seed():
    def run(seed):
        plan = FaultPlan(seed)
        disk = FaultDisk(SimDisk(), plan)
        plan.fail("touch", share=0.3)
        failed = []
        for step in range(500):
            try:
                disk.touch("file")
            except PoolUnavailable:
                failed.append(step)
        return failed

    assert run(7) == run(7) != run(8)
    assert 100 < len(run(7)) < 200


# bytes


def test_a_short_read_gives_half_and_a_short_write_leaves_half(rig):
    rig.plan.short("read")
    rig.plan.short("write", code=errno.EFBIG)
    file = rig.disk.open("file")
    first, second = view(b"." * 60), view(b"." * 60)
    assert file.read(0, [first, second]) == 60
    assert bytes(second) == b"." * 60
    with pytest.raises(PoolFull, match="EFBIG"):
        file.write(0, [view(b"w" * 10)])
    assert rig.inner.content("file")[:8] == b"wwwww\x05\x06\x07"


def test_flips_reach_every_part_and_not_the_file(rig):
    rig.plan.flip(at=2)
    file = rig.disk.open("file")
    parts = [view(b"." * 50), view(b"." * 50)]
    file.read(0, parts)
    assert b"".join(parts) == bytes(range(100))
    file.read(0, parts)
    assert b"".join(parts) == bytes([0x10, *range(1, 50), 50 ^ 0x10, *range(51, 100)])
    file.read(0, parts)
    assert b"".join(parts) == bytes(range(100))
    assert rig.plan.bytes_moved == {"read": 300}


# time


def test_a_delayed_call_takes_that_long(rig):
    rig.plan.delay("touch", 0.05)
    start_s = time.monotonic()
    rig.disk.touch("file")
    assert time.monotonic() - start_s >= 0.05


def test_a_throttle_holds_for_all_readers_together(rig):
    rig.plan.throttle("read", 2_000)
    threads = [
        threading.Thread(target=lambda: rig.disk.open("file").read(0, [view(b"." * 100)]))
        for _ in range(4)
    ]
    start_s = time.monotonic()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert time.monotonic() - start_s >= 0.2


def test_a_held_call_waits_for_the_barrier(rig):
    barrier = rig.plan.hold("remove")
    thread = threading.Thread(target=rig.disk.remove, args=("file",))
    thread.start()
    assert barrier.wait_reached(60)
    assert "file" in rig.inner.names()
    assert not barrier.wait_reached(0.01)
    barrier.open()
    thread.join(60)
    assert "file" not in rig.inner.names()


def test_clear_lets_held_calls_go(rig):
    barrier = rig.plan.hold("remove")
    thread = threading.Thread(target=rig.disk.remove, args=("file",))
    thread.start()
    assert barrier.wait_reached(60)
    rig.plan.clear()
    thread.join(60)
    assert not thread.is_alive()


def test_actions_run_before_half_way_and_after(rig):
    seen = []
    for phase in ("before", "half", "after"):
        rig.plan.act(
            "write",
            lambda call, phase=phase: seen.append((phase, rig.inner.content("file")[:4])),
            phase=phase,
        )
    rig.disk.open("file").write(0, [view(b"wwww")])
    assert seen == [
        ("before", b"\x00\x01\x02\x03"),
        ("half", b"ww\x02\x03"),
        ("after", b"wwww"),
    ]


# death

WRITER = """
import sys
from kvdepot.testing.faults import dying_disk
disk = dying_disk(sys.argv[1], sys.argv[2], nth=int(sys.argv[3]), direct="off")
for name in ("one", "two"):
    lock = disk.lock("lease/" + name, b"alive")
    file = disk.create("tmp/" + name, 8192)
    file.write(0, [memoryview(bytes([65]) * 8192)])
    file.truncate(8000)
    file.sync()
    file.close()
    disk.publish("tmp/" + name, "ns/" + name)
    disk.touch("ns/" + name)
    lock.beat(b"still")
    disk.remove("ns/" + name)
    lock.release()
print("survived")
"""

#: what is left of one/two after dying at the first call of each point
LEFT = {
    "lock:before": set(),
    "lock:after": {"lease/one"},
    "create:before": {"lease/one"},
    "create:after": {"lease/one", "tmp/one:8192:0"},
    "write:before": {"lease/one", "tmp/one:8192:0"},
    "write:half": {"lease/one", "tmp/one:8192:4096"},
    "write:after": {"lease/one", "tmp/one:8192:8192"},
    "truncate:before": {"lease/one", "tmp/one:8192:8192"},
    "truncate:after": {"lease/one", "tmp/one:8000:8000"},
    "sync:before": {"lease/one", "tmp/one:8000:8000"},
    "sync:after": {"lease/one", "tmp/one:8000:8000"},
    "publish:before": {"lease/one", "tmp/one:8000:8000"},
    "publish:linked": {"lease/one", "tmp/one:8000:8000", "ns/one:8000:8000"},
    "publish:after": {"lease/one", "ns/one:8000:8000"},
    "touch:before": {"lease/one", "ns/one:8000:8000"},
    "touch:after": {"lease/one", "ns/one:8000:8000"},
    "beat:before": {"lease/one", "ns/one:8000:8000"},
    "beat:after": {"lease/one", "ns/one:8000:8000"},
    "remove:before": {"lease/one", "ns/one:8000:8000"},
    "remove:after": {"lease/one"},
    "release:before": {"lease/one"},
    "release:after": set(),
}


def left(root):
    found = set()
    for path in root.rglob("*"):
        if path.is_file():
            name = str(path.relative_to(root))
            content = path.read_bytes()
            is_lock = name.startswith("lease/")
            found.add(name if is_lock else f"{name}:{len(content)}:{content.count(b'A')}")
    return found


def test_every_point_has_an_expectation():
    assert set(LEFT) == set(DEATH_POINTS)


@pytest.mark.parametrize("point", DEATH_POINTS)
def test_a_process_dies_for_real_at_the_point(tmp_path, point):
    root = tmp_path / "root"
    child = run_python(WRITER, str(root), point, "1")
    assert (child.returncode, child.stdout) == (-signal.SIGKILL, ""), child.stderr
    assert left(root) == LEFT[point]


def test_nth_chooses_a_later_call(tmp_path):
    root = tmp_path / "root"
    child = run_python(WRITER, str(root), "publish:linked", "2")
    assert child.returncode == -signal.SIGKILL
    assert left(root) == {"lease/two", "tmp/two:8000:8000", "ns/two:8000:8000"}


def test_a_point_that_is_never_reached_kills_nobody(tmp_path):
    child = run_python(WRITER, str(tmp_path / "root"), "publish:linked", "3")
    assert (child.returncode, child.stdout) == (0, "survived\n")


def test_an_unknown_point_is_refused(tmp_path):
    with pytest.raises(ValueError, match="no such point to die at: fork:before"):
        dying_disk(tmp_path, "fork:before")


# damage

CONTENT = bytes(range(1, 251))
AFTER = {
    "truncate": b"",
    "remove_byte": CONTENT[:-1],
    "add_byte": CONTENT + b"\x5a",
    "flip_byte": CONTENT[:40] + bytes([CONTENT[40] ^ 0xFF]) + CONTENT[41:],
    "swap": b"other file",
    "zero_fill": CONTENT[:40] + bytes(16) + CONTENT[56:],
}


def test_there_are_nine_damages():
    assert len({damage.name for damage in DAMAGES}) == len(DAMAGES) == 9


@pytest.mark.parametrize("damage", DAMAGES, ids=lambda damage: damage.name)
def test_each_damage_changes_the_file_as_named(tmp_path, damage):
    path, other = tmp_path / "file", tmp_path / "other"
    path.write_bytes(CONTENT)
    other.write_bytes(b"other file")
    damage.apply(path, Spot(offset=40, length_bytes=16, other=other))
    if damage.name in AFTER:
        assert path.read_bytes() == AFTER[damage.name]
    elif damage.name == "make_folder":
        assert path.is_dir()
    elif damage.name == "make_dangling":
        assert path.is_symlink()
        assert not path.exists()
    else:
        assert damage.name == "make_unreadable"
        assert path.stat().st_mode & 0o777 == 0
    assert other.read_bytes() == (CONTENT if damage.name == "swap" else b"other file")
    assert {entry.name for entry in tmp_path.iterdir()} == {"file", "other"}


def test_damages_refuse_to_do_nothing(tmp_path):
    path = tmp_path / "file"
    path.write_bytes(bytes(100))
    by_name = {damage.name: damage for damage in DAMAGES}
    with pytest.raises(ValueError, match="no bytes to zero"):
        by_name["zero_fill"].apply(path, Spot(10, 10, path))
    with pytest.raises(ValueError, match="no byte 100"):
        by_name["flip_byte"].apply(path, Spot(100, 1, path))


# the clock


def test_the_faces_of_the_clock_move_independently():
    clock = FakeClock(10.0, 500.0)
    clock.advance(1.5)
    assert (clock.monotonic_s(), clock.wall_s()) == (11.5, 501.5)
    clock.jump_wall(-300)
    assert (clock.monotonic_s(), clock.wall_s()) == (11.5, 201.5)
    clock.set_wall(7.0)
    assert (clock.monotonic_s(), clock.wall_s()) == (11.5, 7.0)
    with pytest.raises(ValueError, match="cannot pass backwards"):
        clock.advance(-1)


def test_a_running_clock_advances_by_itself():
    clock = FakeClock(10.0, 500.0, is_running=True)
    clock.jump_wall(1_000)
    start_s, wall_s = clock.monotonic_s(), clock.wall_s()
    time.sleep(0.02)
    assert 10.0 <= start_s < clock.monotonic_s() < 20.0
    assert 1_500.0 <= wall_s < clock.wall_s() < 1_510.0
