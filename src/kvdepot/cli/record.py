"""`kvdepot record`: a recording proxy before a server that logs no prompts."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

__all__ = ["record"]


def record(
    *,
    upstream: str,
    out: Path,
    host: str = "127.0.0.1",
    port: int = 8001,
    hash_users: Annotated[bool, Parameter(negative="")] = False,
    redact: Annotated[tuple[str, ...], Parameter(negative="")] = (),
    drop: Annotated[tuple[str, ...], Parameter(negative="")] = (),
) -> int:
    """Pass requests to an OpenAI-compatible server and record them for kvdepot audit.

    Requests and answers are passed on byte for byte, streams as they come. Only bodies of requests are
    recorded, with the time and the usage that the server says; headers are not, but for ids of requests and
    sessions (X-Request-Id, X-Session-Id). The file is readable by its owner alone.

    Args:
        upstream: Base URL of the server, such as http://127.0.0.1:8000.
        out: The log, as JSON lines; appended to.
        host: Address to listen on.
        port: Port to listen on.
        hash_users: Write hashes for users and sessions.
        redact: Regular expression; what it matches in texts is written as a hash. May be given several times.
        drop: Field of the body to leave out. May be given several times.
    """
    from kvdepot.recording.rows import Redaction
    from kvdepot.recording.running import record as run

    def ready(url: str) -> None:
        print(f"recording {url} -> {upstream} into {out}", file=sys.stderr, flush=True)

    redaction = Redaction(hash_users=hash_users, patterns=redact, drop=drop)
    count = run(upstream, out, host=host, port=port, redaction=redaction, on_ready=ready)
    print(f"recorded {count} requests in {out}")
    return 0
