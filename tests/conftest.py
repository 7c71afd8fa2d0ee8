"""Settings of the whole suite."""

from __future__ import annotations

import os

# Before anything imports torch: two processes with spinning OpenMP threads slow each other tenfold.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
