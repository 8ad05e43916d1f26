"""Reads an input of any supported kind into records, and says what could not be read.

The kind is told by content. A broken line never stops the rest; each is named with its number.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import msgspec

from kvdepot.audit.chatlog import DEPTH_MAX, chat_records, is_cut, is_deep
from kvdepot.audit.enginelog import EngineLines, EventTree, is_event_row
from kvdepot.audit.records import Problem, Reading
from kvdepot.audit.shared import is_shared_header
from kvdepot.audit.traces import are_chained, is_trace_row, trace_record
from kvdepot.errors import ConfigError
from kvdepot.io.lines import LINE_BYTES_MAX, Line, read_lines

__all__ = ["PROBLEMS_KEPT", "read_log", "read_rows"]

PROBLEMS_KEPT = 20
_ARRIVALS = ("context_tokens", "ContextTokens")
_BOM = b"\xef\xbb\xbf"


def read_log(path: str | Path, *, line_bytes_max: int = LINE_BYTES_MAX) -> Reading:
    """Read one input; ``-`` is standard input.

    Raises:
        ConfigError: it cannot be read, or holds nothing that can be audited.
    """
    reading = read_rows(read_lines(path, line_bytes_max=line_bytes_max))
    if not reading.records:
        first = "; ".join(
            f"line {each.line}: {each.what}" if each.line else each.what
            for each in reading.problems[:3]
        )
        raise ConfigError(
            f"{path}: no request in {reading.lines} lines" + (f" ({first})" if first else ""),
            hint="docs/audit.md lists the inputs",
        )
    return reading


def read_rows(lines: Iterable[Line]) -> Reading:
    """Read numbered lines; see `read_log`."""
    reader = _Reader()
    for line in lines:
        reader.feed(line)
    return reader.finish()


class _Reader:
    def __init__(self) -> None:
        self._reading = Reading("chat")
        self._engine = EngineLines()
        self._events = EventTree()
        self._has_events = False
        self._kinds: dict[str, int] = {}
        #: an array or an object that goes over several lines
        self._open: list[bytes] = []
        self._decode = msgspec.json.Decoder().decode

    def feed(self, line: Line) -> None:
        reading = self._reading
        reading.lines += 1
        data = line.data.removeprefix(_BOM) if line.number == 1 else line.data
        if line.fault:
            self._broken(line.number, line.fault)
            return
        if self._open:
            self._open.append(data)
            return
        if not data.strip(b" \t\r\n"):
            return
        if data.lstrip()[:1] not in (b"{", b"["):
            self._plain(data, line.number)
            return
        row = self._row(data, line.number)
        if row is not None:
            self._take_flat(row, line.number, data)

    def _row(self, data: bytes, number: int) -> Any:
        try:
            return self._decode(data)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            failure = error
        if self._reading.lines == 1 and data.strip() in (b"[", b"{"):
            self._open.append(data)  # a document that is written over many lines
            return None
        return self._patched(data, number, failure)

    def _patched(self, data: bytes, number: int, failure: Exception) -> Any:
        """A second try for lone surrogates, NULs in texts, and bytes that are not UTF-8.

        No lone surrogate is left in any text, because none can be written to a result.
        """
        if isinstance(failure, RecursionError):
            self._broken(number, "nested too deeply")
            return None
        try:
            text = data.decode()
            is_utf8 = True
        except UnicodeDecodeError:
            text, is_utf8 = data.decode("utf-8", "replace"), False
        try:
            row = json.loads(text, strict=False)
            row = json.loads(json.dumps(row, ensure_ascii=False).encode("utf-8", "replace"))
        except (ValueError, RecursionError):
            self._broken(number, f"not JSON: {str(failure)[:100]}")
            return None
        if not is_utf8:
            self._note(number, "not UTF-8; the wrong bytes were replaced")
        return row

    def _plain(self, data: bytes, number: int) -> None:
        if b"\0" in data:
            self._broken(number, "holds NUL bytes")
            return
        text = data.decode("utf-8", "replace")
        try:
            is_request = self._engine.feed(text, number)
        except (ValueError, MemoryError, RecursionError) as error:
            self._broken(number, f"cannot be read as a line of vLLM's log: {error}")
            return
        if is_request:
            self._kinds["engine log"] = self._kinds.get("engine log", 0) + 1
        elif self._reading.lines == 1 and self._is_arrivals(text):
            self._note(number, "arrivals and lengths only: they say nothing about reuse")
        elif self._kinds and "engine log" not in self._kinds:
            self._broken(number, "not JSON")

    @staticmethod
    def _is_arrivals(text: str) -> bool:
        return any(name.lower() in text.lower() for name in _ARRIVALS)

    def _take_flat(self, row: Any, number: int, data: bytes) -> None:
        # counting is quick, and a row with few brackets is not deep
        if data.count(b"{") + data.count(b"[") > DEPTH_MAX and is_deep(row):
            self._broken(number, f"nested too deeply: more than {DEPTH_MAX} levels")
        else:
            self._take(row, number)

    def _take(self, row: Any, number: int) -> None:
        if is_event_row(row):
            self._has_events = True
            try:
                self._events.feed(row, number)
            except (ValueError, TypeError, AttributeError, IndexError) as error:
                self._broken(number, f"cannot be read as KV events: {error}")
            return
        if isinstance(row, list):
            for each in row:
                self._take(each, number)
            return
        if not isinstance(row, dict):
            self._broken(number, f"{type(row).__name__} where an object is expected")
            return
        if is_shared_header(row):
            self._reading.is_pseudo = True
            return
        kind = "chat"
        try:
            if is_trace_row(row):
                kind = "trace"
                found = [trace_record(row, number)]
            else:
                found = list(chat_records(row, number))
        except (ValueError, TypeError, KeyError, OverflowError, RecursionError) as error:
            self._broken(number, f"cannot be read as {kind}: {error}")
            return
        if not found:
            self._broken(number, self._why_nothing(row))
        for record in found:
            self._kinds[kind] = self._kinds.get(kind, 0) + 1
            self._reading.cut += is_cut(record) if kind == "chat" else 0
            self._reading.records.append(record)

    @staticmethod
    def _why_nothing(row: dict[str, Any]) -> str:
        if any(name in row for name in _ARRIVALS):
            return "arrivals and lengths only: they say nothing about reuse"
        return f"no prompt in it; its fields are {', '.join(sorted(map(str, row))[:6]) or 'none'}"

    def _broken(self, number: int, what: str) -> None:
        self._reading.broken += 1
        self._note(number, what)

    def _note(self, number: int, what: str) -> None:
        if len(self._reading.problems) < PROBLEMS_KEPT:
            self._reading.problems.append(Problem(number, what))

    def finish(self) -> Reading:
        reading = self._reading
        if self._open:
            data, self._open = b"\n".join(self._open), []
            row = self._patched(data, 1, ValueError("an open bracket")) or []
            self._take_flat(row, 1, data)
        reading.cut += self._engine.finish()
        reading.records += self._engine.records
        if self._has_events:
            reading.records += self._events.finish()
        reading.problems += [*self._engine.problems, *self._events.problems]
        reading.kind = self._kind()
        if reading.kind in ("chained trace", "content trace"):
            reading.records = [each for each in reading.records if each.trace is not None]
        else:
            reading.records = [each for each in reading.records if each.trace is None]
        return reading

    def _kind(self) -> str:
        if self._has_events:
            return "events"
        if self._kinds.get("engine log"):
            return "engine log"
        records = self._reading.records
        traces = [each for each in records if each.trace is not None]
        if len(traces) * 2 > len(records):
            pairs = [(each.extra, each.trace.ids) for each in traces if each.trace]
            return "chained trace" if are_chained(pairs) else "content trace"
        if self._reading.is_pseudo:
            return "audit trace"
        first = next(iter(records), None)
        if first is None or first.body is not None:
            return "chat"
        return "ids" if first.ids is not None else "prompts"
