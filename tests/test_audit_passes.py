"""The passes over token ids against brute force: kvdepot.audit.tokenlog, kvdepot.audit.prefix,
kvdepot.audit.blocklog, kvdepot.audit.copies, kvdepot.audit.edges, kvdepot.audit.curves and
kvdepot.audit.routing, kvdepot.audit.sizing, kvdepot.audit.content.
"""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvdepot.audit.blocklog import BlockLog, block_log, chained
from kvdepot.audit.content import content_steps
from kvdepot.audit.copies import ANCHOR_TOKENS, anchors, bodies, copied
from kvdepot.audit.curves import belady, distances, keep_curve, lru_curve, revisits
from kvdepot.audit.edges import edge_log
from kvdepot.audit.prefix import blocks_of, common_length, exact_hits, mismatches
from kvdepot.audit.records import Record, Trace
from kvdepot.audit.routing import fleet, follow_ups, random_workers, selected, sticky_workers
from kvdepot.audit.sizing import capacity_points, keep_time_s
from kvdepot.audit.tokenlog import MAX_TOKEN_ID, token_log
from kvdepot.errors import ConfigError
from tests import audit_oracle

# few different tokens and blocks, so that prefixes are shared by chance
prompts_of = st.lists(st.lists(st.integers(0, 2), max_size=40), min_size=1, max_size=12)
chains_of = st.lists(st.lists(st.integers(0, 3), max_size=8), min_size=1, max_size=14)


def log_of(prompts, extras=None):
    return token_log([np.array(each, np.int32) for each in prompts], extras=extras)


def blocks_from(chains, *, times=None, sessions=None, size=16) -> BlockLog:
    numbers = chained(chains)
    starts = np.cumsum([0, *map(len, numbers)])
    keys = np.array([each for chain in numbers for each in chain], np.int64)
    return block_log(
        keys,
        starts,
        tokens=np.full(len(keys), size),
        lengths=np.diff(starts) * size,
        times_s=np.arange(len(chains), dtype=float) if times is None else np.array(times, float),
        sessions=np.full(len(chains), -1) if sessions is None else np.array(sessions),
    )


@given(prompts_of, st.integers(0, 200))
def test_prompts_made_one_by_one_give_the_same_log(prompts, tokens):
    whole = log_of(prompts)
    made = token_log((np.array(each, np.int32) for each in prompts), tokens=tokens)
    assert made.ids.tolist() == whole.ids.tolist() == [each for ids in prompts for each in ids]
    assert made.starts.tolist() == whole.starts.tolist()


# --- pass 1


@given(prompts_of, st.sampled_from([1, 2, 4, 16, 17]), st.data())
def test_reuse_is_that_of_brute_force(prompts, block, data):
    extras = [data.draw(st.integers(0, 1)) for _ in prompts]
    log = log_of(prompts, extras)
    blocks = blocks_of(log, block)
    assert blocks.hit_tokens().tolist() == audit_oracle.reused(prompts, block, extras)
    assert mismatches(log, blocks) == 0
    without = blocks_of(log, block, with_extras=False)
    assert without.hit_tokens().tolist() == audit_oracle.reused(prompts, block, [0] * len(prompts))


@given(prompts_of)
def test_exact_hits_are_at_least_the_blocks_and_never_more_than_is_equal(prompts):
    log = log_of(prompts)
    blocks = blocks_of(log, 4)
    exact, donors = exact_hits(log, blocks)
    for request, prompt in enumerate(prompts):
        best = max(
            (common_length(log.prompt(request), log.prompt(each)) for each in range(request)),
            default=0,
        )
        assert blocks.hit_tokens()[request] <= exact[request] <= best
        if donors[request] >= 0:
            donor = prompts[donors[request]]
            assert prompt[: exact[request]] == donor[: exact[request]]


@given(st.lists(st.integers(0, 2), max_size=300), st.lists(st.integers(0, 2), max_size=300))
def test_the_common_length_is_to_the_token(left, right):
    same = common_length(np.array(left, np.int32), np.array(right, np.int32))
    assert left[:same] == right[:same]
    assert same == min(len(left), len(right)) or left[same] != right[same]


def test_long_prompts_hash_exactly():
    rng = np.random.default_rng(1)
    shared = rng.integers(0, MAX_TOKEN_ID, 300_000).astype(np.int32)
    other = shared.copy()
    other[-17] += 1
    log = log_of([shared, other, shared])
    for block in (16, 100):
        hits = blocks_of(log, block).hit_tokens().tolist()
        assert hits[0] == 0
        assert hits[1] == (300_000 - 17) // block * block
        assert hits[2] == 300_000


def test_ids_out_of_range_are_refused():
    with pytest.raises(ConfigError, match="token ids"):
        log_of([[MAX_TOKEN_ID + 1]])
    with pytest.raises(ConfigError, match="token ids"):
        log_of([[-1]])


# --- pass 2


def test_a_body_is_found_wherever_it_stands():
    rng = np.random.default_rng(2)
    body, other = rng.integers(0, 50_000, (2, 3000)).astype(np.int32)
    heads = rng.integers(0, 50_000, (4, 37)).astype(np.int32)
    prompts = [
        np.concatenate([heads[0], body]),
        np.concatenate([heads[1], other]),
        np.concatenate([heads[2], body, other[:500]]),
        np.concatenate([heads[3], rng.integers(0, 50_000, 2000).astype(np.int32)]),
    ]
    log = token_log(prompts)
    found = bodies(log, np.zeros(4, np.int64))
    assert found.copied.tolist() == [0, 0, 3500, 0]
    assert found.donors.tolist() == [-1, -1, 0, -1]


def test_the_turn_before_is_preferred_when_it_has_most():
    rng = np.random.default_rng(3)
    first, second = rng.integers(0, 50_000, (2, 400)).astype(np.int32)
    news = rng.integers(0, 50_000, (3, 30)).astype(np.int32)
    prompts = [first, np.concatenate([news[0], second]), np.concatenate([news[1], first, second])]
    prompts.append(np.concatenate([news[2], first, second]))
    log = token_log(prompts, sessions=[0, 0, 0, 0])
    assert bodies(log, np.zeros(4, np.int64)).donors[3] == 2


def test_anchors_are_where_the_content_is():
    rng = np.random.default_rng(4)
    text = rng.integers(0, 50_000, 5000).astype(np.int32)
    shifted = np.concatenate([rng.integers(0, 50_000, 11).astype(np.int32), text])
    (positions, hashes), (moved, same) = anchors(text), anchors(shifted)
    inner = moved >= 11
    assert (moved[inner] - 11).tolist() == positions.tolist()
    assert same[inner].tolist() == hashes.tolist()
    assert 0.03 < len(positions) / 5000 < 0.1
    assert len(anchors(text[: ANCHOR_TOKENS - 1])[0]) == 0


def test_shared_runs_shorter_than_an_anchor_are_not_copies():
    rng = np.random.default_rng(5)
    text = rng.integers(0, 50_000, 4000).astype(np.int32)
    noise = rng.integers(0, 50_000, 400).astype(np.int32)
    broken = text.copy()
    broken[::20] = noise[:200]
    assert copied(broken, text) == 0
    assert copied(text[1000:], text) == 3000


# --- curves


@given(chains_of, st.integers(0, 12))
def test_the_lru_curve_is_that_of_brute_force(chains, capacity):
    numbers = chained(chains)
    log = edge_log(blocks_from(chains))
    curve = lru_curve(log, [16.0 * capacity])
    assert curve.reused == [16 * audit_oracle.lru(numbers, capacity)]


@given(chains_of)
def test_folding_loses_no_tokens(chains):
    blocks = blocks_from(chains)
    log = edge_log(blocks)
    assert int(log.tokens.sum()) == 16 * len(blocks.blocks)
    again = int(log.tokens[log.previous >= 0].sum())
    assert again == int(blocks.hit_tokens().sum())
    assert (distances(log)[log.previous < 0] == -1).all()


@given(chains_of, st.integers(1, 12))
def test_no_policy_beats_the_bound(chains, capacity):
    log = edge_log(blocks_from(chains))
    least = lru_curve(log, [16.0 * capacity]).reused[0]
    everything = int(log.tokens[log.previous >= 0].sum())
    assert least <= belady(log, 16.0 * capacity) <= everything
    assert belady(log, 1e9) == everything


def test_the_bound_knows_the_future():
    # two prompts by turns, and room for one of them: LRU keeps nothing, the bound half
    chains = [[0, 1], [2, 3]] * 10
    log = edge_log(blocks_from(chains))
    assert lru_curve(log, [32.0]).reused == [0]
    assert belady(log, 32.0) == 9 * 32


@given(chains_of, st.data())
def test_the_keep_curve_is_that_of_brute_force(chains, data):
    times = sorted(data.draw(st.floats(0, 100)) for _ in chains)
    keep = data.draw(st.floats(0, 100))
    last: dict[int, float] = {}
    expected = 0
    for at, chain in zip(times, chained(chains), strict=True):
        expected += sum(16 for each in chain if each in last and at - last[each] <= keep)
        last |= dict.fromkeys(chain, at)
    log = edge_log(blocks_from(chains, times=times))
    assert keep_curve(log, [keep]).reused == [expected]


def test_times_between_uses():
    log = edge_log(blocks_from([[0], [0], [0]], times=[0, 10, 100]))
    assert revisits(log) == {"p50": 10.0, "p90": 90.0, "p95": 90.0, "p99": 90.0}
    assert keep_time_s(log) == 90.0
    assert revisits(edge_log(blocks_from([[0], [1]]))) == {}
    assert keep_time_s(edge_log(blocks_from([[0], [1]]))) == 0.0
    points = capacity_points(log, 100)
    assert points[-1].lru_tokens == 32
    assert points[-1].bound_tokens == 32
    assert points[-1].capacity_bytes == 1600
    assert capacity_points(edge_log(blocks_from([[]])), None) == []


# --- first asks, follow-ups, routing


def test_follow_ups_extend_an_earlier_request_to_its_last_full_block():
    log = blocks_from([[0, 1], [0, 2], [0, 1, 3], [4], [0, 1]])
    assert follow_ups(log).tolist() == [False, False, True, False, True]
    assert follow_ups(blocks_from([[]])).tolist() == [False]


@given(chains_of, st.integers(1, 4))
def test_a_fleet_is_its_parts(chains, instances):
    log = blocks_from(chains)
    workers = random_workers(log.requests, instances)
    capacity = 32.0
    parts: list[list[list[int]]] = [[] for _ in range(instances)]
    for chain, worker in zip(chained(chains), workers, strict=True):
        parts[worker].append(chain)
    expected = sum(16 * audit_oracle.lru(part, 2) for part in parts)
    row = fleet(log, instances, capacity, 1e9)
    assert row.random_private == expected
    assert row.shared == int(log.hit_tokens().sum())
    part = selected(log, np.flatnonzero(workers == 0))
    assert part.requests == int((workers == 0).sum())


def test_sticky_routing_keeps_sessions_together_and_spreads_strangers():
    chains = [[each, 10 + each] for each in range(4)] * 5
    log = blocks_from(chains, sessions=[0, 1, 2, 3] * 5)
    workers = sticky_workers(log, 4)
    assert workers.reshape(5, 4).tolist() == [workers[:4].tolist()] * 5
    assert sorted(workers[:4]) == [0, 1, 2, 3]
    # without sessions, a common head alone must not draw everything to one worker
    heads = blocks_from([[0, *range(10 * each, 10 * each + 9)] for each in range(1, 21)])
    assert len(set(sticky_workers(heads, 4).tolist())) == 4


# --- content ids


def test_content_ids_are_chained_by_what_stands_before_them():
    assert chained([[1, 2], [1, 2], [2, 1]]) == [[0, 1], [0, 1], [2, 3]]
    assert chained([[1], [1]], [0, 1]) == [[0], [1]]


def test_a_changing_piece_masks_the_order_of_passages():
    rng = np.random.default_rng(6)
    records, traces = [], []
    for number in range(60):
        passages = rng.permutation([101, 102, 103, 104]).tolist()
        ids = [1, 2, 1000 + number, *passages, 5000 + number]
        groups = (("sys_prompt", 3), ("passages_ids", 4), ("user_input", 1))
        records.append(Record(number, float(number)))
        traces.append(Trace(ids, [100] * len(ids), groups))
    steps = content_steps(records, traces, least=1)
    assert [step.what for step in steps] == ["behind", "popular_first"]
    assert [step.cause for step in steps] == ["per_user", "piece_order"]
    assert steps[1].alone == 0  # masked
    assert steps[-1].after.reused_tokens == 59 * 600
    assert content_steps(records, [each._replace(groups=()) for each in traces], least=1) == []
