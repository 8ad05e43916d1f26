"""Single parts of the audit: kvdepot.audit.texts, kvdepot.audit.render, kvdepot.audit.template,
 kvdepot.audit.model, kvdepot.audit.history, kvdepot.audit.toolsets,
kvdepot.audit.values, kvdepot.audit.mask, kvdepot.audit.shared.
"""

from __future__ import annotations

import json
import random
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvdepot.audit.history import event, without_reasoning
from kvdepot.audit.mask import masked, prompt_diff
from kvdepot.audit.model import kv_bytes_per_token, load_model
from kvdepot.audit.render import GLUE, ChatMl, content_text, taken_apart
from kvdepot.audit.shared import SHARED_FORMAT, is_shared_header
from kvdepot.audit.template import ModelTemplate
from kvdepot.audit.texts import (
    canonical_json,
    common_prefix,
    common_suffix,
    meeting,
    normalised,
    pieces,
    reordered,
    snapped,
    with_canonical_json,
    with_sorted_pieces,
)
from kvdepot.audit.tokens import ModelEncoder, PieceMemo
from kvdepot.audit.toolsets import tool_change
from kvdepot.audit.values import Seen, pattern, time_around
from kvdepot.errors import ConfigError
from tests.audit_tokenizer import byte_level_tokenizer, same_ids
from tests.audit_traffic import passage

text_of = st.text(st.sampled_from("ab \n"), max_size=200)

# --- texts


@given(text_of, text_of)
def test_the_common_prefix_is_to_the_character(left, right):
    same = common_prefix(left, right)
    assert left[:same] == right[:same]
    assert same == min(len(left), len(right)) or left[same] != right[same]
    assert common_suffix(left, right) == common_prefix(left[::-1], right[::-1])


def test_a_break_starts_where_the_word_starts():
    text = "at 2026-10-20T09:00 in /srv/data, no"
    assert snapped(text, text.index("09"), 0) == text.index("2026")
    assert snapped(text, text.index("data"), 0) == text.index("/srv")
    assert snapped(text, text.index("09"), 8) == 8


def test_texts_meet_again_behind_a_change():
    tail = passage(random.Random(1), 60)
    left, right = f"id: 17\n{tail}", f"id: 4711\n{tail}"
    met = meeting(left, right, 4)
    assert left[met.left :] == right[met.right :]
    assert left[: met.left] == "id: 17"
    assert meeting("x" * 100, "y" * 100, 0) is None


def test_normalising_leaves_what_people_see():
    assert normalised("a \r\nb\t\n\ufeffe\u0301") == "a\nb\n\u00e9"


def test_json_in_a_text_is_written_in_one_way():
    value = {"b": 1, "a": ["\u00e9", 2.0], "c": {"y": None, "x": True}}
    one = f"Facts: {json.dumps(value)} and [1, 2] end"
    other = (
        f"Facts: {json.dumps(value, ensure_ascii=False, indent=2, sort_keys=True)} and [1, 2] end"
    )
    assert with_canonical_json(one) == with_canonical_json(other)
    assert canonical_json(value) in with_canonical_json(one)
    assert with_canonical_json("{broken [ json") == "{broken [ json"


@pytest.mark.parametrize(
    ("split", "write"),
    [
        ("blocks", lambda parts: "\n".join(f"<chunk>\n{p}\n</chunk>" for p in parts)),
        (
            "numbered",
            lambda parts: "\n".join(f"{n}. {p.replace(chr(10), ' ')}" for n, p in enumerate(parts)),
        ),
        ("paragraphs", "\n\n".join),
    ],
)
def test_pieces_are_found_in_any_order_and_put_in_one(split, write):
    rng = random.Random(2)
    parts = [re.sub(r"\n+", "\n", passage(rng, 40)) for _ in range(4)]
    one, other = write(parts), write([parts[2], parts[0], parts[3], parts[1]])
    assert split in reordered(one, other)
    assert reordered(one, one) == []
    assert with_sorted_pieces(one, split, str) == with_sorted_pieces(other, split, str)
    assert len(pieces(one, split)) == 4


def test_overlaps_by_chance_are_no_order():
    rng = random.Random(3)
    lines = [passage(rng, 12).replace("\n", " ") for _ in range(60)]
    one = "\n".join([*lines[:30], lines[40], lines[35]])
    other = "\n".join([*lines[30:], lines[4]])
    assert reordered(one, other) == []


# --- a model's parts


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    rng = random.Random(4)
    (folder / "tokenizer.json").write_text(
        byte_level_tokenizer([passage(rng, 300) for _ in range(5)])
    )
    (folder / "tokenizer_config.json").write_text(json.dumps({"bos_token": {"content": "<s>"}}))
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    config = {
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "hidden_size": 64,
    }
    (folder / "config.json").write_text(json.dumps(config))
    return folder


TEMPLATE = """\
{{- bos_token }}
{%- if tools %}<|im_start|>tools
{%- for tool in tools %}
{{ tool | tojson }}
{%- endfor %}<|im_end|>
{% endif %}
{%- for message in messages %}<|im_start|>{{ message.role }}
{{ message.content | trim }}<|im_end|>
{% endfor %}
{%- if dated %}{{ strftime_now("%Y-%m-%d") }}{% endif %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""


def test_a_model_s_tokenizer_cut_at_lines_gives_its_own_ids(model_folder):
    pytest.importorskip("jinja2")
    parts = load_model(str(model_folder))
    assert parts.kv_bytes_per_token == 2 * 2 * 2 * 16 * 2
    assert parts.encoder.error == ""
    rng = random.Random(5)
    texts = [
        parts.renderer.render({"messages": [{"role": "user", "content": passage(rng, 200)}]}).text
        for _ in range(8)
    ]
    memo = PieceMemo(parts.encoder)
    memo.verify(texts)
    assert memo.cuts in ("lines", "line starts")
    assert same_ids(memo.prompts(texts), parts.encoder.encode(texts))
    assert isinstance(parts.encoder, ModelEncoder)
    assert parts.encoder.decode(parts.encoder.encode(texts[:1])[0].tolist()) == texts[0]


def test_a_model_s_template_says_where_each_part_is(model_folder):
    pytest.importorskip("jinja2")
    render = load_model(str(model_folder)).renderer.render
    tool = {"type": "function", "function": {"name": "f", "parameters": {"b": 1, "a": 2}}}
    body = {
        "messages": [
            {"role": "system", "content": " Be kind. "},
            {"role": "user", "content": "Hi"},
        ],
        "tools": [tool],
    }
    prompt = render(body)
    assert prompt.text.startswith("<s><|im_start|>tools")
    found = {part.path: prompt.text[part.start : part.end] for part in prompt.parts}
    assert found == {"tools[0]": json.dumps(tool), "messages[0]": "Be kind.", "messages[1]": "Hi"}
    assert prompt.part_at(0).path == GLUE
    dated = {**body, "chat_template_kwargs": {"dated": True}}
    assert "2026-09-21" in render(dated, 1_790_000_000.0).text


def test_a_template_that_refuses_or_does_not_compile(model_folder):
    pytest.importorskip("jinja2")
    refusing = ModelTemplate("{{ raise_exception('no system role') }}", {})
    with pytest.raises(ValueError, match="no system role"):
        refusing.render({"messages": [{"role": "user", "content": "x"}]})
    with pytest.raises(ConfigError, match="does not compile"):
        ModelTemplate("{% if %}", {})
    with pytest.raises(ValueError, match="refuses"):
        ModelTemplate(
            "{{ ''.__class__.__mro__ }}{{ messages.__class__.__init__.__globals__ }}", {}
        ).render({"messages": []})


def test_a_folder_without_a_tokenizer_is_named(tmp_path):
    with pytest.raises(ConfigError, match=r"tokenizer\.json") as caught:
        load_model(str(tmp_path))
    assert "estimate" in caught.value.hint
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ConfigError):
        load_model(str(tmp_path))


@pytest.mark.parametrize(
    ("config", "count"),
    [
        ({"num_hidden_layers": 32, "num_key_value_heads": 8, "head_dim": 128}, 131072),
        ({"num_hidden_layers": 61, "kv_lora_rank": 512, "qk_rope_head_dim": 64}, 70272),
        ({"text_config": {"num_hidden_layers": 1, "num_attention_heads": 2, "hidden_size": 8}}, 32),
        ({"num_hidden_layers": 2, "layer_types": ["full_attention", "sliding_attention"],
          "num_attention_heads": 1, "head_dim": 8}, 32),
        ({}, None),
        ({"num_hidden_layers": 2}, None),
    ],
)  # fmt: skip
def test_bytes_of_kv_per_token(config, count):
    assert kv_bytes_per_token(config) == count


# --- rendering


@pytest.mark.parametrize(
    "text",
    [
        "<|im_start|>system\nBe kind.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n",
        "<|start_header_id|>user<|end_header_id|>\n\nHi<|eot_id|><|start_header_id|>assistant<|end_header_id|>",
        "<bos><start_of_turn>user\nHi<end_of_turn>\n<start_of_turn>model\n",
        "<s>[INST] Hi [/INST] Yes </s>[INST] More [/INST]",
        "<|user|>\nHi<|assistant|>\nYes<|user|>\nMore",
        "no markers at all\n",
        "",
    ],
)
def test_a_rendered_prompt_is_taken_apart_and_put_together_again(text):
    body = taken_apart(text)
    prompt = ChatMl().render(body)
    assert prompt.text == text
    assert all(prompt.text[part.start : part.end] for part in prompt.parts if part.end > part.start)
    if "Hi" in text:
        assert any("Hi" in each["content"] and each["role"] == "user" for each in body["messages"])
    assert not any(each["role"] == "assistant" and not each["content"] for each in body["messages"])


def test_parts_of_a_content_and_their_order():
    image = {"type": "image_url", "image_url": {"url": "data:x"}}
    text = content_text([{"type": "text", "text": "see "}, image, " end"])
    assert re.fullmatch(r"see <\|image\|>[0-9a-f]{16}<\|/image\|> end", text)
    assert content_text(None) == ""
    prompt = ChatMl().render(
        {
            "messages": [{"role": "user", "content": "q"}],
            "chat_template_kwargs": {"enable_thinking": False},
        }
    )
    assert prompt.text.endswith("<think>\n\n</think>\n\n")
    closed = {"messages": [{"role": "user", "content": "q"}], "add_generation_prompt": False}
    assert ChatMl().render(closed).text.endswith("q<|im_end|>\n")


# --- histories


def said(*texts):
    roles = ("user", "assistant")
    return [{"role": "system", "content": "s"}] + [
        {"role": roles[number % 2], "content": text} for number, text in enumerate(texts)
    ]


def what(now, before):
    found = event({"messages": now}, {"messages": before})
    return found and (found.cause, found.at)


def test_what_became_of_a_history():
    before = said("a", "b", "c", "d", "e")
    assert what(said("a", "b", "c", "d", "e", "f", "g"), before) is None
    assert what(said("c", "d", "e", "f", "g"), before) == ("window", 1)
    assert what(said("summary", "ok", "g"), before) == ("compaction", 1)
    assert what(before[:3], before) is None
    other = [{"role": "system", "content": "t"}, *before[1:]]
    assert what(other, before) is None
    thought = said("a", "<think>\nhm\n</think>\n\nb", "c")
    assert what(said("a", "b", "c", "d", "e"), thought) == ("reasoning", 2)
    long = "x" * 300
    assert what(said("a", long + "y" * 200, "c"), said("a", long + "z" * 300, "c")) == (
        "edited_later",
        2,
    )
    assert what(said("a", long + "1", "c"), said("a", long + "2", "c")) is None


def test_reasoning_is_left_out_wherever_it_is_written():
    message = {"role": "assistant", "content": "<think>x</think>\n\nyes", "reasoning_content": "y"}
    assert without_reasoning(message) == {"role": "assistant", "content": "yes"}


# --- tools


def tool(name, **more):
    return {"type": "function", "function": {"name": name, "parameters": more}}


def test_how_tools_differ():
    one = [tool("a", x=1, y=2), tool("b")]
    assert tool_change(one, one) is None
    assert tool_change(list(reversed(one)), one).cause == "tool_order"
    assert tool_change([tool("a", y=2, x=1), tool("b")], one).cause == "tool_keys"
    assert tool_change(one[:1], one).detail == "without b"
    assert tool_change([*one, tool("c")], one).detail == "with c"
    changed = tool_change([tool("a", x=1, y=3), tool("b")], one)
    assert (changed.cause, changed.detail) == ("tool_set", "a.function.parameters.y differs")
    assert tool_change([], one).cause == "tool_set"


# --- values


def seen(values, *, users=None, sessions=None, step_s=10.0):
    return [
        Seen(
            value,
            1_790_000_000.0 + n * step_s,
            users and users[n],
            -1 if sessions is None else sessions[n],
        )
        for n, value in enumerate(values)
    ]


def words(rng, count):
    return [passage(rng, 8).replace("\n", " ") for _ in range(count)]


@pytest.mark.parametrize(
    ("values", "cause"),
    [
        ([f"2026-09-21T14:{n:02d}:00Z" for n in range(40)], "time"),
        ([f"{1_790_000_000 + n}" for n in range(40)], "time"),
        ([f"{9 + n // 60:02d}:{n % 60:02d}" for n in range(90)], "time"),
        ([f"{1 + n // 10} October 2026" for n in range(60)], "time"),
        ([f"2026\u5e7410\u6708{1 + n // 10}\u65e5" for n in range(60)], "time"),
        # dates that do not go with the request's time are not its time
        ([f"2026-09-{1 + n * 7 % 28:02d}" for n in range(60)], "ab_test"),
        ([f"req_{n * 7919 % 1000003:x}f0" for n in range(40)], "request_id"),
        ([f"No.{n}" for n in range(100, 160)], "request_id"),
        ([["/srv/a", "/srv/b", "/srv/c", "/srv/d"][n * 7 % 4] for n in range(60)], "environment"),
        ([["en-US", "de-DE"][n % 2] for n in range(60)], "environment"),
        ([["Rule one is firm.", "Rule two is kind."][n >= 30] for n in range(60)], "rollout"),
        ([["Rule one is firm.", "Rule two is kind."][n % 2] for n in range(60)], "ab_test"),
        (words(random.Random(6), 40), "question_first"),
    ],
)
def test_values_are_told_by_looks_and_times(values, cause):
    assert pattern(seen(values)).cause == cause


def test_values_of_users_and_sessions():
    names = [f"{word} Person" for word in ["Ada", "Bob", "Cy", "Dee", "Eve", "Fay"]]
    users = [names[n % 6] for n in range(60)]
    assert pattern(seen(users, users=users)).cause == "per_user"
    ids = [f"s-{n // 4:04x}a1" for n in range(80)]
    found = pattern(seen(ids, sessions=[n // 4 for n in range(80)]))
    assert found.cause == "request_id"
    assert "session" in found.evidence


def test_a_date_is_taken_whole():
    line = "Today is September 22, 2026, fine"
    at = line.index("22")
    assert line[slice(*time_around(line, at, at + 2))] == "September 22, 2026"
    assert time_around("no time here", 3, 5) == (3, 5)


# --- what is shown


def test_masking_keeps_little_of_a_value():
    assert masked("req_3f9a81bc") == "req_\u2026 (12 characters)"
    assert masked("Ada") == "A\u2026 (3 characters)"
    assert masked(" ") == "(nothing)"


def test_a_diff_shows_the_change_and_not_the_text():
    text = passage(random.Random(7), 300)
    before, after = f"Token: secret-4711\n{text}\nend", f"Token: \n{text}\nend\nsecret-4711"
    hidden = prompt_diff(before, after, show_values=False)
    assert "secret" not in hidden
    assert "-Token: xxxxxx-xxxx" in hidden
    shown = prompt_diff(before, after, show_values=True)
    assert "-Token: secret-4711" in shown
    assert "+secret-4711" in shown
    assert len(shown.splitlines()) < 25
    assert prompt_diff(text, text, show_values=True) == ""


def test_the_header_of_a_shared_trace():
    assert is_shared_header({"format": SHARED_FORMAT})
    assert not is_shared_header({"messages": []})
