"""A whole model's parameters in one flat buffer, under the names that its files give them.

A module may hold one parameter where the files hold several tensors: the experts of a layer, say, stacked. Both are
spans of the same buffer, so that a checkpoint reads like one that transformers wrote and nothing is ever rearranged.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor, nn
from transformers.core_model_loading import revert_weight_conversion
from transformers.modeling_utils import PreTrainedModel

from backend.trainer.base import FullWeights
from backend.trainer.base_model import BaseModel
from backend.trainer.flat_layout import FlatLayout, Shape
from together_post_training.errors import PostTrainingError, Reason, fail


class ModelLayout:
    """Two ways to cut one float32 buffer: into a module's parameters, and into its files' tensors.

    A parameter that several modules share is there once, under the name of the first.

    parameters: by the names of `named_parameters`.
    tensors: by the names in model.safetensors, as `save_pretrained` gives them.
    matrices: names of tensors with two dimensions that are neither embeddings nor the output head.
    """

    def __init__(self, module: PreTrainedModel) -> None:
        """Raises UNIMPLEMENTED for a model whose files hold what is not a stretch of some parameter."""
        named = dict(module.named_parameters())
        _require_parameters_alone(module, named)
        self.parameters = FlatLayout({name: tuple(p.shape) for name, p in named.items()})
        starts, shapes = _tensors(module, self.parameters)
        self.tensors = FlatLayout(shapes)
        ends = _starts_of_ends(module, named, self.parameters)
        self.matrices = frozenset(
            name for name, shape in shapes.items() if len(shape) == 2 and starts[name] not in ends
        )

    def parameters_from(self, tensors: Mapping[str, np.ndarray]) -> dict[str, Tensor]:
        """The parameters, float32; those that are one tensor in the files share its memory.

        Nobody may write to them. `tensors` are of the layout's names and shapes.
        """
        pieces = self._pieces()
        parameters = {}
        for name, shape in self.parameters.shapes.items():
            parts = [_tensor(tensors[piece]).reshape(-1) for piece in pieces[name]]
            parameters[name] = (parts[0] if len(parts) == 1 else torch.cat(parts)).view(shape)
        return parameters

    def _pieces(self) -> dict[str, list[str]]:
        """The tensors that each parameter is made of, in order."""
        names, starts, _ = zip(*self.parameters.spans(), strict=True)
        pieces: dict[str, list[str]] = {name: [] for name in names}
        for piece, start, _ in self.tensors.spans():
            pieces[names[bisect_right(starts, start) - 1]].append(piece)
        return pieces


def bind(
    view: PreTrainedModel, module: PreTrainedModel, parameters: Mapping[str, Tensor]
) -> dict[str, nn.Parameter]:
    """Gives a view of a module float32 parameters of its own; returns them by name, none requiring a gradient."""
    view.config.dtype = torch.float32
    own = {name: nn.Parameter(parameters[name], requires_grad=False) for name in parameters}
    by_id = {id(shared): own[name] for name, shared in module.named_parameters()}
    for part in view.modules():
        for name, shared in list(part.named_parameters(recurse=False, remove_duplicate=False)):
            part.register_parameter(name, by_id[id(shared)])
    return own


def under(base: BaseModel, layout: ModelLayout, weights: FullWeights) -> BaseModel:
    """The base model with other weights, float32. On a CPU those that are one tensor share its memory."""
    module = base.view("sdpa")
    parameters = layout.parameters_from(weights.tensors)
    bind(module, base.module, {name: p.to(base.device) for name, p in parameters.items()})
    return replace(base, module=module)


def _tensors(
    module: PreTrainedModel, parameters: FlatLayout
) -> tuple[dict[str, int], dict[str, Shape]]:
    """Where each of the files' tensors starts in the buffer, and its shape, in the buffer's order.

    transformers' own conversion says: it is given each value's position in place of the value.
    """
    kind = torch.int32 if parameters.size < 2**31 else torch.int64
    positions = parameters.views(torch.arange(parameters.size, dtype=kind, device="cpu"))
    found = revert_weight_conversion(module, positions)
    starts = {name: int(t.reshape(-1)[0]) for name, t in found.items()}
    names = sorted(starts, key=lambda name: starts[name])
    expected = 0
    for name in names:
        flat = found[name].reshape(-1)
        if starts[name] != expected or not _is_ascending(flat):
            raise _unsupported(module, f"{name} in another order than it computes with")
        expected += len(flat)
    return starts, {name: tuple(found[name].shape) for name in names}


def _is_ascending(flat: Tensor) -> bool:
    return bool((flat.diff() == 1).all())


def _starts_of_ends(
    module: PreTrainedModel, named: Mapping[str, nn.Parameter], parameters: FlatLayout
) -> set[int]:
    """Where embeddings and output head start in the buffer."""
    ends = [m for m in module.modules() if isinstance(m, nn.Embedding)]
    ids = {id(m.weight) for m in (*ends, module.get_output_embeddings()) if m is not None}
    return {start for name, start, _ in parameters.spans() if id(named[name]) in ids}


def _require_parameters_alone(module: PreTrainedModel, named: Mapping[str, nn.Parameter]) -> None:
    shared = {id(parameter) for parameter in named.values()}
    for name, tensor in module.state_dict(keep_vars=True).items():
        if id(tensor) not in shared:
            raise _unsupported(module, f"{name}, which is no parameter")


def _unsupported(module: PreTrainedModel, what: str) -> PostTrainingError:
    model_type = module.config.model_type
    return fail(
        Reason.UNIMPLEMENTED,
        f"The full weights of model type {model_type!r} cannot be trained: its files hold {what}. Use LoRA.",
        model_type=model_type,
    )


def _tensor(array: np.ndarray) -> Tensor:
    """Shares the array's memory where it can be written to, which torch wants; else copies."""
    return torch.from_numpy(np.require(array, np.float32, ("C", "W")))
