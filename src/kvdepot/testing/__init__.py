"""The testing kit, shipped so that the author of a tier can check it the way kvdepot checks its own.

`toy` is the oracle (the right bytes of any block, from scratch), `conformance` states what a tier
promises, `simdisk` keeps live and durable bytes in memory and crashes at call n, `faults` wraps any
disk in errors and delays, `damage` spoils files, `simclock` owns the time, and `memorytier` is the
smallest tier that keeps every promise. Nothing outside of tests imports this package. The names are
not a stable interface yet.
"""
