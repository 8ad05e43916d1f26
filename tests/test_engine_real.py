"""The real small model, on the beginning of the shipped document: what is reused changes no answer.

The model is the one that `make demo` fetches, through `kvdepot.engines.transformers.convert_gguf`; where
it is not there and cannot be fetched, these tests are skipped.
"""

from __future__ import annotations

import pytest

pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.timeout(600)]
pytest.importorskip("torch")
pytest.importorskip("transformers")

import torch  # noqa: E402

from kvdepot.config import PoolConfig  # noqa: E402
from kvdepot.demo.arms import INSTRUCTION  # noqa: E402
from kvdepot.demo.document import SHIPPED_QUESTIONS, shipped_document  # noqa: E402
from kvdepot.depot import Depot  # noqa: E402
from kvdepot.engines.transformers import EmbeddedEngine  # noqa: E402
from kvdepot.errors import KvdepotError  # noqa: E402
from kvdepot.io.models import small_model  # noqa: E402

#: enough for several read units and all groups, and quick to compute
TOKENS = 500


@pytest.fixture(scope="module")
def files():
    try:
        return small_model()
    except KvdepotError as error:
        pytest.skip(f"the small model is not to be had: {error}")


@pytest.fixture(scope="module")
def engine(files):
    # one thread: two that wait for each other are many times slower when anything runs beside them
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield EmbeddedEngine.open(files.folder, model_name=files.name, load_share=1e9)
    torch.set_num_threads(threads)


def prompts(engine):
    whole = engine.tokenize(shipped_document().text)
    start = engine.tokenizer.decode(whole[1000 : 1000 + TOKENS])
    return [
        engine.chat_text(
            [
                {"role": "system", "content": INSTRUCTION},
                {"role": "user", "content": f"{start}\n\nQuestion: {question}"},
            ]
        )
        for question in SHIPPED_QUESTIONS
    ]


def answer(engine, prompt):
    *_, result = engine.generate(prompt, max_new_tokens=12)
    return result


def test_the_shipped_document_has_4000_to_6000_tokens(engine):
    assert 4000 <= len(engine.tokenize(shipped_document().text)) <= 6000


def test_greedy_answers_equal_those_without_a_depot(engine, tmp_path):
    texts = prompts(engine)
    plain = [answer(engine, text) for text in texts]
    config = PoolConfig.of(str(tmp_path / "pool"))
    engine.depot = Depot.open(engine.identity, pool=config, host_bytes=128 << 20)
    first = answer(engine, texts[0])
    reach = TOKENS // engine.plan.block_tokens * engine.plan.block_tokens
    stored = engine._runner.memory.tensor[:, :, :, :reach].clone()
    engine.depot.close()
    # as after a restart: only the pool is left
    engine._runner.memory.tensor.zero_()
    engine.depot = Depot.open(engine.identity, pool=config, host_bytes=128 << 20)
    reused = [answer(engine, text) for text in texts]
    restored = engine._runner.memory.tensor[:, :, :, :reach].clone()
    engine.close()
    engine.depot = None
    assert first.reused_tokens["disk"] == 0
    assert reused[0].reused_tokens["disk"] >= TOKENS
    assert reused[1].reused_tokens["host"] >= TOKENS
    assert torch.equal(restored.view(torch.int32), stored.view(torch.int32))
    for with_depot, without in zip(reused, plain, strict=True):
        assert with_depot.token_ids == without.token_ids
        assert with_depot.text == without.text
    assert first.token_ids == plain[0].token_ids
