"""Discovery: all of it is found, also by folders whose clocks are wrong, and nothing is lost to an error."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from kvdepot.errors import PoolUnavailable
from kvdepot.io.disk import FileInfo
from kvdepot.io.localdisk import LocalDisk
from kvdepot.pool.catalog import Catalog
from kvdepot.pool.catalog import tmp_path as tmp_name
from kvdepot.pool.segment import SegmentName
from kvdepot.testing.simclock import FakeClock

NAMESPACE = "ab" * 32


def plant(root: Path, hour: str, sequence: int, namespace: str = NAMESPACE) -> Path:
    folder = root / "ns" / namespace / hour
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / str(SegmentName("0" * 16, sequence))
    path.write_bytes(b"x" * 100)
    return path


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path


def test_old_and_future_hours_are_found_alike(root: Path) -> None:
    catalog = Catalog(LocalDisk(root), FakeClock())
    for number, hour in enumerate(("1999010100", "2026113007", "9999123123", "2026113007-1")):
        plant(root, hour, number)
    assert len(catalog.refresh().added) == 4
    assert catalog.used_bytes == 400
    plant(root, "1999010100", 9)
    assert [e.name.sequence for e in catalog.refresh().added] == [9]


def test_a_change_within_one_tick_of_the_clock_is_found(root: Path) -> None:
    """mtimes tick coarsely: a folder that has just changed is listed until it has been quiet."""
    clock = FakeClock()
    catalog = Catalog(LocalDisk(root), clock)
    plant(root, "2026113007", 1)
    catalog.refresh()
    folder = root / "ns" / NAMESPACE / "2026113007"
    times = folder.stat()
    plant(root, "2026113007", 2)

    os.utime(folder, ns=(times.st_atime_ns, times.st_mtime_ns))
    assert len(catalog.refresh().added) == 1


def test_removed_and_replaced_files_are_told(root: Path) -> None:
    catalog = Catalog(LocalDisk(root), FakeClock())
    path = plant(root, "2026113007", 1)
    plant(root, "2026113007", 2)
    catalog.refresh()
    path.unlink()
    changes = catalog.refresh(is_full=True)
    assert [e.name.sequence for e in changes.removed] == [1]
    other = plant(root, "2026113008", 3)
    other.rename(root / "ns" / NAMESPACE / "2026113007" / str(SegmentName("0" * 16, 2)))
    changes = catalog.refresh(is_full=True)
    # another file under a known name: what we knew of it holds no more
    assert [e.name.sequence for e in changes.removed] == [2]
    assert [e.name.sequence for e in changes.added] == [2]


def test_names_that_are_not_ours_are_left_alone(root: Path) -> None:
    catalog = Catalog(LocalDisk(root), FakeClock())
    plant(root, "2026113007", 1)
    (root / "ns" / NAMESPACE / "notes.txt").write_text("mine")
    (root / "ns" / "holiday").mkdir()
    (root / "ns" / NAMESPACE / "2026113007" / "picture.jpg").write_text("mine")
    (root / "ns" / NAMESPACE / "2026113007" / str(SegmentName("1" * 16, 1))).mkdir()
    (root / "ns" / NAMESPACE / "2026113007" / str(SegmentName("2" * 16, 1))).symlink_to("nowhere")
    assert len(catalog.refresh().added) == 1


def test_an_error_half_way_loses_nothing(root: Path) -> None:
    class Breaking(LocalDisk):
        is_broken = False

        def files(self, folder: str) -> list[FileInfo]:
            if self.is_broken and folder.endswith("2026113008"):
                raise PoolUnavailable("EIO")
            return super().files(folder)

    disk = Breaking(root)
    catalog = Catalog(disk, FakeClock())
    plant(root, "2026113007", 1)
    plant(root, "2026113008", 2)
    disk.is_broken = True
    with pytest.raises(PoolUnavailable):
        catalog.refresh()
    disk.is_broken = False
    assert len(catalog.refresh().added) == 2


def test_claims_count_by_their_name_or_their_length(root: Path) -> None:
    catalog = Catalog(LocalDisk(root), FakeClock())
    (root / "tmp").mkdir()
    (root / tmp_name(SegmentName("0" * 16, 1), 5000)).write_bytes(b"")
    (root / tmp_name(SegmentName("0" * 16, 2), 10)).write_bytes(b"x" * 70)
    (root / "tmp" / "core.1234").write_bytes(b"x" * 1000)
    assert sorted(entry.reserved_bytes for entry in catalog.tmp_entries()) == [70, 5000]


def test_empty_hours_are_named_except_the_newest(root: Path) -> None:
    catalog = Catalog(LocalDisk(root), FakeClock())
    for hour in ("2026113006", "2026113007"):
        plant(root, hour, 1).unlink()
    plant(root, "2026113005", 1)
    catalog.refresh(is_full=True)
    assert catalog.empty_hours() == [(NAMESPACE, "2026113006")]
