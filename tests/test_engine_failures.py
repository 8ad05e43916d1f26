"""A failure of the cache never fails a request (`kvdepot.engines.transformers.reuse` and `runner`).

Whatever a tier raises, the prompt is computed, the answer is the same, and the failure is counted. And
storage that is slow must not teach the engine to wait longer the next time.
"""

from __future__ import annotations

import time

import pytest

pytestmark = pytest.mark.engine
pytest.importorskip("torch")
pytest.importorskip("transformers")

from kvdepot.config import PoolConfig  # noqa: E402
from kvdepot.depot import Depot  # noqa: E402
from kvdepot.engines.transformers.engine import EmbeddedEngine  # noqa: E402
from kvdepot.engines.transformers.events import Result  # noqa: E402
from kvdepot.restore import Restore  # noqa: E402
from tests.tiny_models import prompt_of, save_tiny  # noqa: E402


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save_tiny(tmp_path_factory.mktemp("model"))


def answer(each, prompt):
    *_, result = each.generate(prompt, max_new_tokens=5)
    assert isinstance(result, Result)
    assert result.computed_tokens + sum(result.reused_tokens.values()) == len(prompt)
    return result


def opened(folder, pool, **settings):
    return EmbeddedEngine.open(
        folder,
        depot=lambda identity: Depot.open(
            identity, pool=PoolConfig.of(str(pool)), host_bytes=1 << 20
        ),
        **{"block_tokens": 8, "load_share": 1e9, **settings},
    )


def broken(*_args, **_kwargs):
    raise RuntimeError("the cache is broken")


@pytest.fixture
def prompt_and_answer(folder, tmp_path):
    prompt = prompt_of(60)
    with opened(folder, tmp_path / "pool") as each:
        expected = answer(each, prompt)
    return prompt, expected.token_ids


@pytest.mark.parametrize("verb", ["lookup", "restore", "store"])
def test_a_broken_depot_costs_reuse_and_nothing_else(
    folder, tmp_path, prompt_and_answer, monkeypatch, verb
):
    prompt, expected = prompt_and_answer
    with opened(folder, tmp_path / "pool") as each:
        monkeypatch.setattr(each.depot, verb, broken)
        # behind a store that works the rest must still be whole
        found = answer(each, [*prompt])
        assert found.token_ids == expected
        assert each.cache_failures == 1
        assert (found.computed_tokens == len(prompt)) == (verb != "store")


def test_a_restore_that_breaks_half_way_is_computed(
    folder, tmp_path, prompt_and_answer, monkeypatch
):
    prompt, expected = prompt_and_answer
    runs = Restore.runs

    def breaking(self, group_index):
        yield from runs(self, group_index)
        if group_index == 1:
            broken()

    monkeypatch.setattr(Restore, "runs", breaking)
    with opened(folder, tmp_path / "pool") as each:
        found = answer(each, prompt)
        assert found.token_ids == expected
        assert found.computed_tokens == len(prompt)
        assert each.cache_failures == 1
        # rows come back when the pool's threads have let go of them, which is not the answer's moment
        give_up_at = time.monotonic() + 60
        while any(host.counts()[2] for host in each.depot.hosts):
            assert time.monotonic() < give_up_at, "a broken restore keeps its rows"
            each.depot.drain(1.0)


def test_slow_storage_does_not_earn_longer_deadlines(
    folder, tmp_path, prompt_and_answer, monkeypatch
):
    prompt, _ = prompt_and_answer
    runs = Restore.runs

    def slow(self, group_index):
        time.sleep(0.05)
        yield from runs(self, group_index)

    monkeypatch.setattr(Restore, "runs", slow)
    monkeypatch.setattr("kvdepot.engines.transformers.runner._RATE_TOKENS_MIN", 1)
    with opened(folder, tmp_path / "pool") as each:
        cost = each.depot.policies.cost
        before = cost.prefill_s(len(prompt))
        assert answer(each, prompt).reused_tokens["disk"] > 0
        assert cost.prefill_s(len(prompt)) == before
        other = prompt_of(61)[::-1]
        assert answer(each, other).computed_tokens == len(other)
        assert cost.prefill_s(len(prompt)) != before
