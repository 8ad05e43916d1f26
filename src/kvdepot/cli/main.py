"""The `kvdepot` command: the commands by name, and how errors reach a person.

Data goes to stdout; progress, logs and errors go to stderr. Exit status: 0 done, 1 done and what was
checked is bad, 2 an error, with `error:` and where possible `hint:` lines.

The commands' modules are imported when they are used (or listed), and import what is heavy only when
they run: `kvdepot --help` must be quick and work without the demo extra.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Sequence

from cyclopts import App, CycloptsError

from kvdepot import __version__
from kvdepot.errors import KvdepotError

__all__ = ["app", "main", "run"]

app = App(
    name="kvdepot",
    help="Keep the KV cache that an LLM engine evicts, and read it back instead of computing it.",
    version=__version__,
    help_format="plaintext",
)
# a help text here, so that listing the commands imports none of them
app.command(
    "kvdepot.cli.audit:app",
    name="audit",
    help="Say where the prefix of prompts breaks, why, and what the fix brings.",
)
app.command(
    "kvdepot.cli.demo:demo",
    name="demo",
    help="Ask a small model about a long document, end the process, ask again from the pool.",
)
app.command(
    "kvdepot.cli.pool:app",
    name="pool",
    help="Look at a pool: what it holds, and whether every byte verifies.",
)
app.command(
    "kvdepot.cli.record:record",
    name="record",
    help="Pass requests to a server and record them for kvdepot audit.",
)
app.command(
    "kvdepot.cli.simulate:simulate",
    name="simulate",
    help="Replay a trace through the policies: TTFT, token share, bytes, and what was refused and why.",
)
app.command(
    "kvdepot.cli.bench:app",
    name="bench",
    help="Measure what a tier brings: rounds, peak, contention; compare and import results.",
)

app.command(
    "kvdepot.cli.serve:serve",
    name="serve",
    help="Serve a model over a pool, with vLLM or the embedded engine: kvdepot serve MODEL --pool URL.",
)
app.command(
    "kvdepot.cli.vllm:vllm_config",
    name="vllm-config",
    help="Print the JSON that vLLM takes as --kv-transfer-config, for a launcher of your own.",
)

#: libraries that only some commands need, and the extra that brings them
_EXTRA_OF = {
    **dict.fromkeys(("accelerate", "gguf", "torch", "transformers"), "demo"),
    "aiohttp": "bench",
}
_FAILED = 2
_INTERRUPTED = 130


def main() -> None:
    """Entry point of the `kvdepot` command."""
    logging.basicConfig(stream=sys.stderr, format="%(levelname)s %(name)s: %(message)s")
    sys.exit(run(sys.argv[1:]))


def run(arguments: Sequence[str]) -> int:
    """Run one command and give its exit status; errors of the tree are printed, not raised."""
    try:
        status = app(
            list(arguments),
            exit_on_error=False,
            print_error=False,
            result_action="return_value",
        )
        sys.stdout.flush()
    except KvdepotError as error:
        return _fail(error, error.hint)
    except CycloptsError as error:
        return _fail(" ".join(str(error).split()), _usage_hint(arguments))
    except ImportError as error:
        library = _missing_library(error)
        if library is None:
            raise
        return _fail(
            f"this command needs {library}", f"pip install 'kvdepot[{_EXTRA_OF[library]}]'"
        )
    except KeyboardInterrupt:
        return _INTERRUPTED
    except BrokenPipeError:
        # the reader of our output has seen enough; nothing must be written to it at exit either
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    return status if isinstance(status, int) else 0


def _usage_hint(arguments: Sequence[str]) -> str:
    if arguments[:1] in (["serve"], ["vllm-config"]) and "--" not in arguments:
        return "what is meant for vLLM stands behind a --; add --help to see what kvdepot takes"
    return "add --help to see what a command takes"


def _missing_library(error: BaseException | None) -> str | None:
    """The library of an extra whose absence is behind an import error; None for any other reason."""
    while error is not None:
        if isinstance(error, ModuleNotFoundError) and error.name in _EXTRA_OF:
            return error.name
        error = error.__cause__
    return None


def _fail(error: KvdepotError | str, hint: str) -> int:
    print(f"error: {error}", file=sys.stderr)
    if hint:
        print(f"hint: {hint}", file=sys.stderr)
    return _FAILED
