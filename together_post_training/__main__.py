"""`python -m together_post_training`: the client's commands of `together-post-training`."""

import sys

from together_post_training.cli.execute import main

sys.exit(main())
