"""Shared memory of somebody else's in huge pages: the same bytes, the same mappings."""

from __future__ import annotations

import mmap
import os
import threading

import pytest

from kvdepot.io.hugepages import gather_pages, gather_pages_behind

HUGE = 2 << 20
LENGTH = 4 * HUGE + 3 * 4096


@pytest.fixture
def memory():
    """A file in memory with a pattern, as another component maps it."""
    fd = os.memfd_create("test")
    os.ftruncate(fd, LENGTH)
    mapped = mmap.mmap(fd, LENGTH)
    mapped[:] = bytes(range(256)) * (LENGTH // 256)
    yield fd, mapped
    mapped.close()
    os.close(fd)


def test_the_content_stays_as_it_is(memory):
    fd, mapped = memory
    before = bytes(mapped)
    gather_pages(fd, LENGTH)
    assert bytes(mapped) == before
    mapped[5] = 7
    assert os.pread(fd, 1, 5) == b"\x07", "it is still the same memory"


def test_others_may_write_meanwhile(memory):
    fd, mapped = memory
    stop = threading.Event()

    def write():
        while not stop.is_set():
            for offset in range(0, LENGTH, 4096):
                mapped[offset] = (mapped[offset] + 1) % 256

    writer = threading.Thread(target=write)
    writer.start()
    try:
        for _ in range(3):
            gather_pages_behind(fd, LENGTH).join(60)
    finally:
        stop.set()
        writer.join(60)
    rest = bytes(mapped)
    pattern = bytes(range(256)) * 16
    for offset in range(0, LENGTH, 4096):
        assert rest[offset + 1 : offset + 4096] == pattern[1:]


def test_what_cannot_be_gathered_is_told_and_harmless(memory, tmp_path):
    fd, mapped = memory
    assert not gather_pages(fd, 4096), "less than one huge page"
    file = os.open(tmp_path / "file", os.O_RDONLY | os.O_CREAT)
    try:
        assert not gather_pages(file, LENGTH), "a descriptor that cannot be written"
    finally:
        os.close(file)
    assert mapped[1] == 1


def test_the_descriptor_may_be_closed_at_once():
    fd = os.memfd_create("test")
    os.ftruncate(fd, LENGTH)
    thread = gather_pages_behind(fd, LENGTH)
    os.close(fd)
    thread.join(60)
    assert not thread.is_alive()
