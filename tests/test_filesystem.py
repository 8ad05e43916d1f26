"""What storage a path is on, and reading past the page cache."""

from __future__ import annotations

import ctypes
import mmap
import os

import pytest

from kvdepot.errors import PoolError
from kvdepot.io import filesystem
from kvdepot.io.filesystem import (
    MEMORY_FILE_SYSTEMS,
    drop_cached_pages,
    file_system_of,
    free_bytes_of,
)

MOUNTS = """\
21 1 8:1 / / rw,relatime shared:1 - ext4 /dev/root rw
30 21 0:5 / /dev rw - devtmpfs udev rw
31 21 0:25 / /tmp rw shared:5 - tmpfs tmpfs rw
32 31 8:2 / /tmp/with\\040space rw - xfs /dev/sdb rw
33 21 8:3 / /data rw master:1 - ext4 /dev/sdc rw
34 33 8:4 / /data rw - btrfs /dev/sdd rw
"""


@pytest.mark.parametrize(
    ("path", "kind"),
    [
        ("/srv/pool", "ext4"),
        ("/tmp/pool", "tmpfs"),
        ("/tmpfile", "ext4"),
        ("/tmp/with space/pool", "xfs"),
        ("/data/pool", "btrfs"),
        ("/", "ext4"),
    ],
)
def test_the_innermost_and_latest_mount_counts(tmp_path, monkeypatch, path, kind):
    (tmp_path / "mountinfo").write_text(MOUNTS)
    monkeypatch.setattr(filesystem, "_MOUNTS", tmp_path / "mountinfo")
    assert file_system_of(path) == kind


def test_here_it_is_known_and_memory_is_told_from_storage(tmp_path, monkeypatch):
    assert file_system_of(tmp_path)
    assert file_system_of("/dev/shm") in MEMORY_FILE_SYSTEMS
    monkeypatch.setattr(filesystem, "_MOUNTS", tmp_path / "absent")
    assert file_system_of(tmp_path) == ""


def test_free_space_is_told_for_what_does_not_exist_yet(tmp_path):
    free = free_bytes_of(tmp_path)
    assert free > 0
    assert abs(free_bytes_of(tmp_path / "not" / "yet") - free) < 1 << 30


def cached_pages(path):
    """How many pages of a file the kernel holds, by mincore."""
    size = path.stat().st_size
    with path.open("r+b") as file, mmap.mmap(file.fileno(), size) as mapped:
        pages = -(-size // mmap.PAGESIZE)
        present = (ctypes.c_ubyte * pages)()
        address = ctypes.addressof(ctypes.c_char.from_buffer(mapped))
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.mincore(ctypes.c_void_p(address), ctypes.c_size_t(size), present):
            pytest.skip(f"no mincore here: {os.strerror(ctypes.get_errno())}")
        return sum(page & 1 for page in present)


def test_cached_pages_are_dropped_and_the_bytes_stay(tmp_path):
    if file_system_of(tmp_path) in {*MEMORY_FILE_SYSTEMS, "overlay", ""}:
        pytest.skip("the temporary folder is not on a file system with a page cache of its own")
    content = os.urandom(1 << 20)
    path = tmp_path / "a" / "b" / "x.kvseg"
    path.parent.mkdir(parents=True)
    path.write_bytes(content)
    other = tmp_path / "other.txt"
    other.write_bytes(content)
    assert cached_pages(path) > 200
    assert drop_cached_pages(tmp_path, "*.kvseg") == 1
    assert cached_pages(path) < 20
    assert cached_pages(other) > 200
    assert path.read_bytes() == content


def test_a_file_that_cannot_be_opened_is_an_error(tmp_path):
    (tmp_path / "dangling.kvseg").symlink_to(tmp_path / "absent")
    with pytest.raises(PoolError, match="dangling"):
        drop_cached_pages(tmp_path, "*.kvseg")
