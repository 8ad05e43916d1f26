"""Python children of a test: the same interpreter and source tree, whatever is installed."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SOURCE = ROOT / "src"


def run_python(
    code: str,
    *arguments: str,
    env: dict[str, str] | None = None,
    cwd: Path | None = None,
    timeout_s: float = 110,
) -> subprocess.CompletedProcess[str]:
    """Run `code` in a child that can import kvdepot; `env` replaces the whole environment."""
    prelude = f"import sys; sys.path[:0] = [{str(SOURCE)!r}, {str(ROOT)!r}]\n"
    return subprocess.run(
        [sys.executable, "-c", prelude + code, *arguments],
        env=env,
        cwd=cwd,
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
    )


def run_cli(
    *arguments: str,
    cwd: Path | None = None,
    env: dict[str, str] | None = None,
    timeout_s: float = 110,
) -> subprocess.CompletedProcess[str]:
    """Run the `kvdepot` command from the source tree; `env` is added to the environment."""
    return subprocess.run(
        [sys.executable, "-m", "kvdepot", *arguments],
        env={**os.environ, "PYTHONPATH": str(SOURCE), **(env or {})},
        cwd=cwd,
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
    )
