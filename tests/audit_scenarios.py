"""Planted faults of single prompts: causes 1 to 14 of the classifier table, and two at once.

Each cause has at least one. They were written before the classifiers; `tests/test_audit_planted.py`
reports the score of the blind ones apart.
"""

from __future__ import annotations

import copy
import json
import unicodedata
import uuid

from tests.audit_planted import Planted, behind, clock, in_front, scenario
from tests.audit_traffic import (
    WORDS,
    chats,
    edited,
    passage,
    question,
    sentence,
    shuffled_keys,
    singles,
    tools,
)

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
    everything = tools(rng)
    base = edited(singles(rng), lambda row, _: row.update(tools=everything))
    rows = edited(base, lambda row, _: row.update(tools=rng.sample(row["tools"], 9)))
    return Planted(rows, "tool_order", "tools", base)


@scenario()
def tool_keys_in_any_order(rng):
    everything = tools(rng)
    base = edited(singles(rng), lambda row, _: row.update(tools=everything))
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
        field = first[min(first)]
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
        base,
        lambda row, i: (in_front(row, "Job no.  of today\n\n", 1), behind(row, f"\n{48211 + i}")),
    )
    return Planted(rows, "request_id", "messages[1]", fixed)


@scenario()
def nonce_in_chat_system(rng):
    base = chats(rng)
    nonces = [f"{rng.getrandbits(64):016x}" for _ in base]
    rows = edited(base, lambda row, i: in_front(row, f"nonce={nonces[i]};\n"))
    fixed = edited(base, lambda row, i: (in_front(row, "nonce=;\n"), behind(row, f"\n{nonces[i]}")))
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
        lambda row, _: (
            in_front(row, "You talk to .\n"),
            behind(row, f"\n{profiles[row['user']]}"),
        ),
    )
    return Planted(rows, "per_user", "messages[0]", fixed)


# --- 8 places


@scenario()
def working_folder_in_system(rng):
    base = singles(rng)
    folders = [f"/home/grace/{rng.choice(WORDS)}/{rng.choice(WORDS)}" for _ in range(9)]
    chosen = [rng.choice(folders) for _ in base]
    rows = edited(base, lambda row, i: in_front(row, f"Working directory: {chosen[i]}\n"))
    fixed = edited(base, lambda row, i: behind(row, f"\nWorking directory: {chosen[i]}"))
    return Planted(rows, "environment", "messages[0]", fixed)


@scenario(blind=True)
def locale_in_system(rng):
    base = singles(rng)
    chosen = [rng.choice(["en-US", "de-DE", "fr-FR", "zh-CN", "ja-JP", "pt-BR"]) for _ in base]
    rows = edited(base, lambda row, i: in_front(row, f"locale={chosen[i]}\n"))
    fixed = edited(base, lambda row, i: (in_front(row, "locale=\n"), behind(row, f"\n{chosen[i]}")))
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
    return Planted(
        rows, "json_form", "messages[1]", edited(base, lambda r, i: put(r, i, chosen[i]))
    )


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
