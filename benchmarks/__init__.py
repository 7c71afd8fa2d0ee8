"""Benchmarks: ratios within one run, never part of the tests. `make bench BENCH=spine`."""
