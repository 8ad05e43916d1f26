"""What a peak test asks: sessions over documents of their own, or the requests of a trace."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import NamedTuple

from kvdepot.bench.loads import Turn
from kvdepot.bench.plan import Load, Traffic
from kvdepot.bench.prompts import Material
from kvdepot.bench.traces import TraceRow

__all__ = ["Ask", "session_turns", "storm_turns", "text_of_blocks", "trace_turns"]

_TOKEN_CHARACTERS = 4.0
_WORDS = [
    "river",
    "stone",
    "paper",
    "light",
    "garden",
    "market",
    "window",
    "letter",
    "summer",
    "engine",
    "bridge",
    "silver",
    "morning",
    "village",
    "captain",
    "harvest",
    "island",
    "pattern",
    "shadow",
    "signal",
    "travel",
    "winter",
    "castle",
    "forest",
    "mirror",
    "number",
    "orange",
    "pencil",
    "quarter",
    "ribbon",
]


class Ask(NamedTuple):
    """One request of a load."""

    session: str
    turn: int
    text: str
    output_tokens: int
    #: all of a session's turns share it; sessions over one document do as well
    salt: str


def session_turns(
    traffic: Traffic, load: Load, material: Material, *, salt: str, seed: int, count: int = 0
) -> list[Turn[Ask]]:
    """Turns of all sessions, so mixed that a session's next turn comes when others have been by.

    Args:
        traffic: sizes.
        load: its own number of requests wins.
        material: cut into documents.
        salt: of this run and arm; no other run finds what this one has stored.
        seed: of the order, and of the documents drawn.
        count: requests; 0: as many as the load or the traffic has.
    """
    order = random.Random(seed)
    wanted = count or load.requests or traffic.sessions * traffic.turns
    sessions = -(-wanted // traffic.turns)
    documents = _documents(traffic, sessions, order)
    # waves: in one, every session of a group has its turn; groups overlap, so that first asks and
    # follow-ups come at the same time
    plan: list[tuple[float, int, int]] = [
        (session + turn * max(sessions / 2, 1) + order.random(), session, turn)
        for session in range(sessions)
        for turn in range(traffic.turns)
    ]
    turns: list[Turn[Ask]] = []
    last: dict[int, int] = {}
    for _, session, turn in sorted(plan):
        ask = Ask(
            session=f"{session}",
            turn=turn,
            text=_text(traffic, material, documents[session], session, turn),
            output_tokens=traffic.output_tokens,
            salt=salt,
        )
        turns.append(Turn(ask, after=last.get(session), think_s=traffic.think_s if turn else 0.0))
        last[session] = len(turns) - 1
    return turns[:wanted]


def storm_turns(
    turns: Sequence[Turn[Ask]], sessions: int
) -> tuple[list[Turn[Ask]], list[Turn[Ask]]]:
    """First asks to get sessions going, and the follow-ups that all return within a second."""
    firsts = [turn for turn in turns if turn.item.turn == 0][:sessions]
    names = {turn.item.session for turn in firsts}
    seconds = [t for t in turns if t.item.turn == 1 and t.item.session in names][:sessions]
    plain = [Turn(turn.item) for turn in firsts]
    return plain, [
        Turn(turn.item, at_s=index / max(len(seconds), 1)) for index, turn in enumerate(seconds)
    ]


def trace_turns(rows: Sequence[TraceRow], traffic: Traffic, *, salt: str) -> list[Turn[Ask]]:
    """A trace's requests at its times, with text made of its block ids."""
    turns: list[Turn[Ask]] = []
    last: dict[str, int] = {}
    counts: dict[str, int] = {}
    limit = traffic.input_tokens_max
    for index, row in enumerate(rows[: traffic.requests or None]):
        tokens = min(row.input_tokens, limit) if limit else row.input_tokens
        session = row.session or f"request {index}"
        ask = Ask(
            session=session,
            turn=counts.get(session, 0),
            text=text_of_blocks(row.blocks, row.block_tokens, tokens, unique=index),
            output_tokens=max(2, row.output_tokens),
            salt=salt,
        )
        turns.append(
            Turn(
                ask,
                at_s=row.at_s * traffic.time_scale,
                after=last.get(session) if row.session else None,
                think_s=row.think_s * traffic.time_scale,
            )
        )
        last[session] = len(turns) - 1
        counts[session] = counts.get(session, 0) + 1
    return turns


def text_of_blocks(blocks: Sequence[int], block_tokens: int, tokens: int, *, unique: int) -> str:
    """Text of a number of tokens in which equal block ids are equal text, whatever the request.

    What is left behind the last block is text of its own: no other request has it.
    """
    characters = round(tokens * _TOKEN_CHARACTERS)
    width = round(block_tokens * _TOKEN_CHARACTERS)
    parts = []
    left = characters
    for block in blocks:
        if left <= 0:
            break
        parts.append(_filler(f"block {block}", min(width, left)))
        left -= width
    if left > 0:
        parts.append(_filler(f"request {unique}", left))
    return "".join(parts)


def _filler(seed: str, characters: int) -> str:
    """Words drawn by a seed; the same seed gives the same text in every process."""
    drawn = random.Random(seed)
    words = [f"{seed}:"]
    length = len(seed) + 1
    while length < characters:
        word = drawn.choice(_WORDS)
        words.append(word)
        length += len(word) + 1
    return " ".join(words)[:characters]


def _documents(traffic: Traffic, sessions: int, order: random.Random) -> list[int]:
    """Which document each session is about."""
    if traffic.zipf <= 0:
        return list(range(sessions))
    weights = [1 / (rank + 1) ** traffic.zipf for rank in range(traffic.sessions)]
    return order.choices(range(traffic.sessions), weights, k=sessions)


def _text(traffic: Traffic, material: Material, document: int, session: int, turn: int) -> str:
    """The conversation so far: common part, document, and all turns up to this one."""
    common = _piece(material, 0, traffic.common_tokens)
    body = _piece(material, 7919 * (document + 1), traffic.document_tokens)
    asked = [
        _filler(
            f"Turn {index} of session {session}", round(traffic.turn_tokens * _TOKEN_CHARACTERS)
        )
        for index in range(turn + 1)
    ]
    return f"{common}[document {document}]\n{body}\n\n" + "\n\n".join(asked)


def _piece(material: Material, offset: int, tokens: int) -> str:
    """A piece of the material from an offset on, around its end if need be."""
    characters = round(tokens * _TOKEN_CHARACTERS)
    text = material.text
    start = offset % len(text)
    while len(text) < start + characters:
        text += material.text
    return text[start : start + characters]
