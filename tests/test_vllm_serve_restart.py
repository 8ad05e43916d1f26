"""`kvdepot serve` with the real small model: ask, stop the server, start it again, ask.

Another question about the same text: its prefix comes from the pool, vLLM says so, and the answer is the
one that a server without the prefix computes. Where the model is not there and cannot be fetched, this is
skipped.
"""

from __future__ import annotations

import pytest

from kvdepot.errors import KvdepotError
from tests.vllm_server import segments, serving

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.timeout(290)]

#: of vLLM; the pool's block, chosen by itself, is the same: 1.4 MiB
BLOCK = 32
ARGUMENTS = ["--dtype", "float32", "--block-size", str(BLOCK), "--max-model-len", "2048"]
QUESTIONS = ("In one sentence, what is this text about?", "Which language is this text written in?")


@pytest.fixture(scope="module")
def model():
    from kvdepot.io.models import small_model

    try:
        return small_model().folder
    except KvdepotError as error:
        pytest.skip(f"the small model is not to be had: {error}")


def test_a_restarted_server_answers_a_follow_up_from_the_pool(model, tmp_path):
    from kvdepot.demo.document import shipped_document

    document = shipped_document().text[:2600]
    first, second = (f"{document}\n\nQuestion: {each}\nAnswer:" for each in QUESTIONS)
    pool = tmp_path / "pool"
    options = {
        "options": ["--capacity", "1GiB", "--host-bytes", "128MiB"],
        "arguments": ARGUMENTS,
        "environment": {"OMP_NUM_THREADS": "2"},
    }
    with serving(model, pool, tmp_path / "first.log", **options) as server:
        asked = server.ask(first, tokens=16)
        assert asked.cached_tokens == 0
        # a salt of its own shares nothing, so this is what computing gives
        computed = server.ask(second, tokens=16, cache_salt="compute")
        assert computed.cached_tokens == 0
    assert f"blocks of {BLOCK} tokens" in server.log.read_text()
    assert segments(pool)
    # vLLM kills its children when it ends, the I/O process too; what was being written is swept later
    unfinished = {path.name for path in (pool / "tmp").iterdir()}

    shared = common_prefix(asked.prompt, computed.prompt)
    expected = shared // BLOCK * BLOCK
    assert expected >= 400
    with serving(model, pool, tmp_path / "second.log", **options) as server:
        follow_up = server.ask(second, tokens=16)
        assert follow_up.cached_tokens == expected
        assert follow_up.tokens == computed.tokens
        assert server.cached_from("disk") == expected
        assert server.cached_from("device") == server.cached_from("host") == 0
        # whatever it took from the pool stays with it
        again = server.ask(second, tokens=16)
        assert again.tokens == computed.tokens
        assert server.cached_from("disk") == expected
        assert unfinished.isdisjoint(path.name for path in (pool / "tmp").iterdir())


def common_prefix(one, other):
    pairs = enumerate(zip(one, other, strict=False))
    return next((index for index, (a, b) in pairs if a != b), min(len(one), len(other)))
