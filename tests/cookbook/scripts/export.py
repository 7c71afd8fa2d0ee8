"""The cookbook's way from a checkpoint to a model that one serves: python export.py PATH ADAPTER PEFT MERGED."""

# pyright: reportMissingImports=false
# Runs in the cookbook's environment.

from __future__ import annotations

import sys

from tinker_cookbook import weights

MODEL = "Qwen/Qwen3.5-9B-Base"

path, adapter, peft, merged = sys.argv[1:]
weights.download(tinker_path=path, output_dir=adapter)
weights.build_lora_adapter(base_model=MODEL, adapter_path=adapter, output_path=peft)
weights.build_hf_model(base_model=MODEL, adapter_path=adapter, output_path=merged)
