"""kvdepot.io.localdisk: a folder as a Disk, and everything a file system may do to it."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvdepot.errors import PoolDenied, PoolError, PoolFull, PoolUnavailable
from kvdepot.io.buffers import aligned_bytes
from kvdepot.io.disk import FileInfo
from kvdepot.io.localdisk import LocalDisk
from tests.children import ROOT, SOURCE
from tests.disks import PAGE, block, content, put


@pytest.fixture(params=["auto", "off"])
def disk(tmp_path, request):
    return LocalDisk(tmp_path / "pool", direct=request.param)


def test_the_root_is_made_if_its_parent_exists(tmp_path):
    LocalDisk(tmp_path / "pool")
    assert (tmp_path / "pool").is_dir()
    assert list((tmp_path / "pool").iterdir()) == []  # the probe left nothing
    with pytest.raises(PoolError, match="ENOENT"):
        LocalDisk(tmp_path / "missing" / "pool")


# --- the verbs


def test_a_file_is_written_published_listed_read_and_removed(disk):
    put(disk, "tmp/a", block(1), block(2, pages=2))
    assert disk.publish("tmp/a", "ns/x/a")
    assert disk.files("tmp") == []
    (entry,) = disk.files("ns/x")
    assert entry.name == "a"
    assert entry.length_bytes == 3 * PAGE
    assert entry.is_regular
    assert not entry.is_folder
    assert entry.inode == (disk.root / "ns/x/a").stat().st_ino
    file = disk.open("ns/x/a")
    assert file.length_bytes == 3 * PAGE
    rows = [block(0), block(0), block(0)]
    assert file.read(0, rows) == 3 * PAGE
    assert [bytes(row) for row in rows] == [bytes(block(byte)) for byte in (1, 2, 2)]
    file.close()
    file.close()
    assert disk.remove("ns/x/a")
    assert not disk.remove("ns/x/a")
    assert disk.open("ns/x/a") is None


def test_absence_is_a_value(disk):
    assert disk.open("ns/none") is None
    assert disk.read_small("ns/none") is None
    assert disk.files("ns/none") == []
    assert not disk.remove("ns/none")
    assert not disk.touch("ns/none")
    disk.close()


def test_folders_are_removed_only_when_empty(disk):
    put(disk, "ns/x/a", block(1))
    assert not disk.remove("ns/x")
    assert not disk.remove("ns")
    assert disk.remove("ns/x/a")
    assert disk.remove("ns/x")
    assert not disk.remove("ns/x")
    assert disk.remove("ns")


def test_folders_are_listed_as_folders(disk):
    put(disk, "ns/x/a", block(1))
    (entry,) = disk.files("ns")
    assert isinstance(entry, FileInfo)
    assert entry.is_folder
    assert not entry.is_regular
    assert disk.files("ns/x/a") == []


def test_a_name_is_created_once(disk):
    put(disk, "tmp/a", block(1))
    with pytest.raises(PoolDenied, match="EEXIST"):
        disk.create("tmp/a", 0)
    assert content(disk, "tmp/a") == bytes(block(1))


def test_space_is_reserved_at_create(disk):
    file = disk.create("tmp/a", 5 * PAGE)
    assert file.length_bytes == 5 * PAGE
    assert (disk.root / "tmp/a").stat().st_size == 5 * PAGE
    file.truncate(2 * PAGE)
    assert file.length_bytes == 2 * PAGE
    file.sync()
    file.close()
    assert (disk.root / "tmp/a").stat().st_size == 2 * PAGE


def test_small_files_are_read_whole_and_large_ones_refused(disk):
    put(disk, "a", memoryview(b"x" * 100))
    assert content(disk, "a") == b"x" * 100
    assert disk.read_small("a", 100) == b"x" * 100
    with pytest.raises(PoolDenied, match="larger than 99"):
        disk.read_small("a", 99)
    put(disk, "empty")
    assert content(disk, "empty") == b""


def test_a_read_stops_at_the_end_of_the_file(disk):
    put(disk, "a", block(7), memoryview(b"tail"))
    file = disk.open("a")
    rows = [block(0, pages=2), block(0)]
    assert file.read(0, rows) == PAGE + 4
    assert bytes(rows[0][: PAGE + 4]) == b"\x07" * PAGE + b"tail"
    assert file.read(10 * PAGE, rows) == 0
    file.close()


def test_a_touch_moves_the_time_of_a_file(disk):
    put(disk, "a", block(1))
    os.utime(disk.root / "a", ns=(10**18, 10**18))
    assert disk.touch("a")
    assert disk.files("")[0].mtime_ns > 10**18


def test_space_is_what_the_file_system_says(disk):
    space = disk.space()
    status = os.statvfs(disk.root)
    assert 0 < space.free_bytes <= space.total_bytes
    assert space.total_bytes == status.f_blocks * status.f_frsize
    assert (space.total_inodes is None) == (status.f_files == 0)


def test_a_file_system_without_inode_counts_has_none(disk, monkeypatch):
    class Status:
        f_bavail, f_blocks, f_frsize, f_favail, f_files = 10, 20, 4096, 0, 0

    monkeypatch.setattr(os, "statvfs", lambda path: Status)
    space = disk.space()
    assert (space.free_inodes, space.total_inodes) == (None, None)
    assert (space.free_bytes, space.total_bytes) == (40_960, 81_920)


def test_many_parts_go_in_several_calls(disk):
    count = 2 * os.sysconf("SC_IOV_MAX") + 7
    memory = aligned_bytes(count * 16)
    memory[:] = os.urandom(count * 16)
    parts = [memory[index * 16 : (index + 1) * 16] for index in range(count)]
    put(disk, "a", *parts)
    back = aligned_bytes(count * 16)
    file = disk.open("a")
    assert file.read(0, [back[index * 16 : (index + 1) * 16] for index in range(count)]) == len(
        back
    )
    file.close()
    assert back == memory


_PARTS = st.lists(st.sampled_from([0, 1, 7, 512, PAGE - 1, PAGE, 2 * PAGE]), max_size=6)


@given(
    write_offset=st.sampled_from([0, 1, 512, PAGE, 3 * PAGE]),
    write_sizes=_PARTS,
    read_offset=st.sampled_from([0, 1, 512, PAGE, 2 * PAGE]),
    read_sizes=_PARTS,
)
def test_any_mix_of_aligned_and_unaligned_parts_agrees_with_a_byte_string(
    tmp_path_factory, write_offset, write_sizes, read_offset, read_sizes
):
    disk = LocalDisk(tmp_path_factory.mktemp("mix"))
    payload = aligned_bytes(max(1, sum(write_sizes)))[: sum(write_sizes)]
    payload[:] = os.urandom(len(payload))
    file = disk.create("a", PAGE)
    file.write(write_offset, _cut(payload, write_sizes))
    model = bytearray(max(PAGE, write_offset + len(payload) if payload else 0))
    model[write_offset : write_offset + len(payload)] = payload
    rows = aligned_bytes(max(1, sum(read_sizes)))[: sum(read_sizes)]
    got = file.read(read_offset, _cut(rows, read_sizes))
    file.close()
    expected = bytes(model[read_offset : read_offset + len(rows)])
    assert got == len(expected)
    assert bytes(rows[:got]) == expected


def _cut(memory, sizes):
    parts, offset = [], 0
    for size in sizes:
        parts.append(memory[offset : offset + size])
        offset += size
    return parts


# --- publishing


def test_publish_never_overwrites(disk):
    put(disk, "tmp/a", block(1))
    put(disk, "tmp/b", block(2))
    assert disk.publish("tmp/a", "ns/s")
    assert not disk.publish("tmp/b", "ns/s")
    assert content(disk, "ns/s") == bytes(block(1))
    assert content(disk, "tmp/b") == bytes(block(2))


def test_publish_of_nothing_is_an_error(disk):
    with pytest.raises(PoolUnavailable, match="publish"):
        disk.publish("tmp/none", "ns/s")
    assert disk.files("ns") == []


def test_many_publishers_of_one_name_have_one_winner(disk):
    for number in range(8):
        put(disk, f"tmp/{number}", block(number))
    won = []
    start = threading.Barrier(8)

    def publish(number):
        start.wait()
        if disk.publish(f"tmp/{number}", "ns/s"):
            won.append(number)

    threads = [threading.Thread(target=publish, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    (winner,) = won
    assert content(disk, "ns/s") == bytes(block(winner))
    assert len(disk.files("tmp")) == 7


@pytest.mark.parametrize("code", [errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS])
def test_without_hard_links_publish_renames(disk, monkeypatch, code):
    def refuse(*args, **kwargs):
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(os, "link", refuse)
    put(disk, "tmp/a", block(1))
    put(disk, "tmp/b", block(2))
    put(disk, "ns/other", block(3))
    assert disk.publish("tmp/a", "ns/s")
    assert not disk.publish("tmp/b", "ns/s")
    assert content(disk, "ns/s") == bytes(block(1))
    assert content(disk, "tmp/b") == bytes(block(2))


def test_a_lost_answer_to_a_publish_is_a_publish(disk, monkeypatch):
    # NFS: the server links, its answer is lost, and the repeat is told that the name is taken
    link = os.link

    def link_and_deny(old, new):
        link(old, new)
        raise FileExistsError(errno.EEXIST, "exists")

    put(disk, "ns/other", block(3))
    put(disk, "tmp/a", block(1))
    monkeypatch.setattr(os, "link", link_and_deny)
    assert disk.publish("tmp/a", "ns/s")
    assert content(disk, "ns/s") == bytes(block(1))
    assert disk.files("tmp") == []


def test_a_source_that_cannot_be_removed_does_not_unpublish(disk, monkeypatch):
    put(disk, "ns/other", block(3))
    put(disk, "tmp/a", block(1))

    def refuse(path):
        raise OSError(errno.EIO, "input/output error")

    with monkeypatch.context() as patch:
        patch.setattr(os, "unlink", refuse)
        assert disk.publish("tmp/a", "ns/s")
    assert content(disk, "ns/s") == bytes(block(1))


# --- names, links and foreign things


@pytest.mark.parametrize("name", ["/etc/x", "../x", "ns/../../x", "..", "a\0b"])
def test_names_never_leave_the_root(disk, name):
    calls = [
        lambda: disk.create(name, 0),
        lambda: disk.open(name),
        lambda: disk.read_small(name),
        lambda: disk.files(name),
        lambda: disk.remove(name),
        lambda: disk.touch(name),
        lambda: disk.lock(name, b""),
        lambda: disk.publish(name, "x"),
        lambda: disk.publish("x", name),
    ]
    for call in calls:
        with pytest.raises(PoolDenied, match="not a name below"):
            call()
    assert os.listdir(disk.root.parent) == ["pool"]


def test_odd_names_are_names(disk):
    for name in ("ns/a b", "ns/é語", "ns/CON", "ns/..x", "ns/a\nb", "ns/" + "n" * 255):
        put(disk, name, block(1))
        assert content(disk, name) == bytes(block(1))
    assert len(disk.files("ns")) == 6
    with pytest.raises(PoolDenied, match="ENAMETOOLONG"):
        disk.create("ns/" + "n" * 256, 0)


def test_links_are_not_followed(disk):
    outside = disk.root.parent / "outside"
    outside.write_bytes(b"secret")
    (disk.root / "link").symlink_to(outside)
    (disk.root / "dangling").symlink_to(disk.root / "nowhere")
    (disk.root / "loop").symlink_to(disk.root / "loop")
    for name in ("link", "dangling", "loop"):
        assert disk.open(name) is None
        assert disk.read_small(name) is None
        with pytest.raises(PoolDenied):
            disk.create(name, 0)
        with pytest.raises(PoolDenied):
            disk.lock(name, b"text that must not land outside")
        assert disk.touch(name)
    assert not any(entry.is_regular or entry.is_folder for entry in disk.files(""))
    assert disk.remove("link")
    assert outside.read_bytes() == b"secret"
    assert not (disk.root / "nowhere").exists()


def test_folders_pipes_and_sockets_are_no_files(disk):
    (disk.root / "folder").mkdir()
    os.mkfifo(disk.root / "pipe")
    assert disk.open("folder") is None
    assert disk.open("pipe") is None  # and it does not wait for a writer
    assert {entry.name: entry.is_regular for entry in disk.files("")} == {
        "folder": False,
        "pipe": False,
    }
    with pytest.raises(PoolDenied):
        disk.create("folder", 0)


@pytest.mark.parametrize("name", ["file", "file/below"])
def test_a_root_that_is_a_file_is_refused(tmp_path, name):
    (tmp_path / "file").write_bytes(b"mine")
    with pytest.raises(PoolDenied) as caught:
        LocalDisk(tmp_path / name)
    assert str(tmp_path / name) in str(caught.value)
    assert (tmp_path / "file").read_bytes() == b"mine"


def test_a_file_where_a_folder_is_due_is_refused_and_kept(disk):
    put(disk, "ns", memoryview(b"mine"))
    with pytest.raises(PoolDenied):
        disk.create("ns/a", 0)
    put(disk, "tmp/a", block(1))
    with pytest.raises(PoolDenied):
        disk.publish("tmp/a", "ns/a")
    assert disk.files("ns") == []
    assert content(disk, "ns") == b"mine"


def test_a_vanished_root_is_made_again_by_the_next_write(disk):
    disk.root.rename(disk.root.with_name("gone"))
    assert disk.open("a") is None
    assert disk.files("") == []
    with pytest.raises(PoolUnavailable):
        disk.space()
    put(disk, "ns/a", block(1))
    assert content(disk, "ns/a") == bytes(block(1))


# --- locks

_HOLDER = f"""
import sys
sys.path[:0] = [{str(SOURCE)!r}, {str(ROOT)!r}]
from kvdepot.io.localdisk import LocalDisk
lock = LocalDisk(sys.argv[1]).lock("lease/w", b"child")
print("held" if lock else "taken", flush=True)
if sys.stdin.readline().strip() == "release":
    lock.release()
    print("released", flush=True)
    sys.stdin.readline()
"""


@pytest.fixture
def holder(tmp_path):
    """A child that tries to hold the lock ``lease/w`` of the pool."""
    children = []

    def start():
        child = subprocess.Popen(
            [sys.executable, "-c", _HOLDER, str(tmp_path / "pool")],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        children.append(child)
        return child, child.stdout.readline().strip()

    yield start
    for child in children:
        child.kill()
        child.communicate()


def test_a_lock_has_one_holder_and_a_text_that_others_read(disk):
    lock = disk.lock("lease/w", b"first")
    assert lock is not None
    assert content(disk, "lease/w") == b"first"
    assert disk.lock("lease/w", b"second") is None
    assert content(disk, "lease/w") == b"first"
    lock.beat(b"a longer text")
    assert content(disk, "lease/w") == b"a longer text"
    lock.beat(b"short")
    assert content(disk, "lease/w") == b"short"
    lock.release()
    lock.release()
    assert disk.files("lease") == []
    again = disk.lock("lease/w", b"third")
    assert again is not None
    again.release()


def test_a_beat_moves_the_time_that_others_see(disk):
    lock = disk.lock("lease/w", b"text")
    os.utime(disk.root / "lease/w", ns=(10**18, 10**18))
    lock.beat(b"text")
    assert disk.files("lease")[0].mtime_ns > 10**18
    lock.release()


def test_a_lock_of_another_process_is_respected_until_it_lets_go(disk, holder):
    child, answer = holder()
    assert answer == "held"
    assert disk.lock("lease/w", b"ours") is None
    assert content(disk, "lease/w") == b"child"
    child.stdin.write("release\n")
    child.stdin.flush()
    assert child.stdout.readline().strip() == "released"
    lock = disk.lock("lease/w", b"ours")
    assert lock is not None
    assert holder()[1] == "taken"
    lock.release()


def test_a_killed_holder_has_no_lock(disk, holder):
    child, answer = holder()
    assert answer == "held"
    child.send_signal(signal.SIGKILL)
    child.wait()
    assert content(disk, "lease/w") == b"child"
    lock = disk.lock("lease/w", b"ours")
    assert lock is not None
    assert content(disk, "lease/w") == b"ours"
    lock.release()


def test_many_threads_hold_a_lock_one_at_a_time(disk):
    holders = []
    counts = []
    inside = threading.Lock()

    def work():
        for _ in range(50):
            lock = disk.lock("lease/w", b"x")
            if lock is None:
                continue
            with inside:
                holders.append(1)
                counts.append(len(holders))
            with inside:
                holders.pop()
            lock.release()

    threads = [threading.Thread(target=work) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert counts
    assert max(counts) == 1


def test_a_lock_that_cannot_be_written_is_given_back(disk, monkeypatch):
    def fail(*args):
        raise OSError(errno.ENOSPC, "no space")

    with monkeypatch.context() as patch:
        patch.setattr(os, "pwrite", fail)
        with pytest.raises(PoolFull, match="ENOSPC"):
            disk.lock("lease/w", b"x")
    lock = disk.lock("lease/w", b"x")
    assert lock is not None
    lock.release()


def test_files_are_closed(disk):
    def descriptors():
        return len(os.listdir("/proc/self/fd"))

    before = descriptors()
    put(disk, "a", block(1))
    for _ in range(10):
        file = disk.open("a")
        file.read(0, [block(0)])
        file.close()
        disk.read_small("a")
        disk.open("none")
        disk.files("")
        lock = disk.lock("l", b"x")
        disk.lock("l", b"x")
        lock.release()
        with pytest.raises(PoolDenied):
            disk.create("a", 0)
    assert descriptors() == before
