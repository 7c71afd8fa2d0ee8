"""`python -m backend` is `together-post-training`."""

import sys

from backend.cli import main

sys.exit(main())
