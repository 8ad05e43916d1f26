"""What the engine calls its bytes, and the account of what one request reuses."""

from __future__ import annotations

import pytest

pytestmark = pytest.mark.engine
pytest.importorskip("torch")
pytest.importorskip("transformers")

import torch  # noqa: E402

from kvdepot.clock import SystemClock  # noqa: E402
from kvdepot.depot import Depot  # noqa: E402
from kvdepot.engines.transformers.blocks import plan_blocks  # noqa: E402
from kvdepot.engines.transformers.identify import (  # noqa: E402
    dtype_name,
    identity_of,
    loaded_fingerprint,
)
from kvdepot.engines.transformers.memory import KvMemory, KvShape  # noqa: E402
from kvdepot.engines.transformers.reuse import Reuse  # noqa: E402
from kvdepot.identity import UNDETERMINED  # noqa: E402
from kvdepot.keys import block_keys, root_key  # noqa: E402
from tests.tiny_models import tiny_model  # noqa: E402

SHAPE = KvShape(4, 2, 8, torch.float32)
PLAN = plan_blocks(SHAPE, block_tokens=8, group_count=2)


def identity(**changes):
    fields = {
        "model_name": "tiny",
        "weights_fingerprint": "ab" * 32,
        "attention": "sdpa",
    }
    return identity_of(tiny_model(), SHAPE, PLAN, **{**fields, **changes})


def test_types_have_plain_names():
    assert [dtype_name(each) for each in (torch.bfloat16, torch.float32)] == ["bfloat16", "float32"]


def test_every_input_is_in_the_identity():
    first = identity()
    assert first.undetermined == ()
    assert first.block_bytes == tuple(group.block_bytes for group in PLAN.groups)
    others = [
        identity(model_name="other"),
        identity(weights_fingerprint="cd" * 32),
        identity(attention="eager"),
        identity_of(
            tiny_model().bfloat16(),
            SHAPE,
            PLAN,
            model_name="tiny",
            weights_fingerprint="ab" * 32,
            attention="sdpa",
        ),
    ]
    assert len({each.digest() for each in (first, *others)}) == 5


def test_the_fingerprint_of_what_was_loaded_sees_a_change_after_loading():
    files = "ab" * 32
    model = tiny_model()
    before = loaded_fingerprint(model, files)
    assert loaded_fingerprint(tiny_model(), files) == before != files
    assert loaded_fingerprint(model, "cd" * 32) != before
    assert loaded_fingerprint(model, UNDETERMINED) == UNDETERMINED
    # as a merged adapter does
    with torch.no_grad():
        model.model.layers[1].self_attn.q_proj.weight[0, 0] += 1e-3
    assert loaded_fingerprint(model, files) != before
    assert loaded_fingerprint(tiny_model().bfloat16(), files) != before


# --- the account


@pytest.fixture
def depot():
    with Depot.open(identity(), pool=None, host_bytes=1 << 20) as each:
        yield each


def stored(depot, tokens):
    keys = block_keys(depot.identity.digest(), list(range(tokens)), 8)
    depot.store(keys, root_key(depot.identity.digest()), lambda *_: None, tokens=8)
    return keys


def reuse_of(depot, keys, prompt_tokens):
    def fail(what: str, error: Exception) -> None:
        raise AssertionError(what) from error

    return Reuse(
        depot,
        keys,
        KvMemory(SHAPE, 64),
        prompt_tokens=prompt_tokens,
        load_share=1e9,
        on_failure=fail,
        clock=SystemClock(),
    )


@pytest.mark.parametrize(
    ("prompt_tokens", "reused"), [(33, 32), (32, 31), (40, 32), (25, 24), (24, 23)]
)
def test_the_last_token_is_never_reused(depot, prompt_tokens, reused):
    keys = stored(depot, 32)[: prompt_tokens // 8]
    reuse = reuse_of(depot, keys, prompt_tokens)
    assert reuse.tokens == reused
    assert reuse.by_tier() == {"device": 0, "host": reused, "disk": 0}
    assert reuse.bytes_read == 0
    reuse.release()
    reuse.release()


def test_a_shorter_prefix_is_accounted_for_as_such(depot):
    reuse = reuse_of(depot, stored(depot, 32), 40)
    assert reuse.gate is not None
    reuse.shorten(1)
    assert (reuse.tokens, reuse.gate) == (8, None)
    assert sum(reuse.by_tier().values()) == 8
    reuse.shorten(0)
    assert reuse.tokens == sum(reuse.by_tier().values()) == 0
    reuse.release()


@pytest.mark.parametrize("has_depot", [True, False])
def test_nothing_to_reuse_is_nothing(depot, has_depot):
    keys = block_keys(depot.identity.digest(), [7] * 32, 8) if has_depot else []
    reuse = reuse_of(depot if has_depot else None, keys, 32)
    assert (reuse.tokens, reuse.gate, reuse.bytes_read) == (0, None, 0)
    assert sum(reuse.by_tier().values()) == 0
    reuse.release()
