"""The simulated disk: the verbs answer as `Disk` says, and crashes leave plausible images only.

Covers kvdepot.testing.simdisk and, through it, kvdepot.testing.simmedia.
"""

from __future__ import annotations

import threading
import time

import pytest

from kvdepot.errors import PoolDenied, PoolFull, PoolUnavailable
from kvdepot.io.localdisk import LocalDisk
from kvdepot.testing.faults import FaultDisk, FaultPlan
from kvdepot.testing.simclock import FakeClock
from kvdepot.testing.simdisk import CRASH_PHASES, SimDisk, SimulatedCrash

PAGE = 4096


def view(data: bytes) -> memoryview:
    return memoryview(bytearray(data))


def opened(disk, name):
    file = disk.open(name)
    assert file is not None
    return file


def put(disk, name, data=b"x" * 100):
    file = disk.create(name, 0)
    file.write(0, [view(data)])
    file.close()
    return file


# what every Disk answers; the real one and the wrapped one are asked the same


@pytest.fixture(params=["sim", "local", "fault"])
def disk(request, tmp_path):
    if request.param == "sim":
        return SimDisk()
    local = LocalDisk(tmp_path / "root", direct="off")
    return local if request.param == "local" else FaultDisk(local, FaultPlan())


def test_a_file_holds_what_was_written_in_parts(disk):
    file = disk.create("a/b/file", 10_000)
    assert file.length_bytes == 10_000
    file.write(5, [view(b"one"), view(b""), view(b"two")])
    file.truncate(9)
    file.sync()
    file.close()
    assert disk.read_small("a/b/file") == b"\0" * 5 + b"onet"
    again = disk.open("a/b/file")
    first, second = view(b"...."), view(b"........")
    assert again.read(4, [first, second]) == 5
    assert (bytes(first), bytes(second)) == (b"\0one", b"t.......")
    assert again.read(100, [first]) == 0
    again.close()
    again.close()


def test_absence_is_a_value(disk):
    assert disk.open("no") is None
    assert disk.read_small("no") is None
    assert disk.touch("no") is False
    assert disk.remove("no") is False
    assert disk.files("no") == []
    put(disk, "folder/file")
    assert disk.open("folder") is None


def test_create_refuses_a_taken_name_and_a_file_as_folder(disk):
    put(disk, "taken")
    with pytest.raises(PoolDenied):
        disk.create("taken", 0)
    with pytest.raises(PoolDenied):
        disk.create("taken/inside", 0)


def test_publish_moves_once_and_never_over_another(disk):
    put(disk, "tmp/one", b"1")
    put(disk, "tmp/two", b"2")
    assert disk.publish("tmp/one", "ns/x/final") is True
    assert disk.publish("tmp/two", "ns/x/final") is False
    assert disk.read_small("ns/x/final") == b"1"
    assert disk.read_small("tmp/two") == b"2"
    assert disk.read_small("tmp/one") is None
    with pytest.raises(PoolUnavailable):
        disk.publish("tmp/one", "elsewhere")


def test_remove_takes_files_and_empty_folders_only(disk):
    put(disk, "folder/file")
    assert disk.remove("folder") is False
    assert disk.remove("folder/file") is True
    assert disk.remove("folder") is True
    assert disk.files(".") == []


def test_files_lists_one_level(disk):
    put(disk, "folder/file", b"12345")
    put(disk, "folder/deeper/other")
    found = {info.name: info for info in disk.files("folder")}
    assert set(found) == {"file", "deeper"}
    assert (found["file"].length_bytes, found["file"].is_regular) == (5, True)
    assert (found["deeper"].is_folder, found["deeper"].is_regular) == (True, False)
    assert found["file"].inode != 0


def test_an_open_file_outlives_its_name(disk):
    put(disk, "file", b"old")
    file = opened(disk, "file")
    disk.remove("file")
    put(disk, "file", b"new")
    row = view(b"...")
    assert file.read(0, [row]) == 3
    assert bytes(row) == b"old"
    file.close()


def test_read_small_refuses_a_large_file(disk):
    put(disk, "file", b"12345")
    with pytest.raises(PoolDenied):
        disk.read_small("file", 4)


def test_a_lock_is_held_once_and_shows_its_text(disk):
    lock = disk.lock("lease/w", b"first text")
    assert disk.read_small("lease/w") == b"first text"
    assert disk.lock("lease/w", b"other") is None
    lock.beat(b"second")
    assert disk.read_small("lease/w") == b"second"
    lock.release()
    lock.release()
    assert disk.read_small("lease/w") is None
    again = disk.lock("lease/w", b"third")
    assert again is not None
    again.release()


def test_touch_moves_the_time_forward(disk):
    put(disk, "file")
    before = disk.files(".")[0].mtime_ns
    assert disk.touch("file") is True
    assert disk.files(".")[0].mtime_ns >= before


def test_a_folders_time_moves_when_its_entries_do(disk):
    def mtime_ns():
        return next(info.mtime_ns for info in disk.files(".") if info.name == "folder")

    put(disk, "folder/file")
    times = [mtime_ns()]
    for change in (
        lambda: put(disk, "folder/other"),
        lambda: disk.publish("folder/other", "folder/final"),
        lambda: disk.remove("folder/final"),
        lambda: disk.create("folder/deeper/file", 0).close(),
    ):
        time.sleep(0.02)  # longer than a tick of the file system's clock
        change()
        times.append(mtime_ns())
    assert times == sorted(set(times))


# limits, clock and counts


def test_capacity_is_a_limit():
    disk = SimDisk(capacity_bytes=4 * PAGE)
    file = disk.create("one", 3 * PAGE)
    assert disk.space().free_bytes == PAGE
    with pytest.raises(PoolFull):
        disk.create("two", 2 * PAGE)
    assert disk.names() == ["one"]
    file.write(3 * PAGE, [view(b"x" * PAGE)])
    with pytest.raises(PoolFull):
        file.write(4 * PAGE, [view(b"x")])
    disk.remove("one")
    assert disk.space().free_bytes == 4 * PAGE


def test_inodes_are_a_limit_and_folders_take_one_each():
    disk = SimDisk(inodes_max=4)
    put(disk, "a/b/file")
    assert disk.space().free_inodes == 1
    put(disk, "a/b/other")
    with pytest.raises(PoolFull):
        disk.create("a/b/third", 0)
    with pytest.raises(PoolFull):
        disk.lock("a/b/lock", b"")


def test_times_come_from_the_clock():
    clock = FakeClock(wall_s=100.0)
    disk = SimDisk(clock=clock)
    put(disk, "file")
    clock.jump_wall(-40)
    disk.touch("file")
    assert disk.files(".")[0].mtime_ns == 60 * 10**9


@pytest.mark.parametrize("name", ["../out", "/abs", "a//b", "a/./b", "a/..", "", "a\0b"])
def test_names_that_leave_the_root_are_the_callers_fault(name):
    with pytest.raises(AssertionError, match="outside the root"):
        SimDisk().open(name)


def test_calls_are_counted_by_verb():
    disk = SimDisk()
    put(disk, "file")
    disk.files(".")
    opened(disk, "file").read(0, [view(b"..")])
    assert disk.counts == {"create": 1, "write": 1, "files": 1, "open": 1, "read": 1}
    assert disk.mutations == 2


# dying


def script(disk):
    """A writer's life; at every call the whole past is known."""
    lock = disk.lock("lease/w", b"alive")
    file = disk.create("tmp/s", 2 * PAGE)
    file.write(0, [view(b"A" * 2 * PAGE)])
    file.truncate(2 * PAGE - 1)
    file.sync()
    disk.publish("tmp/s", "ns/s")
    disk.touch("ns/s")
    lock.beat(b"still alive")
    disk.remove("ns/s")
    lock.release()


def test_every_mutating_call_can_be_the_last():
    whole = SimDisk()
    script(whole)
    assert whole.mutations == 10
    for phase in CRASH_PHASES:
        for at in range(1, whole.mutations + 1):
            disk = SimDisk(crash_at=at, crash_phase=phase)
            with pytest.raises(SimulatedCrash, match=f"died {phase} call {at}"):
                script(disk)
            assert disk.is_dead
            frozen = {name: disk.content(name) for name in disk.names()}
            for call in (
                lambda: disk.create("late", 0),  # noqa: B023
                lambda: disk.remove("ns/s"),  # noqa: B023
                lambda: disk.files("."),  # noqa: B023
            ):
                with pytest.raises(SimulatedCrash):
                    call()
            assert {name: disk.content(name) for name in disk.names()} == frozen


@pytest.mark.parametrize(
    ("at", "phase", "content"),
    [
        (3, "before", {"tmp/s": bytes(2 * PAGE)}),
        (3, "half", {"tmp/s": b"A" * PAGE + bytes(PAGE)}),
        (3, "after", {"tmp/s": b"A" * 2 * PAGE}),
        (2, "half", {"tmp/s": b""}),
        (6, "before", {"tmp/s": b"A" * (2 * PAGE - 1)}),
        (6, "half", {"tmp/s": b"A" * (2 * PAGE - 1), "ns/s": b"A" * (2 * PAGE - 1)}),
        (6, "after", {"ns/s": b"A" * (2 * PAGE - 1)}),
    ],
)
def test_the_last_call_happens_as_far_as_the_phase_says(at, phase, content):
    disk = SimDisk(crash_at=at, crash_phase=phase)
    with pytest.raises(SimulatedCrash):
        script(disk)
    found = {name: disk.content(name) for name in disk.names() if name != "lease/w"}
    assert found == content


def test_after_kill_the_bytes_stay_and_the_locks_are_free():
    disk = SimDisk()
    other = disk.attach()
    lock = disk.lock("lease/w", b"first")
    assert lock is not None
    put(disk, "file", b"unsynced")
    assert other.lock("lease/w", b"second") is None
    disk.kill()
    with pytest.raises(SimulatedCrash):
        lock.beat(b"zombie")
    assert other.read_small("file") == b"unsynced"
    assert other.read_small("lease/w") == b"first"
    assert other.lock("lease/w", b"second") is not None


def test_a_dead_handle_does_not_stop_the_others():
    disk = SimDisk()
    other = disk.attach(crash_at=1)
    with pytest.raises(SimulatedCrash):
        other.create("file", 0)
    put(disk, "file")


# power loss


def images(disk, count=200):
    return [disk.crash(seed) for seed in range(count)]


def test_synced_bytes_under_settled_names_always_survive():
    disk = SimDisk()
    put(disk, "file", b"D" * 3 * PAGE)
    disk.settle()
    for image in images(disk, 50):
        assert image.content("file") == b"D" * 3 * PAGE


def test_sync_alone_does_not_keep_a_name():
    disk = SimDisk(seed=1)
    file = disk.create("file", 0)
    file.write(0, [view(b"D" * PAGE)])
    file.sync()
    survivors = [image for image in images(disk) if image.names()]
    assert 0 < len(survivors) < 200
    assert all(image.content("file") == b"D" * PAGE for image in survivors)


@pytest.mark.parametrize("sector_bytes", [512, 4096])
def test_unsynced_sectors_are_old_new_or_zero_each_on_its_own(sector_bytes):
    disk = SimDisk(sector_bytes=sector_bytes)
    put(disk, "file", b"O" * 8 * PAGE)
    disk.settle()
    opened(disk, "file").write(PAGE, [view(b"N" * 4 * PAGE)])
    seen = set()
    for image in images(disk):
        content = image.content("file")
        assert len(content) == 8 * PAGE
        assert content[:PAGE] == b"O" * PAGE
        assert content[5 * PAGE :] == b"O" * 3 * PAGE
        sectors = [content[at : at + sector_bytes] for at in range(PAGE, 5 * PAGE, sector_bytes)]
        assert all(len(set(sector)) == 1 for sector in sectors)
        seen.add(bytes(sector[0] for sector in sectors))
    kinds = {frozenset(pattern) for pattern in seen}
    assert {frozenset(b"N"), frozenset(b"O"), frozenset(b"NO\0")} <= kinds


def test_the_length_of_an_unsynced_file_is_old_new_or_between():
    disk = SimDisk()
    put(disk, "file", b"O" * PAGE)
    disk.settle()
    file = opened(disk, "file")
    file.write(PAGE, [view(b"N" * 3 * PAGE)])
    lengths = {len(image.content("file")) for image in images(disk)}
    assert {PAGE, 4 * PAGE} < lengths
    assert min(lengths) == PAGE
    assert max(lengths) == 4 * PAGE
    file.truncate(10)
    assert {len(image.content("file")) for image in images(disk)} > {PAGE, 10}


def test_a_published_name_is_there_or_not_and_never_holds_anothers_bytes():
    seen = set()
    for disk in [SimDisk(seed=seed) for seed in range(12)]:
        put(disk, "tmp/s", b"S" * PAGE)
        put(disk, "tmp/other", b"T" * PAGE)
        disk.settle()
        disk.publish("tmp/s", "ns/s")
        disk.remove("tmp/other")
        for image in images(disk, 50):
            for name, byte in (("tmp/s", b"S"), ("ns/s", b"S"), ("tmp/other", b"T")):
                if name in image.names():
                    assert image.content(name) == byte * PAGE
            seen.add(tuple(image.names()))
    # both folders on their own: the file may be under either name, both, or none
    assert {("ns/s",), ("tmp/s",), ("ns/s", "tmp/s"), ()} <= seen
    assert all(set(names) <= {"tmp/s", "ns/s", "tmp/other"} for names in seen)


def test_an_image_is_a_disk_of_its_own_and_repeatable():
    disk = SimDisk(seed=5)
    put(disk, "tmp/s", b"S" * 5 * PAGE)
    first, again = disk.crash(9), disk.crash(9)
    assert first.names() == again.names()
    assert [first.content(n) for n in first.names()] == [again.content(n) for n in again.names()]
    put(first, "new")
    assert "new" not in disk.names()
    assert "new" not in again.names()


def test_a_planted_file_survives_everything():
    disk = SimDisk()
    disk.plant("a/b", b"foreign")
    assert all(image.content("a/b") == b"foreign" for image in images(disk, 20))
    assert disk.mutations == 0


def test_threads_do_not_lose_each_others_writes():
    disk = SimDisk()
    file = disk.create("file", 0)

    def write(index):
        for step in range(50):
            file.write((step * 4 + index) * 512, [view(bytes([index]) * 512)])

    threads = [threading.Thread(target=write, args=(index,)) for index in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert disk.content("file") == b"".join(bytes([i]) * 512 for i in range(4)) * 50
    assert disk.mutations == 201
