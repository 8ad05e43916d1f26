"""The embedded engine behind an OpenAI-compatible HTTP server: `kvdepot serve --engine embedded`.

settings   what a server is started with
wire       bodies of requests and answers
queueing   one engine thread, a bounded queue before it, and the accounts
app        the routes
running    open the engine, serve until a signal
"""

from __future__ import annotations

__all__: list[str] = []
