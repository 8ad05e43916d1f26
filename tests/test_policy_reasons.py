"""Every miss has a reason and an advice; a cache that is only written is found."""

from __future__ import annotations

from kvdepot.policy.reasons import ADVICE, Explanation, MissLog, Reason
from kvdepot.policy.write_only import WriteOnlyDetector

GIB = 1 << 30


def test_every_reason_has_an_advice():
    assert set(ADVICE) == set(Reason)


def test_reasons_are_counted_by_request_and_by_block():
    log = MissLog()
    log.note(None)
    log.note(Explanation(Reason.EVICTED, 3, 10))
    log.note(Explanation(Reason.EVICTED, 0, 5))
    log.note(Explanation(Reason.BREAKER, 9, 10))
    assert log.complete == 1
    assert log.requests() == {Reason.EVICTED: 2, Reason.BREAKER: 1}
    assert log.blocks() == {Reason.EVICTED: 12, Reason.BREAKER: 1}


def test_an_explanation_reads_as_a_sentence():
    text = Explanation(Reason.CORRUPT, 3, 10, "segment x").text()
    assert text.startswith(
        "reuse ended at block 3 of 10: corrupt (segment x); the storage loses bytes"
    )


def detector() -> WriteOnlyDetector:
    return WriteOnlyDetector(stored_min_bytes=GIB, requests_min=10)


def test_a_cache_that_is_only_written_is_found_with_the_likely_reason():
    found = detector()
    for _ in range(20):
        found.stored(GIB // 10)
        found.looked_up(is_hit=False)
    verdict = found.verdict({Reason.NEVER_STORED: 20})
    assert "only written: 2.00 GiB stored, 0.00 GiB read back in 20 requests" in verdict.warning
    assert "never_stored" in verdict.warning


def test_prefixes_that_are_found_and_not_loaded_are_told_apart():
    found = detector()
    for _ in range(20):
        found.stored(GIB // 10)
        found.looked_up(is_hit=True)
    assert "found but not loaded" in found.verdict({Reason.REFUSED_COST: 20}).warning


def test_it_warns_once_and_again_when_twice_as_much_was_stored():
    found = detector()
    for _ in range(10):
        found.stored(GIB // 10)
        found.looked_up(is_hit=False)
    assert not found.due_warning({})  # a little less than a GiB
    found.stored(GIB)
    assert found.due_warning({})
    assert not found.due_warning({})
    found.stored(GIB)
    assert not found.due_warning({})
    found.stored(2 * GIB)
    assert found.due_warning({})


def test_little_traffic_and_real_reuse_are_no_reason_to_warn():
    few = detector()
    few.stored(10 * GIB)
    few.looked_up(is_hit=False)
    assert not few.verdict({}).warning
    useful = detector()
    for _ in range(20):
        useful.stored(GIB)
        useful.looked_up(is_hit=True)
    useful.read_back(GIB)
    assert not useful.verdict({}).warning
