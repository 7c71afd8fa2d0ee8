"""Benchmarks: ratios within one run, never part of the tests. `make bench BENCH=spine`."""

import os

# Before anything imports torch: idle OpenMP threads that spin would take the cores from the other side.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
