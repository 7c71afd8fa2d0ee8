"""`import together.post_training.tinker as tinker`: another name for the module tinker_compat."""

import sys

import tinker_compat

sys.modules[__name__] = tinker_compat
