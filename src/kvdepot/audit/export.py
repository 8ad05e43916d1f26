"""An audit trace: a log without its text, on which everything but quoted text works.

Texts become pseudo-words: a salted hash of a few words, and how many tokens they are (``~3f9a…~12``).
Runs of words are cut where the words say so, so the same text has the same pseudo-words wherever it stands.
What structure needs stays: line ends, JSON punctuation, roles, tags such as ``<think>``; values that an audit
tells by their looks (times, ids, paths) are replaced by others of the same look. The salt is made anew for
each export and is not kept: without it nobody can try words against hashes.

Times of requests, token counts, and which texts are equal remain visible: whoever must not learn those must
not get the trace.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import re
import unicodedata
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from kvdepot.audit.records import Body, Record
from kvdepot.audit.render import LITERAL, image_mark
from kvdepot.audit.shared import SHARED_FORMAT, SHARED_VERSION
from kvdepot.audit.texts import canonical_json, json_blocks
from kvdepot.audit.tokens import PieceMemo

__all__ = ["Pseudonyms", "shared_rows"]

#: what stays as it is: line ends, blanks at their ends, JSON and list punctuation, tags
_KEPT = re.compile(
    r"((?m:^)[ \t]*(?:\[\d+\]|\(?\d+[.):]|[-*\u2022#]{1,4})[ \t]+"
    r"|\r\n|\n|[ \t\u00a0\u200b]+(?=\r?\n|\Z)|\ufeff"
    r"|</?[a-zA-Z_][\w-]{0,30}>|<\|[\w/]{1,40}\|>"
    r"|[{}\[\]\"]+[,:]?\s?|[,;:=]\s?(?=[\s\S]))"
)
#: values that are told by their looks
_VALUES = re.compile(
    r"(?P<time>\d{4}-\d\d-\d\d(?:[T ]\d\d:\d\d(?::\d\d(?:\.\d+)?)?(?:Z|[+-]\d\d:?\d\d)?)?"
    r"|(?<!\d)(?:[01]?\d|2[0-3]):[0-5]\d(?::[0-5]\d)?(?:\s?[AaPp][Mm])?(?!\d)"
    r"|(?<!\d)1[0-9]{9}(?:\d{3})?(?!\d)"
    r"|(?i:\b(?:mon|tues|wednes|thurs|fri|satur|sun)day\b)"
    r"|(?i:\b\d{0,2} ?(?:jan|feb|mar|apr|may|jun|jul|aug|sep|oct|nov|dec)[a-z]*\.? \d{1,4}(?:, \d{4})?\b))"
    r"|(?P<id>\b(?=[\w-]*\d)[\w-]{6,}\b|\b\d{3,}\b)"
    r"|(?P<path>(?<![\w<])(?:~|\.{1,2})?/[\w.+-]+(?:/[\w.+-]*)*)"
    r"|(?P<locale>\b[a-z]{2}[-_][A-Z]{2}\b)"
)
_CUT_ONE_IN = 4
_WORDS_MOST = 12
_COMBINING = "e\u0301"


class Pseudonyms:
    """Replaces texts. The same text has the same pseudo-words in one export, and others in the next.

    Args:
        salt: secret and random, at least 16 bytes.
        memo: counts tokens.
    """

    def __init__(self, salt: bytes, memo: PieceMemo) -> None:
        self._salt = salt
        self._memo = memo
        self._words: dict[str, str] = {}

    def name(self, kind: str, value: str) -> str:
        """A pseudonym for a user, a session, a salt, a tool."""
        return f"{kind}-{self._digest(f'{kind} {value}')[:10]}"

    def text(self, text: str) -> str:
        """A text of pseudo-words."""
        made: list[str] = []
        at = 0
        for start, end, value in json_blocks(text):
            made += [*self._parts(text[at:start]), self._json(text[start:end], value)]
            at = end
        return "".join([*made, *self._parts(text[at:])])

    def number(self, value: int | float) -> int | float:  # noqa: PYI041 - which of them matters
        """Another number of the same size and kind."""
        written = self._like(repr(value))
        return int(written) if isinstance(value, int) else float(written)

    def _json(self, text: str, value: Any) -> str:
        """JSON of the same shape, written in the same way."""
        shown = _shared_json(value, self)
        is_escaped = text.isascii() and not canonical_json(value).isascii()
        return json.dumps(shown, ensure_ascii=is_escaped, indent=2 if "\n" in text else None)

    def _digest(self, text: str) -> str:
        return hmac.new(self._salt, text.encode("utf-8", "replace"), hashlib.sha256).hexdigest()

    def _parts(self, text: str) -> Iterator[str]:
        at = 0
        for match in _VALUES.finditer(text):
            yield from self._prose(text[at : match.start()])
            yield self._value(match)
            at = match.end()
        yield from self._prose(text[at:])

    def _value(self, match: re.Match[str]) -> str:
        value = match[0]
        if match["time"] or match["locale"]:
            return value  # no more telling than the times of the requests
        if match["path"]:
            return "/" + "/".join(self._digest(part)[:6] for part in value.strip("/").split("/"))
        return self._like(value)

    def _like(self, value: str) -> str:
        """Another value of the same shape: digits for digits, letters for letters."""
        stream = iter(self._digest(value) * (1 + len(value) // 64))
        made: list[str] = []
        for sign in value:
            number = int(next(stream), 16)
            if sign.isdigit():
                # no leading zero where there was none: it may be a number in JSON
                made.append(str(number % 9 + 1 if sign != "0" else 0))
            elif sign.isalpha():
                made.append(("abcdef" if sign.lower() in "abcdef" else "ghkmnp")[number % 6])
            else:
                made.append(sign)
        return "".join(made)

    def _prose(self, text: str) -> Iterator[str]:
        for number, part in enumerate(_KEPT.split(text)):
            if number % 2:
                yield part
            elif part:
                yield from self._chunks(part)

    def _chunks(self, text: str) -> Iterator[str]:
        """Runs of words, cut behind words whose hash says so."""
        words = re.findall(r"\s*\S+|\s+", text)
        run: list[str] = []
        for word in words:
            run.append(word)
            plain = unicodedata.normalize("NFC", word.strip())
            mark = hashlib.sha256(self._salt + plain.encode("utf-8", "replace")).digest()[0]
            if mark % _CUT_ONE_IN == 0 or len(run) == _WORDS_MOST:
                yield self._word("".join(run))
                run = []
        if run:
            yield self._word("".join(run))

    def _word(self, text: str) -> str:
        known = self._words.get(text)
        if known is not None:
            return known
        plain = unicodedata.normalize("NFC", text)
        count = max(1, len(self._memo.prompts([plain])[0]))
        made = f"~{self._digest(plain)[:12]}~{count} "
        if plain != text:
            # the same letters in another Unicode form stay the same letters in another form
            made += _COMBINING
        elif not text.isascii():
            made += unicodedata.normalize("NFC", _COMBINING)
        self._words[text] = made
        return made


def shared_rows(
    records: Iterable[Record], bodies: Sequence[Body], names: Pseudonyms
) -> Iterator[dict[str, Any]]:
    """Rows of an audit trace: the header, then one row a request.

    Args:
        records: in the order of time.
        bodies: of each record; rendered prompts taken apart.
        names: replaces texts.
    """
    yield {"format": SHARED_FORMAT, "version": SHARED_VERSION}
    for record, body in zip(records, bodies, strict=True):
        row: dict[str, Any] = {
            "timestamp": record.time_s,
            "request_id": record.request_id and names.name("r", record.request_id),
            "session_id": record.session and names.name("s", record.session),
            "user": record.user and names.name("u", record.user),
        }
        for field, value in record.extra:
            row["lora_name" if field == "lora" else field] = names.name(field, value)
        if record.usage_cached is not None:
            row["usage"] = {"prompt_tokens_details": {"cached_tokens": record.usage_cached}}
        row |= _shared_body(body, names)
        yield {key: value for key, value in row.items() if value is not None}


def _shared_body(body: Body, names: Pseudonyms) -> Body:
    made: Body = {"messages": [_shared_message(each, names) for each in body["messages"]]}
    if isinstance(body.get("tools"), list):
        made["tools"] = [_shared_json(each, names) for each in body["tools"]]
    if isinstance(body.get("chat_template_kwargs"), dict):
        made["chat_template_kwargs"] = _shared_json(body["chat_template_kwargs"], names)
    if "add_generation_prompt" in body:
        made["add_generation_prompt"] = bool(body["add_generation_prompt"])
    if LITERAL in body:
        made[LITERAL] = [str(each) for each in body[LITERAL]]
    return made


def _shared_message(message: Body, names: Pseudonyms) -> Body:
    made: Body = {"role": str(message.get("role"))}
    content = message.get("content")
    if isinstance(content, str):
        made["content"] = names.text(content)
    elif isinstance(content, list):
        made["content"] = [_shared_part(part, names) for part in content]
    for key in ("reasoning_content", "reasoning"):
        if isinstance(message.get(key), str):
            made[key] = names.text(message[key])
    calls = message.get("tool_calls")
    if isinstance(calls, list):
        made["tool_calls"] = [_shared_call(call, names) for call in calls]
    return made


def _shared_part(part: Any, names: Pseudonyms) -> Any:
    if isinstance(part, str):
        return names.text(part)
    if not isinstance(part, dict):
        return None
    if isinstance(part.get("text"), str):
        return {"type": "text", "text": names.text(part["text"])}
    return {"type": str(part.get("type")), "digest": names.name("m", image_mark(part))}


def _shared_call(call: Any, names: Pseudonyms) -> Any:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict):
        return {}
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        try:
            value = json.loads(arguments)
        except (ValueError, RecursionError):
            written = names.text(arguments)
        else:
            # written in the way in which it was written: with or without blanks and line ends
            indent = 2 if "\n" in arguments else None
            written = json.dumps(_shared_json(value, names), indent=indent)
    else:
        written = json.dumps(_shared_json(arguments, names))
    return {
        "type": "function",
        "function": {"name": names.name("f", str(function.get("name"))), "arguments": written},
    }


def _shared_json(value: Any, names: Pseudonyms) -> Any:
    """JSON of the same shape; keys that schemas and templates know stay readable."""
    if isinstance(value, dict):
        return {
            key if key in _SCHEMA_KEYS else names.name("k", str(key)): _shared_json(each, names)
            for key, each in value.items()
        }
    if isinstance(value, list):
        return [_shared_json(each, names) for each in value]
    if isinstance(value, str):
        return value if value in _SCHEMA_WORDS else names.text(value)
    if isinstance(value, int | float) and not isinstance(value, bool):
        return names.number(value) if abs(value) < 1e15 and value == value else 0  # noqa: PLR0124
    return value


_SCHEMA_WORDS = {"function", "object", "string", "number", "integer", "boolean", "array", "null"}
_SCHEMA_KEYS = {
    "type", "function", "name", "description", "parameters", "properties", "required", "items", "enum",
    "anyOf", "oneOf", "allOf", "default", "$ref", "$defs", "strict", "enable_thinking", "date_string",
}  # fmt: skip
