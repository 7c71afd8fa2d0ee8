"""Which layers of a model an adapter trains, and how PEFT finds them again."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

from torch import nn
from transformers.modeling_utils import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from backend.trainer.base import ALL_LINEAR, FAMILY_DEFAULT, LoraConfig, PeftTargets
from backend.trainer.families import SEPARATE_MLP, Family, family, matches
from together_post_training.errors import PostTrainingError, Reason, fail

# PEFT's name for a tensor of the module at {path}: its model wraps ours twice.
PEFT_PREFIX = "base_model.model."

# In models with experts PEFT takes these names for parts of experts, as earlier versions of transformers kept them
# (peft.utils.transformers_weight_conversion), wherever they stand. It reaches such a layer by its weight's path.
_TAKEN_FOR_EXPERTS = frozenset(SEPARATE_MLP)
# In the order in which transformers' modules register them.
_EXPERT_PARAMETERS = ("gate_up_proj", "down_proj")


@dataclass(frozen=True, slots=True, kw_only=True)
class Layer:
    """What one pair of A and B belongs to: a linear layer, or one matrix of each expert of an MLP.

    path: the module's, or the experts' parameter's.
    num_experts: E; 0 for a linear layer.
    tensors: the names of A and B in PEFT's file.
    peft_name: by which PEFT finds it, `as_parameter` among the target_parameters, else among the target_modules.
    is_transposed: the weight is kept as (in, out).
    """

    path: str
    num_in: int
    num_out: int
    tensors: tuple[str, str]
    peft_name: str
    num_experts: int = 0
    as_parameter: bool = False
    is_transposed: bool = False

    def shapes(self, rank: int) -> tuple[tuple[int, int], tuple[int, int]]:
        """Of A and B. Those of experts lie one after the other: A's rows by expert, then by rank; B's columns by rank,
        then by expert."""
        width = rank * max(self.num_experts, 1)
        return (width, self.num_in), (self.num_out, width)


def linear_layers(module: PreTrainedModel) -> dict[str, nn.Linear]:
    """Every linear layer, the output head too, by path, in the model's order; weights are shared, never copied."""
    return {
        path: _as_linear(layer)
        for path, layer in module.named_modules()
        if isinstance(layer, nn.Linear | Conv1D)
    }


def expert_modules(module: PreTrainedModel) -> dict[str, nn.Module]:
    """The modules that hold all experts of an MLP, by path, in the model's order."""
    paths = {path.rpartition(".")[0] for path, x in layers_of(module).items() if x.num_experts}
    return {path: part for path, part in module.named_modules() if path in paths}


def layers_of(module: PreTrainedModel) -> dict[str, Layer]:
    """Everything that some adapter may train, by path, in the model's order.

    The routers of experts are no part of it.
    """
    known = family(module.config.model_type)
    layers = {}
    for path, part in module.named_modules():
        if isinstance(part, nn.Linear | Conv1D):
            layers[path] = _linear(path, part, has_experts=bool(known.experts))
        for name, parameter in part.named_parameters(recurse=False):
            if matches(f"{path}.{name}", known.experts):
                layers[f"{path}.{name}"] = _experts(path, name, parameter)
    return layers


def select(layers: Mapping[str, Layer], model_type: str, lora: LoraConfig) -> list[Layer]:
    """Those that an adapter of this configuration trains, in the model's order, as its file names them.

    Raises:
        PostTrainingError: INVALID_ARGUMENT for a name that no layer has, or for dropout where PEFT has none.
    """
    chosen = _chosen(layers, family(model_type), lora)
    if lora.dropout and any(layer.as_parameter for layer in chosen):
        raise _no_dropout(lora, next(layer.path for layer in chosen if layer.as_parameter))
    paths = {layer.path for layer in chosen}
    return [
        replace(layer, tensors=_tensors(layer, paths), peft_name=_peft_name(layer, paths, layers))
        for layer in chosen
    ]


def tensor_shapes(layers: Sequence[Layer], rank: int) -> dict[str, tuple[int, int]]:
    """Of an adapter of these layers, by the names in its file."""
    return {
        name: shape
        for layer in layers
        for name, shape in zip(layer.tensors, layer.shapes(rank), strict=True)
    }


def peft_targets(layers: Sequence[Layer]) -> PeftTargets:
    """How PEFT finds the layers that `select` chose."""
    return PeftTargets(
        modules=tuple(sorted({layer.peft_name for layer in layers if not layer.as_parameter})),
        parameters=tuple(sorted({layer.peft_name for layer in layers if layer.as_parameter})),
        fan_in_fan_out=any(layer.is_transposed for layer in layers),
    )


def tensor_names(path: str) -> tuple[str, str]:
    """(A's name, B's name), as PEFT's file format gives them."""
    return f"{PEFT_PREFIX}{path}.lora_A.weight", f"{PEFT_PREFIX}{path}.lora_B.weight"


def _chosen(layers: Mapping[str, Layer], known: Family, lora: LoraConfig) -> list[Layer]:
    if lora.module_names:
        return _named(layers, lora.module_names)
    unembed = known.unembed * lora.train_unembed
    if lora.target_modules == (ALL_LINEAR,):
        return [x for x in layers.values() if not matches(x.path, known.unembed) or unembed]
    if lora.target_modules == (FAMILY_DEFAULT,):
        names = known.default
    else:
        names = known.attn * lora.train_attn + (known.mlp + known.experts) * lora.train_mlp
    return [layer for layer in layers.values() if matches(layer.path, names + unembed)]


def _named(layers: Mapping[str, Layer], names: Collection[str]) -> list[Layer]:
    for name in names:
        if not any(matches(path, [name]) for path in layers):
            known = ", ".join(sorted({_short(layer) for layer in layers.values()}))
            raise fail(
                Reason.INVALID_ARGUMENT,
                f"target_modules: {name!r} is no layer of this model that an adapter can train. There are {known}; "
                f"give such names, whole paths, or one of the words {ALL_LINEAR!r} and {FAMILY_DEFAULT!r}.",
                target_module=name,
                available=known,
            )
    return [layer for layer in layers.values() if matches(layer.path, names)]


def _linear(path: str, layer: nn.Linear | Conv1D, *, has_experts: bool) -> Layer:
    is_transposed = isinstance(layer, Conv1D)
    as_parameter = has_experts and path.rpartition(".")[2] in _TAKEN_FOR_EXPERTS
    return Layer(
        path=path,
        num_in=layer.weight.shape[0 if is_transposed else 1],
        num_out=layer.weight.shape[1 if is_transposed else 0],
        tensors=tensor_names(path),
        peft_name=f"{path}.weight" if as_parameter else path,
        as_parameter=as_parameter,
        is_transposed=is_transposed,
    )


def _experts(module: str, name: str, parameter: nn.Parameter) -> Layer:
    num_experts, num_out, num_in = parameter.shape
    return Layer(
        path=f"{module}.{name}",
        num_in=num_in,
        num_out=num_out,
        num_experts=num_experts,
        tensors=tensor_names(module),
        peft_name=f"{module}.{name}",
        as_parameter=True,
    )


def _as_linear(layer: nn.Linear | Conv1D) -> nn.Linear:
    """A Conv1D as the linear layer that it is, over the same weights."""
    if isinstance(layer, nn.Linear):
        return layer
    linear = nn.Linear(layer.nx, layer.nf, device="meta")
    linear.weight = nn.Parameter(layer.weight.T, requires_grad=False)
    linear.bias = layer.bias
    return linear


def _tensors(layer: Layer, paths: Collection[str]) -> tuple[str, str]:
    """PEFT wraps a module once for each of its parameters that is trained, the first one innermost."""
    if not layer.num_experts:
        return layer.tensors
    module, _, name = layer.path.rpartition(".")
    later = _EXPERT_PARAMETERS[_EXPERT_PARAMETERS.index(name) + 1 :]
    depth = sum(f"{module}.{other}" in paths for other in later)
    return tensor_names(module + ".base_layer" * depth)


def _peft_name(layer: Layer, paths: Collection[str], layers: Mapping[str, Layer]) -> str:
    """The usual short name where it means no layer but those that are trained, else the whole path."""
    short = _short(layer)
    if layer.as_parameter and not layer.num_experts:
        return layer.peft_name
    return short if all(path in paths for path in layers if matches(path, [short])) else layer.path


def _short(layer: Layer) -> str:
    num_parts = 2 if layer.num_experts else 1
    return ".".join(layer.path.rsplit(".", num_parts)[-num_parts:])


def _no_dropout(lora: LoraConfig, path: str) -> PostTrainingError:
    return fail(
        Reason.INVALID_ARGUMENT,
        f"LoRA dropout {lora.dropout} with {path}: adapters of experts, and of MLPs beside experts, have no dropout "
        "(PEFT's have none either). Set dropout to 0, or train the attention alone.",
        dropout=lora.dropout,
        layer=path,
    )
