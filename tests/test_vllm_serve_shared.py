"""Servers at once on one pool, as `kvdepot serve` starts them: what they share, and what never.

A tiny model with random weights is enough: counts and greedy answers are compared. Two servers are
started once for all tests, and each test asks prompts of its own.
"""

from __future__ import annotations

import random
import shutil

import pytest

from tests.children import run_cli
from tests.vllm_server import segments, serving, start, wait_for_new_segments

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.timeout(290)]

BLOCK = 64
OPTIONS = ["--capacity", "256MiB", "--host-bytes", "32MiB", "--block-tokens", str(BLOCK)]
ARGUMENTS = [
    *("--dtype", "float32"),
    *("--block-size", "32"),
    *("--max-model-len", "1024"),
    "--enable-lora",
    *("--max-loras", "2"),
]
LENGTH = 700
#: whole blocks of a prompt
WHOLE = LENGTH // BLOCK * BLOCK


def prompt_of(seed):
    return random.Random(seed).choices(range(256), k=LENGTH)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("shared")


@pytest.fixture(scope="module")
def model(folder):
    from tests.vllm_models import tiny_llama

    return tiny_llama(folder / "model")


@pytest.fixture(scope="module")
def pair(folder, model):
    """Two servers and their pool. Adapters are loaded while they run."""
    pool = folder / "pool"
    servers = []
    try:
        for name in ("a", "b"):
            log = folder / f"{name}.log"
            servers.append(start(model, pool, log, options=OPTIONS, arguments=ARGUMENTS))
        for server in servers:
            server.wait_until_up()
        yield (*servers, pool)
        for server in servers:
            server.stop()
    finally:
        for server in servers:
            server.kill()


def asked(server, pool, prompt, **fields):
    """An answer, after its blocks are in the pool."""
    before = segments(pool)
    answer = server.ask(prompt, **fields)
    assert answer.cached_tokens == 0
    wait_for_new_segments(pool, before)
    return answer


def test_a_server_reuses_what_another_computed_a_second_ago(pair):
    a, b, pool = pair
    prompt = prompt_of("shared")
    computed = asked(a, pool, prompt)
    from_disk = b.cached_from("disk")
    found = b.found(prompt, WHOLE)
    assert found.tokens == computed.tokens
    assert b.cached_from("disk") == from_disk + WHOLE


def test_a_longer_prompt_reuses_the_beginning(pair):
    a, b, pool = pair
    prompt = prompt_of("longer")
    asked(a, pool, prompt)
    b.found([*prompt[:WHOLE], *prompt_of("another end")[:100]], WHOLE)


def test_tenants_with_other_salts_share_nothing(pair):
    a, b, pool = pair
    prompt = prompt_of("salted")
    asked(a, pool, prompt, cache_salt="ada")
    assert b.ask(prompt, cache_salt="grace").cached_tokens == 0
    assert b.ask(prompt).cached_tokens == 0
    # and the same tenant does, so it was no miss of another kind
    b.found(prompt, WHOLE, cache_salt="ada")


def kept(server, pool, seed, name):
    """A prompt and its answer by an adapter, whose blocks are in the pool.

    The files of an adapter are looked at beside the request, which is not kept where that takes too long.
    """
    for attempt in range(5):
        prompt = prompt_of(f"{seed} {attempt}")
        before = segments(pool)
        answer = server.ask(prompt, model=name)
        assert answer.cached_tokens == 0
        try:
            wait_for_new_segments(pool, before, timeout_s=5)
        except AssertionError:
            continue
        return prompt, answer
    raise AssertionError(f"nothing of adapter {name} is kept\n{server.tail()}")


def test_an_adapter_is_shared_by_the_servers_that_have_it(pair, folder):
    from tests.vllm_models import adapter

    a, b, pool = pair
    place = adapter(folder / "steady", seed=3)
    for server in (a, b):
        server.load_adapter("steady", place)
    prompt, ours = kept(a, pool, "steady at a", "steady")
    kept(b, pool, "steady at b", "steady")
    found = b.found(prompt, WHOLE, model="steady")
    assert found.tokens == ours.tokens
    assert b.ask(prompt).cached_tokens == 0


def test_an_adapter_of_the_same_name_and_other_weights_shares_nothing(pair, folder):
    from tests.vllm_models import adapter

    a, b, pool = pair
    place = adapter(folder / "changing", seed=1)
    a.load_adapter("changing", place)
    prompt, ours = kept(a, pool, "changing at a", "changing")
    # same name, same path: for vLLM's own hash the same adapter
    shutil.rmtree(place)
    adapter(place, seed=2)
    b.load_adapter("changing", place)
    kept(b, pool, "changing at b", "changing")
    theirs = b.ask(prompt, model="changing")
    assert theirs.cached_tokens == 0
    assert theirs.tokens != ours.tokens


def test_another_revision_of_the_model_shares_nothing(pair, folder, model):
    from tests.vllm_models import another_revision

    a, _, pool = pair
    prompt = prompt_of("revised")
    asked(a, pool, prompt)
    revised = another_revision(model, folder / "revised" / "model")
    log = folder / "revised.log"
    with serving(revised, pool, log, options=OPTIONS, arguments=ARGUMENTS) as server:
        asked(server, pool, prompt)
        server.forget()
        server.found(prompt, WHOLE)
    namespaces = sorted(path.name for path in (pool / "ns").iterdir())
    assert len(namespaces) == 2
    said = run_cli("pool", "explain", str(pool), *namespaces).stdout.splitlines()
    assert [line.split(":")[0] for line in said] == ["weights_fingerprint"]
