"""kvdepot.io.buffers and kvdepot.io.host: aligned memory, shared memory, and this boot's name."""

from __future__ import annotations

import os
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvdepot.errors import ConfigError
from kvdepot.io import host
from kvdepot.io.buffers import ALIGNMENT, HostBuffer, address_of, aligned_bytes, merged_rows
from tests.children import run_python

PAGE = ALIGNMENT


@pytest.mark.parametrize("is_shared", [False, True])
@pytest.mark.parametrize("is_prefaulted", [False, True])
@pytest.mark.parametrize("length", [1, PAGE - 1, PAGE, PAGE + 1, 3 << 20])
def test_a_buffer_is_aligned_zero_and_writable(length, is_shared, is_prefaulted):
    buffer = HostBuffer(length, is_shared=is_shared, is_prefaulted=is_prefaulted)
    assert length <= buffer.length_bytes < length + PAGE
    assert buffer.memory.nbytes == buffer.length_bytes
    assert buffer.length_bytes % PAGE == 0
    assert address_of(buffer.memory) % PAGE == 0
    assert not any(buffer.memory[::PAGE])
    buffer.memory[-1] = 7
    assert buffer.memory[buffer.length_bytes - 1] == 7
    assert (buffer.fd is not None) == is_shared
    buffer.close()


@pytest.mark.parametrize("length", [0, -1])
def test_a_buffer_of_nothing_is_refused(length):
    with pytest.raises(ConfigError, match="at least one byte"):
        HostBuffer(length)


@pytest.mark.parametrize("length", [0, 1, 4095, 4096, 100_000])
def test_aligned_bytes_have_exactly_the_length(length):
    memory = aligned_bytes(length)
    assert memory.nbytes == length
    assert address_of(memory) % PAGE == 0
    memory[:] = b"\1" * length
    assert bytes(memory) == b"\1" * length


def test_memory_outlives_its_buffer_while_a_view_is_left():
    buffer = HostBuffer(PAGE)
    view = buffer.memory[10:20]
    view[:] = b"0123456789"
    buffer.close()
    buffer.close()
    del buffer
    assert bytes(view) == b"0123456789"


def test_a_shared_buffer_is_the_same_memory_in_a_child():
    buffer = HostBuffer(2 * PAGE, is_shared=True)
    buffer.memory[:5] = b"hello"
    code = """
import os, sys
from kvdepot.io.buffers import HostBuffer
fd, length = int(sys.argv[1]), int(sys.argv[2])
mapped = HostBuffer.of_fd(os.open(f"/proc/{os.getppid()}/fd/{fd}", os.O_RDWR), length)
print(bytes(mapped.memory[:5]))
mapped.memory[-3:] = b"bye"
mapped.close()
"""
    child = run_python(code, str(buffer.fd), str(buffer.length_bytes))
    assert (child.returncode, child.stdout) == (0, "b'hello'\n"), child.stderr
    assert bytes(buffer.memory[-3:]) == b"bye"
    assert buffer.fd is not None
    ours = os.fstat(buffer.fd).st_ino
    assert ours in _open_inodes()
    buffer.close()
    buffer.close()
    assert ours not in _open_inodes()


@pytest.mark.parametrize("length", [2 << 20, (9 << 20) + PAGE])
def test_large_shared_memory_can_have_huge_pages_and_is_the_same_in_a_second_map(length):
    buffer = HostBuffer(length, is_shared=True, is_prefaulted=True)
    assert buffer.fd is not None
    huge = 2 << 20
    assert (address_of(buffer.memory) - buffer.fd_offset) % huge == 0
    assert os.fstat(buffer.fd).st_size == buffer.fd_offset + buffer.length_bytes
    other = HostBuffer.of_fd(
        os.dup(buffer.fd), buffer.length_bytes, fd_offset=buffer.fd_offset, is_prefaulted=True
    )
    assert not any(other.memory[::PAGE])
    buffer.memory[0] = 1
    buffer.memory[-1] = 2
    assert (other.memory[0], other.memory[-1]) == (1, 2)
    other.close()
    buffer.close()


def _open_inodes():
    """Inodes of this process's open memory files (`mmap` keeps a descriptor of its own)."""
    links = {fd: f"/proc/self/fd/{fd}" for fd in os.listdir("/proc/self/fd")}
    return {
        os.stat(link).st_ino
        for link in links.values()
        if os.path.lexists(link) and "memfd:kvdepot-host" in os.readlink(link)
    }


def test_addresses_are_of_the_first_byte():
    memory = aligned_bytes(2 * PAGE)
    assert address_of(memory[100:]) == address_of(memory) + 100
    assert address_of(memory[:0]) == 0


# --- rows as few parts


def test_neighbours_become_one_part():
    rows = HostBuffer(8 * PAGE).memory
    parts = merged_rows([rows[index * PAGE : (index + 1) * PAGE] for index in (0, 1, 2, 5, 6, 4)])
    assert parts is not None
    assert [part.nbytes for part in parts] == [3 * PAGE, 2 * PAGE, PAGE]
    assert [address_of(part) for part in parts] == [
        address_of(rows[start * PAGE :]) for start in (0, 5, 4)
    ]


def test_unaligned_rows_are_not_merged():
    rows = HostBuffer(8 * PAGE).memory
    assert merged_rows([rows[:PAGE], rows[PAGE : PAGE + 100]]) is None
    assert merged_rows([rows[1 : PAGE + 1]]) is None
    assert merged_rows([]) == []


def test_rows_of_two_maps_stay_apart_even_if_they_touch():
    # the kernel often puts maps side by side; one view over both would be a view of neither
    maps = [HostBuffer(PAGE) for _ in range(16)]
    rows = sorted((buffer.memory for buffer in maps), key=address_of)
    parts = merged_rows(rows)
    assert parts is not None
    assert len(parts) == 16


@given(st.lists(st.integers(0, 11), min_size=1, max_size=12, unique=True))
def test_merged_rows_are_the_rows_in_their_order(order):
    memory = HostBuffer(12 * PAGE).memory
    for index in range(12):
        memory[index * PAGE : (index + 1) * PAGE] = bytes([index]) * PAGE
    parts = merged_rows([memory[index * PAGE : (index + 1) * PAGE] for index in order])
    assert parts is not None
    assert b"".join(parts) == b"".join(bytes([index]) * PAGE for index in order)
    breaks = sum(second != first + 1 for first, second in pairwise(order))
    assert len(parts) == breaks + 1


# --- the host's name for this boot


def test_the_boot_id_is_the_kernel_s_or_empty(monkeypatch, tmp_path):
    ours = host.host_boot_id()
    assert ours == host.host_boot_id()
    for content, expected in ((None, ""), ("an-id\n", "an-id")):
        file = tmp_path / "boot_id"
        if content is not None:
            file.write_text(content)
        monkeypatch.setattr(host, "_BOOT_ID", file)
        host.host_boot_id.cache_clear()
        assert host.host_boot_id() == expected
    monkeypatch.undo()
    host.host_boot_id.cache_clear()
    assert host.host_boot_id() == ours
