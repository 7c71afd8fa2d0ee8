"""The files of full weights: for inference a whole Hugging Face directory, for training the tensors alone.

Tensors go to disk and come back one by one, so that a model is never in memory twice. No torch.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from backend.checkpoints.tensor_file import read_float32, write_float32
from backend.trainer.base import FullWeights
from together_post_training.errors import Reason, fail

CONFIG = "config.json"

# What transformers may read beside the weights; those that the base model has are copied.
_COMPANIONS = (
    "generation_config.json",
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "chat_template.jinja",
    "chat_template.json",
)


def write_weights(path: Path, weights: FullWeights) -> None:
    """transformers wants this metadata."""
    write_float32(path, weights.tensors, {"format": "pt"})


def read_weights(path: Path) -> FullWeights:
    """Raises ValueError for what is not a safetensors file of float32."""
    tensors, _ = read_float32(path)
    return FullWeights(tensors=tensors)


def write_companions(directory: Path, base: Path) -> list[str]:
    """Makes a directory with weights one that transformers loads by itself; the names of what was added.

    Args:
        base: the directory of the base model.

    Raises:
        PostTrainingError: UNAVAILABLE when the base model's files are not where they were.
    """
    try:
        config = json.loads((base / CONFIG).read_bytes())
    except FileNotFoundError:
        raise fail(
            Reason.UNAVAILABLE,
            f"An inference checkpoint of full weights needs the base model's {CONFIG}, and {base} has none any more: "
            "put the model's directory back, or save a training checkpoint.",
            directory=base,
        ) from None
    config.pop("torch_dtype", None)
    config["dtype"] = "float32"
    (directory / CONFIG).write_text(json.dumps(config, indent=2) + "\n")
    present = [name for name in _COMPANIONS if (base / name).is_file()]
    for name in present:
        shutil.copyfile(base / name, directory / name)
    return [CONFIG, *present]
