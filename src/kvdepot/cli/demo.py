"""`kvdepot demo`: ask a small model about a long document, end the process, ask again from the pool."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from kvdepot.errors import ConfigError

__all__ = ["demo"]


def demo(
    *,
    document: Path | None = None,
    question: Annotated[list[str] | None, Parameter(negative="")] = None,
    model: str | None = None,
    pool: str | None = None,
    out: Path = Path("out"),
    block_tokens: int | None = None,
    max_new_tokens: int = 32,
    dtype: str = "float32",
) -> int:
    """Ask a small model about a long document, end the process, ask again from the pool.

    Five arms, each a process of its own: without a depot; first ask; follow-up in a new process; another
    instance beside the first; the same document behind a changed first line. Writes demo.json and
    demo.html. Exit status 1 if something did not go as it should.

    Args:
        document: A UTF-8 text file; by default a text that is shipped.
        question: What to ask; give it up to three times (first ask, follow-up, other instance).
        model: A model folder or hub id; by default a small model, fetched once.
        pool: Where the pool is: file:///path, fs:///path or a path; by default a temporary folder. Each
            run leaves about 400 MB of blocks there that no later run reuses; they are evicted like others.
        out: Folder for demo.json and demo.html.
        block_tokens: Tokens in a block; by default chosen by the size of the model's KV.
        max_new_tokens: An answer ends there at the latest.
        dtype: float32, bfloat16 or float16; most CPUs are fast with float32 only.
    """
    from kvdepot.demo.document import SHIPPED_QUESTIONS, read_document, shipped_document
    from kvdepot.demo.page import result_page
    from kvdepot.demo.result import encode_result
    from kvdepot.demo.run import DemoSettings, run_demo
    from kvdepot.demo.show import TerminalShow, print_result
    from kvdepot.io.models import model_files, small_model
    from kvdepot.io.results import make_writable
    from kvdepot.urls import PoolUrl

    _need_extra()
    if document is not None and not question:
        raise ConfigError("a document of your own needs a question", hint="add --question TEXT")
    text = shipped_document() if document is None else read_document(document)
    if pool is not None:
        print(PoolUrl.parse(pool).describe(), file=sys.stderr)
    make_writable(out)
    with TerminalShow() as show:
        files = small_model(show.fetching) if model is None else model_files(model)
        settings = DemoSettings(
            document=text,
            questions=tuple(question or SHIPPED_QUESTIONS),
            model=files,
            dtype=dtype,
            pool_url=pool,
            block_tokens=block_tokens,
            max_new_tokens=max_new_tokens,
        )
        result = run_demo(settings, show)
    (out / "demo.json").write_bytes(encode_result(result))
    (out / "demo.html").write_text(result_page(result), encoding="utf-8")
    print_result(result)
    print(f"wrote {out / 'demo.json'} and {out / 'demo.html'}")
    return 1 if result.problems else 0


def _need_extra() -> None:
    """Fail now, and not after minutes, when the demo extra is not installed."""
    import importlib.util

    for name in ("torch", "transformers", "gguf", "accelerate"):
        if importlib.util.find_spec(name) is None:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
