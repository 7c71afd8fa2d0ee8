"""`import together.post_training.tinker as tinker`: another name for the module tinker_compat."""

import sys
from typing import TYPE_CHECKING

import tinker_compat

if TYPE_CHECKING:
    # Type checkers and editors read names; they do not follow sys.modules.
    from tinker_compat import *  # noqa: F403

sys.modules[__name__] = tinker_compat
