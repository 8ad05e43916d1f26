"""Sampling, and text that streams: pieces join to the text, stop texts never show."""

from __future__ import annotations

import pytest

pytestmark = pytest.mark.engine
pytest.importorskip("torch")
pytest.importorskip("transformers")

import torch  # noqa: E402
from hypothesis import given  # noqa: E402
from hypothesis import strategies as st  # noqa: E402

from kvdepot.engines.transformers.decoding import Sampler, TextStream  # noqa: E402
from kvdepot.errors import ConfigError  # noqa: E402
from tests.tiny_models import tiny_tokenizer  # noqa: E402

TOKENIZER = tiny_tokenizer()


def streamed(text, stop=()):
    stream = TextStream(TOKENIZER, stop)
    pieces = []
    for token in TOKENIZER(text)["input_ids"]:
        pieces.append(stream.push(token))
        if stream.is_stopped:
            break
    pieces.append(stream.finish())
    assert "".join(pieces) == stream.text
    return stream


@given(st.text())
def test_pieces_join_to_the_text(text):
    # every token is one byte here, so most tokens of most texts are incomplete characters
    expected = TOKENIZER.decode(TOKENIZER(text)["input_ids"])
    assert streamed(text).text == expected


def test_an_incomplete_character_is_held_back():
    stream = TextStream(TOKENIZER)
    pieces = [stream.push(token) for token in TOKENIZER("aé€")["input_ids"]]
    assert pieces == ["a", "", "é", "", "", "€"]


@given(st.text("ab\n", max_size=30), st.sampled_from(["\n\n", "ab", "aab", "b"]))
def test_the_text_ends_before_the_first_stop_text(text, stop):
    stream = streamed(text, (stop,))
    assert stream.text == text.split(stop)[0]
    assert stream.is_stopped == (stop in text)


def test_the_beginning_of_a_stop_text_is_held_back_until_it_is_none():
    stream = TextStream(TOKENIZER, ("END",))
    pieces = [stream.push(token) for token in TOKENIZER("xENxEND")["input_ids"]]
    assert pieces == ["x", "", "", "ENx", "", "", ""]
    assert stream.text == "xENx"


def test_the_earliest_of_several_stop_texts_ends_the_text():
    assert streamed("one two three", ("three", "two")).text == "one "


def test_greedy_takes_the_largest():
    assert Sampler().pick(torch.tensor([0.1, 5.0, -3.0])) == 1


def test_sampling_repeats_with_its_seed_and_varies_without():
    logits = torch.zeros(1000)
    first = [Sampler(temperature=1.0, seed=7).pick(logits) for _ in range(3)]
    assert len(set(first)) == 1
    sampler = Sampler(temperature=1.0, seed=7)
    assert len({sampler.pick(logits) for _ in range(20)}) > 10
    assert len({Sampler(temperature=1.0).pick(logits) for _ in range(20)}) > 10


def test_sampling_follows_the_probabilities():
    logits = torch.log(torch.tensor([0.5, 0.3, 0.2]))
    sampler = Sampler(temperature=1.0, seed=1)
    counts = torch.bincount(torch.tensor([sampler.pick(logits) for _ in range(3000)]), minlength=3)
    assert torch.allclose(counts / 3000, torch.tensor([0.5, 0.3, 0.2]), atol=0.05)


@pytest.mark.parametrize(
    ("top_p", "kept"), [(0.4, {0}), (0.5, {0}), (0.6, {0, 1}), (1.0, {0, 1, 2})]
)
def test_top_p_keeps_the_most_likely(top_p, kept):
    sampler = Sampler(temperature=1.0, top_p=top_p, seed=2)
    logits = torch.log(torch.tensor([0.5, 0.3, 0.2]))
    assert {sampler.pick(logits) for _ in range(300)} == kept


def test_values_out_of_range_are_refused():
    nan = float("nan")
    for temperature, top_p in ((-1.0, 1.0), (nan, 1.0), (1.0, 0.0), (1.0, 1.1), (1.0, nan)):
        with pytest.raises(ConfigError):
            Sampler(temperature=temperature, top_p=top_p)
