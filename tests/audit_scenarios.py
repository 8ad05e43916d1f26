"""Planted faults for the audit: traffic with one known fault (or none), and the same after the edit.

Each of the causes of the classifier table has at least one. They were written before the classifiers,
and those in `BLIND` were not looked at while the classifiers were made: `tests/test_audit_planted.py`
reports the two scores apart.
"""

from __future__ import annotations

import copy
import datetime
import hashlib
import json
import random
import unicodedata
import uuid
from collections.abc import Callable
from typing import Any, NamedTuple

from tests.audit_traffic import (
    START,
    WORDS,
    Row,
    chats,
    edited,
    last_user,
    passage,
    question,
    sentence,
    shuffled_keys,
    singles,
    tools,
)


class Planted(NamedTuple):
    """Traffic and the truth about it."""

    rows: list[Row]
    #: slug of the cause that must come first, or "none"
    cause: str
    #: how the finding's place must begin; "" where there is no place in a prompt
    place: str
    #: the same traffic after the right edit; None where no edit of the prompt is the answer
    fixed: list[Row] | None = None
    #: further arguments of the audit
    options: dict[str, Any] = {}  # noqa: RUF012


Maker = Callable[[random.Random], Planted]
SCENARIOS: dict[str, Maker] = {}
BLIND: set[str] = set()


def scenario(*, blind: bool = False) -> Callable[[Maker], Maker]:
    def register(maker: Maker) -> Maker:
        SCENARIOS[maker.__name__] = maker
        if blind:
            BLIND.add(maker.__name__)
        return maker

    return register


def planted(name: str) -> Planted:
    """The scenario of this name; the same at every call."""
    return SCENARIOS[name](random.Random(f"planted {name}"))


def in_front(row: Row, text: str, message: int = 0) -> None:
    row["messages"][message]["content"] = text + row["messages"][message]["content"]


def behind(row: Row, text: str) -> None:
    last_user(row)["content"] += text


def clock(row: Row) -> datetime.datetime:
    return datetime.datetime.fromtimestamp(row["timestamp"], datetime.UTC)


# --- nothing wrong


@scenario()
def clean_singles(rng):
    return Planted(singles(rng), "none", "")


@scenario(blind=True)
def clean_chats(rng):
    return Planted(chats(rng), "none", "")


@scenario()
def nothing_shared(rng):
    rows = singles(rng, requests=60)
    for row in rows:
        row["messages"] = [{"role": "user", "content": passage(rng, 500)}]
    return Planted(rows, "none", "")


@scenario(blind=True)
def nothing_shared_but_ids(rng):
    rows = singles(rng, requests=60)
    for row in rows:
        content = f"Ticket {uuid.UUID(int=rng.getrandbits(128))}\n{passage(rng, 500)}"
        row["messages"] = [{"role": "user", "content": content}]
    return Planted(rows, "none", "")


# --- 1 salt, adapter, model


@scenario()
def salt_per_user(rng):
    base = singles(rng)
    rows = edited(base, lambda row, _: row.update(cache_salt=f"salt-{row['user']}"))
    return Planted(rows, "extra_key", "cache_salt", base)


@scenario(blind=True)
def two_adapters(rng):
    base = singles(rng)
    names = [rng.choice(["m-lora-a", "m-lora-b", "m-lora-c"]) for _ in base]
    rows = edited(base, lambda row, i: row.update(model=names[i]))
    return Planted(rows, "extra_key", "model", base)


# --- 2 to 4 tools


@scenario()
def tools_in_any_order(rng):
    base = edited(singles(rng), lambda row, _, all_=tools(rng): row.update(tools=all_))
    rows = edited(base, lambda row, _: row.update(tools=rng.sample(row["tools"], 9)))
    return Planted(rows, "tool_order", "tools", base)


@scenario()
def tool_keys_in_any_order(rng):
    base = edited(singles(rng), lambda row, _, all_=tools(rng): row.update(tools=all_))
    rows = edited(base, lambda row, _: row.update(tools=shuffled_keys(rng, row["tools"])))
    return Planted(rows, "tool_keys", "tools", base)


@scenario()
def tool_set_by_chance(rng):
    everything = tools(rng, 8)
    base = edited(singles(rng), lambda row, _: row.update(tools=copy.deepcopy(everything)))

    def some(row, _):
        row["tools"] = [tool for tool in row["tools"] if rng.random() < 0.75]

    return Planted(edited(base, some), "tool_set", "tools", base)


@scenario(blind=True)
def folder_in_a_schema(rng):
    everything = tools(rng, 6)
    base = edited(singles(rng), lambda row, _: row.update(tools=copy.deepcopy(everything)))
    folders = [f"/srv/{rng.choice(WORDS)}/{rng.randrange(10**6):x}" for _ in range(40)]

    def say(row, _):
        first = row["tools"][1]["function"]["parameters"]["properties"]
        field = first[sorted(first)[0]]
        field["description"] += f" Relative to {rng.choice(folders)} only."

    return Planted(edited(base, say), "tool_set", "tools", base)


# --- 5 time


@scenario()
def time_in_system(rng):
    base = singles(rng)

    def stamp(row, _):
        in_front(row, f"Current time: {clock(row):%Y-%m-%dT%H:%M:%SZ}\n")

    def moved(row, _):
        behind(row, f"\nCurrent time: {clock(row):%Y-%m-%dT%H:%M:%SZ}")

    return Planted(edited(base, stamp), "time", "messages[0]", edited(base, moved))


@scenario(blind=True)
def long_date_in_the_middle(rng):
    base = singles(rng)

    def cut(row):
        content = row["messages"][0]["content"]
        at = content.index("\n", 300) + 1
        return content[:at], content[at:]

    def stamp(row, _):
        head, tail = cut(row)
        now = f"{clock(row):%A, %d %B %Y, %I:%M:%S %p}"
        row["messages"][0]["content"] = f"{head}It is now {now} in the office.\n{tail}"

    def moved(row, _):
        head, tail = cut(row)
        row["messages"][0]["content"] = f"{head}It is now  in the office.\n{tail}"
        behind(row, f"\n{clock(row):%A, %d %B %Y, %I:%M:%S %p}")

    return Planted(edited(base, stamp), "time", "messages[0]", edited(base, moved))


@scenario()
def epoch_before_document(rng):
    base = singles(rng)

    def stamp(row, _):
        in_front(row, f"[sent {row['timestamp'] * 1000:.0f}] ", 1)

    def moved(row, _):
        in_front(row, "[sent ] ", 1)
        behind(row, f"\n{row['timestamp'] * 1000:.0f}")

    return Planted(edited(base, stamp), "time", "messages[1]", edited(base, moved))


@scenario()
def date_of_the_day(rng):
    base = singles(rng, span_s=9 * 86400.0, requests=140)

    def stamp(row, _):
        in_front(row, f"Today is {clock(row):%B %d, %Y}.\n")

    def moved(row, _):
        behind(row, f"\n{clock(row):%B %d, %Y}")
        in_front(row, "Today is .\n")

    return Planted(edited(base, stamp), "time", "messages[0]", edited(base, moved))


# --- 6 ids


@scenario()
def uuid_in_system(rng):
    base = singles(rng)
    ids = [str(uuid.UUID(int=rng.getrandbits(128), version=4)) for _ in base]
    rows = edited(base, lambda row, i: in_front(row, f"trace: {ids[i]}\n"))
    fixed = edited(base, lambda row, i: behind(row, f"\ntrace: {ids[i]}"))
    return Planted(rows, "request_id", "messages[0]", fixed)


@scenario(blind=True)
def counter_before_document(rng):
    base = singles(rng)
    rows = edited(base, lambda row, i: in_front(row, f"Job no. {48211 + i} of today\n\n", 1))
    fixed = edited(
        base, lambda row, i: (in_front(row, "Job no.  of today\n\n", 1), behind(row, f"\n{48211 + i}"))
    )
    return Planted(rows, "request_id", "messages[1]", fixed)


@scenario()
def nonce_in_chat_system(rng):
    base = chats(rng)
    nonces = [f"{rng.getrandbits(64):016x}" for _ in base]
    rows = edited(base, lambda row, i: in_front(row, f"nonce={nonces[i]};\n"))
    fixed = edited(
        base, lambda row, i: (in_front(row, "nonce=;\n"), behind(row, f"\n{nonces[i]}"))
    )
    return Planted(rows, "request_id", "messages[0]", fixed)


# --- 7 users


@scenario()
def user_profile_in_system(rng):
    base = singles(rng, users=25)
    profiles = {
        f"user-{n}": f"{rng.choice(WORDS).title()} {rng.choice(WORDS).title()}, {rng.choice(WORDS)} team"
        for n in range(25)
    }
    rows = edited(base, lambda row, _: in_front(row, f"You talk to {profiles[row['user']]}.\n"))
    fixed = edited(
        base,
        lambda row, _: (in_front(row, "You talk to .\n"), behind(row, f"\n{profiles[row['user']]}")),
    )
    return Planted(rows, "per_user", "messages[0]", fixed)


# --- 8 places


@scenario()
def working_folder_in_system(rng):
    base = singles(rng)
    folders = [f"/home/grace/{rng.choice(WORDS)}/{rng.choice(WORDS)}" for _ in range(9)]
    chosen = [rng.choice(folders) for _ in base]
    rows = edited(base, lambda row, i: in_front(row, f"Working directory: {chosen[i]}\n"))
    fixed = edited(
        base,
        lambda row, i: (in_front(row, "Working directory: \n"), behind(row, f"\n{chosen[i]}")),
    )
    return Planted(rows, "environment", "messages[0]", fixed)


@scenario(blind=True)
def locale_in_system(rng):
    base = singles(rng)
    chosen = [rng.choice(["en-US", "de-DE", "fr-FR", "zh-CN", "ja-JP", "pt-BR"]) for _ in base]
    rows = edited(base, lambda row, i: in_front(row, f"locale={chosen[i]}\n"))
    fixed = edited(
        base, lambda row, i: (in_front(row, "locale=\n"), behind(row, f"\n{chosen[i]}"))
    )
    return Planted(rows, "environment", "messages[0]", fixed)


# --- 9 versions of the prompt


def _replaced(row, old, new):
    row["messages"][0]["content"] = row["messages"][0]["content"].replace(old, new)


@scenario()
def rolled_out_once(rng):
    base = singles(rng, documents=9, requests=110)
    old = base[0]["messages"][0]["content"].split("\n")[5]
    half = len(base) // 2
    new = sentence(rng, 15)
    rows = edited(base, lambda row, i: _replaced(row, old, new) if i >= half else None)
    fixed = edited(base, lambda row, _: _replaced(row, old, new))
    return Planted(rows, "rollout", "messages[0]", fixed)


@scenario()
def two_prompts_at_once(rng):
    base = singles(rng, documents=9, requests=110)
    old = base[0]["messages"][0]["content"].split("\n")[4]
    new = sentence(rng, 15)
    arms = [rng.random() < 0.5 for _ in base]
    rows = edited(base, lambda row, i: _replaced(row, old, new) if arms[i] else None)
    return Planted(rows, "ab_test", "messages[0]", base)


# --- 10 the template


@scenario()
def date_of_the_template(rng):
    base = singles(rng, span_s=12 * 86400.0, requests=140)

    def prompt(row, day):
        system, user = (message["content"] for message in row["messages"])
        head = f"Cutting Knowledge Date: December 2023\nToday Date: {day}\n\n"
        row["prompt"] = (
            f"<|begin_of_text|><|start_header_id|>system<|end_header_id|>\n\n{head}{system}<|eot_id|>"
            f"<|start_header_id|>user<|end_header_id|>\n\n{user}<|eot_id|>"
            "<|start_header_id|>assistant<|end_header_id|>\n\n"
        )
        del row["messages"]

    rows = edited(base, lambda row, _: prompt(row, f"{clock(row):%d %b %Y}"))
    fixed = edited(base, lambda row, _: prompt(row, "26 Jul 2024"))
    return Planted(rows, "template", "", fixed)


@scenario(blind=True)
def two_starts_of_text(rng):
    # one client adds the start-of-text token that the template adds already
    base = singles(rng, documents=9, requests=110)
    arms = [rng.random() < 0.5 for _ in base]

    def prompt(row, marker):
        system, user = (message["content"] for message in row["messages"])
        row["prompt"] = (
            f"{marker}<|im_start|>system\n{system}<|im_end|>\n<|im_start|>user\n{user}<|im_end|>\n"
            "<|im_start|>assistant\n"
        )
        del row["messages"]

    rows = edited(base, lambda row, i: prompt(row, "<s>" if arms[i] else "<s><s>"))
    return Planted(rows, "template", "", edited(base, lambda row, _: prompt(row, "<s>")))


# --- 11 white space and spelling


@scenario()
def line_ends_of_two_clients(rng):
    base = singles(rng, documents=9, requests=110)
    arms = [rng.random() < 0.5 for _ in base]

    def crlf(row, i):
        if arms[i]:
            for message in row["messages"]:
                message["content"] = message["content"].replace("\n", "\r\n")

    return Planted(edited(base, crlf), "white_space", "messages[0]", base)


@scenario(blind=True)
def two_unicode_forms(rng):
    base = singles(rng, documents=9, requests=110)
    arms = [rng.random() < 0.5 for _ in base]

    def accents(row, i):
        for message in row["messages"]:
            text = message["content"].replace("ea", "\u00e9").replace("ou", "\u00fc")
            message["content"] = unicodedata.normalize("NFD", text) if i >= 0 and arms[i] else text

    fixed = edited(base, lambda row, _: accents(row, -1))
    return Planted(edited(base, accents), "white_space", "messages[0]", fixed)


# --- 12 JSON in a message


def _facts(rng):
    return {
        word: {"value": rng.randrange(10**6), "unit": rng.choice(WORDS), "note": sentence(rng, 9)}
        for word in rng.sample(WORDS, 40)
    }


@scenario()
def json_keys_in_a_message(rng):
    base = singles(rng)
    facts = [_facts(rng) for _ in range(5)]
    chosen = [rng.choice(facts) for _ in base]
    asked = [question(rng) for _ in base]

    def put(row, i, value):
        row["messages"][1]["content"] = f"Facts:\n{json.dumps(value)}\n\n{asked[i]}"

    rows = edited(base, lambda row, i: put(row, i, shuffled_keys(rng, chosen[i])))
    return Planted(rows, "json_form", "messages[1]", edited(base, lambda r, i: put(r, i, chosen[i])))


@scenario(blind=True)
def json_escapes_of_two_clients(rng):
    base = singles(rng, documents=9, requests=110)
    facts = [
        {f"cl\u00e9_{key}": {**value, "note": value["note"].replace("a", "\u00e4")}
         for key, value in _facts(rng).items()}
        for _ in range(9)
    ]  # fmt: skip
    chosen = [rng.choice(facts) for _ in base]
    arms = [rng.random() < 0.5 for _ in base]
    asked = [question(rng) for _ in base]

    def put(row, i, *, ascii_only):
        text = json.dumps(chosen[i], ensure_ascii=ascii_only)
        row["messages"][1]["content"] = f"Facts:\n{text}\n\n{asked[i]}"

    rows = edited(base, lambda row, i: put(row, i, ascii_only=arms[i]))
    fixed = edited(base, lambda row, i: put(row, i, ascii_only=False))
    return Planted(rows, "json_form", "messages[1]", fixed)


# --- 13 order of pieces


@scenario()
def passages_in_any_order(rng):
    base = singles(rng)
    groups = [[passage(rng, 130) for _ in range(5)] for _ in range(5)]
    chosen = [rng.randrange(5) for _ in base]
    asked = [question(rng) for _ in base]

    def put(row, i, pieces):
        text = "\n".join(f"<chunk>\n{piece}\n</chunk>" for piece in pieces)
        row["messages"][1]["content"] = f"{text}\n\nQuestion: {asked[i]}"

    def shuffled(row, i):
        put(row, i, rng.sample(groups[chosen[i]], 5))

    fixed = edited(base, lambda row, i: put(row, i, groups[chosen[i]]))
    return Planted(edited(base, shuffled), "piece_order", "messages[1]", fixed)


@scenario(blind=True)
def numbered_memories_in_any_order(rng):
    base = singles(rng)
    groups = [[sentence(rng, 24) for _ in range(12)] for _ in range(4)]
    chosen = [rng.randrange(4) for _ in base]

    def put(row, pieces):
        lines = "\n".join(f"{n}. {piece}" for n, piece in enumerate(pieces, start=1))
        row["messages"][0]["content"] += f"\n\nMemories:\n{lines}"

    rows = edited(base, lambda row, i: put(row, rng.sample(groups[chosen[i]], 12)))
    fixed = edited(base, lambda row, i: put(row, groups[chosen[i]]))
    return Planted(rows, "piece_order", "messages[0]", fixed)


@scenario()
def examples_in_any_order(rng):
    base = singles(rng)
    shots = [(question(rng), passage(rng, 60)) for _ in range(6)]

    def put(row, chosen):
        between = [
            {"role": role, "content": text}
            for pair in chosen
            for role, text in zip(("user", "assistant"), pair, strict=True)
        ]
        row["messages"][1:1] = between

    rows = edited(base, lambda row, _: put(row, rng.sample(shots, 6)))
    return Planted(rows, "piece_order", "messages[1]", edited(base, lambda row, _: put(row, shots)))


# --- 14 the question first


@scenario()
def question_before_document(rng):
    base = singles(rng)

    def first(row, _):
        document, asked = row["messages"][1]["content"].split("\n\nQuestion: ")
        row["messages"][1]["content"] = f"Question: {asked}\n\n{document}"

    return Planted(edited(base, first), "question_first", "messages[1]", base)


@scenario(blind=True)
def title_before_knowledge(rng):
    # the session's title, made from the question, stands in the system prompt
    base = singles(rng)
    titles = [sentence(rng, rng.randint(4, 9))[:-1] for _ in base]
    rows = edited(base, lambda row, i: in_front(row, f"# Chat about: {titles[i]}\n\n"))
    fixed = edited(
        base, lambda row, i: (in_front(row, "# Chat about: \n\n"), behind(row, f"\n{titles[i]}"))
    )
    return Planted(rows, "question_first", "messages[0]", fixed)


# --- 15 to 19 histories


@scenario()
def window_of_four_turns(rng):
    base = chats(rng, turns=10)

    def slide(row, _):
        turns = (len(row["messages"]) - 2) // 2
        if turns > 4:
            del row["messages"][1 : 1 + 2 * (turns - 4)]

    return Planted(edited(base, slide), "window", "messages[1]")


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

    rows = edited(base, lambda row, i: picture(row, i))
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


# --- two at once


@scenario()
def id_behind_a_clock(rng):
    base = singles(rng)
    ids = [f"req_{rng.getrandbits(48):012x}" for _ in base]

    def both(row, i):
        in_front(row, f"Time: {clock(row):%H:%M:%S}\nRequest: {ids[i]}\n")

    def fixed(row, i):
        in_front(row, "Time: \nRequest: \n")
        behind(row, f"\n{clock(row):%H:%M:%S}\n{ids[i]}")

    return Planted(edited(base, both), "time", "messages[0]", edited(base, fixed))


@scenario(blind=True)
def clock_and_passages(rng):
    base = passages_in_any_order(rng)

    def stamp(row, _):
        in_front(row, f"Now: {clock(row):%Y-%m-%d %H:%M:%S}\n")

    def moved(row, _):
        in_front(row, "Now: \n")
        behind(row, f"\n{clock(row):%Y-%m-%d %H:%M:%S}")

    assert base.fixed is not None
    return Planted(edited(base.rows, stamp), "time", "messages[0]", edited(base.fixed, moved))
