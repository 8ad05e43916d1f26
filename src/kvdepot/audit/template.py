"""The model's own chat template, rendered with jinja2 in its sandbox.

Where a part of the body ends up in the text is found by searching for it from left to right; a template
may trim contents or skip them, so a part that is not found has no place.
"""

from __future__ import annotations

import datetime as dt
import importlib
import json
from typing import Any

from kvdepot.audit.records import Body
from kvdepot.audit.render import LITERAL, ChatMl, Part, Prompt, clean_text, content_text
from kvdepot.errors import ConfigError

__all__ = ["ModelTemplate"]


class ModelTemplate:
    """Renders with a template's source.

    Args:
        source: a Jinja template as models ship it.
        names: variables of the model, such as ``bos_token``.

    Raises:
        ConfigError: jinja2 is not installed, or the template does not compile.
    """

    name = "the model's chat template"

    def __init__(self, source: str, names: dict[str, str]) -> None:
        try:
            sandbox = importlib.import_module("jinja2.sandbox")
            extensions = ["jinja2.ext.loopcontrols"]
        except ImportError as error:
            raise ConfigError(
                "a model's chat template needs jinja2", hint="pip install 'kvdepot[audit]'"
            ) from error
        environment = sandbox.ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=extensions
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _refuse
        environment.globals["strftime_now"] = self._strftime_now
        self._now = dt.datetime.fromtimestamp(0, dt.UTC)
        self._names = names
        try:
            self._template = environment.from_string(source)
        except Exception as error:
            raise ConfigError(f"the chat template does not compile: {error}") from error

    def _strftime_now(self, form: str) -> str:
        """The time of the request, as the server would have seen it."""
        return self._now.strftime(form)

    def render(self, body: Body, time_s: float | None = None) -> Prompt:
        if LITERAL in body:
            return ChatMl().render(body)
        self._now = dt.datetime.fromtimestamp(time_s or 0, dt.UTC)
        kwargs = body.get("chat_template_kwargs")
        names: dict[str, Any] = {
            **self._names,
            "messages": [_flat(message) for message in body["messages"]],
            "tools": body.get("tools") or None,
            "documents": body.get("documents"),
            "add_generation_prompt": body.get("add_generation_prompt", True),
            **(kwargs if isinstance(kwargs, dict) else {}),
        }
        try:
            text = clean_text(self._template.render(**names))
        except Exception as error:  # a template may raise anything, its own refusals as well
            raise ValueError(f"the chat template refuses this request: {error}") from error
        return Prompt(text, _found(text, body))


def _to_json(value: object, indent: int | None = None, **_: object) -> str:
    return json.dumps(value, ensure_ascii=False, indent=indent)


def _refuse(message: str) -> None:
    raise ValueError(message)


def _flat(message: Body) -> Body:
    """Most templates want text where the API allows a list of parts, and arguments as objects."""
    made = {**message}
    if isinstance(message.get("content"), list):
        made["content"] = content_text(message["content"])
    elif message.get("content") is None:
        made["content"] = ""
    return made


def _found(text: str, body: Body) -> list[Part]:
    parts: list[Part] = []
    at = 0
    tools = body.get("tools")
    for number, tool in enumerate(tools if isinstance(tools, list) else []):
        for written in _writings(tool):
            place = text.find(written)
            if place >= 0:
                parts.append(Part(f"tools[{number}]", place, place + len(written)))
                break
    for number, message in enumerate(body["messages"]):
        content = clean_text(content_text(message.get("content")))
        for written in (content, content.strip()):
            place = text.find(written, at) if written else -1
            if place >= 0:
                parts.append(Part(f"messages[{number}]", place, place + len(written)))
                at = place + len(written)
                break
    return _without_overlaps(sorted(parts, key=lambda part: (part.start, -part.end)))


def _writings(tool: object) -> list[str]:
    values = [tool]
    if isinstance(tool, dict) and isinstance(tool.get("function"), dict):
        values.append(tool["function"])
    return [
        json.dumps(value, ensure_ascii=False, indent=indent)
        for value in values
        for indent in (None, 4, 2)
    ]


def _without_overlaps(parts: list[Part]) -> list[Part]:
    kept: list[Part] = []
    for part in parts:
        if not kept or part.start >= kept[-1].end:
            kept.append(part)
    return kept
