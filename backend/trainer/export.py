"""A checkpoint as a plain Hugging Face directory: the base model with its adapter merged in, or its full weights."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from torch import Tensor, nn
from transformers.modeling_utils import PreTrainedModel

from backend.checkpoints import model_files
from backend.trainer import base_model, targets
from backend.trainer.base import Adapter, FullWeights, Weights
from backend.trainer.checks import check_adapter, check_full_weights
from backend.trainer.experts import columns_of_b, rows_of_a
from backend.trainer.model_layout import ModelLayout, under
from backend.trainer.targets import Layer
from together_post_training.errors import Reason, fail

DType = Literal["float32", "bfloat16", "float16"]


def export_merged(
    weights: Weights, target: Path, *, base: str, path: str | None = None, dtype: DType = "float32"
) -> None:
    """Writes the model that the weights make of the base model: config, weights, tokenizer.

    Args:
        target: a directory that does not exist, or is empty. It appears whole or not at all.
        base, path: the base model's name and where it lies, as `base_model.load` takes them.
        dtype: what the weights are rounded to, once.

    Raises:
        PostTrainingError: INVALID_ARGUMENT for a directory that holds something; INCOMPATIBLE_CHECKPOINT when the
            weights are not the base model's; and what `base_model.load` raises.
    """
    check_free(target)
    loaded = base_model.load(base, path, dtype="float32", device="cpu")
    module = loaded.module
    if isinstance(weights, FullWeights):
        layout = ModelLayout(module)
        module = under(loaded, layout, check_full_weights(weights, layout.tensors.shapes)).module
    else:
        merge(module, weights)
    with directory_to_fill(target) as scratch:
        model_files.write_companions(scratch, Path(loaded.info.location))
        with base_model.without_progress_bar():
            module.to(getattr(torch, dtype)).save_pretrained(scratch)


@torch.no_grad()
def merge(module: PreTrainedModel, adapter: Adapter) -> None:
    """W + scale * B A in place of W, in place, float32. A head that is the embedding becomes a matrix of its own.

    Raises:
        PostTrainingError: INCOMPATIBLE_CHECKPOINT, naming missing, unexpected or misshapen tensors; nothing is changed.
    """
    layers = targets.select(targets.layers_of(module), module.config.model_type, adapter.lora)
    check_adapter(adapter, adapter.lora, targets.tensor_shapes(layers, adapter.lora.rank))
    for layer in layers:
        if not layer.num_experts and module.get_submodule(layer.path) is _head(module):
            _untie(module)
        weight = module.get_parameter(layer.path if layer.num_experts else f"{layer.path}.weight")
        delta = _product(layer, adapter)
        weight.add_(delta.mT if layer.is_transposed else delta, alpha=adapter.lora.scale)


def check_free(target: Path) -> None:
    """Raises INVALID_ARGUMENT unless nothing is there, or an empty directory."""
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise fail(
            Reason.INVALID_ARGUMENT,
            f"{target} exists and is not an empty directory: nothing is overwritten. Name another one.",
            directory=target,
        )


@contextmanager
def directory_to_fill(target: Path) -> Iterator[Path]:
    """Becomes the target when all is written; until then, and if anything fails, there is nothing."""
    target = target.expanduser().absolute()
    target.parent.mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(prefix=f".{target.name}.", dir=target.parent))
    try:
        yield scratch
        # safetensors writes files that nobody else may read.
        for path in (scratch, *scratch.iterdir()):
            path.chmod(0o755 if path.is_dir() else 0o644)
        scratch.rename(target)
    except OSError:
        check_free(target)
        raise
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def _head(module: PreTrainedModel) -> nn.Module:
    head = module.get_output_embeddings()
    assert head is not None, "a causal language model has an output head"
    return head


def _untie(module: PreTrainedModel) -> None:
    head, embedding = _head(module), module.get_input_embeddings()
    if head.get_parameter("weight") is embedding.get_parameter("weight"):
        copy = head.get_parameter("weight").detach().clone()
        head.weight = nn.Parameter(copy, requires_grad=False)
        module.config.tie_word_embeddings = False


def _product(layer: Layer, adapter: Adapter) -> Tensor:
    """B A: (out, in), or (E, out, in)."""
    a, b = (torch.from_numpy(np.ascontiguousarray(adapter.tensors[n])) for n in layer.tensors)
    if not layer.num_experts:
        return b @ a
    return columns_of_b(b, layer.num_experts) @ rows_of_a(a, layer.num_experts)
