"""Damaged, missing and foreign files in a pool: a miss, never wrong bytes, never an exception.

The nine damages of segments, at header, payload, footer and trailer, before the pool is opened,
between lookup and load, and while the file is open. Then whatever else may lie in a pool's folders.
"""

from __future__ import annotations

import errno
import os
import shutil
import socket
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple

import pytest

from kvdepot.errors import FormatError, PoolDenied, UnknownVersion
from kvdepot.identity import FORMAT_VERSION
from kvdepot.io.localdisk import LocalDisk
from kvdepot.pool.segment import HEADER_BYTES, TRAILER_BYTES
from kvdepot.pool.survey import scrub
from kvdepot.pool.tier import PoolTier
from kvdepot.testing.damage import DAMAGES, Damage, Spot
from kvdepot.testing.faults import FaultDisk, FaultPlan
from kvdepot.testing.toy import ToyEngine, toy_identity
from kvdepot.tiers import Outcome
from tests.pool_rig import ask, find_blocks, pool_config, put, segment_files, tmp_files
from tests.tries import eventually

DONE, MISS, CORRUPT, FAILED = Outcome.DONE, Outcome.MISS, Outcome.CORRUPT, Outcome.FAILED
BLOCKS = 6
REGIONS = ("header", "payload", "footer", "trailer")
MOMENTS = ("before_open", "before_load", "while_open")


class Case(NamedTuple):
    damage: Damage
    region: str
    moment: str

    def __str__(self):
        return "-".join(filter(None, (self.damage.name, self.region, self.moment)))


CASES = [
    Case(damage, region, moment)
    for damage in DAMAGES
    for region in (REGIONS if damage.has_place else ("",))
    for moment in MOMENTS
]


@pytest.fixture
def rig(tmp_path):
    """A pool of two prompts in a segment each, not open."""
    root = tmp_path / "pool"
    engine = ToyEngine((4096,))
    prompts = [engine.prompt(seed, BLOCKS) for seed in (1, 2)]
    with PoolTier.open(pool_config(root), engine.identity) as tier:
        for tokens in prompts:
            assert set(put(tier, engine, tokens)) == {DONE}
    blocks = find_blocks(root, engine.digest)
    paths = [blocks[engine.keys(tokens)[0]].path for tokens in prompts]
    assert len(set(paths)) == 2
    return SimpleNamespace(
        root=root, engine=engine, prompts=prompts, paths=paths, blocks=blocks, plan=FaultPlan()
    )


def opened(rig, **settings):
    disk = FaultDisk(LocalDisk(rig.root, direct="auto"), rig.plan)
    return PoolTier.open(pool_config(rig.root, **settings), rig.engine.identity, disks=[disk])


def spot_of(rig, region):
    """A place in the first segment; payloads are hit in the middle of block 2."""
    length = rig.paths[0].stat().st_size
    block = rig.blocks[rig.engine.keys(rig.prompts[0])[2]]
    last = rig.blocks[rig.engine.keys(rig.prompts[0])[-1]]
    offset = {
        "header": 60,
        "payload": block.offset + block.length // 2,
        "footer": last.offset + last.length + 40,
        "trailer": length - TRAILER_BYTES + 20,
        "": 0,
    }[region]
    assert HEADER_BYTES < block.offset + block.length < length
    return Spot(offset, 32, rig.paths[1])


def strike(rig, case):
    if case.damage.is_void:
        name = str(rig.paths[0].relative_to(rig.root))
        rig.plan.fail("open", errno.EACCES, when=lambda call: call.name == name)
    else:
        case.damage.apply(rig.paths[0], spot_of(rig, case.region))


def compute_again(tier, engine, tokens):
    """What a server does. The first store may meet an index that has not noticed the damage yet."""
    for _ in range(2):
        assert set(put(tier, engine, tokens)) == {DONE}
        if set(ask(tier, engine, tokens)) == {DONE}:
            return
    raise AssertionError("blocks that were stored again are still not there")


@pytest.mark.parametrize("case", CASES, ids=str)
def test_damage_is_a_miss_and_the_pool_goes_on(rig, case):
    engine, (tokens, other) = rig.engine, rig.prompts
    keys = engine.keys(tokens)
    if case.moment == "before_open":
        strike(rig, case)
    with opened(rig) as tier:
        if case.moment == "while_open":
            assert set(ask(tier, engine, tokens)) == {DONE}
        elif case.moment == "before_load":
            assert tier.lookup(keys) == BLOCKS
        if case.moment != "before_open":
            strike(rig, case)

        outcomes = ask(tier, engine, tokens)  # compares every DONE row with the oracle
        if case.region == "payload":
            assert list(outcomes) == [DONE, DONE, CORRUPT, DONE, DONE, DONE]
        assert set(outcomes) <= {DONE, MISS, CORRUPT, FAILED}
        untouched = ask(tier, engine, other)
        assert set(untouched) == {DONE} or case.damage.name == "swap"
        # what lookup says after the damage was seen, load holds: nobody tries for ever
        found = tier.lookup(keys)
        assert set(ask(tier, engine, tokens[: found * engine.block_tokens])) <= {DONE}
        if DONE not in outcomes:
            assert found == 0

        for prompt in rig.prompts:
            compute_again(tier, engine, prompt)
    # a damage that the first process did not meet (it had the footer in memory, or the file open)
    # is met by the next one, which computes and stores anew
    with opened(rig) as tier:
        for prompt in rig.prompts:
            assert set(ask(tier, engine, prompt)) <= {DONE, MISS, CORRUPT, FAILED}
            compute_again(tier, engine, prompt)
    assert tmp_files(rig.root) == []


@pytest.mark.parametrize(
    ("name", "region", "counter"),
    [
        ("truncate", "", "corrupt_segments_total"),
        ("remove_byte", "", "corrupt_segments_total"),
        ("add_byte", "", "corrupt_segments_total"),
        ("swap", "", "corrupt_segments_total"),
        ("flip_byte", "footer", "corrupt_segments_total"),
        ("zero_fill", "trailer", "corrupt_segments_total"),
        ("flip_byte", "header", "corrupt_segments_total"),
        ("flip_byte", "payload", "corrupt_blocks_total"),
    ],
)
def test_damage_is_counted_once_however_often_it_is_met(rig, name, region, counter):
    damage = next(damage for damage in DAMAGES if damage.name == name)
    strike(rig, Case(damage, region, ""))
    with opened(rig) as tier:
        for _ in range(3):
            ask(tier, rig.engine, rig.prompts[0])
            tier.tick()
        assert tier.counters.snapshot()[counter] == (2 if name == "swap" else 1)


def test_a_segment_truncated_to_every_length_is_never_served_wrong(rig):
    whole = rig.paths[0].read_bytes()
    lengths = {0, 1, 127, 128, 4095, 4096, 4097, 8192, len(whole) - 4096, len(whole) - 128}
    for length in sorted(lengths):
        rig.paths[0].write_bytes(whole[:length])
        with opened(rig) as tier:
            assert tier.lookup(rig.engine.keys(rig.prompts[0])) == 0
            assert set(ask(tier, rig.engine, rig.prompts[0])) == {MISS}
            assert set(ask(tier, rig.engine, rig.prompts[1])) == {DONE}


def test_a_deleted_segment_is_a_miss_and_not_looked_for_again(rig):
    with opened(rig) as tier:
        rig.paths[0].unlink()
        assert set(ask(tier, rig.engine, rig.prompts[0])) == {MISS}
        assert tier.lookup(rig.engine.keys(rig.prompts[0])) == 0
        assert set(ask(tier, rig.engine, rig.prompts[1])) == {DONE}
        assert tier.counters.snapshot()["lost_segments_total"] == 1


def test_a_deleted_pool_is_a_miss_and_begins_anew(rig):
    with opened(rig) as tier:
        shutil.rmtree(rig.root)
        assert set(ask(tier, rig.engine, rig.prompts[0])) == {MISS}
        assert put(tier, rig.engine, rig.prompts[0])
        ask(tier, rig.engine, rig.prompts[0])
    with opened(rig) as tier:
        assert set(put(tier, rig.engine, rig.prompts[0])) == {DONE}
        assert set(ask(tier, rig.engine, rig.prompts[0])) == {DONE}


def test_blocks_come_back_when_the_storage_recovers(rig):
    name = str(rig.paths[0].relative_to(rig.root))
    rig.plan.fail("open", errno.EIO, when=lambda call: call.name == name)
    with opened(rig, lease_s=0.1, discover_interval_s=60.0) as tier:
        assert set(ask(tier, rig.engine, rig.prompts[0])) == {MISS}
        rig.plan.clear()

        def has_come_back():
            tier.tick()
            return tier.lookup(rig.engine.keys(rig.prompts[0])) == BLOCKS

        assert eventually(has_come_back)
        assert set(ask(tier, rig.engine, rig.prompts[0])) == {DONE}


@pytest.mark.parametrize("share", [0.2, 1.0])
def test_read_errors_are_outcomes(rig, share):
    rig.plan.fail("read", errno.EIO, share=share)
    with opened(rig) as tier:
        for _ in range(5):
            outcomes = ask(tier, rig.engine, rig.prompts[0])
            assert set(outcomes) <= {DONE, MISS, FAILED}
        rig.plan.clear()
        assert set(put(tier, rig.engine, rig.prompts[0])) <= {DONE}


@pytest.mark.parametrize("share", [0.5, 1.0])
def test_bits_that_flip_on_the_way_are_corrupt(rig, share):
    with opened(rig) as tier:
        rig.plan.flip(share=share)
        outcomes = ask(tier, rig.engine, rig.prompts[0])
        assert share < 1.0 or DONE not in outcomes
    rig.plan.clear()
    with opened(rig) as tier:
        assert set(ask(tier, rig.engine, rig.prompts[0])) == {DONE}


def test_short_reads_are_corrupt_and_not_half_served(rig):
    with opened(rig) as tier:
        ask(tier, rig.engine, rig.prompts[0][:16])  # the file is open, its header is checked
        rig.plan.short("read")
        outcomes = ask(tier, rig.engine, rig.prompts[0])
        assert CORRUPT in outcomes


# segments that are whole but do not belong here


def test_a_segment_of_another_identity_is_not_served(rig):
    theirs = ToyEngine(identity=toy_identity((4096,), weights_fingerprint="other"))
    with PoolTier.open(pool_config(rig.root), theirs.identity) as tier:
        put(tier, theirs, rig.prompts[0])
        put(tier, theirs, rig.prompts[1])
    strangers = [p for p in segment_files(rig.root) if theirs.digest.hex() in str(p)]
    for mine, stranger in zip(rig.paths, strangers, strict=True):
        shutil.copy(stranger, mine.with_name(stranger.name))  # beside ours
        shutil.copy(stranger, mine)  # and instead of ours
    with opened(rig) as tier:
        assert tier.lookup(rig.engine.keys(rig.prompts[0])) == 0
        assert set(ask(tier, rig.engine, rig.prompts[0])) == {MISS}


def test_a_segment_under_another_name_is_not_served(rig):
    os.rename(rig.paths[0], rig.paths[0].with_name("0123456789abcdef-00000001.kvseg"))
    with opened(rig) as tier:
        assert tier.lookup(rig.engine.keys(rig.prompts[0])) == 0
        assert set(ask(tier, rig.engine, rig.prompts[1])) == {DONE}


def test_a_segment_of_another_version_is_left_alone(rig):
    with rig.paths[0].open("r+b") as file:
        for offset in (8, rig.paths[0].stat().st_size - TRAILER_BYTES + 8):
            file.seek(offset)
            file.write((FORMAT_VERSION + 1).to_bytes(4, "little"))
    with opened(rig) as tier:
        assert tier.lookup(rig.engine.keys(rig.prompts[0])) == 0
        assert set(ask(tier, rig.engine, rig.prompts[1])) == {DONE}
        assert set(put(tier, rig.engine, rig.prompts[0])) == {DONE}


# foreign files


def plant_foreign(rig):
    """Things that other programs, people and other releases leave in folders."""
    hour = rig.paths[0].parent
    namespace = hour.parent
    for folder in (
        rig.root,
        rig.root / "ns",
        namespace,
        hour,
        rig.root / "tmp",
        rig.root / "lease",
    ):
        (folder / "README.txt").write_bytes(b"please keep")
        (folder / "name with spaces, \xfc and\nnewline").write_bytes(b"odd")
        (folder / "folder").mkdir()
        (folder / "folder" / "file").write_bytes(b"inside")
        (folder / "dangling").symlink_to(folder / "nowhere")
        (folder / "link").symlink_to("/etc/hostname")
        os.mkfifo(folder / "fifo")
    (hour / "0123456789abcdef-0000zzzz.kvseg").write_bytes(b"nearly")
    (hour / "0123456789abcdef-00000001.kvseg.bak").write_bytes(rig.paths[0].read_bytes())
    (hour / "x.kvseg").write_bytes(b"")
    (namespace / "not-an-hour").mkdir()
    (namespace / "not-an-hour" / rig.paths[0].name).write_bytes(rig.paths[0].read_bytes())
    (rig.root / "ns" / ("a" * 64)).write_bytes(b"a file where a namespace could be")
    (rig.root / "lease" / "nobody.lease").mkdir()
    (rig.root / "tmp" / "editor.swp").write_bytes(b"not ours")
    listener = socket.socket(socket.AF_UNIX)
    os.chdir(hour)
    try:
        listener.bind("socket")
    finally:
        listener.close()


def foreign(rig, own):
    """Every path that is not the pool's own, with its content."""
    found = {}
    for place, folders, names in os.walk(rig.root):
        for name in folders + names:
            path = os.path.join(place, name)
            if path in own:
                continue
            is_plain = os.path.isfile(path) and not os.path.islink(path)
            found[path] = Path(path).read_bytes() if is_plain else os.lstat(path).st_mode
    return found


def test_foreign_files_are_neither_used_nor_counted_nor_removed(rig, monkeypatch):
    monkeypatch.chdir(rig.root)  # back where we were in the end
    own = {os.path.join(place, n) for place, ds, ns in os.walk(rig.root) for n in ds + ns}
    plant_foreign(rig)
    before = foreign(rig, own)
    assert len(before) > 50
    engine = rig.engine
    # room for few segments, so that the cleaner works as well
    with opened(rig, capacity_bytes=512 * 1024, segment_bytes=64 * 1024, lease_s=0.05) as tier:
        used = tier.usage().used_bytes
        assert used == sum(path.stat().st_size for path in rig.paths)
        for seed in range(10, 40):
            tokens = engine.prompt(seed, 12)
            put(tier, engine, tokens)
            tier.tick()
            assert set(ask(tier, engine, tokens)) <= {DONE}
        assert tier.counters.snapshot()["segments_evicted_total"] > 5
    after = foreign(rig, own)
    assert {path: after.get(path) for path in before} == before


# the pool's own small files


def snapshot(root):
    return {
        str(path.relative_to(root)): path.read_bytes() if path.is_file() else None
        for path in root.rglob("*")
    }


@pytest.mark.parametrize("version", [0, FORMAT_VERSION + 1, 99, "2b"])
def test_a_pool_of_another_version_is_refused_and_left_as_it_was(rig, version):
    pool_json = rig.root / "pool.json"
    text = pool_json.read_text()
    quoted = f'"{version}"' if isinstance(version, str) else str(version)
    assert f'"version": {FORMAT_VERSION}' in text
    pool_json.write_text(
        text.replace(f'"version": {FORMAT_VERSION}', f'"version": {quoted}, "new_field": [1]')
    )
    before = snapshot(rig.root)
    with pytest.raises(UnknownVersion) as caught:
        opened(rig)
    assert str(version) in str(caught.value)
    assert f"version {FORMAT_VERSION}" in str(caught.value)
    assert snapshot(rig.root) == before


@pytest.mark.parametrize(
    "content",
    [b"", b"{", b"[]", b"\xff\xfe", b'{"format": "other", "version": 1}', b"null", b"0" * 4096],
)
def test_a_damaged_pool_file_is_refused_and_left_as_it_was(rig, content):
    (rig.root / "pool.json").write_bytes(content)
    before = snapshot(rig.root)
    with pytest.raises(FormatError, match=r"pool\.json"):
        opened(rig)
    assert snapshot(rig.root) == before


@pytest.mark.parametrize("content", [b"", b"{}", b"\0" * 100, b'{"model_name": 1}'])
def test_a_damaged_manifest_is_refused_with_a_next_step(rig, content):
    next(rig.root.glob("ns/*/identity.json")).write_bytes(content)
    with pytest.raises(FormatError, match="damaged") as caught:
        opened(rig)
    assert "remove the namespace folder" in caught.value.hint


@pytest.mark.parametrize("name", ["pool.json", "ns", "lease"])
def test_a_folder_for_a_file_and_a_file_for_a_folder(rig, name):
    path = rig.root / name
    if path.is_dir():
        shutil.rmtree(path)
        path.write_bytes(b"in the way")
    else:
        path.unlink()
        path.mkdir()
    with pytest.raises((PoolDenied, FormatError)):
        opened(rig)


def test_a_file_in_the_place_of_tmp_stops_stores_only(rig):
    shutil.rmtree(rig.root / "tmp")
    (rig.root / "tmp").write_bytes(b"in the way")
    with opened(rig) as tier:
        assert set(ask(tier, rig.engine, rig.prompts[0])) == {DONE}
        fresh = rig.engine.prompt(3, 2)
        assert set(put(tier, rig.engine, fresh)) <= {FAILED, Outcome.DROPPED}
        assert set(ask(tier, rig.engine, fresh)) == {MISS}
    assert (rig.root / "tmp").read_bytes() == b"in the way"


def test_a_root_that_is_a_file_is_refused(tmp_path):
    path = tmp_path / "file"
    path.write_bytes(b"text")
    with pytest.raises(PoolDenied, match="is a file"):
        PoolTier.open(pool_config(path), ToyEngine().identity)
    assert path.read_bytes() == b"text"


def test_scrub_finds_what_reading_would_find(rig):
    disk = LocalDisk(rig.root, direct="off", is_read_only=True)
    assert all(check.is_sound for check in scrub(disk))
    strike(rig, Case(next(d for d in DAMAGES if d.name == "flip_byte"), "payload", ""))
    by_path = {check.path: check for check in scrub(disk)}
    bad = by_path[str(rig.paths[0].relative_to(rig.root))]
    assert (bad.bad_blocks, bad.is_sound) == (1, False)
    assert by_path[str(rig.paths[1].relative_to(rig.root))].is_sound
