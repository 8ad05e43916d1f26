"""Reports: self-contained HTML pages that open from disk, without a network and without scripts.

page   the frame of a page, and escaping
charts lines and steps as SVG
bars   horizontal bars, plain and stacked
lines  line charts
"""

from __future__ import annotations

__all__: list[str] = []
