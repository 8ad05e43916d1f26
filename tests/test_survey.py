"""Looking at a pool from outside finds every damaged block, and names what cannot be used."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvdepot.errors import ConfigError
from kvdepot.io.localdisk import LocalDisk
from kvdepot.pool.survey import scrub, survey
from kvdepot.pool.tier import PoolTier
from kvdepot.testing.toy import ToyEngine
from tests.pool_rig import pool_config, segment_files


@pytest.fixture
def filled(tmp_path: Path) -> Path:
    engine = ToyEngine((4096,))
    with PoolTier.open(pool_config(tmp_path), engine.identity) as tier:
        tier.store(engine.writes(engine.prompt(1, 100)))
        assert tier.drain(10)
    return tmp_path


def look(root: Path) -> LocalDisk:
    return LocalDisk(root, is_read_only=True)


def test_a_sound_pool_is_sound(filled: Path) -> None:
    checks = list(scrub(look(filled)))
    assert all(check.is_sound for check in checks)
    assert sum(check.blocks for check in checks) == 100
    assert sum(check.payload_bytes for check in checks) == 100 * 4096
    found = survey(look(filled))
    assert [namespace.blocks for namespace in found.namespaces] == [100]
    assert found.namespaces[0].identity is not None
    assert found.namespaces[0].identity.model_name == "toy"
    assert found.used_bytes == sum(path.stat().st_size for path in segment_files(filled))
    assert found.unfinished == 0


def test_one_flipped_byte_of_a_payload_is_one_bad_block(filled: Path) -> None:
    path = segment_files(filled)[0]
    content = bytearray(path.read_bytes())
    content[4096 * 3 + 5] ^= 1
    path.write_bytes(content)
    bad = [check for check in scrub(look(filled)) if not check.is_sound]
    assert [(check.bad_blocks, check.problem) for check in bad] == [(1, "")]


@pytest.mark.parametrize("place", ["header", "footer", "length"])
def test_a_damaged_frame_is_named(filled: Path, place: str) -> None:
    path = segment_files(filled)[0]
    content = bytearray(path.read_bytes())
    if place == "length":
        content = content[:-1]
    else:
        content[10 if place == "header" else -4090] ^= 1
    path.write_bytes(content)
    bad = [check for check in scrub(look(filled)) if not check.is_sound]
    assert len(bad) == 1
    assert bad[0].problem
    if place != "header":
        assert [namespace.bad_segments for namespace in survey(look(filled)).namespaces] == [1]


def test_a_folder_without_a_pool_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="holds no pool"):
        survey(look(tmp_path))
