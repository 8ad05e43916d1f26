"""`python -m kvdepot` is the `kvdepot` command."""

from __future__ import annotations

from kvdepot.cli.main import main

__all__: list[str] = []

if __name__ == "__main__":
    main()
