"""vLLM itself over a pool: ask, end the process, start another one, ask again.

The connector is kvdepot.engines.vllm.connector, the spec kvdepot.engines.vllm.cpu_spec.
"""

from __future__ import annotations

from typing import Any

import pytest

import tests.needs_vllm  # noqa: F401  # isort: skip

from tests.tiny_models import SMALL, save_tiny, tiny_config
from tests.vllm_engines import run_engine

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    config = tiny_config(**{**SMALL, "max_position_embeddings": 4096, "head_dim": 32})
    return save_tiny(tmp_path_factory.mktemp("model"), config=config)


@pytest.mark.parametrize(
    ("block", "per_chunk", "engine"),
    [
        (32, 1, {"prefix_match_unit": 16}),
        (32, 2, {"enable_prefix_caching": False}),
        (128, 1, {"max_num_batched_tokens": 256, "enable_chunked_prefill": True}),
    ],
)
def test_what_one_process_computed_the_next_one_reads(tmp_path, model, block, per_chunk, engine):
    settings: dict[str, Any] = {
        "model": str(model),
        "pool": str(tmp_path / "pool"),
        "extra": {"blocks_per_chunk": per_chunk},
        "engine": {"block_size": block, **engine},
    }
    asks = [{"seed": 1, "length": 700}, {"seed": 2, "length": 400}]
    first = run_engine(tmp_path, asks=asks, **settings)
    assert [answer.cached for answer in first.answers] == [0, 0]
    chunk = block * per_chunk
    assert len(first.stored) == 700 // chunk + 400 // chunk
    then = run_engine(tmp_path, asks=[*asks, {"seed": 3, "length": 100}], **settings)
    assert [answer.cached for answer in then.answers] == [
        700 // chunk * chunk,
        400 // chunk * chunk,
        0,
    ]
    assert [answer.tokens for answer in then.answers[:2]] == [a.tokens for a in first.answers]
    assert then.loaded == first.stored, "rows came back other than they were stored"
    assert then.counters["load_blocks_total"] == len(first.stored)
    assert then.errors == {}
