"""`python -m kvdepot.serving`: the embedded server, for a launcher."""

from __future__ import annotations

import sys

from kvdepot.serving.running import main

__all__: list[str] = []

if __name__ == "__main__":
    sys.exit(main())
