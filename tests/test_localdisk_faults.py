"""kvdepot.io.localdisk on storage that refuses, falls short, fills up or may not be written."""

from __future__ import annotations

import errno
import fcntl
import os
import subprocess
from pathlib import Path

import pytest

from kvdepot.errors import ConfigError, PoolDenied, PoolFull, PoolUnavailable
from kvdepot.io.localdisk import LocalDisk
from kvdepot.io.localfile import O_DIRECT
from tests.children import run_python
from tests.disks import PAGE, block, content, put


@pytest.fixture(params=["auto", "off"])
def disk(tmp_path, request):
    return LocalDisk(tmp_path / "pool", direct=request.param)


@pytest.fixture
def direct_disk(tmp_path):
    disk = LocalDisk(tmp_path / "pool")
    if not disk.is_direct:
        pytest.skip(f"no O_DIRECT under {tmp_path}: {disk.direct_reason}")
    return disk


@pytest.fixture
def mounted(tmp_path):
    """Mount a small tmpfs; skipped where mounting is not allowed."""
    places: list[Path] = []

    def mount(options):
        place = tmp_path / f"mount{len(places)}"
        place.mkdir()
        command = ["mount", "-t", "tmpfs", "-o", options, "kvdepot-test", str(place)]
        try:
            done = subprocess.run(command, capture_output=True, text=True)
        except FileNotFoundError:
            pytest.skip("there is no mount command")
        if done.returncode:
            pytest.skip(f"cannot mount a tmpfs: {done.stderr.strip()}")
        places.append(place)
        return place

    yield mount
    for place in places:
        subprocess.run(["umount", "--lazy", str(place)], check=True)


# --- O_DIRECT


def test_the_probe_says_what_it_found(direct_disk, tmp_path):
    assert "worked" in direct_disk.direct_reason
    assert LocalDisk(tmp_path / "pool", direct="on").is_direct
    off = LocalDisk(tmp_path / "pool", direct="off")
    assert not off.is_direct
    assert off.direct_reason == "switched off"


def test_aligned_calls_are_direct_and_others_are_not(direct_disk, monkeypatch):
    used = []
    for verb in ("preadv", "pwritev"):
        call = getattr(os, verb)

        def spy(fd, parts, offset, *flags, verb=verb, call=call):
            used.append((verb, bool(fcntl.fcntl(fd, fcntl.F_GETFL) & O_DIRECT)))
            return call(fd, parts, offset, *flags)

        monkeypatch.setattr(os, verb, spy)
    file = direct_disk.create("a", 4 * PAGE)
    file.write(0, [block(1), block(2)])
    file.write(2 * PAGE, [memoryview(b"unaligned")])
    file.write(1, [block(3)])
    file.read(0, [block(0), block(0)])
    file.read(PAGE, [block(0)[:100]])
    file.close()
    assert used == [
        ("pwritev", True),
        ("pwritev", False),
        ("pwritev", False),
        ("preadv", True),
        ("preadv", False),
    ]


def _refusing(verb, code):
    """A system call that refuses O_DIRECT descriptors, and is itself otherwise."""
    call = getattr(os, verb)

    def refuse(target, argument, *rest, **named):
        flags = argument if verb == "open" else fcntl.fcntl(target, fcntl.F_GETFL)
        if flags & O_DIRECT:
            raise OSError(code, os.strerror(code))
        return call(target, argument, *rest, **named)

    return refuse


@pytest.mark.parametrize("verb", ["open", "pwritev", "preadv"])
@pytest.mark.parametrize("code", [errno.EINVAL, errno.EOPNOTSUPP])
def test_a_file_system_without_direct_io_is_served_buffered(
    tmp_path, monkeypatch, caplog, verb, code
):
    # LMCache#4364: accepted at open, EINVAL at every write; the tier stayed empty and said it was well
    monkeypatch.setattr(os, verb, _refusing(verb, code))
    disk = LocalDisk(tmp_path / "pool")
    assert not disk.is_direct
    assert errno.errorcode[code] in disk.direct_reason
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert errno.errorcode[code] in caplog.text
    put(disk, "a", block(1), block(2))
    assert content(disk, "a") == bytes(block(1)) + bytes(block(2))
    assert os.listdir(disk.root) == ["a"]
    with pytest.raises(ConfigError, match="O_DIRECT is demanded") as caught:
        LocalDisk(tmp_path / "pool", direct="on")
    assert caught.value.hint


@pytest.mark.parametrize("verb", ["open", "pwritev", "preadv"])
def test_direct_io_that_stops_working_later_is_given_up_with_one_warning(
    direct_disk, monkeypatch, caplog, verb
):
    put(direct_disk, "before", block(9))
    caplog.clear()
    monkeypatch.setattr(os, verb, _refusing(verb, errno.EINVAL))
    for name in ("a", "b"):
        put(direct_disk, name, block(1), block(2))
        file = direct_disk.open(name)
        row = block(0, pages=2)
        assert file.read(0, [row]) == 2 * PAGE
        file.close()
        assert row == bytes(block(1)) + bytes(block(2))
    assert not direct_disk.is_direct
    assert "EINVAL" in direct_disk.direct_reason
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert content(direct_disk, "before") == bytes(block(9))


@pytest.mark.parametrize("code", [errno.EIO, errno.ESTALE, errno.ETIMEDOUT])
@pytest.mark.parametrize("verb", ["preadv", "pwritev"])
def test_other_errors_are_not_blamed_on_direct_io(direct_disk, monkeypatch, verb, code):
    put(direct_disk, "a", block(1))

    def fail(*args):
        raise OSError(code, os.strerror(code))

    with monkeypatch.context() as patch:
        patch.setattr(os, verb, fail)
        file = direct_disk.open("a") if verb == "preadv" else direct_disk.create("b", PAGE)
        with pytest.raises(PoolUnavailable, match=errno.errorcode[code]) as caught:
            (file.read if verb == "preadv" else file.write)(0, [block(0)])
        file.close()
    assert caught.value.retryable
    assert caught.value.path
    assert direct_disk.is_direct


# --- short, failing and refused calls


@pytest.mark.parametrize("most", [1, 512, PAGE, PAGE + 1])
def test_short_writes_and_reads_go_on_where_they_stopped(disk, monkeypatch, most):
    pwritev, preadv = os.pwritev, os.preadv

    def shortened(call):
        def short(fd, parts, offset, *flags):
            # aligned where the call asked for aligned, as a direct device would
            first = memoryview(parts[0])[:most]
            return call(fd, [first], offset, *flags)

        return short

    data = block(0, pages=3)
    data[:] = bytes(range(256)) * (3 * PAGE // 256)
    if disk.is_direct and most % PAGE:
        # a direct device moves whole pages; only the buffered path can stop in between
        disk.is_direct = False
    monkeypatch.setattr(os, "pwritev", shortened(pwritev))
    monkeypatch.setattr(os, "preadv", shortened(preadv))
    pages = 1 if most == 1 else 3
    put(disk, "a", data[: pages * PAGE])
    file = disk.open("a")
    row = block(0, pages=3)
    assert file.read(0, [row[: pages * PAGE]]) == pages * PAGE
    file.close()
    assert row[: pages * PAGE] == data[: pages * PAGE]


def test_a_write_without_progress_is_an_error_and_no_loop(disk, monkeypatch):
    file = disk.create("a", PAGE)
    monkeypatch.setattr(os, "pwritev", lambda *args: 0)
    with pytest.raises(PoolUnavailable, match="EIO"):
        file.write(0, [block(1)])
    with pytest.raises(PoolUnavailable, match="EIO"):
        file.write(0, [memoryview(b"unaligned")])
    file.close()


@pytest.mark.parametrize(
    ("code", "kind"),
    [
        (errno.ENOSPC, PoolFull),
        (errno.EDQUOT, PoolFull),
        (errno.EFBIG, PoolFull),
        (errno.EACCES, PoolDenied),
        (errno.EROFS, PoolDenied),
        (errno.EIO, PoolUnavailable),
        (errno.ETIMEDOUT, PoolUnavailable),
        (errno.ESTALE, PoolUnavailable),
    ],
)
def test_every_verb_translates_what_the_system_says(disk, monkeypatch, code, kind):
    put(disk, "a", block(1))
    file = disk.create("b", PAGE)

    def fail(*args, **kwargs):
        raise OSError(code, os.strerror(code))

    name = errno.errorcode[code]
    with monkeypatch.context() as patch:
        for verb in ("pwritev", "ftruncate", "fdatasync", "statvfs"):
            patch.setattr(os, verb, fail)
        for call in (
            lambda: file.write(0, [block(2)]),
            lambda: file.truncate(0),
            file.sync,
            disk.space,
        ):
            with pytest.raises(kind, match=name):
                call()
        patch.setattr(os, "open", fail)
        with pytest.raises(kind, match=name):
            disk.create("c", 0)
        if code != errno.ESTALE:  # a stale handle means that the file is gone
            with pytest.raises(kind, match=name):
                disk.open("a")
    file.close()


# --- full file systems


@pytest.mark.root
def test_a_full_file_system_is_pool_full_and_leaves_nothing(mounted):
    disk = LocalDisk(mounted("size=1m"))
    with pytest.raises(PoolFull, match="ENOSPC"):
        disk.create("tmp/big", 4 << 20)
    assert disk.files("tmp") == []
    put(disk, "tmp/fits", block(1, pages=64))
    file = disk.create("tmp/grows", 0)
    with pytest.raises(PoolFull, match="ENOSPC"):
        file.write(0, [block(2, pages=300)])
    file.close()
    assert disk.remove("tmp/grows")
    assert content(disk, "tmp/fits") == bytes(block(1, pages=64))
    put(disk, "tmp/again", block(3, pages=64))
    assert disk.space().total_bytes == 1 << 20


@pytest.mark.root
def test_used_up_inodes_are_pool_full_though_space_is_left(mounted):
    disk = LocalDisk(mounted("size=1m,nr_inodes=32"))
    made = 0
    while disk.space().free_inodes:
        disk.create(f"tmp/{made}", 0).close()
        made += 1
    assert 20 <= made < 32
    with pytest.raises(PoolFull, match="ENOSPC"):
        disk.create("tmp/one more", 0)
    space = disk.space()
    assert space.free_inodes == 0
    assert space.total_inodes == 32
    assert space.free_bytes > 500_000
    assert disk.remove("tmp/0")
    disk.create("tmp/again", 0).close()


@pytest.mark.root
def test_a_pool_on_a_file_system_that_is_full_already_opens(mounted):
    place = mounted("size=64k,nr_inodes=8")
    full = LocalDisk(place)
    put(full, "a", block(1, pages=15))
    made = 0
    while full.space().free_inodes:
        (place / f"filler{made}").touch()
        made += 1
    disk = LocalDisk(place)
    assert content(disk, "a") == bytes(block(1, pages=15))
    with pytest.raises(PoolFull):
        disk.create("b", 0)


def test_a_file_size_limit_is_pool_full():
    # RLIMIT_FSIZE: the second write is short, the third says EFBIG; no root needed
    child = run_python(
        """
import resource, sys, tempfile
from kvdepot.errors import PoolFull
from kvdepot.io.buffers import aligned_bytes
from kvdepot.io.localdisk import LocalDisk
for direct in ("auto", "off"):
    with tempfile.TemporaryDirectory() as folder:
        disk = LocalDisk(folder, direct=direct)
        resource.setrlimit(resource.RLIMIT_FSIZE, (16384, resource.RLIM_INFINITY))
        try:
            disk.create("reserved", 1 << 20)
        except PoolFull as error:
            print("reserve", str(error).split(": ")[1])
        file = disk.create("grows", 0)
        file.write(0, [aligned_bytes(12000)])
        try:
            file.write(12000, [aligned_bytes(12000)])
        except PoolFull as error:
            print("write", str(error).split(": ")[1])
        file.close()
        # a root that is opened under the limit works for reading
        resource.setrlimit(resource.RLIMIT_FSIZE, (1024, resource.RLIM_INFINITY))
        again = LocalDisk(folder, direct=direct)
        print(again.open("grows").length_bytes, [entry.name for entry in again.files("")])
        resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY,) * 2)
""",
        env=dict(os.environ),
    )
    assert child.returncode == 0, child.stderr
    lines = child.stdout.splitlines()
    assert lines == ["reserve EFBIG", "write EFBIG", "16384 ['grows']"] * 2


# --- read-only


def test_a_disk_opened_read_only_changes_nothing(tmp_path):
    place = tmp_path / "pool"
    put(LocalDisk(place), "ns/a", block(1))
    before = sorted((path, path.lstat().st_mtime_ns) for path in [place, *place.rglob("*")])
    disk = LocalDisk(place, is_read_only=True)
    assert content(disk, "ns/a") == bytes(block(1))
    file = disk.open("ns/a")
    row = block(0)
    assert file.read(0, [row]) == PAGE
    file.close()
    assert row == block(1)
    assert not disk.touch("ns/a")
    for call in (
        lambda: disk.create("b", 0),
        lambda: disk.publish("ns/a", "ns/b"),
        lambda: disk.remove("ns/a"),
        lambda: disk.lock("lease/w", b""),
    ):
        with pytest.raises(PoolDenied, match="read-only"):
            call()
    after = sorted((path, path.lstat().st_mtime_ns) for path in [place, *place.rglob("*")])
    assert after == before


def test_a_missing_root_opened_read_only_is_not_made(tmp_path):
    disk = LocalDisk(tmp_path / "pool", is_read_only=True)
    assert disk.files("") == []
    assert not (tmp_path / "pool").exists()


@pytest.mark.root
def test_a_read_only_file_system_is_denied_and_can_be_read(mounted):
    place = mounted("size=1m")
    put(LocalDisk(place), "ns/a", block(1))
    subprocess.run(["mount", "-o", "remount,ro", str(place)], check=True)
    with pytest.raises(PoolDenied, match="EROFS"):
        LocalDisk(place)
    disk = LocalDisk(place, is_read_only=True)
    assert content(disk, "ns/a") == bytes(block(1))
    off = LocalDisk(place, direct="off")
    assert not off.touch("ns/a")
    for call in (
        lambda: off.create("b", 0),
        lambda: off.remove("ns/a"),
        lambda: off.publish("ns/a", "ns/b"),
        lambda: off.lock("ns/lock", b""),
    ):
        with pytest.raises(PoolDenied, match="EROFS"):
            call()


def test_missing_permissions_are_denied_with_the_path(tmp_path):
    # in a child that gives up root, because root may do anything
    child = run_python(
        """
import os, sys, tempfile
from kvdepot.errors import PoolDenied
from kvdepot.io.localdisk import LocalDisk
folder = tempfile.mkdtemp(dir="/tmp")
os.chmod(folder, 0o777)
if os.getuid() == 0:
    os.setgid(65534)
    os.setuid(65534)
place = folder + "/pool"
disk = LocalDisk(place)
file = disk.create("ns/a", 0)
file.write(0, [memoryview(b"x")])
file.close()
def tried(call):
    try:
        call()
    except PoolDenied as error:
        assert "EACCES" in str(error) and folder in error.path, error
        print("denied")
os.chmod(place + "/ns/a", 0)
tried(lambda: disk.open("ns/a"))
os.chmod(place + "/ns/a", 0o644)
os.chmod(place + "/ns", 0o555)
tried(lambda: disk.create("ns/b", 0))
tried(lambda: disk.remove("ns/a"))
tried(lambda: disk.publish("ns/a", "ns/c"))
tried(lambda: disk.lock("ns/lock", b""))
print(disk.read_small("ns/a"))
os.chmod(place + "/ns", 0)
tried(lambda: disk.files("ns"))
tried(lambda: disk.open("ns/a"))
os.chmod(place, 0o555)
tried(lambda: LocalDisk(place))
os.chmod(place, 0)
tried(lambda: LocalDisk(place))
tried(lambda: LocalDisk(place + "/below"))
os.chmod(place, 0o755)
os.chmod(place + "/ns", 0o755)
os.unlink(place + "/ns/a")
os.rmdir(place + "/ns")
os.rmdir(place)
""",
        env=dict(os.environ),
        cwd=Path("/"),
    )
    assert child.returncode == 0, child.stderr
    assert child.stdout.splitlines() == ["denied"] * 5 + ["b'x'"] + ["denied"] * 5
