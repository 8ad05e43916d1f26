"""`kvdepot pool why` and `kvdepot.pool.why`: how far a prompt is there, and why no further."""

from __future__ import annotations

import json

import pytest

from kvdepot.cli import main as cli_main
from kvdepot.errors import ConfigError
from kvdepot.io.localdisk import LocalDisk
from kvdepot.keys import RequestExtras
from kvdepot.policy.reasons import Reason
from kvdepot.pool.tier import PoolTier
from kvdepot.pool.why import why
from kvdepot.testing.toy import ToyEngine, toy_identity
from tests.pool_rig import pool_config, put, segment_files

BLOCKS = 10


@pytest.fixture
def engine() -> ToyEngine:
    return ToyEngine([4096, 4096])


@pytest.fixture
def prompt(engine):
    return engine.prompt(1, BLOCKS, extra_tokens=3)


@pytest.fixture
def pool(tmp_path, engine, prompt):
    with PoolTier.open(pool_config(tmp_path / "p"), engine.identity) as tier:
        put(tier, engine, prompt)
    return tmp_path / "p"


def ask(pool, tokens, **settings):
    return why(LocalDisk(pool, is_read_only=True), tokens, **settings)


def test_a_prompt_that_is_there_needs_no_reason(pool, engine, prompt):
    (answer,) = ask(pool, prompt)
    assert (answer.found, answer.blocks, answer.reason) == (BLOCKS, BLOCKS, None)
    assert answer.digest == engine.digest.hex()


def test_a_prompt_that_goes_on_was_never_stored(pool, engine):
    (answer,) = ask(pool, engine.prompt(1, 2 * BLOCKS)[: 16 * BLOCKS] + [7] * 32)
    assert (answer.found, answer.blocks, answer.reason) == (BLOCKS, BLOCKS + 2, Reason.NEVER_STORED)
    (answer,) = ask(pool, [1] * 5)
    assert answer.reason is Reason.TOO_SHORT


def test_a_salt_and_another_identity_are_named(pool, engine, prompt):
    (answer,) = ask(pool, prompt, salt="tenant")
    assert (answer.found, answer.reason) == (0, Reason.SALT)
    other = ToyEngine(identity=toy_identity([4096, 4096], weights_fingerprint="newer"))
    with PoolTier.open(pool_config(pool), other.identity) as tier:
        put(tier, other, other.prompt(5, 2))
    best, second = ask(pool, prompt)
    assert best.reason is None
    assert second.reason is Reason.OTHER_IDENTITY
    assert "weights_fingerprint" in second.detail
    (only,) = ask(pool, prompt, namespace=second.digest[:8].upper())
    assert only == second


def test_a_salted_prompt_is_found_with_its_salt(tmp_path, prompt):
    salted = ToyEngine([4096], extras=RequestExtras(tenant_salt="tenant"))
    with PoolTier.open(pool_config(tmp_path / "p"), salted.identity) as tier:
        put(tier, salted, prompt)
    assert ask(tmp_path / "p", prompt, salt="tenant")[0].reason is None
    assert ask(tmp_path / "p", prompt)[0].found == 0


def test_a_hole_was_evicted(pool, engine):
    chain = engine.prompt(2, 150)
    with PoolTier.open(pool_config(pool), engine.identity) as tier:
        for stop in range(10, 160, 10):
            put(tier, engine, chain[: stop * 16])
    (before,) = ask(pool, chain)
    assert before.found == 150
    for path in segment_files(pool)[1:3]:
        path.unlink()
    (answer,) = ask(pool, chain)
    assert answer.found < 150
    assert answer.reason is Reason.EVICTED


def test_a_damaged_namespace_is_said_to_be_one(pool, prompt, engine):
    (pool / "ns" / engine.digest.hex() / "identity.json").write_text("{")
    (answer,) = ask(pool, prompt)
    assert answer.reason is Reason.NOT_KEYED


def test_keys_of_an_engine_cannot_be_made_here(tmp_path, prompt):
    other = ToyEngine(identity=toy_identity([4096], hash_scheme="an engine's"))
    with PoolTier.open(pool_config(tmp_path / "p"), other.identity) as tier:
        put(tier, other, prompt)
    (answer,) = ask(tmp_path / "p", prompt)
    assert answer.reason is Reason.NOT_KEYED
    assert "an engine's" in answer.detail


def test_no_pool_and_no_prompt_are_errors(tmp_path, pool):
    with pytest.raises(ConfigError, match="no pool"):
        ask(tmp_path, [1])
    with pytest.raises(ConfigError, match="cannot be keyed"):
        ask(pool, [-1] * 32)


def test_the_command(pool, prompt, capsys):
    listed = ",".join(map(str, prompt))
    assert cli_main.run(["pool", "why", str(pool), listed]) == 0
    assert "10 of 10 blocks" in capsys.readouterr().out
    assert cli_main.run(["pool", "why", str(pool), listed, "--salt", "x"]) == 1
    assert "salt" in capsys.readouterr().out
    assert cli_main.run(["pool", "why", str(pool), "1 2 3", "--json"]) == 1
    assert json.loads(capsys.readouterr().out)["reason"] == "too_short"
    assert cli_main.run(["pool", "why", str(pool), "hello"]) == 2
    assert "--model" in capsys.readouterr().err
    assert cli_main.run(["pool", "why", str(pool), "1", "--namespace", "zz"]) == 2
