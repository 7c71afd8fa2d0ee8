"""Settings of the whole suite."""

from __future__ import annotations

import os

from hypothesis import settings

# Before anything imports torch: two processes with spinning OpenMP threads slow each other tenfold.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

# The same examples on every run, so that a red test is red again; `--hypothesis-profile=search` looks
# for new ones.
settings.register_profile("suite", deadline=None, derandomize=True, max_examples=60)
settings.register_profile("search", deadline=None, max_examples=2000)
settings.load_profile("suite")
