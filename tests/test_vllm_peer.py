"""Whatever is stored and asked in whatever order, our tier finds what vLLM's own tiers find.

The wheel of vLLM has no tests of its own, so its tiers are the peers: the example, which keeps a dict of
keys and no bytes, and the one that writes a file per chunk.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest

import tests.needs_vllm  # noqa: F401  # isort: skip

from hypothesis import given, settings
from hypothesis import strategies as st
from vllm.v1.kv_offload.base import LookupResult
from vllm.v1.kv_offload.tiering.example.manager import ExampleSecondaryTierManager
from vllm.v1.kv_offload.tiering.fs.manager import FileSystemTierManager
from vllm.v1.kv_offload.tiering.manager import TieringOffloadingManager

from tests.vllm_rig import Ask, TierRig

pytestmark = pytest.mark.vllm


class PeerRig(TierRig):
    """The rig with one of vLLM's tiers behind its managers."""

    def __init__(self, folder: Path, kind: str, **options) -> None:
        super().__init__(folder, **options)
        self.tier.shutdown()
        self.has_bytes = kind == "fs"
        spec, view = self.tier._offloading_spec, self.primary.get_kv_memoryview()
        self.peer = (
            FileSystemTierManager(spec, view, "fs", str(folder), 2, 2)
            if self.has_bytes
            else ExampleSecondaryTierManager(spec, view, "example")
        )
        self.manager = TieringOffloadingManager(self.primary, [self.peer])

    def hits(self, ask):
        """As vLLM's scheduler asks; its tier of files does not know at once."""
        count = 0
        is_waiting = False
        for key in ask.keys:
            result = self.manager.lookup(key, ask.context)
            if result is LookupResult.MISS:
                break
            is_waiting |= result is not LookupResult.HIT
            count += 1
        self.step()
        return None if is_waiting else count

    def check(self, ask, count):
        if self.has_bytes:
            super().check(ask, count)


#: (what to do, prompt, chunks)
STEPS = st.lists(
    st.tuples(
        st.sampled_from(["put", "take", "forget"]), st.sampled_from("abc"), st.integers(1, 12)
    ),
    min_size=1,
    max_size=12,
)


@pytest.mark.parametrize("kind", ["example", "fs"])
@settings(max_examples=12)
@given(steps=STEPS, rows=st.sampled_from([12, 32]))
def test_the_same_is_found(kind, steps, rows):
    with tempfile.TemporaryDirectory() as folder:
        base = Path(folder)
        # all of a store may wait to be written, so that nothing is dropped
        ours = TierRig(base / "pool", rows=rows, write_queue_bytes=64 << 20)
        with ours, PeerRig(base / "other", kind, rows=rows) as peer:
            for step, prompt, chunks in steps:
                found = [play(rig, step, prompt, chunks) for rig in (ours, peer)]
                assert found[0] == found[1], (step, prompt, chunks)


def play(rig: TierRig, step: str, prompt: str, chunks: int) -> int | None:
    if step == "forget":
        rig.forget_host()
        return None
    ask = Ask(prompt, chunks)
    if step == "take":
        return rig.take(ask)
    rig.begin(ask)
    rig.store(ask)
    rig.end(ask)
    rig.wait_idle()
    pool = rig.tier.pool
    assert pool is None or pool.drain(30)
    return None
