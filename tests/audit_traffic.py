"""Traffic of made-up applications, deterministic by seed, for the planted scenarios of the audit.

The words are invented, so that no text of others is needed and two documents share only what a
scenario lets them share.
"""

from __future__ import annotations

import copy
import random
from typing import Any

Row = dict[str, Any]

_ONSETS = [
    "b",
    "br",
    "c",
    "d",
    "dr",
    "f",
    "fl",
    "g",
    "gr",
    "h",
    "k",
    "l",
    "m",
    "n",
    "p",
    "pl",
    "r",
    "s",
    "st",
    "t",
    "tr",
    "v",
    "w",
]
_VOWELS = ["a", "e", "i", "o", "u", "ai", "ea", "io", "ou"]
_CODAS = ["", "l", "m", "n", "nd", "r", "rk", "s", "st", "t", "x"]
_COMMON = [
    "the",
    "of",
    "and",
    "to",
    "in",
    "is",
    "for",
    "that",
    "with",
    "as",
    "it",
    "on",
    "by",
    "are",
    "be",
    "this",
    "from",
    "at",
    "or",
    "which",
]


def vocabulary(seed: int = 7, words: int = 900) -> list[str]:
    """Invented words, the common ones of English between them so that lines look like prose."""
    rng = random.Random(f"vocabulary {seed}")
    made: set[str] = set()
    while len(made) < words:
        made.add(
            "".join(
                rng.choice(_ONSETS) + rng.choice(_VOWELS) + rng.choice(_CODAS)
                for _ in range(rng.choice([1, 2, 2, 3]))
            )
        )
    return sorted(made)


WORDS = vocabulary()


def sentence(rng: random.Random, words: int) -> str:
    """One sentence; about four words in ten are common ones."""
    chosen = [rng.choice(_COMMON if rng.random() < 0.4 else WORDS) for _ in range(words)]
    return " ".join(chosen).capitalize() + "."


def passage(rng: random.Random, words: int) -> str:
    """Lines of about 90 characters, with an empty line now and then."""
    lines: list[str] = []
    left = words
    while left > 0:
        count = min(left, rng.randint(9, 15))
        lines.append(sentence(rng, count))
        left -= count
        if rng.random() < 0.12:
            lines.append("")
    return "\n".join(lines).strip()


def question(rng: random.Random) -> str:
    return sentence(rng, rng.randint(7, 14))[:-1] + "?"


def arrivals(rng: random.Random, count: int, span_s: float = 3600.0) -> list[float]:
    """Times in order, irregular."""
    return sorted(round(rng.uniform(0, span_s), 3) for _ in range(count))


START = 1_790_000_000.0  # a day in 2026


def singles(
    rng: random.Random,
    *,
    requests: int = 120,
    documents: int = 5,
    words: int = 700,
    users: int = 12,
    system_words: int = 220,
    span_s: float = 3600.0,
) -> list[Row]:
    """One question each about one of a few documents, behind one system prompt."""
    system = "You answer questions about records.\n" + passage(rng, system_words)
    texts = [passage(rng, words) for _ in range(documents)]
    rows = []
    for number, at in enumerate(arrivals(rng, requests, span_s)):
        asked = f"Question: {question(rng)}"
        rows.append(
            {
                "request_id": f"r{number:05d}",
                "session_id": f"s{number:05d}",
                "user": f"user-{rng.randrange(users)}",
                "timestamp": START + at,
                "model": "m",
                "messages": [
                    {"role": "system", "content": system},
                    {
                        "role": "user",
                        "content": f"<document>\n{rng.choice(texts)}\n</document>\n\n{asked}",
                    },
                ],
            }
        )
    return rows


def chats(
    rng: random.Random,
    *,
    sessions: int = 14,
    turns: int = 8,
    words: int = 260,
    answer_words: int = 60,
    system_words: int = 160,
) -> list[Row]:
    """Conversations that grow by an answer and a question a turn; two about each document."""
    system = "You are a patient helper.\n" + passage(rng, system_words)
    texts = [passage(rng, words) for _ in range((sessions + 1) // 2)]
    rows: list[Row] = []
    for session in range(sessions):
        history: list[Row] = [{"role": "system", "content": system}]
        at = rng.uniform(0, 1800)
        for turn in range(turns):
            asked = question(rng)
            if turn == 0:
                asked = f"<document>\n{texts[session % len(texts)]}\n</document>\n\n{asked}"
            history.append({"role": "user", "content": asked})
            rows.append(
                {
                    "session_id": f"c{session:03d}",
                    "user": f"user-{session % 9}",
                    "timestamp": START + round(at, 3),
                    "model": "m",
                    "messages": copy.deepcopy(history),
                }
            )
            history.append({"role": "assistant", "content": passage(rng, answer_words)})
            at += rng.uniform(20, 120)
    rows.sort(key=_time_of)
    for number, row in enumerate(rows):
        row["request_id"] = f"r{number:05d}"
    return rows


def _time_of(row: Row) -> float:
    return float(row["timestamp"])


def tools(rng: random.Random, count: int = 9) -> list[Row]:
    """Function tools with nested schemas."""
    made = []
    for name in rng.sample(WORDS, count):
        fields = rng.sample(WORDS, 4)
        made.append(
            {
                "type": "function",
                "function": {
                    "name": f"{name}_lookup",
                    "description": passage(rng, 30),
                    "parameters": {
                        "type": "object",
                        "properties": {
                            field: {"type": "string", "description": sentence(rng, 12)}
                            for field in fields
                        },
                        "required": fields[:2],
                    },
                },
            }
        )
    return made


def edited(rows: list[Row], edit: Any) -> list[Row]:
    """A deep copy with `edit(row, number)` applied to each row in place."""
    changed = copy.deepcopy(rows)
    for number, row in enumerate(changed):
        edit(row, number)
    return changed


def last_user(row: Row) -> Row:
    """The last user message."""
    found: Row = [each for each in row["messages"] if each["role"] == "user"][-1]
    return found


def shuffled_keys(rng: random.Random, value: Any) -> Any:
    """The same JSON with the keys of every object in another order."""
    if isinstance(value, dict):
        keys = list(value)
        rng.shuffle(keys)
        return {key: shuffled_keys(rng, value[key]) for key in keys}
    if isinstance(value, list):
        return [shuffled_keys(rng, each) for each in value]
    return value
