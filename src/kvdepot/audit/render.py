"""From a request body to the text that the model receives, and which part of the body each character is.

Without the model's own template, a ChatML form is used that many models share: marker, role, content.
A prompt that was logged rendered is taken apart at the role markers of the common families, so that it
can be edited like a body; what stands between the contents is kept as it is.
"""

from __future__ import annotations

import hashlib
import json
import re
from bisect import bisect_right
from typing import Any, NamedTuple, Protocol

from kvdepot.audit.records import Body

__all__ = [
    "GLUE",
    "LITERAL",
    "ChatMl",
    "Part",
    "Prompt",
    "Renderer",
    "clean_text",
    "content_text",
    "image_mark",
    "message_text",
    "taken_apart",
]

#: the path of characters that are in no content
GLUE = "template"
#: the key under which a prompt that was taken apart keeps what stands between its contents
LITERAL = "_between"


class Part(NamedTuple):
    """Characters [start, end) of a prompt come from `path` of its body."""

    path: str
    start: int
    end: int


class Prompt(NamedTuple):
    """A rendered prompt."""

    text: str
    parts: list[Part]

    def part_at(self, char: int) -> Part:
        """The part of a character; for glue, a part whose path is `GLUE` between its neighbours."""
        number = bisect_right(self.parts, char, key=lambda part: part.start) - 1
        if number >= 0 and char < self.parts[number].end:
            return self.parts[number]
        start = self.parts[number].end if number >= 0 else 0
        is_last = number + 1 >= len(self.parts)
        end = len(self.text) if is_last else self.parts[number + 1].start
        return Part(GLUE, start, end)

    def part(self, path: str) -> Part | None:
        """The part with this path."""
        return next((part for part in self.parts if part.path == path), None)


class Renderer(Protocol):
    """Turns bodies into prompts."""

    name: str

    def render(self, body: Body, time_s: float | None = None) -> Prompt:
        """Render one body, at a time of day where a template asks for it."""


def clean_text(text: str) -> str:
    """Text without lone surrogates, which no tokenizer takes."""
    if text.isascii():
        return text
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-8", "replace").decode()
    return text


def image_mark(part: dict[str, Any]) -> str:
    """What stands for an image: the digest of its content."""
    content = json.dumps(part, sort_keys=True, ensure_ascii=False)
    return (
        f"<|image|>{hashlib.sha256(content.encode('utf-8', 'replace')).hexdigest()[:16]}<|/image|>"
    )


def content_text(content: object) -> str:
    """The text of a message's content; images by digest."""
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        return json.dumps(content, ensure_ascii=False)
    texts = []
    for part in content:
        if isinstance(part, str):
            texts.append(part)
        elif isinstance(part, dict) and isinstance(part.get("text"), str):
            texts.append(part["text"])
        elif isinstance(part, dict):
            texts.append(image_mark(part))
    return "".join(texts)


def message_text(message: Body) -> str:
    """Everything of a message that reaches the model, in the order in which ChatML writes it."""
    reasoning = message.get("reasoning_content") or message.get("reasoning")
    thought = f"<think>\n{reasoning}\n</think>\n\n" if isinstance(reasoning, str) else ""
    calls = message.get("tool_calls")
    called = "".join(
        f"\n<tool_call>\n{_call(call)}\n</tool_call>"
        for call in (calls if isinstance(calls, list) else [])
    )
    return thought + content_text(message.get("content")) + called


def _call(call: object) -> str:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict):
        return json.dumps(call, ensure_ascii=False)
    arguments = function.get("arguments")
    text = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
    return f'{{"name": {json.dumps(function.get("name"))}, "arguments": {text}}}'


class ChatMl:
    """The form that is used without a template of the model."""

    name = "ChatML (built in)"

    def render(self, body: Body, time_s: float | None = None) -> Prompt:  # noqa: ARG002 - no dates in it
        writer = _Writer()
        if LITERAL in body:
            return self._literal(writer, body)
        messages = body["messages"]
        is_system = bool(messages) and messages[0].get("role") in ("system", "developer")
        tools = body.get("tools")
        if is_system or tools:
            writer.glue("<|im_start|>system\n")
            if is_system:
                writer.part("messages[0]", message_text(messages[0]))
            if isinstance(tools, list) and tools:
                self._tools(writer, tools)
            writer.glue("<|im_end|>\n")
        for number, message in enumerate(messages):
            if number == 0 and is_system:
                continue
            name = f" {message['name']}" if isinstance(message.get("name"), str) else ""
            writer.glue(f"<|im_start|>{message.get('role')}{name}\n")
            writer.part(f"messages[{number}]", message_text(message))
            writer.glue("<|im_end|>\n")
        self._end(writer, body)
        return writer.prompt()

    @staticmethod
    def _tools(writer: _Writer, tools: list[Any]) -> None:
        writer.glue("\n\n# Tools\n\n<tools>")
        for number, tool in enumerate(tools):
            writer.glue("\n")
            writer.part(f"tools[{number}]", json.dumps(tool, ensure_ascii=False))
        writer.glue("\n</tools>")

    @staticmethod
    def _end(writer: _Writer, body: Body) -> None:
        if body.get("add_generation_prompt") is False:
            return
        writer.glue("<|im_start|>assistant\n")
        kwargs = body.get("chat_template_kwargs")
        if isinstance(kwargs, dict) and kwargs.get("enable_thinking") is False:
            writer.glue("<think>\n\n</think>\n\n")

    @staticmethod
    def _literal(writer: _Writer, body: Body) -> Prompt:
        between = body[LITERAL]
        for number, message in enumerate(body["messages"]):
            writer.glue(between[number])
            writer.part(f"messages[{number}]", content_text(message.get("content")))
        writer.glue(between[len(body["messages"])])
        return writer.prompt()


class _Writer:
    def __init__(self) -> None:
        self._texts: list[str] = []
        self._parts: list[Part] = []
        self._at = 0

    def glue(self, text: str) -> None:
        self._texts.append(text)
        self._at += len(text)

    def part(self, path: str, text: str) -> None:
        text = clean_text(text)
        self._parts.append(Part(path, self._at, self._at + len(text)))
        self.glue(text)

    def prompt(self) -> Prompt:
        return Prompt("".join(self._texts), self._parts)


#: how the common families write a role; the content follows up to the closing marker
_FAMILIES = [
    re.compile(
        r"<\|im_start\|>(?P<role>\w+)[^\n]*\n(?P<content>.*?)(?=<\|im_end\|>|\Z)", re.DOTALL
    ),
    re.compile(
        r"<\|start_header_id\|>(?P<role>\w+)<\|end_header_id\|>\n\n"
        r"(?:Cutting Knowledge Date: [^\n]*\nToday Date: [^\n]*\n\n)?"
        r"(?P<content>.*?)(?=<\|eot_id\|>|\Z)",
        re.DOTALL,
    ),
    re.compile(r"<start_of_turn>(?P<role>\w+)\n(?P<content>.*?)(?=<end_of_turn>|\Z)", re.DOTALL),
    re.compile(
        r"<\|start_of_role\|>(?P<role>\w+)<\|end_of_role\|>(?P<content>.*?)(?=<\|end_of_text\|>|\Z)",
        re.DOTALL,
    ),
    re.compile(
        r"<\|start\|>(?P<role>\w+)[^<]*<\|message\|>(?P<content>.*?)(?=<\|end\|>|<\|call\|>|\Z)",
        re.DOTALL,
    ),
    re.compile(r"<\uff5c(?P<role>User|Assistant)\uff5c>(?P<content>.*?)(?=<\uff5c|\Z)", re.DOTALL),
    re.compile(
        r"<\|(?P<role>system|user|assistant)\|>\n?(?P<content>.*?)"
        r"(?=<\|(?:system|user|assistant|end|endoftext)\|>|\Z)",
        re.DOTALL,
    ),
    re.compile(r"\[(?P<role>INST)\](?P<content>.*?)(?=\[/INST\]|\Z)", re.DOTALL),
]


def taken_apart(text: str) -> Body:
    """A body whose rendering is exactly `text`: messages by role markers, or one message."""
    text = clean_text(text)
    messages: list[Body] = []
    between: list[str] = []
    at = 0
    family = next((each for each in _FAMILIES if each.search(text)), None)
    for match in family.finditer(text) if family else ():
        role = match["role"].lower()
        if (
            role in ("assistant", "model")
            and match.end() == len(text)
            and not match["content"].strip()
        ):
            continue  # the generation prompt
        between.append(text[at : match.start("content")])
        messages.append({"role": "user" if role == "inst" else role, "content": match["content"]})
        at = match.end("content")
    if not messages:
        messages, between, at = [{"role": "user", "content": text}], [""], len(text)
    between.append(text[at:])
    return {"messages": messages, LITERAL: between}
