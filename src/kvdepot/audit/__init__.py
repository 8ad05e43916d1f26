"""The prompt-prefix audit: where the prefix breaks, why, and what the fix brings.

`kvdepot.audit.run.audit` is the whole of it; ``docs/audit.md`` explains the passes.
"""

from __future__ import annotations

__all__: list[str] = []
