"""Who may bring how much into the host tier, and what tells two requests of equal tokens apart.

Of kvdepot.engines.vllm.room, .missing and .extras.
"""

from __future__ import annotations

import hashlib
import time
from types import SimpleNamespace

import pytest

import tests.needs_vllm  # noqa: F401  # isort: skip

from vllm.v1.kv_offload.base import make_offload_key

from kvdepot.clock import SystemClock
from kvdepot.engines.vllm.blocks import RequestBlocks
from kvdepot.engines.vllm.extras import AdapterDigests, has_known_images, has_steady_keys
from kvdepot.engines.vllm.missing import GroupChunks, missing_ends
from kvdepot.engines.vllm.room import HostRoom, Turn
from kvdepot.testing.simclock import FakeClock

pytestmark = pytest.mark.vllm

NOW, WAIT = Turn.NOW, Turn.WAIT


class Costs:
    """So many seconds for one row, of 16 tokens."""

    def __init__(self, load_row_s, compute_row_s):
        self.load_row_s = load_row_s
        self.compute_row_s = compute_row_s

    def load_s(self, length_bytes):
        return length_bytes / 1000 * self.load_row_s

    def compute_s(self, tokens, position, length_bytes):
        assert position >= 0 < length_bytes
        return tokens / 16 * self.compute_row_s


class Host:
    """A host tier whose loads are a hundred times quicker than computing."""

    def __init__(self, rows, load_row_s=0.1, compute_row_s=10.0):
        self.clock = FakeClock()
        self.pinned = 0
        self.asked = 0
        self.costs = Costs(load_row_s, compute_row_s)
        self.room = HostRoom(
            rows,
            1000,
            rows_pinned=lambda: self.pinned,
            costs=self.costs,
            clock=self.clock,
        )

    def ask(self, name, chunks, start=0):
        def missing():
            self.asked += 1
            return [start + 16 * (number + 1) for number in range(chunks)]

        return self.room.ask(name, start, start + 16 * chunks, missing)


def test_what_fits_goes_on_at_once_and_keeps_its_room():
    host = Host(10)
    assert host.ask("a", 6) == (NOW, None)
    assert host.ask("a", 0) == (NOW, None)
    assert host.asked == 1, "a request that has its room is not looked through again"


def test_a_second_one_waits_for_all_that_it_needs():
    host = Host(10)
    host.ask("a", 6)
    assert host.ask("b", 5) == (WAIT, None)
    assert host.ask("b", 5) == (WAIT, None)
    assert host.room.waits == 1
    host.room.give_back("a")
    assert host.ask("b", 5) == (NOW, None)


def test_a_request_that_waits_is_looked_through_again_only_when_room_was_given_back():
    host = Host(10)
    host.ask("a", 6)
    host.ask("b", 2)
    host.ask("c", 5)
    host.asked = 0
    for _ in range(5):
        assert host.ask("c", 5) == (WAIT, None)
    assert host.asked == 0
    host.room.give_back("b")
    assert host.ask("c", 5) == (WAIT, None)
    assert host.asked == 1
    assert host.ask("c", 4, start=16) == (NOW, None), "a part of it is on the device by now"
    assert host.asked == 2


def test_a_request_with_nothing_to_bring_in_never_waits():
    host = Host(10)
    host.ask("a", 10)
    host.ask("b", 5)
    assert host.ask("c", 0) == (NOW, None)


def test_the_first_to_come_is_the_first_to_go():
    host = Host(10)
    host.ask("a", 6)
    assert host.ask("b", 10) == (WAIT, None)
    assert host.ask("c", 4) == (WAIT, None), "it would fit, and b would starve"
    host.room.give_back("a")
    assert host.ask("c", 4) == (WAIT, None)
    assert host.ask("b", 10) == (NOW, None)
    host.room.give_back("b")
    assert host.ask("c", 4) == (NOW, None)


def test_a_request_that_computes_sooner_than_its_turn_comes_computes():
    host = Host(10, load_row_s=1.0, compute_row_s=3.0)
    host.ask("a", 10)
    assert host.ask("b", 10) == (WAIT, None), "10 s of waiting and 10 s of reading against 30 s"
    assert host.ask("c", 2) == (NOW, 0), "20 s of waiting against 6 s"
    assert host.room.short_tokens == 32


def test_the_part_that_fits_is_brought_in_where_waiting_takes_longer():
    host = Host(10, load_row_s=100.0)
    host.ask("a", 6)
    host.costs.load_row_s = 0.1
    assert host.ask("b", 5) == (NOW, 4 * 16), "600 s of waiting against 10 s for the last chunk"


def test_a_request_that_computes_quickly_neither_waits_nor_takes_room():
    host = Host(10, compute_row_s=0.01)
    host.ask("a", 6)
    assert host.ask("b", 5, start=48) == (NOW, 48)
    assert (host.room.short_requests, host.room.short_tokens, host.room.waits) == (1, 80, 0)


def test_a_request_larger_than_the_host_tier_brings_in_what_fits():
    host = Host(10)
    assert host.ask("a", 25, start=32) == (NOW, 32 + 10 * 16)
    assert "would have avoided 240 recomputed tokens" in host.room.advice()
    assert (host.room.short_requests, host.room.short_tokens, host.room.waits) == (1, 240, 0)


def test_a_request_larger_than_the_host_tier_waits_for_all_of_it():
    host = Host(10)
    host.ask("a", 6)
    assert host.ask("b", 25) == (WAIT, None)
    host.room.give_back("a")
    assert host.ask("b", 25) == (NOW, 10 * 16)


def test_patience_ends_and_the_request_goes_on_with_what_there_is():
    host = Host(10)
    host.ask("a", 6)
    assert host.ask("b", 8) == (WAIT, None)
    host.clock.advance(1.0)
    assert host.ask("b", 8) == (WAIT, None), "it may be late by a little"
    host.clock.advance(10.0)
    assert host.ask("b", 8) == (NOW, 4 * 16)
    host.room.give_back("a")
    host.room.give_back("b")
    assert host.ask("c", 10) == (NOW, None), "all room has come back"


def test_patience_ends_with_no_room_at_all_and_the_request_computes():
    host = Host(10)
    host.ask("a", 10)
    assert host.ask("b", 8, start=48) == (WAIT, None)
    host.clock.advance(20)
    assert host.ask("b", 8, start=48) == (NOW, 48)


def test_rows_that_stores_hold_are_no_room_until_they_are_written():
    host = Host(10)
    host.pinned = 7
    assert host.ask("a", 5) == (WAIT, None)
    host.pinned = 5
    assert host.ask("a", 5) == (NOW, None)


def test_chunks_of_several_groups_that_end_together_come_in_together():
    host = Host(3)
    assert host.room.ask("a", 0, 32, lambda: [32, 16, 32, 16]) == (NOW, 16)


def test_a_request_that_ends_while_it_waits_keeps_nobody():
    host = Host(10)
    host.ask("a", 10)
    host.ask("b", 10)
    host.room.give_back("b")
    host.room.give_back("a")
    host.room.give_back("a")
    assert host.ask("c", 10) == (NOW, None)


# --- which chunks those are


def groups_of(*counts):
    return [
        GroupChunks(16, [make_offload_key(bytes([n]) * 32, group) for n in range(count)])
        for group, count in enumerate(counts)
    ]


def test_chunks_that_are_in_the_pool_and_not_in_the_host_tier_are_missing():
    (group, other) = groups = groups_of(8, 4)
    here = {group.keys[2], group.keys[5]}
    asked = []

    def held(keys):
        asked.append(len(keys))
        return 3

    ends = missing_ends(groups, 20, lambda key: key not in here, held)
    assert ends == [32, 64, 80, 32, 48, 64]
    assert asked == [5, 3], "one question for each group"
    assert missing_ends(groups, 200, lambda key: True, held) == []
    assert other.keys[0] != group.keys[0]


def test_a_prefix_of_thousands_is_found_with_a_few_lookups_and_ends_at_what_was_lost():
    keys = [
        make_offload_key(hashlib.sha256(bytes([n % 256, n // 256])).digest(), 0)
        for n in range(3000)
    ]
    blocks = RequestBlocks(b"i" * 32, b"")
    held = {blocks.key(key) for key in keys[:1234]}
    asked = []

    def lookup(wanted):
        asked.append(len(wanted))
        return next((n for n, key in enumerate(wanted) if key not in held), len(wanted))

    assert blocks.prefix(keys, lookup, is_chained=True) == 1234
    assert len(asked) < 15
    assert blocks.prefix(keys[:1234], lookup, is_chained=True) == 1234
    assert blocks.prefix([], lookup, is_chained=True) == 0
    assert blocks.prefix(keys[1234:], lookup, is_chained=True) == 0
    asked.clear()
    assert blocks.prefix(keys, lookup, is_chained=False) == 1234
    assert asked == [3000]
    blocks.lost.add(keys[77])
    assert blocks.prefix(keys, lookup, is_chained=True) == 77


# --- what a request's hashes do not tell


def image(content, identifier=None):
    return SimpleNamespace(mm_hash=content, identifier=identifier or content)


@pytest.mark.parametrize(
    ("features", "is_known"),
    [
        (None, True),
        ([], True),
        ([image("ab" * 32)], True),
        ([image("ab" * 64)], True),
        ([image("ab" * 32, "adapter:" + "ab" * 32)], True),
        ([image("ab" * 32), image("cat")], False),
        ([image("cat")], False),
        ([image(None, "ab" * 32)], False),
        ([image("ab" * 32, "cd" * 32)], False),
        ([image("AB" * 32)], False),
    ],
)
def test_only_images_named_by_their_content_are_cached(features, is_known):
    assert has_known_images(SimpleNamespace(mm_features=features)) is is_known


def test_a_session_of_streamed_input_keeps_keys_of_tokens_that_it_took_back():
    assert has_steady_keys(SimpleNamespace(resumable=False))
    assert not has_steady_keys(SimpleNamespace(resumable=True))


@pytest.fixture
def adapter(tmp_path):
    folder = tmp_path / "adapter"
    folder.mkdir()
    (folder / "adapter_config.json").write_text("{}")
    (folder / "adapter_model.safetensors").write_bytes(b"one")
    return SimpleNamespace(lora_name="a", lora_int_id=1, lora_path=str(folder), folder=folder)


def digest_of(digests, adapter):
    check = digests.check(adapter)
    give_up_s = time.monotonic() + 60
    while not check.is_over:
        assert time.monotonic() < give_up_s
        time.sleep(0.002)
    assert not check.is_pending(0.0)
    return check.digest


def test_an_adapter_is_known_by_its_content(adapter):
    clock = SystemClock()
    digests = AdapterDigests(clock)
    one = digest_of(digests, adapter)
    assert len(one) == 32
    assert digest_of(digests, adapter) == one
    (adapter.folder / "adapter_model.safetensors").write_bytes(b"two")
    assert digest_of(AdapterDigests(clock), adapter) not in (None, one), "a later engine sees it"


def test_an_adapter_that_changes_under_an_engine_is_not_cached_any_more(adapter, caplog):
    digests = AdapterDigests(SystemClock())
    one = digest_of(digests, adapter)
    weights = adapter.folder / "adapter_model.safetensors"
    weights.write_bytes(b"two")
    assert digest_of(digests, adapter) is None
    weights.write_bytes(b"one")
    assert digest_of(digests, adapter) is None, "the engine may have loaded either"
    assert caplog.text.count("have changed") == 1
    adapter.lora_int_id = 2
    assert digest_of(digests, adapter) == one, "loaded anew under another number"


def test_an_adapter_that_is_not_here_is_not_cached(adapter):
    adapter.lora_path = "no/such-adapter"
    assert digest_of(AdapterDigests(SystemClock()), adapter) is None


def test_a_request_waits_for_the_look_at_its_adapter_only_so_long():
    clock = FakeClock()
    check = AdapterDigests(clock)
    check._thread = object()  # type: ignore[assignment]  # nobody looks
    question = check.check(SimpleNamespace(lora_name="a", lora_int_id=1, lora_path="x"))
    assert question.is_pending(clock.monotonic_s())
    clock.advance(0.6)
    assert not question.is_pending(clock.monotonic_s())
    assert question.digest is None
    later = check.check(SimpleNamespace(lora_name="a", lora_int_id=1, lora_path="x"))
    assert not later.is_pending(clock.monotonic_s()), "while one look hangs, nobody waits"
