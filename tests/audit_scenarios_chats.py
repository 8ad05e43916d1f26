"""Planted faults of conversations, pictures and engines: causes 15 to 23 of the classifier table."""

from __future__ import annotations

import hashlib
import json
import random

from tests.audit_planted import Planted, scenario
from tests.audit_traffic import (
    START,
    WORDS,
    Row,
    chats,
    edited,
    passage,
    question,
    sentence,
    singles,
)

# --- 15 to 19 histories


@scenario()
def window_of_four_turns(rng):
    base = chats(rng, turns=10)

    def slide(row, _):
        turns = (len(row["messages"]) - 2) // 2
        if turns > 4:
            del row["messages"][1 : 1 + 2 * (turns - 4)]

    def step(row, _):
        turns = (len(row["messages"]) - 2) // 2
        if turns > 4:  # never fewer than four turns, and four more before the start moves
            del row["messages"][1 : 1 + 2 * ((turns - 4) // 4 * 4)]

    return Planted(edited(base, slide), "window", "messages[1]", edited(base, step))


def _thinking(rng, base, *, keep_last):
    thoughts: dict[str, str] = {}

    def think(row, _):
        answers = [each for each in row["messages"] if each["role"] == "assistant"]
        for answer in answers[-1:] if keep_last else []:
            text = thoughts.setdefault(answer["content"], passage(rng, 50))
            answer["content"] = f"<think>\n{text}\n</think>\n\n{answer['content']}"

    return edited(base, think)


@scenario()
def reasoning_kept_once(rng):
    base = chats(rng)
    return Planted(_thinking(rng, base, keep_last=True), "reasoning", "messages[", base)


@scenario(blind=True)
def reasoning_field_kept_once(rng):
    base = chats(rng)
    thoughts: dict[str, str] = {}

    def think(row, _):
        for answer in [each for each in row["messages"] if each["role"] == "assistant"][-1:]:
            answer["reasoning_content"] = thoughts.setdefault(answer["content"], passage(rng, 50))

    return Planted(edited(base, think), "reasoning", "messages[", base)


def _agents(rng, *, arguments):
    """Sessions whose answers call a tool; `arguments` writes the arguments, given (value, is_last)."""
    base = chats(rng, sessions=10, turns=8, answer_words=20)
    calls: dict[str, Row] = {}

    def act(row, _):
        answers = [each for each in row["messages"] if each["role"] == "assistant"]
        for answer in answers:
            value = calls.setdefault(
                answer["content"],
                {word: sentence(rng, 8) for word in rng.sample(WORDS, 8)},
            )
            answer["tool_calls"] = [
                {
                    "id": f"call_{hashlib.sha256(answer['content'].encode()).hexdigest()[:8]}",
                    "type": "function",
                    "function": {
                        "name": "find",
                        "arguments": arguments(value, answer is answers[-1]),
                    },
                }
            ]

    return edited(base, act)


@scenario()
def arguments_written_again(rng):
    state = rng.getstate()
    rows = _agents(rng, arguments=lambda value, last: json.dumps(value, indent=2 if last else None))
    rng.setstate(state)
    fixed = _agents(rng, arguments=lambda value, _: json.dumps(value))
    return Planted(rows, "answer_rewritten", "messages[", fixed)


@scenario()
def summary_every_few_turns(rng):
    base = chats(rng, turns=12)
    summaries: dict[tuple[str, int], str] = {}

    def compact(row, _):
        turns = (len(row["messages"]) - 2) // 2
        cut = turns // 3 * 3
        if cut:
            text = summaries.setdefault((row["session_id"], cut), passage(rng, 50))
            row["messages"][1 : 1 + 2 * cut] = [
                {"role": "user", "content": f"Summary of what was said:\n{text}"},
                {"role": "assistant", "content": "Understood."},
            ]

    return Planted(edited(base, compact), "compaction", "messages[1]")


@scenario()
def results_cut_later(rng):
    base = chats(rng, sessions=12, turns=8, answer_words=30)

    def results(row, *, cut):
        answers = [each for each in row["messages"] if each["role"] == "assistant"]
        for answer in answers:
            made = random.Random(answer["content"])
            text = passage(made, 160)
            is_old = answer is not answers[-1]
            answer["role"] = "tool"
            answer["tool_call_id"] = "c"
            answer["content"] = text[:120] + " [cut]" if cut or is_old else text

    rows = edited(base, lambda row, _: results(row, cut=False))
    return Planted(
        rows, "edited_later", "messages[", edited(base, lambda row, _: results(row, cut=True))
    )


# --- 20 pictures


@scenario()
def picture_encoded_again(rng):
    base = chats(rng, sessions=12, turns=6, words=200)

    def picture(row, noise):
        first = row["messages"][1]
        data = hashlib.sha256(f"{row['session_id']} {noise}".encode()).hexdigest()
        first["content"] = [
            {"type": "image_url", "image_url": {"url": f"data:image/jpeg;base64,{data}"}},
            {"type": "text", "text": first["content"]},
        ]

    rows = edited(base, picture)
    fixed = edited(base, lambda row, _: picture(row, ""))
    return Planted(rows, "media", "messages[1]", fixed)


# --- 21 to 23 not the prompt's fault


@scenario()
def all_at_once(rng):
    base = singles(rng, documents=4, requests=96, words=1500)
    # each document is asked about by 24 requests within a few milliseconds
    rows = edited(base, lambda row, i: row.update(timestamp=START + i // 24 * 600 + i % 24 * 0.001))
    for number, row in enumerate(rows):
        row["messages"][1]["content"] = base[number // 24]["messages"][1]["content"].replace(
            "Question:", f"Question ({question(rng)}):"
        )
    return Planted(rows, "too_early", "", options={"prefill_tokens_per_s": 5000.0})


@scenario()
def engine_forgets(rng):
    rows = singles(rng)

    def usage(row, i):
        row["usage"] = {"prompt_tokens_details": {"cached_tokens": 0 if i % 3 else 64}}

    return Planted(edited(rows, usage), "evicted", "")


@scenario(blind=True)
def prompts_below_a_block(rng):
    rows = singles(rng, documents=30, words=130, system_words=20, requests=150)
    return Planted(rows, "granularity", "", options={"block_tokens": 1024})
