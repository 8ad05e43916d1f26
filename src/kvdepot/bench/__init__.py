"""`kvdepot bench`: rounds that prove their isolation, the peak test, the contention test, the report.

quantiles    percentiles and their distribution-free intervals
runstats     statistics whose unit is the run: bootstrap ratios, equivalence, Holm, trend
rows         one request's record, and the files of a result
"""

from __future__ import annotations

__all__: list[str] = []
