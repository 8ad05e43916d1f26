"""The embedded engine over a real depot: what is reused is right, accounted for, and never in the way."""

from __future__ import annotations

import logging
import os

import pytest

pytestmark = pytest.mark.engine
pytest.importorskip("torch")
pytest.importorskip("transformers")

import torch  # noqa: E402

from kvdepot.config import PoolConfig  # noqa: E402
from kvdepot.depot import Depot  # noqa: E402
from kvdepot.engines.transformers import engine, runner  # noqa: E402
from kvdepot.engines.transformers.engine import EmbeddedEngine  # noqa: E402
from kvdepot.engines.transformers.events import FirstToken, Result, TextPiece  # noqa: E402
from kvdepot.errors import ConfigError, UnsupportedModel  # noqa: E402
from kvdepot.identity import UNDETERMINED  # noqa: E402
from kvdepot.keys import Image, RequestExtras  # noqa: E402
from tests.tiny_models import SMALL, prompt_of, save_tiny  # noqa: E402
from tests.tries import eventually  # noqa: E402

TOKENS = 8


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save_tiny(tmp_path_factory.mktemp("model"))


@pytest.fixture
def pool(tmp_path):
    return tmp_path / "pool"


def depot_at(pool, *, host_bytes=1 << 20):
    config = None if pool is None else PoolConfig.of(str(pool), discover_interval_s=0.05)
    return lambda identity: Depot.open(identity, pool=config, host_bytes=host_bytes)


def opened(folder, pool=None, **settings):
    # a tiny model computes a prompt in less time than a busy machine needs to wake a thread: loads
    # would rightly be given up
    settings = {"load_share": 1e9, "block_tokens": TOKENS, **settings}
    return EmbeddedEngine.open(folder, depot=depot_at(pool), **settings)


def answer(each, prompt, *, max_new_tokens=6, **options):
    *_, result = each.generate(prompt, max_new_tokens=max_new_tokens, **options)
    assert isinstance(result, Result)
    total = result.computed_tokens + sum(result.reused_tokens.values())
    assert total == result.prompt_tokens
    assert result.computed_tokens >= 1
    return result


def plain(folder, prompt, **options):
    """The answer without any depot."""
    with EmbeddedEngine.open(folder) as each:
        return answer(each, prompt, **options)


def fill(folder, pool, prompt, **options):
    """Ask once and end, so that the pool has the prompt's blocks; give the KV that was stored."""
    with opened(folder, pool, **options) as each:
        answer(each, prompt)
        blocks = len(prompt) // TOKENS
        return each._runner.memory.tensor[:, :, :, : blocks * TOKENS].clone()


# --- reuse


def test_a_new_process_reuses_from_disk_and_answers_the_same(folder, pool):
    document = prompt_of(101)
    stored = fill(folder, pool, [*document, 7, 8])
    question = [*document, 9, 10, 11]
    with opened(folder, pool) as each:
        result = answer(each, question)
        # byte for byte: bit patterns, not numbers that may compare equal
        restored = each._runner.memory.tensor[:, :, :, :96].contiguous().view(torch.int32)
        assert torch.equal(restored, stored[:, :, :, :96].contiguous().view(torch.int32))
    assert result.reused_tokens == {"device": 0, "host": 0, "disk": 96}
    assert result.computed_tokens == 8
    assert result.bytes_read == 96 * each.token_bytes
    expected = plain(folder, question)
    assert result.token_ids == expected.token_ids
    assert result.text == expected.text
    assert expected.reused_tokens == {"device": 0, "host": 0, "disk": 0}


def test_the_same_process_reuses_from_memory(folder, pool):
    prompt = prompt_of(50)
    with opened(folder, pool) as each:
        first = answer(each, prompt)
        second = answer(each, prompt)
    assert first.bytes_written == 48 * each.token_bytes
    assert second.reused_tokens == {"device": 0, "host": 48, "disk": 0}
    assert second.bytes_read == second.bytes_written == 0
    assert second.token_ids == first.token_ids


def test_a_host_tier_alone_is_a_depot_too(folder):
    with opened(folder) as each:
        first, second = answer(each, prompt_of(50)), answer(each, prompt_of(50))
    assert first.bytes_written == 0
    assert second.reused_tokens["host"] == 48
    assert second.token_ids == first.token_ids


@pytest.mark.parametrize("length", [1, 7, 8, 9, 16, 17, 24])
def test_every_length_is_accounted_for_and_the_last_token_is_computed(folder, pool, length):
    prompt = prompt_of(length)
    fill(folder, pool, prompt)
    with opened(folder, pool) as each:
        result = answer(each, prompt)
    # of a prompt that is covered whole, one token less is reused
    assert result.reused_tokens["disk"] == min(length // TOKENS * TOKENS, length - 1)
    assert result.token_ids == plain(folder, prompt).token_ids


def test_only_the_common_prefix_is_reused(folder, pool):
    document = prompt_of(64)
    fill(folder, pool, document)
    changed = [*document[:30], (document[30] + 1) % 256, *document[31:]]
    with opened(folder, pool) as each:
        result = answer(each, changed)
        assert result.reused_tokens["disk"] == 24
        assert result.token_ids == plain(folder, changed).token_ids
        first_changed = [(document[0] + 1) % 256, *document[1:]]
        assert answer(each, first_changed).computed_tokens == 64


def test_another_instance_sees_the_blocks_while_the_first_lives(folder, pool):
    prompt = prompt_of(40)
    with opened(folder, pool) as first, opened(folder, pool) as other:
        answer(first, prompt)
        assert first.depot.drain(60)
        keys = other.keys(prompt)
        assert eventually(lambda: other.depot.lookup(keys).blocks == len(keys))
        result = answer(other, prompt)
    assert result.reused_tokens["disk"] == 39


def test_a_long_prompt_is_computed_in_parts_and_reused_whole(folder, pool, monkeypatch):
    prompt = prompt_of(100)
    whole = plain(folder, prompt)
    monkeypatch.setattr(runner, "_PART_TOKENS", 16)
    assert plain(folder, prompt).token_ids == whole.token_ids
    fill(folder, pool, prompt[:50])
    with opened(folder, pool) as each:
        result = answer(each, prompt)
    assert result.reused_tokens["disk"] == 48
    assert result.token_ids == whole.token_ids


def test_memory_grows_for_a_prompt_that_is_longer_than_expected(folder, pool, monkeypatch):
    monkeypatch.setattr(runner, "_MEMORY_TOKENS", 16)
    prompt = prompt_of(90)
    fill(folder, pool, prompt)
    with opened(folder, pool) as each:
        result = answer(each, prompt)
        assert each._runner.memory.capacity_tokens >= 96
    assert result.reused_tokens["disk"] == 88


@pytest.mark.parametrize("groups", [1, 2, 4])
def test_any_number_of_groups_gives_the_same_answer(folder, pool, groups):
    prompt = prompt_of(45)
    fill(folder, pool, prompt, group_count=groups)
    with opened(folder, pool, group_count=groups) as each:
        result = answer(each, prompt)
    assert result.reused_tokens["disk"] == 40
    assert result.token_ids == plain(folder, prompt).token_ids


# --- what must not be reused


def test_tenants_do_not_share(folder, pool):
    prompt = prompt_of(32)
    ours, theirs = RequestExtras(tenant_salt="a"), RequestExtras(tenant_salt="b")
    with opened(folder, pool) as each:
        answer(each, prompt, extras=ours)
        assert answer(each, prompt, extras=theirs).computed_tokens == 32
        assert answer(each, prompt).computed_tokens == 32
        assert answer(each, prompt, extras=ours).computed_tokens == 1


def test_one_changed_byte_of_the_weights_is_another_model(folder, pool, tmp_path):
    prompt = prompt_of(32)
    fill(folder, pool, prompt)
    other = save_tiny(tmp_path / folder.name)
    weights = other / "model.safetensors"
    content = bytearray(weights.read_bytes())
    content[-3] ^= 1
    weights.write_bytes(content)
    with opened(other, pool) as each:
        assert answer(each, prompt).computed_tokens == 32
        assert each.identity.model_name == folder.name


def test_another_dtype_is_another_model(folder, pool):
    prompt = prompt_of(32)
    fill(folder, pool, prompt)
    with opened(folder, pool, dtype="bfloat16") as each:
        assert (each.identity.kv_dtype, each.identity.model_dtype) == ("bfloat16", "bfloat16")
        assert answer(each, prompt).computed_tokens == 32
        assert answer(each, prompt).reused_tokens["host"] == 31


def test_the_identity_is_resolved(folder):
    with opened(folder) as each:
        identity = each.identity
    assert identity.undetermined == ()
    assert "auto" not in str(identity).lower()
    assert identity.engine == "transformers"
    assert torch.__version__ in identity.engine_version
    assert identity.attention == "kvdepot_sdpa"
    assert [group.kind for group in identity.groups] == ["full"] * 3
    assert identity.block_tokens == TOKENS


def test_what_cannot_be_determined_switches_sharing_off_loudly(folder, pool, monkeypatch, caplog):
    monkeypatch.setattr(engine, "weights_fingerprint", lambda _folder: UNDETERMINED)
    with opened(folder, pool) as each:
        assert each.depot is None
        assert answer(each, prompt_of(32)).computed_tokens == 32
    assert "sharing is OFF" in caplog.text
    assert "weights_fingerprint" in caplog.text
    assert not pool.exists()


def test_a_request_that_cannot_be_keyed_is_computed_and_counted(folder, pool):
    prompt = prompt_of(32)
    malformed = RequestExtras(images=(Image(b"short", 0, 4),))
    with opened(folder, pool) as each:
        first = answer(each, prompt, extras=malformed)
        second = answer(each, prompt, extras=malformed)
        assert each.uncacheable_requests == 2
    assert first.computed_tokens == second.computed_tokens == 32
    assert first.bytes_written == 0


# --- damage, loss, lateness


def segments(pool):
    return sorted(pool.glob("ns/*/*/*.kvseg"))


@pytest.mark.parametrize("share", [0.1, 0.5, 0.9])
def test_a_damaged_block_is_computed_and_the_answer_is_right(folder, pool, share):
    prompt = prompt_of(80)
    fill(folder, pool, prompt)
    [segment] = segments(pool)
    content = bytearray(segment.read_bytes())
    content[int(share * 3 * 10 * 4096) + 4096 + 17] ^= 0x40
    segment.chmod(0o644)
    segment.write_bytes(content)
    with opened(folder, pool) as each:
        result = answer(each, prompt)
        assert each.depot.counters()["corrupt_blocks_total"] == 1
        assert result.reused_tokens["disk"] < 79
        again = answer(each, prompt)
        assert sum(again.reused_tokens.values()) == 79
    expected = plain(folder, prompt).token_ids
    assert result.token_ids == again.token_ids == expected


def test_a_segment_that_vanishes_between_lookup_and_load_is_computed(folder, pool):
    prompt = prompt_of(80)
    fill(folder, pool, prompt)
    with opened(folder, pool) as each:
        assert each.depot.lookup(each.keys(prompt)).blocks == 10
        for segment in segments(pool):
            segment.unlink()
        result = answer(each, prompt)
    assert result.computed_tokens == 80
    assert result.token_ids == plain(folder, prompt).token_ids


def test_a_load_past_its_deadline_is_given_up(folder, pool):
    prompt = prompt_of(80)
    fill(folder, pool, prompt)
    with opened(folder, pool, load_share=0.0) as each:
        result = answer(each, prompt)
    assert result.computed_tokens == 80
    assert result.token_ids == plain(folder, prompt).token_ids


def test_a_pool_that_is_gone_costs_time_and_nothing_else(folder, tmp_path):
    prompt = prompt_of(40)
    pool = tmp_path / "pool"
    with opened(folder, pool) as each:
        pool.rename(tmp_path / "moved")
        first, second = answer(each, prompt), answer(each, prompt)
    assert first.token_ids == second.token_ids == plain(folder, prompt).token_ids


# --- storing


def test_the_answer_is_not_stored_unless_asked_for(folder, pool):
    prompt = prompt_of(32)
    with opened(folder, pool) as each:
        result = answer(each, prompt, max_new_tokens=17)
        longer = each.keys([*prompt, *result.token_ids])
        assert each.depot.lookup(longer).blocks == 4
        assert result.bytes_written == 32 * each.token_bytes


def test_the_answer_is_stored_when_asked_for(folder, pool):
    prompt = prompt_of(32)
    with opened(folder, pool, store_generated=True) as each:
        result = answer(each, prompt, max_new_tokens=17)
        # the last token was sampled and never computed: 32 + 16 tokens have KV
        assert result.bytes_written == 48 * each.token_bytes
        follow_up = [*prompt, *result.token_ids, 5, 6]
        reused = answer(each, follow_up)
    assert reused.reused_tokens["host"] == 48
    assert reused.token_ids == plain(folder, follow_up).token_ids


def test_a_stream_that_is_closed_after_the_first_token_has_stored_the_prompt(folder, pool):
    prompt = prompt_of(32)
    with opened(folder, pool) as each:
        stream = each.generate(prompt, max_new_tokens=10)
        assert isinstance(next(stream), FirstToken)
        assert each.depot.lookup(each.keys(prompt)).blocks == 0
        stream.close()
        assert each.depot.lookup(each.keys(prompt)).blocks == 4
        # and the engine is free for the next one
        assert answer(each, prompt).computed_tokens == 1


# --- the stream


def test_events_come_in_order_and_pieces_join_to_the_text(folder):
    with opened(folder) as each:
        events = list(each.generate("a prompt", max_new_tokens=30))
    assert isinstance(events[0], FirstToken)
    assert isinstance(events[-1], Result)
    result = events[-1]
    pieces = events[1:-1]
    assert all(isinstance(piece, TextPiece) and piece.text for piece in pieces)
    assert "".join(piece.text for piece in pieces) == result.text
    assert result.prompt_tokens == len("a prompt")
    assert 0 < result.ttft_s <= result.total_s
    assert result.ttft_s == events[0].ttft_s
    assert (len(result.token_ids), result.finish) == (30, "length")


def test_the_clock_of_the_ttft_starts_with_the_call(folder):
    class Clock:
        now = 0.0

        def monotonic_s(self):
            return self.now

        wall_s = monotonic_s

    clock = Clock()
    with opened(folder, clock=clock) as each:
        stream = each.generate(prompt_of(5), max_new_tokens=1)
        clock.now += 100.0
        assert next(stream).ttft_s >= 100.0


def test_an_end_token_and_a_stop_text_end_the_answer(folder):
    with opened(folder) as each:
        free = answer(each, prompt_of(20), max_new_tokens=12)
        end = free.token_ids[4]
        length = free.token_ids.index(end)
        each._end_ids = frozenset({end})
        ended = answer(each, prompt_of(20), max_new_tokens=12)
        assert ended.token_ids == free.token_ids[:length]
        assert ended.finish == "stop"
        each._end_ids = frozenset()
        stop = free.text[3:5]
        stopped = answer(each, prompt_of(20), max_new_tokens=12, stop=(stop,))
        assert stopped.text == free.text.split(stop)[0]
        assert stopped.finish == "stop"


def test_sampling_with_a_seed_is_the_same_with_and_without_reuse(folder, pool):
    prompt = prompt_of(40)
    fill(folder, pool, prompt)
    options = {"temperature": 0.8, "top_p": 0.9, "seed": 3, "max_new_tokens": 12}
    with opened(folder, pool) as each:
        reused = answer(each, prompt, **options)
    assert reused.reused_tokens["disk"] == 39
    assert reused.token_ids == plain(folder, prompt, **options).token_ids


def test_progress_goes_up_to_what_is_to_be_computed(folder, pool, monkeypatch):
    monkeypatch.setattr(runner, "_PART_TOKENS", 16)
    seen = []
    with opened(folder, pool, on_progress=lambda *now: seen.append(now)) as each:
        answer(each, prompt_of(40))
        assert seen == sorted(seen)
        assert seen[-1] == (40, 40)
        assert len(seen) == 3 * SMALL["num_hidden_layers"] + 1
        seen.clear()
        answer(each, prompt_of(40))
        assert seen[-1] == (1, 1)


def test_one_request_at_a_time(folder):
    with opened(folder) as each:
        stream = each.generate(prompt_of(5), max_new_tokens=3)
        next(stream)
        with pytest.raises(RuntimeError, match="one request at a time"):
            answer(each, prompt_of(5))
        stream.close()
        answer(each, prompt_of(5))


def test_a_chat_ends_where_the_answer_begins(folder):
    with opened(folder) as each:
        text = each.chat_text([{"role": "user", "content": "hello"}])
        assert text == "<user>hello\n<assistant>"
        assert each.tokenizer.decode(each.tokenize(text)) == text


def test_equal_bits_are_asked_for_unless_the_user_said_otherwise(folder, monkeypatch):
    monkeypatch.delenv("MKL_CBWR", raising=False)
    opened(folder).close()
    assert os.environ["MKL_CBWR"] == "AUTO"
    monkeypatch.setenv("MKL_CBWR", "COMPATIBLE")
    opened(folder).close()
    assert os.environ["MKL_CBWR"] == "COMPATIBLE"


# --- bad input


def test_bad_prompts_are_refused_with_the_numbers(folder):
    with opened(folder) as each:
        with pytest.raises(ConfigError, match="empty"):
            each.generate([], max_new_tokens=1)
        with pytest.raises(ConfigError, match=r"500 tokens .* 13, .* 512 tokens"):
            each.generate(prompt_of(500), max_new_tokens=13)
        with pytest.raises(ConfigError, match="vocabulary of 300"):
            each.generate([1, 300], max_new_tokens=1)
        with pytest.raises(ConfigError, match="vocabulary"):
            each.generate([-1], max_new_tokens=1)
        with pytest.raises(ConfigError, match="max_new_tokens"):
            each.generate([1], max_new_tokens=0)
        assert answer(each, prompt_of(500), max_new_tokens=12).prompt_tokens == 500


def test_bad_settings_are_refused(folder):
    with pytest.raises(ConfigError, match="float8"):
        EmbeddedEngine.open(folder, dtype="float8")
    with pytest.raises(ConfigError, match="no such model folder"):
        EmbeddedEngine.open(folder / "absent")
    with pytest.raises(ConfigError, match="block_tokens"):
        EmbeddedEngine.open(folder, block_tokens=-1)


def test_a_model_that_cannot_be_cut_is_refused_before_its_weights_are_read(tmp_path):
    import transformers

    config = transformers.MistralConfig(**SMALL, sliding_window=64)
    config.save_pretrained(tmp_path)
    with pytest.raises(UnsupportedModel, match="sliding window of 64"):
        EmbeddedEngine.open(tmp_path)


def test_bounds_of_the_pool_apply_as_everywhere(folder, pool, caplog):
    caplog.set_level(logging.WARNING)
    with pytest.raises(ConfigError, match="does not hold one block"):
        EmbeddedEngine.open(folder, depot=depot_at(pool, host_bytes=64), block_tokens=TOKENS)
