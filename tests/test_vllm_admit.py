"""What of vLLM's stores is written: kvdepot.engines.vllm.admit, alone and in vLLM's managers."""

from __future__ import annotations

import pytest

import tests.needs_vllm  # noqa: F401  # isort: skip

from vllm.v1.kv_offload.base import ReqContext, make_offload_key

from kvdepot.engines.vllm.admit import StoreAdmission
from kvdepot.engines.vllm.blocks import RequestBlocks
from kvdepot.metrics import Counters
from kvdepot.policy.admission import Admission, AdmissionSettings
from kvdepot.policy.write_only import WriteOnlyDetector
from kvdepot.testing.simclock import FakeClock
from tests.vllm_rig import Ask, TierRig

pytestmark = pytest.mark.vllm

TOKENS = 16
ROW_BYTES = 1000


class Desk:
    """An admission over two groups: full attention (1), and a window (0) with chunks twice as long."""

    def __init__(self, **settings):
        self.clock = FakeClock()
        self.counters = Counters()
        self.held = set()
        self.admission = StoreAdmission(
            Admission(AdmissionSettings(**settings)),
            {0: 2 * TOKENS, 1: TOKENS},
            frozenset({1}),
            row_bytes=ROW_BYTES,
            counters=self.counters,
            clock=self.clock,
        )

    def lookup(self, keys):
        return next((n for n, key in enumerate(keys) if key not in self.held), len(keys))

    def offer(self, request, keys, prompt_tokens=1000):
        return self.admission.wanted(
            self.admission.in_order(keys),
            request,
            prompt_tokens=prompt_tokens,
            lookup=self.lookup,
        )

    def refused(self, reason):
        return self.counters.snapshot()[f"not_admitted_{reason}_blocks_total"]


def request_of(chunks, seed=0):
    """A request, its chunks of full attention, and those behind a window."""
    context = ReqContext("request")
    full = [make_offload_key(bytes([seed, n]) * 16, 1) for n in range(chunks)]
    window = [make_offload_key(bytes([seed, n]) * 16, 0) for n in range(chunks // 2)]
    for number, key in enumerate(window):
        context.set_offload_key_position(key, (number + 1) * 2 * TOKENS)
    for number, key in enumerate(full):
        context.set_offload_key_position(key, (number + 1) * TOKENS)
    blocks = RequestBlocks(b"i" * 32, b"")
    blocks.learn(context)
    return blocks, full, window


def test_without_settings_everything_is_written_in_its_order():
    desk = Desk()
    blocks, full, window = request_of(4)
    keys = [*window, *full]
    assert desk.admission.in_order(keys) == keys
    assert desk.offer(blocks, keys) == keys
    assert desk.counters.snapshot()["store_not_admitted_blocks_total"] == 0


def test_on_second_sight_the_other_groups_follow_full_attention():
    desk = Desk(when="second_sight")
    blocks, full, window = request_of(4)
    assert desk.offer(blocks, [*window, *full]) == []
    assert desk.refused("first_sight") == 6
    again, full, window = request_of(4)
    assert desk.offer(again, [*window, *full]) == [*full, *window]
    assert desk.refused("first_sight") == 6


def test_a_chunk_that_is_not_wanted_ends_what_is_written_of_its_request():
    desk = Desk(when="second_sight")
    first, full, window = request_of(8)
    desk.offer(first, full[:3])
    second, full, window = request_of(8)
    # vLLM hands a prompt over in pieces
    assert desk.offer(second, [*full[:4], *window[:2]]) == [*full[:3], *window[:1]]
    third = full[5:]
    assert desk.offer(first, third) == []
    assert desk.offer(second, [*third, *window[2:]]) == [], "seen before, and not reachable"
    assert desk.refused("first_sight") == 3 + 2 + 3 + 5
    last, full, window = request_of(8)
    assert desk.offer(last, full) == [*full[:4]], "the fifth was never offered"


def test_what_the_pool_has_is_not_asked_about():
    desk = Desk(when="second_sight")
    blocks, full, window = request_of(4)
    desk.held = {blocks.key(key) for key in full[:2]}
    assert desk.offer(blocks, [*full, *window]) == [*full[:2], *window[:1]]
    assert desk.refused("first_sight") == 3


def test_short_prompts_are_left_out():
    desk = Desk(prompt_tokens_min=500)
    blocks, full, _ = request_of(4)
    assert desk.offer(blocks, full, prompt_tokens=499) == []
    assert desk.refused("class") == 4
    longer, full, _ = request_of(4, seed=1)
    assert desk.offer(longer, full, prompt_tokens=500) == full


def test_a_budget_counts_the_rows_of_all_groups_and_fills_up_again():
    desk = Desk(bytes_per_day=24 * 3 * 2 * ROW_BYTES)
    blocks, full, _ = request_of(4)
    assert desk.offer(blocks, full) == full[:3]
    assert desk.refused("budget") == 1
    other, full, _ = request_of(4, seed=1)
    assert desk.offer(other, full) == []
    desk.clock.advance(3600)
    later, full, _ = request_of(4, seed=2)
    assert desk.offer(later, full) == full[:3]


def test_answers_are_written_where_they_are_wanted():
    desk = Desk(generated=False)
    blocks, full, window = request_of(4)
    keys = [*full, *window]
    assert desk.offer(blocks, keys, prompt_tokens=3 * TOKENS + 1) == [*full[:3], *window[:1]]
    assert desk.refused("class") == 2
    desk = Desk(bytes_per_day=1 << 40)
    blocks, full, window = request_of(4)
    assert desk.offer(blocks, [*full, *window], prompt_tokens=TOKENS) == [*full, *window]


# --- in vLLM's own managers


def test_a_chunk_is_in_the_pool_once_it_was_computed_twice(tmp_path):
    with TierRig(tmp_path / "pool", admission={"when": "second_sight"}) as rig:
        rig.put(Ask("a", 4))
        rig.forget_host()
        assert rig.take(Ask("a", 4)) == 0
        rig.put(Ask("a", 4))
        rig.forget_host()
        assert rig.take(Ask("a", 4)) == 4
        counts = rig.tier.counters.snapshot()
        assert counts["store_not_admitted_blocks_total"] == 4
        assert counts["not_admitted_first_sight_blocks_total"] == 4
        assert counts["store_blocks_total"] == 4


def test_the_length_of_a_prompt_is_known_until_its_request_ends(tmp_path):
    with TierRig(tmp_path / "pool", admission={"prompt_tokens_min": 100}) as rig:
        short, longer = Ask("a", 2), Ask("b", 4)
        for ask, tokens in ((short, 99), (longer, 130)):
            rig.tier.prompt_tokens[ask.context.req_id] = tokens
            rig.put(ask)
        assert rig.tier.prompt_tokens == {}
        rig.forget_host()
        assert rig.take(Ask("a", 2)) == 0
        assert rig.take(Ask("b", 4)) == 4


def test_a_pool_that_is_only_written_is_told_of(tmp_path, caplog):
    with TierRig(tmp_path / "pool") as rig:
        detector = WriteOnlyDetector(stored_min_bytes=1000, requests_min=3)
        rig.tier.patience.policies.write_only = detector
        for number in range(3):
            ask = Ask(f"prompt {number}", 2)
            rig.begin(ask)
            assert rig.hits(ask) == 0
            rig.store(ask)
            rig.end(ask)
            rig.wait_idle()
        rig.step()
        rig.tier.stats._next_s = 0.0
        assert rig.tier.get_stats() is not None
        assert rig.tier.stats.is_write_only
        assert "only written" in caplog.text
        assert rig.tier.pool.drain(30)
        rig.forget_host()
        assert rig.take(Ask("prompt 0", 2)) == 2
        rig.step()
        rig.tier.stats._next_s = 0.0
        rig.tier.get_stats()
        assert not rig.tier.stats.is_write_only
