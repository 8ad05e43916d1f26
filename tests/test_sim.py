"""The simulator: accounts close, laws hold under any bandwidth, and known answers come out."""

from __future__ import annotations

import json
import statistics

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvdepot.cli import simulate as simulate_command
from kvdepot.cli.admission import Admit
from kvdepot.cli.main import run
from kvdepot.errors import ConfigError
from kvdepot.policy.admission import AdmissionSettings
from kvdepot.sim.caches import LruBlocks, SeenIds
from kvdepot.sim.ending import keep
from kvdepot.sim.instance import Instance, Prompt, find_runs
from kvdepot.sim.result import SimResult, percentiles
from kvdepot.sim.settings import Prefill, SimSettings
from kvdepot.sim.storage import Loading, Storage
from kvdepot.sim.trace import TraceRequest, read_trace, repeated, rescaled
from kvdepot.sim.world import World, simulate

TOKENS = 64
TOKEN_BYTES = 1000
BLOCK_BYTES = TOKENS * TOKEN_BYTES
#: 1,000 tokens a second, so a block takes 64 ms and break-even is 1 MB/s
PREFILL = Prefill(0.0, 1e-3, 0.0)
BREAK_EVEN = TOKEN_BYTES * 1000.0


def world(**fields) -> SimSettings:
    defaults = {
        "prefill": PREFILL,
        "block_tokens": TOKENS,
        "token_bytes": TOKEN_BYTES,
        "read_bytes_per_s": 1e9,
        "is_trained": True,
    }
    return SimSettings(**{**defaults, **fields})


def request(at_s: float, *ids: int, extra: int = 10) -> TraceRequest:
    return TraceRequest(at_s, len(ids) * TOKENS + extra, 20, list(ids))


def conversation(turns: int = 2, blocks: int = 50, gap_s: float = 100.0) -> list[TraceRequest]:
    return [request(turn * gap_s, *range(1, blocks + 1)) for turn in range(turns)]


# --- known answers


def test_without_storage_everything_is_computed():
    result = simulate(conversation(), world(policies="off"))
    assert result.ttft_s.p50 == pytest.approx(3.21)
    assert result.token_share == 0.0
    assert result.amplification == pytest.approx(6420 / 3220)
    assert result.read_bytes == result.written_bytes == 0


def test_a_follow_up_comes_from_fast_storage():
    result = simulate(conversation(), world())
    assert result.first_ask_ttft_s.p50 == pytest.approx(3.21)
    assert result.follow_up_ttft_s.p50 == pytest.approx(0.01 + 0.002 + 0.0032, rel=0.05)
    assert result.reused_tokens == {"device": 0, "host": 0, "disk": 3200}
    assert result.read_bytes == result.written_bytes == 50 * BLOCK_BYTES
    assert result.modes == {"load": 1, "meet": 0, "compute": 1}
    assert result.amplification == pytest.approx(1.0, abs=0.01)


def test_nearer_tiers_are_asked_first():
    requests = conversation(3)
    device = simulate(requests, world(device_bytes=50 * BLOCK_BYTES))
    assert device.reused_tokens == {"device": 6400, "host": 0, "disk": 0}
    host = simulate(requests, world(host_bytes=50 * BLOCK_BYTES))
    assert host.reused_tokens == {"device": 0, "host": 6400, "disk": 0}


def test_slow_storage_is_left_alone():
    off = simulate(conversation(6), world(policies="off"))
    slow = simulate(conversation(6), world(read_bytes_per_s=BREAK_EVEN / 20))
    blind = simulate(conversation(6), world(read_bytes_per_s=BREAK_EVEN / 20, policies="load_all"))
    assert slow.follow_up_ttft_s.p95 <= 1.1 * off.follow_up_ttft_s.p95
    assert slow.reasons["refused_cost"] == 5
    assert blind.follow_up_ttft_s.p50 > 10 * off.follow_up_ttft_s.p50


def test_at_break_even_the_two_meet_in_the_middle():
    requests = conversation()
    sequential = simulate(requests, world(read_bytes_per_s=BREAK_EVEN))
    blind = simulate(requests, world(read_bytes_per_s=BREAK_EVEN, policies="load_all"))
    both = simulate(requests, world(read_bytes_per_s=BREAK_EVEN, can_meet=True))
    best = min(sequential.follow_up_ttft_s.p50, blind.follow_up_ttft_s.p50)
    assert both.modes["meet"] == 1
    assert both.follow_up_ttft_s.p50 <= 0.8 * best
    assert both.follow_up_ttft_s.p50 >= 0.45 * best


def test_a_burst_in_order_waits_half_as_long_as_all_at_once():
    firsts = [
        request(number * 10.0, *range(100 * number, 100 * number + 50)) for number in range(16)
    ]
    burst = [each._replace(at_s=1000.0) for each in firsts]
    # prefill is slow and the tail is short, so that loads decide
    settings = world(read_bytes_per_s=30 * BREAK_EVEN)
    ordered = simulate(firsts + burst, settings)
    at_once = simulate(firsts + burst, settings._replace(policies="load_all"))
    assert ordered.modes["load"] == 16
    assert ordered.follow_up_ttft_s.p50 <= 0.6 * at_once.follow_up_ttft_s.p50
    assert ordered.follow_up_ttft_s.largest <= 1.05 * at_once.follow_up_ttft_s.largest


def test_a_hang_costs_the_slack_and_ends_by_itself():
    requests = [request(second * 10.0, *range(1, 51)) for second in range(40)]
    off = simulate(requests, world(policies="off"))
    result = World(world(factors=((100.0, 0.0), (130.0, 1.0))))
    result.run(requests)
    follow_ups = list(result.tally.follow_ups)
    assert max(follow_ups) <= 1.10 * off.follow_up_ttft_s.largest
    during, after = follow_ups[10:13], follow_ups[14:]
    assert statistics.median(during) > 3.0
    # within ten seconds of its end the next request is served from storage again
    assert max(after[1:]) < 0.1


def test_a_small_host_buffer_is_shared_and_the_size_that_is_needed_is_said():
    firsts = [
        request(number * 10.0, *range(100 * number, 100 * number + 50)) for number in range(4)
    ]
    burst = [each._replace(at_s=1000.0) for each in firsts]
    settings = world(host_bytes=60 * BLOCK_BYTES, read_bytes_per_s=1.5 * BREAK_EVEN)
    result = simulate(firsts + burst, settings)
    assert result.requests == 8
    assert result.reasons["host_full"] >= 1
    assert "host buffer of" in result.host_advice
    large = simulate(firsts + burst, settings._replace(host_bytes=0))
    assert large.host_advice == ""


def test_second_sight_writes_a_quarter_and_reads_as_much():
    once = [
        request(number * 1.0, *range(1000 * number, 1000 * number + 10)) for number in range(30)
    ]
    again = [request(100.0 + turn, *range(1, 11)) for turn in range(10)]
    always = simulate(once + again, world())
    second = simulate(once + again, world(admission=AdmissionSettings(when="second_sight")))
    assert second.written_bytes < always.written_bytes / 10
    assert second.read_bytes >= 0.8 * always.read_bytes


def test_a_cache_that_is_only_written_is_reported():
    requests = [
        request(number * 1.0, *range(10 * number, 10 * number + 10)) for number in range(300)
    ]
    result = simulate(requests, world(token_bytes=1 << 20, read_bytes_per_s=1e12))
    assert "only written" in result.write_only


def test_several_instances_share_the_pool():
    requests = [
        request(0.0, *range(1, 51)),
        request(50.0, *range(1, 51)),
        request(50.0, *range(1, 51)),
    ]
    result = simulate(requests, world(instances=2))
    assert result.reused_tokens["disk"] == 2 * 3200


# --- laws


_traces = st.lists(
    st.tuples(st.floats(0, 20), st.integers(0, 3), st.integers(0, 30), st.integers(1, 200)),
    min_size=1,
    max_size=30,
)


def build(steps) -> list[TraceRequest]:
    """Requests of up to four families, each a prefix of its family's chain."""
    now, found = 0.0, []
    for gap, family, blocks, extra in steps:
        now += gap
        ids = range(family * 1000, family * 1000 + blocks)
        found.append(request(now, *ids, extra=extra))
    return found


@given(
    _traces,
    st.floats(1e3, 1e10),
    st.booleans(),
    st.integers(1, 3),
    st.tuples(st.integers(0, 40), st.integers(0, 60), st.integers(0, 200)),
)
def test_every_token_is_accounted_for(steps, bandwidth, can_meet, instances, blocks):
    device, host, disk = blocks
    requests = build(steps)
    result = simulate(
        requests,
        world(
            read_bytes_per_s=bandwidth,
            can_meet=can_meet,
            instances=instances,
            device_bytes=device * BLOCK_BYTES,
            host_bytes=host * BLOCK_BYTES,
            disk_bytes=disk * BLOCK_BYTES,
            is_trained=False,
        ),
    )
    assert result.requests == len(requests)
    assert result.prompt_tokens == sum(each.input_tokens for each in requests)
    assert result.computed_tokens + sum(result.reused_tokens.values()) == result.prompt_tokens
    assert min(result.reused_tokens.values()) >= 0
    assert result.amplification >= 0.99
    assert sum(result.modes.values()) == len(requests)
    assert result.ttft_s.largest < float("inf")


_factors = st.lists(
    st.tuples(st.floats(0.1, 60), st.sampled_from([0.0, 0.001, 0.01, 0.1, 1.0, 10.0])), max_size=8
)


@given(
    _traces, st.floats(BREAK_EVEN / 100, BREAK_EVEN * 100), _factors, st.booleans(), st.booleans()
)
def test_never_slower_than_computing_under_any_bandwidth(
    steps, bandwidth, changes, can_meet, is_trained
):
    """One request at a time, so that only the storage can be to blame."""
    requests, at_s = [], 0.0
    for place, each in enumerate(build(steps)):
        requests.append(each._replace(at_s=place * 30.0))
    factors = []
    for gap, factor in changes:
        at_s += gap
        factors.append((at_s, factor))
    settings_ = world(
        read_bytes_per_s=bandwidth,
        factors=tuple(factors),
        can_meet=can_meet,
        is_trained=is_trained,
    )
    alone = [PREFILL.seconds(each.input_tokens) for each in requests]
    found = World(settings_)
    found.run(requests)
    # the order of answers is the order of requests, as each ends before the next comes
    first, follow = iter(found.tally.first_asks), iter(found.tally.follow_ups)
    seen = SeenIds()
    for each, compute_s in zip(requests, alone, strict=True):
        leading = seen.leading(each.block_ids)
        seen.add(each.block_ids)
        is_follow_up = bool(leading) and 2 * leading >= len(each.block_ids)
        ttft_s = next(follow if is_follow_up else first)
        assert ttft_s <= compute_s * 1.10 + 1e-6


# --- parts


def test_lru_drops_suffixes_before_prefixes():
    cache = LruBlocks(3)
    assert cache.use([1, 2, 3, 4]) == 4
    assert [each in cache for each in (1, 2, 3, 4)] == [True, True, True, False]
    assert cache.evicted == 1
    assert len(LruBlocks(0).ids) == 0


def test_seen_ids_of_any_size():
    seen = SeenIds()
    seen.add([1, 5, 1 << 40])
    assert seen.leading([1, 5, 1 << 40, 7]) == 3
    assert seen.leading([7]) == 0
    seen.add([])


def test_storage_shares_or_orders():
    for is_ordered, ends in ((True, [1.0, 3.0]), (False, [2.0, 3.0])):
        storage = Storage(100.0, is_ordered=is_ordered, ageing=1.0)
        small, large = Loading("small", 100, 0.0), Loading("large", 200, 0.0)
        storage.begin(large, 0.0)
        storage.begin(small, 0.0)
        found = []
        while storage.waiting:
            at_s = storage.next_event_s()
            storage.advance(at_s)
            found += [(each.owner, at_s) for each in storage.take_done()]
        assert [at_s for _, at_s in found] == pytest.approx(ends)
        assert found[0][0] == "small"


def test_storage_that_hangs_goes_on_later():
    storage = Storage(100.0, factors=((0.5, 0.0), (2.0, 1.0)), ageing=1.0)
    storage.begin(Loading("x", 100, 0.0), 0.0)
    storage.advance(1.0)
    assert storage.read_bytes == 50
    assert storage.next_event_s() == 2.0
    storage.advance(2.5)
    assert [each.owner for each in storage.take_done()] == ["x"]


def test_runs_name_the_nearest_tier():
    instance = Instance(world(device_bytes=BLOCK_BYTES, host_bytes=2 * BLOCK_BYTES))
    disk = LruBlocks(10)
    disk.use([1, 2, 3, 4])
    instance.host.use([1, 2])
    instance.device.use([1])
    runs = find_runs([1, 2, 3, 4, 5], instance, disk, 7)
    assert runs == [("device", 1, 0), ("host", 1, 0), ("disk", 2, 7)]
    assert find_runs([], instance, disk, 7) == []


def test_nothing_is_kept_without_storage():
    settings_ = world(policies="off")
    prompt = Prompt(request(0.0, 1, 2), Instance(settings_), is_follow_up=False)
    assert keep(prompt, LruBlocks(0), settings_, 0.0) == 0


def test_percentiles_of_nothing_are_zero():
    assert percentiles([]).p95 == 0.0
    assert percentiles([1.0, 3.0]).mean == 2.0


def test_prefill_and_its_inverse_agree():
    for prefill in (Prefill(0.1, 1e-3, 0.0), Prefill(0.1, 1e-3, 1e-7)):
        for tokens, position in ((10, 0), (5000, 0), (300, 8000)):
            seconds = prefill.seconds(tokens, position)
            assert prefill.tokens(seconds, position) == pytest.approx(tokens)
        assert prefill.tokens(0.05) == 0.0


@pytest.mark.parametrize(
    "fields",
    [
        {"instances": 0},
        {"read_bytes_per_s": 0.0},
        {"host_bytes": -1},
        {"prefill": Prefill(0.0, 0.0, 0.0)},
        {"factors": ((5.0, 1.0), (1.0, 1.0))},
    ],
)
def test_impossible_worlds_are_refused(fields):
    with pytest.raises(ConfigError):
        simulate(conversation(), world(**fields))


# --- traces and the command


LINES = [
    b'{"timestamp": 0, "input_length": 1100, "output_length": 5, "hash_ids": [0, 1, 2]}',
    b"",
    b'{"timestamp": 3000, "input_length": 1600, "output_length": 5, "hash_ids": [0, 1, 3, 4], "x": 1}',
]


def test_only_full_blocks_of_a_trace_count():
    found = list(read_trace(LINES))
    assert found == [
        TraceRequest(0.0, 1100, 5, [0, 1]),
        TraceRequest(3.0, 1600, 5, [0, 1, 3]),
    ]
    assert [each.at_s for each in rescaled(found, 0.5)] == [0.0, 1.5]


@pytest.mark.parametrize(
    "line",
    [
        b"{",
        b'{"timestamp": 1}',
        b'{"timestamp": -5, "input_length": 10, "output_length": 5, "hash_ids": []}',
        b'{"timestamp": 5000, "input_length": 0, "output_length": 5, "hash_ids": []}',
    ],
)
def test_a_line_that_is_no_request_is_named(line):
    with pytest.raises(ConfigError, match="line 4"):
        list(read_trace([*LINES, line]))


def test_copies_of_a_trace_share_only_the_system_prompt():
    found = list(repeated(list(read_trace(LINES)), 5))
    assert len(found) == 5
    assert found[2].block_ids == [0, 1 + 4]
    assert found[4].block_ids == [0, 1 + 8]
    assert [each.at_s for each in found] == sorted(each.at_s for each in found)


@pytest.fixture
def trace(tmp_path):
    lines = [
        {
            "timestamp": turn * 50_000,
            "input_length": 5200,
            "output_length": 9,
            "hash_ids": list(range(11)),
        }
        for turn in range(6)
    ]
    path = tmp_path / "trace.jsonl"
    path.write_text("\n".join(json.dumps(line) for line in lines))
    return path


def test_the_command_prints_a_table_or_one_object(trace, capsys):
    assert run(["simulate", str(trace), "--device", "0"]) == 0
    table = capsys.readouterr().out
    assert "6 requests" in table
    assert "5 load" in table
    options = [
        "--device",
        "0",
        "--json",
        "--load",
        "2",
        "--requests",
        "12",
        "--fault",
        "100:0,130:1",
    ]
    assert run(["simulate", str(trace), *options]) == 0
    found = json.loads(capsys.readouterr().out)
    assert set(found) == set(SimResult.__struct_fields__)
    assert found["requests"] == 12


@pytest.mark.parametrize(
    "options",
    [
        ["--fault", "soon"],
        ["--load", "0"],
        ["--prefill", "0"],
        ["--instances", "0"],
        ["--device", "a lot"],
    ],
)
def test_the_command_refuses_what_means_nothing(trace, options, capsys):
    assert run(["simulate", str(trace), *options]) == 2
    assert "error:" in capsys.readouterr().err


def test_the_command_simulates_the_prefill_that_it_is_told(trace):
    settings = simulate_command._settings(
        simulate_command.Engine(prefill=1000.0), simulate_command.Store(), Admit(), "on"
    )
    assert settings.prefill.seconds(10) == pytest.approx(0.01, rel=0.01)
    late = settings.prefill.seconds(10, 100_000) / settings.prefill.seconds(10)
    assert late == pytest.approx(3.0, rel=0.01)


def test_the_command_says_when_there_is_no_trace(tmp_path, capsys):
    assert run(["simulate", str(tmp_path / "none")]) == 2
    (tmp_path / "empty").touch()
    assert run(["simulate", str(tmp_path / "empty")]) == 2
    assert "holds no request" in capsys.readouterr().err
