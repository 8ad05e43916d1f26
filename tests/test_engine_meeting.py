"""The embedded engine under the policies: the front computed while the back is read, and the account.

`kvdepot.engines.transformers.backload`: whatever comes of the back, the answer is that of computing.
"""

from __future__ import annotations

import errno
import time

import pytest

pytestmark = pytest.mark.engine
pytest.importorskip("torch")
pytest.importorskip("transformers")

from kvdepot.config import PoolConfig  # noqa: E402
from kvdepot.depot import Depot  # noqa: E402
from kvdepot.engines.transformers import backload  # noqa: E402
from kvdepot.engines.transformers.engine import EmbeddedEngine  # noqa: E402
from kvdepot.engines.transformers.events import Result  # noqa: E402
from kvdepot.io.localdisk import LocalDisk  # noqa: E402
from kvdepot.metrics import Counters  # noqa: E402
from kvdepot.policy.decide import Mode  # noqa: E402
from kvdepot.policy.reasons import Reason  # noqa: E402
from kvdepot.pool.tier import PoolTier  # noqa: E402
from kvdepot.testing.faults import FaultDisk, FaultPlan  # noqa: E402
from tests.tiny_models import prompt_of, save_tiny  # noqa: E402
from tests.tries import in_one_try_of  # noqa: E402

BLOCK = 8
PROMPT = 250


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save_tiny(tmp_path_factory.mktemp("model"))


class Opened:
    """An engine over a pool with faults."""

    def __init__(self, folder, pool):
        self.faults = FaultPlan()

        def depot(identity):
            counters = Counters()
            tier = PoolTier.open(
                PoolConfig.of(str(pool)),
                identity,
                disks=[FaultDisk(LocalDisk(pool), self.faults)],
                counters=counters,
            )
            found = Depot.open(identity, pool=None, host_bytes=1 << 24)
            return Depot(identity, tier, found.hosts, counters=counters, clock=found._clock)

        self.engine = EmbeddedEngine.open(folder, depot=depot, block_tokens=BLOCK)
        self.cost = self.engine.depot.policies.cost

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.faults.clear()
        self.engine.close()

    def expect(self, *, token_s: float, load_s: float, blocks: int = PROMPT // BLOCK) -> None:
        """Have the policies believe that computing and reading take so long."""
        size = blocks * sum(self.engine.identity.block_bytes)
        self.expect_computing(token_s)
        for _ in range(8):
            self.cost.loaded("disk", size, load_s)
            self.cost.loaded("disk", 2 * size, 2 * load_s)

    def expect_computing(self, token_s: float) -> None:
        """Have the policies know how long computing takes, and nothing of the storage."""
        for _ in range(8):
            for tokens in (64, 128, 256):
                self.cost.computed(tokens, 0, token_s * tokens)

    def answer(self, prompt) -> Result:
        *_, result = self.engine.generate(prompt, max_new_tokens=5)
        assert isinstance(result, Result)
        assert result.computed_tokens + sum(result.reused_tokens.values()) == len(prompt)
        return result

    def mode(self) -> Mode:
        return self.engine.depot.policies.recent()[-1].choice.mode


@pytest.fixture
def stored(folder, tmp_path, monkeypatch):
    """A pool with a prompt in it, and what a model says to that prompt."""
    monkeypatch.setattr(backload, "_PASS_TOKENS_MIN", BLOCK)
    monkeypatch.setattr(backload, "_FIRST_PASS_TOKENS", BLOCK)
    paste = backload.BackLoad.paste

    def patient(self, computed_token):
        # a tiny model is through before any disk has answered
        self._chunks.wait(0.5)
        paste(self, computed_token)

    monkeypatch.setattr(backload.BackLoad, "paste", patient)
    prompt = prompt_of(PROMPT)
    with Opened(folder, tmp_path / "pool") as opened:
        expected = opened.answer(prompt).token_ids
        assert opened.engine.depot.drain(10)
    return tmp_path / "pool", prompt, expected


@in_one_try_of(5)
def test_the_front_is_computed_and_the_back_is_read(folder, stored):
    pool, prompt, expected = stored
    with Opened(folder, pool) as opened:
        opened.expect(token_s=1.0, load_s=125.0)
        found = opened.answer(prompt)
        assert opened.mode() is Mode.MEET
        assert found.token_ids == expected
        assert found.reused_tokens["disk"] > 0
        assert found.reused_tokens["host"] == 0
        assert found.bytes_read > 0
        assert not opened.engine.cache_failures
        # what was read and what was computed is in memory now
        again = opened.answer(prompt)
        assert again.token_ids == expected
        assert again.reused_tokens["host"] > 0


def test_a_back_that_never_comes_costs_nothing_but_the_passes(folder, stored):
    pool, prompt, expected = stored
    with Opened(folder, pool) as opened:
        opened.expect(token_s=1.0, load_s=125.0)
        barrier = opened.faults.hold("read")
        found = opened.answer(prompt)
        assert opened.mode() is Mode.MEET
        assert found.token_ids == expected
        assert found.computed_tokens == len(prompt)
        assert found.reused_tokens["disk"] == 0
        barrier.open()


def test_errors_in_the_back_are_computed(folder, stored):
    pool, prompt, expected = stored
    with Opened(folder, pool) as opened:
        opened.expect(token_s=1.0, load_s=125.0)
        opened.faults.fail("read", errno.EIO)
        found = opened.answer(prompt)
        assert found.token_ids == expected
        assert found.computed_tokens == len(prompt)
        reasons = opened.engine.depot.policies.misses.requests()
        assert set(reasons) == {Reason.FAILED}


def test_fast_storage_is_read_whole_and_slow_storage_is_left_alone(folder, stored):
    pool, prompt, expected = stored
    with Opened(folder, pool) as opened:
        opened.expect(token_s=1.0, load_s=0.5)
        found = opened.answer(prompt)
        assert opened.mode() is Mode.LOAD
        assert found.token_ids == expected
        assert found.reused_tokens["disk"] == PROMPT // BLOCK * BLOCK
    with Opened(folder, pool) as opened:
        opened.expect(token_s=1e-4, load_s=5000.0)
        found = opened.answer(prompt)
        assert opened.mode() is Mode.COMPUTE
        assert found.token_ids == expected
        assert found.bytes_read == 0
        assert opened.engine.depot.counters()["reuse_ended_refused_cost_total"] == 1


def test_a_prompt_that_is_stored_whole_computes_one_token(folder, stored):
    pool, prompt, _ = stored
    whole = prompt[: PROMPT // BLOCK * BLOCK]
    with Opened(folder, pool) as opened:
        opened.expect(token_s=1.0, load_s=125.0)
        first = opened.answer(whole)
        assert opened.mode() is Mode.MEET
        again = opened.answer(whole)
        assert again.token_ids == first.token_ids
        assert again.computed_tokens == 1


def test_a_load_that_hangs_is_given_up_after_the_slack(folder, stored):
    pool, prompt, expected = stored
    with Opened(folder, pool) as opened:
        opened.expect(token_s=0.01, load_s=0.001)
        opened.faults.hold("read")
        begun = time.monotonic()
        found = opened.answer(prompt)
        assert time.monotonic() - begun < 30, "the hang has no end"
        assert found.token_ids == expected
        assert found.computed_tokens == len(prompt)
        assert opened.engine.depot.counters()["reuse_ended_deadline_total"] == 1


@in_one_try_of(5)
def test_quick_storage_of_unknown_speed_is_awaited(folder, stored):
    pool, prompt, expected = stored
    with Opened(folder, pool) as opened:
        opened.expect_computing(1.0)
        found = opened.answer(prompt)
        assert opened.mode() is Mode.MEET
        assert found.token_ids == expected
        assert found.reused_tokens["disk"] == PROMPT // BLOCK * BLOCK


@in_one_try_of(5)
def test_what_is_in_memory_is_pasted_although_no_pass_came_before(folder, stored):
    pool, prompt, expected = stored
    with Opened(folder, pool) as opened:
        opened.expect_computing(1.0)
        opened.answer(prompt[: 10 * BLOCK + 1])
        opened.cost._reads.clear()
        found = opened.answer(prompt)
        assert opened.mode() is Mode.MEET
        assert found.token_ids == expected
        assert found.reused_tokens["host"] == 10 * BLOCK
        assert found.reused_tokens["disk"] == (PROMPT // BLOCK - 10) * BLOCK


@in_one_try_of(5)
def test_storage_of_unknown_speed_that_hangs_gets_a_look_and_no_more(folder, stored):
    pool, prompt, expected = stored
    with Opened(folder, pool) as opened:
        opened.expect_computing(0.04)  # ten seconds for the prompt, so 0.8 may be lost
        barrier = opened.faults.hold("read")
        found = opened.answer(prompt)
        assert opened.mode() is Mode.MEET
        assert found.token_ids == expected
        assert found.computed_tokens == len(prompt)
        lost_s = opened.engine.depot.policies.recent()[-1].load_s
        assert 0.2 < lost_s <= 0.8
        assert found.load_s == lost_s
        barrier.open()
