"""Where a text may be cut so that its pieces, tokenized alone, give the tokens of the whole.

Tokenizers differ, so each way of cutting is tried on texts made to break it, and on the log's own.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence

__all__ = ["LINES", "SPECIAL", "WHOLE", "WORDS", "cut", "probes", "special_pattern"]

#: what special tokens look like, where no tokenizer says it
SPECIAL = re.compile(
    r"<\|[A-Za-z0-9_/]{1,40}\|>|<\uff5c[^<>\uff5c]{1,40}\uff5c>|</?s>|<(?:start|end)_of_turn>"
)
WHOLE = "whole prompts"
#: how a text between special tokens is cut, in the order in which it is tried
LINES: dict[str, re.Pattern[str] | None] = {
    "lines": re.compile(r"(?<=\n)(?=\S)"),
    "line starts": re.compile(r"(?=\n\S)"),
    "special tokens": None,
}
#: white space as Unicode has it: Python counts four signs more
_S, _X = r"[^\S\x1c-\x1f]", r"[\S\x1c-\x1f]"
#: how the pieces of new lines are found, in the order in which it is tried; a piece is a word with the blank
#: before it and the signs at it. Some tokenizers take line ends with the blanks behind them, others with
#: the signs before them.
WORDS: dict[str, re.Pattern[str]] = {
    "words": re.compile(rf" ?{_X}+|{_S}+(?!{_X})|{_S}+"),
    "words and line ends": re.compile(
        rf" ?{_X}+(?:{_S}*[\r\n]+)?|{_S}*[\r\n]+|{_S}+(?!{_X})|{_S}+"
    ),
}

_SIDES = (
    *(
        "a",
        "Zb",
        "don't",
        "'s",
        "7",
        "1234",
        "_",
        ".",
        ");",
        '"',
        "-",
        "/",
        "{",
        "\u00e9",
        "e\u0301",
    ),
    *("\u4e2d\u6587", "\u3002", "\u0439", "\u200b", "\u0301", "\U0001f600", "\u00b2", "\ufeff"),
)
_GAPS = (
    *(
        "",
        "\n",
        "\n\n",
        "\n\n\n",
        "\r\n",
        "\r\n\r\n",
        "\n\r",
        "\t",
        "\t\t",
        "\n\t",
        "\t\n",
        " \n",
        "  \n",
    ),
    *(
        "\n ",
        "\n  ",
        "\n    ",
        " \n ",
        "\n \n",
        "\n\n \n  ",
        " \t",
        "\t ",
        " \t \n\t ",
        "\x0b",
        "\x0c",
    ),
    *("\u00a0", " \u00a0", "\u00a0 ", "\u3000", "\u2028", "\x85", "\n\u3000", "\x1c", " \x1c "),
    *(" " * count for count in (1, 2, 3, 4, 5, 7, 8, 9, 12, 16, 17, 24, 32, 33)),
)


def special_pattern(tokens: Iterable[tuple[str, bool]]) -> re.Pattern[str] | None:
    """What finds special tokens in a text; None if there are none.

    Args:
        tokens: each with whether it takes the white space behind it.
    """
    texts = sorted({each for each in tokens if each[0]}, key=lambda each: (-len(each[0]), each))
    if not texts:
        return None
    first = "".join(sorted({re.escape(text[0]) for text, _ in texts}))
    every = "|".join(re.escape(text) + (f"{_S}*" if takes else "") for text, takes in texts)
    return re.compile(f"(?=[{first}])(?:{every})")


def cut(text: str, cuts: str = "lines", special: re.Pattern[str] | None = SPECIAL) -> list[str]:
    """Pieces that together are `text`: special tokens alone, and what `cuts` makes of the rest."""
    if cuts == WHOLE:
        return [text] if text else []
    lines = LINES[cuts]
    pieces: list[str] = []
    at = 0
    for match in special.finditer(text) if special is not None else ():
        _add(pieces, text[at : match.start()], lines)
        pieces.append(match[0])
        at = match.end()
    _add(pieces, text[at:], lines)
    return pieces


def _add(pieces: list[str], text: str, lines: re.Pattern[str] | None) -> None:
    if not text:
        return
    if lines is None:
        pieces.append(text)
    else:
        pieces += filter(None, lines.split(text))


def probes(marks: Sequence[str]) -> Iterator[str]:
    """Texts in which every kind of sign stands before and behind every kind of white space.

    Args:
        marks: special tokens, added ones, and what only looks like them.
    """
    for left in _SIDES:
        yield "".join([left + gap + right for gap in _GAPS for right in _SIDES])
    for mark in marks:
        yield "".join([f"{left}{mark}{right}" for left in ("a", ".", " ", "\n", "a \n", "  ")
                       for right in ("a", ".", " a", "\n", "\n\nb", "  b", " \n ")])  # fmt: skip
