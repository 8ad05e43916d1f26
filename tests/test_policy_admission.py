"""What is written: always a prefix of what is offered, within class, sight and budget."""

from __future__ import annotations

import hashlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvdepot.errors import ConfigError
from kvdepot.policy.admission import (
    Admission,
    AdmissionSettings,
    Admitted,
    SeenBefore,
    StoreClass,
    WriteBudget,
)

DAY_S = 86_400.0


def key(number: int) -> bytes:
    return hashlib.sha256(str(number).encode()).digest()


def keys(*numbers: int) -> list[bytes]:
    return [key(number) for number in numbers]


def test_always_takes_everything():
    admission = Admission()
    assert admission.is_always
    assert admission.admit(0.0, keys(1, 2, 3), 100, prompt_tokens=48) == Admitted(3, "")


def test_second_sight_writes_what_is_computed_twice():
    admission = Admission(AdmissionSettings(when="second_sight"))
    assert not admission.is_always
    offered = keys(1, 2, 3)
    assert admission.admit(0.0, offered, 100, prompt_tokens=48) == Admitted(0, "first_sight")
    assert admission.admit(1.0, offered, 100, prompt_tokens=48) == Admitted(3, "")


def test_only_the_shared_beginning_is_taken():
    admission = Admission(AdmissionSettings(when="second_sight"))
    admission.admit(0.0, keys(1, 2, 3, 4), 100, prompt_tokens=64)
    assert admission.admit(1.0, keys(1, 2, 8, 9), 100, prompt_tokens=64) == Admitted(
        2, "first_sight"
    )


def test_short_prompts_are_not_written_and_answers_have_no_minimum():
    admission = Admission(AdmissionSettings(prompt_tokens_min=100))
    assert admission.admit(0.0, keys(1), 100, prompt_tokens=99) == Admitted(0, "class")
    assert admission.admit(0.0, keys(1), 100, prompt_tokens=100).blocks == 1
    generated = admission.admit(0.0, keys(1), 9, prompt_tokens=1, kind=StoreClass.GENERATED)
    assert generated.blocks == 1


def test_the_budget_of_a_day_is_kept_over_days():
    admission = Admission(AdmissionSettings(bytes_per_day=24_000))
    written = 0
    for minute in range(3 * 24 * 60):
        written += (
            100 * admission.admit(minute * 60.0, keys(*range(50)), 100, prompt_tokens=9).blocks
        )
    assert 3 * 24_000 * 0.98 <= written <= 3 * 24_000 + 1000


def test_what_cannot_be_reached_is_remembered_and_costs_nothing():
    admission = Admission(AdmissionSettings(when="second_sight", bytes_per_day=24_000))
    keys = [bytes([n]) * 32 for n in range(4)]
    found = admission.admit(0.0, keys, 100, prompt_tokens=64, is_reachable=False)
    assert found == (0, "first_sight")
    found = admission.admit(0.0, keys, 100, prompt_tokens=64, is_reachable=False)
    assert found.blocks == 0
    assert admission.admit(0.0, keys, 250, prompt_tokens=64) == (4, ""), "the budget is whole"


@given(
    st.integers(1, 10**9),
    st.lists(
        st.tuples(st.floats(0, 10_000), st.lists(st.integers(1, 10**6), max_size=5)), max_size=50
    ),
)
def test_a_budget_is_never_exceeded(per_day, stores):
    budget = WriteBudget(per_day)
    now, written = 0.0, 0
    for gap, sizes in stores:
        now += gap
        taken = budget.take(now, sizes)
        written += sum(sizes[:taken])
        assert written <= per_day / 24 + now * per_day / DAY_S + 1e-3


def test_a_bloom_filter_forgets_and_never_denies_what_is_fresh():
    seen = SeenBefore(1000)
    wrong = sum(seen.see(key(number)) for number in range(1000))
    assert wrong < 10
    assert all(seen.knows(key(number)) for number in range(900))
    for number in range(1000, 4000):
        seen.see(key(number))
    assert sum(seen.knows(key(number)) for number in range(1000)) < 50
    assert all(seen.see(key(number)) for number in range(3500, 4000))


def test_answers_are_a_class_of_their_own():
    admission = Admission(AdmissionSettings(generated=False))
    assert not admission.is_always
    assert admission.admit(0.0, keys(1), 9, prompt_tokens=1).blocks == 1
    refused = admission.admit(0.0, keys(1), 9, prompt_tokens=1, kind=StoreClass.GENERATED)
    assert refused == Admitted(0, "class")


def test_settings_take_sizes_as_people_write_them():
    settings = AdmissionSettings.of(when="second_sight", bytes_per_day="500GB")
    assert settings == AdmissionSettings(when="second_sight", bytes_per_day=500 * 10**9)
    assert AdmissionSettings.of() == AdmissionSettings()


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"when": "sometimes"}, "sometimes"),
        ({"bytes_per_day": "much"}, "not a size"),
        ({"bytes_per_day": -1}, "negative"),
        ({"prompt_tokens_min": -1}, "negative"),
        ({"prompt_tokens_min": "100"}, "int"),
        ({"generated": 1}, "bool"),
        ({"seen_keys_max": 0}, "at least one key"),
        ({"wen": "always"}, "wen"),
    ],
)
def test_settings_that_mean_nothing_are_refused(settings, words):
    with pytest.raises(ConfigError, match=words):
        AdmissionSettings.of(**settings)


def test_a_direct_settings_object_is_checked_too():
    with pytest.raises(ConfigError, match="sometimes"):
        AdmissionSettings(when="sometimes")  # type: ignore[arg-type]
