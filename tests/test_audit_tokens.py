"""Text to token ids: kvdepot.audit.tokens, kvdepot.audit.cuts."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvdepot.audit.cuts import SPECIAL, cut, special_pattern
from kvdepot.audit.tokens import FallbackEncoder, ModelEncoder, PieceMemo, PseudoEncoder
from tests.audit_tokenizer import byte_level_tokenizer, same_ids
from tests.audit_traffic import passage


@given(st.text(max_size=300))
def test_pieces_are_the_whole_text(text):
    for cuts in ("lines", "line starts", "special tokens", "whole prompts"):
        assert "".join(cut(text, cuts)) == text


@given(st.text(st.sampled_from("ab1 .\n\t\r\u00e9\u4e2d<|im_end|>{}"), max_size=300))
def test_the_fallback_is_exact_when_cut_at_lines(text):
    encoder = FallbackEncoder()
    memo = PieceMemo(encoder)
    whole = encoder.encode([text])[0].tolist()
    assert memo.prompts([text])[0].tolist() == whole
    back = {number: part for part, number in encoder._ids.items()}
    assert "".join(back[each] for each in whole) == text


class Joining:
    """A tokenizer that looks over line ends, and over special tokens where told to."""

    name, error, splits = "joining", "", False
    marks: Sequence[str] = ()
    special: re.Pattern[str] | None = SPECIAL

    def __init__(self, pattern):
        self._pattern = re.compile(pattern, re.DOTALL)
        self._ids: dict[str, int] = {}

    def encode(self, texts):
        return [
            np.array([self._ids.setdefault(each, len(self._ids)) for each in found], np.int32)
            for found in map(self._pattern.findall, texts)
        ]


@pytest.mark.parametrize(
    ("pattern", "cuts"),
    [
        (r"\w+|\s+(?!\S)|\s|.", "line starts"),
        (r"\w+\n\w+|\w+|<\|\w+\|>|.", "special tokens"),
        (r".*", "whole prompts"),
    ],
)
def test_a_tokenizer_that_looks_over_cuts_is_cut_less(pattern, cuts):
    texts = ["one\n\ntwo\nthree<|x|>four\nfive", "one\n\nfive\nfour<|x|>\nsix"]
    encoder = Joining(pattern)
    memo = PieceMemo(encoder)
    memo.verify(texts)
    assert memo.cuts == cuts
    assert same_ids(memo.prompts(texts), encoder.encode(texts))


def test_a_special_token_takes_the_white_space_that_unicode_knows():
    # Python takes the separators of ASCII for white space too; tokenizers do not
    special = special_pattern([("<keep>", True)])
    assert cut("<keep> \u3000\x1c a", "line starts", special) == ["<keep> \u3000", "\x1c a"]


@given(
    st.lists(st.sampled_from(["~a~1", "~b~1", " ", "~a~2", "x", "\n", "~", "1", ""])).map("".join)
)
def test_words_of_one_token_are_read_like_any(text):
    encoder = PseudoEncoder()
    for each in (text, text.replace("~a~1", "~a~1 "), " ".join(["~a~1", "~c~1"] * 5)):
        assert encoder.encode([each])[0].tolist() == encoder._of_any(each)


def test_a_pseudo_word_stands_for_its_tokens():
    encoder = PseudoEncoder()
    one, other = map(np.ndarray.tolist, encoder.encode(["~k1~3 ~k2~1\nx", "~k1~3 ~k3~2"]))
    assert len(one) == 6
    assert one[:3] == other[:3]
    assert len(other) == 5


#: how newer models split: signs take the line ends behind them
NEWER = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
#: text that makes tokenizers look over the places where one would like to cut
NASTY = st.lists(
    st.sampled_from(
        (
            *("a", "Zb", "don't", "7", "1234", "_", ".", ");", "<", "\u00e9", "e\u0301", "\u4e2d"),
            *(" ", "  ", "    ", "\n", "\n\n", "\r\n", "\t", "\u00a0", "\u3000", "\x1c", "\x0b"),
            *("<|im_end|>", "<|im_start|>", "<tool>", "<keep>", "in between", "<|no_such|>"),
            *("\u200b", "\U0001f600"),
        )
    ),
    max_size=60,
).map("".join)


@pytest.mark.parametrize(
    ("splitter", "added", "cuts", "words"),
    [
        (None, [], "line starts", "words"),
        (None, [("<tool>", {}), ("<keep>", {"rstrip": True})], "line starts", "words"),
        (NEWER, [("<tool>", {"special": True})], "lines", "words and line ends"),
        (NEWER, [("<tool>", {"lstrip": True})], "special tokens", ""),
        (NEWER, [("in between", {}), ("    ", {})], "lines", "words and line ends"),
    ],
)
def test_pieces_give_the_tokens_of_the_whole(splitter, added, cuts, words):
    rng = random.Random(4)
    source = byte_level_tokenizer([passage(rng, 300) for _ in range(5)], splitter, added)
    encoder = ModelEncoder(source, "small")
    memo = PieceMemo(encoder)
    memo.verify(["one\ntwo"])
    assert (memo.cuts, memo.words) == (cuts, words)

    @given(st.lists(NASTY, min_size=1, max_size=4))
    def exact(texts):
        for each in (memo, memo.fresh()):
            assert same_ids(each.prompts(texts), [encoder.encode([text])[0] for text in texts])

    exact()


def test_words_that_do_not_come_again_are_not_remembered():
    rng = random.Random(4)
    encoder = ModelEncoder(byte_level_tokenizer([passage(rng, 300) for _ in range(5)]), "small")
    memo = PieceMemo(encoder)
    memo.verify(["one\ntwo"])
    memo = memo.fresh()
    texts = [
        "\n".join(" ".join(f"{rng.getrandbits(60):x}" for _ in range(20)) for _ in range(100))
        for _ in range(20)
    ]
    assert same_ids(memo.prompts(texts), encoder.encode(texts))
    # all 2,000 lines and a line end, but fewer than half of the 40,000 words
    assert len(memo._known) == 20_001


def test_without_rules_for_words_only_lines_are_remembered():
    parts = json.loads(byte_level_tokenizer(["one two three"]))
    parts["pre_tokenizer"] = None
    memo = PieceMemo(ModelEncoder(json.dumps(parts), "small"))
    memo.verify(["one\ntwo"])
    assert memo.words == ""
