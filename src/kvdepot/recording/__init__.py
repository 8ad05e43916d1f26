"""A recording proxy: `kvdepot record` stands before an OpenAI-compatible server and logs what it is asked.

rows     from a request and its answer to a row of the log; redaction
proxy    passes everything through, byte for byte, and records beside it
running  serve until a signal
"""

from __future__ import annotations

__all__: list[str] = []
