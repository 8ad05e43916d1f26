"""After a reset of vLLM's caches the weights may be others: kvdepot.engines.vllm.resets."""

from __future__ import annotations

import threading

import pytest

import tests.needs_vllm  # noqa: F401  # isort: skip

from kvdepot.engines.vllm import tier as tier_module
from kvdepot.errors import PoolUnavailable
from tests.tries import eventually
from tests.vllm_rig import Ask, TierRig

pytestmark = pytest.mark.vllm


def test_after_a_reset_nothing_is_shared_until_the_files_are_found_unchanged(
    tmp_path, monkeypatch, caplog
):
    files = ["as loaded"]
    monkeypatch.setattr(tier_module, "files_of", lambda settings: files[0])
    with TierRig(tmp_path / "pool") as rig:
        rig.tier._files = files[0]
        rig.put(Ask("a", 4))
        rig.tier.resets.note()
        rig.forget_host()
        assert rig.take(Ask("a", 4)) == 0
        rig.put(Ask("b", 4))
        rig.tier.resume()
        assert eventually(lambda: rig.tier.pool is not None)
        assert rig.take(Ask("a", 4)) == 4
        rig.forget_host()
        assert rig.take(Ask("b", 4)) == 0, "it was kept while the weights may have been others"
        # weights are exchanged after the reset, and before requests are taken on again
        rig.tier.resets.note()
        files[0] = "exchanged"
        rig.tier.resume()
        assert eventually(lambda: "files have changed" in caplog.text)
        rig.forget_host()
        assert rig.take(Ask("a", 4)) == 0
        rig.tier.resume()
        assert rig.tier.pool is None


def test_a_look_that_began_before_a_reset_does_not_end_it(tmp_path, monkeypatch):
    looking, go_on = threading.Event(), threading.Event()

    def files_of(settings):
        looking.set()
        assert go_on.wait(30)
        return "as loaded"

    monkeypatch.setattr(tier_module, "files_of", files_of)
    with TierRig(tmp_path / "pool") as rig:
        rig.tier._files = "as loaded"
        rig.tier.resets.note()
        rig.tier.resume()
        assert looking.wait(30)
        rig.tier.resets.note()
        assert rig.tier.resets.counts == {"resets_total": 2, "resets_checked_total": 0}
        go_on.set()
        assert eventually(lambda: not rig.tier.resets.is_looking)
        assert rig.tier.pool is None
        rig.tier.resume()
        assert eventually(lambda: rig.tier.pool is not None)
        assert rig.tier.get_stats() is not None
        assert rig.tier.stats.counts["resets_checked_total"] == 2
        rig.tier.resets.note(for_good=True)
        rig.tier.resume()
        assert not any(thread.name == "kvdepot-files" for thread in threading.enumerate())
        assert rig.tier.pool is None


def test_files_that_cannot_be_looked_at_are_looked_at_again(tmp_path, monkeypatch):
    answers = [PoolUnavailable("gone"), "as loaded"]

    def files_of(settings):
        answer = answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    monkeypatch.setattr(tier_module, "files_of", files_of)
    with TierRig(tmp_path / "pool") as rig:
        rig.tier._files = "as loaded"
        rig.tier.resets.note()
        rig.tier.resume()
        assert eventually(lambda: not rig.tier.resets.is_looking)
        assert rig.tier.pool is None
        rig.tier.resume()
        assert eventually(lambda: rig.tier.pool is not None)
