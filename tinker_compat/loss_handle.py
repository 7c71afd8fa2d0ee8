"""Losses of one sample, created by `ServiceClient.create_custom_loss` and used by handle.

    1. trace       when the loss is created: torch.fx records what the function does with its tensors. What cannot be
                   recorded, or is more than arithmetic on the named inputs, is refused.
    2. as_loss_fn  a handle and its data become a loss of whole batches for `forward_backward_custom`: the recorded
                   graph is evaluated in this process, sample by sample, as Tinker's SDK does by default.

No code travels to the server: it sees the targets, and the derivative that came out of the graph.
"""

from __future__ import annotations

import builtins
import inspect
import re
import threading
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

import tinker
from tinker import types

if TYPE_CHECKING:
    import torch.fx

LossFn = Callable[[list[types.Datum], list[Any]], tuple[Any, dict[str, float]]]
Rank = Literal[0, 1, 2]

_MAX_INPUTS = 16
_INPUT_NAME = re.compile(r"[a-z_][a-z0-9_]{0,63}")
_METRIC_NAME = re.compile(r"custom/[a-z0-9_./-]{1,64}:(sum|mean)")
# Where the functions that may be called come from. Python's operators say that they are from `_operator`.
_CALLABLE_FROM = ("torch", "math", "operator", "_operator")
# Methods that end a graph, and why.
_FORBIDDEN_METHODS = {
    "backward": "return the loss, and forward_backward_custom runs the backward pass",
    **dict.fromkeys(
        ["item", "numpy", "tolist"],
        "it leaves torch, and every value, metrics included, has to stay a tensor",
    ),
}
# Tracing replaces functions of torch and math for its duration.
_tracing = threading.Lock()


@dataclass(frozen=True)
class _LossInput:
    """Tinker's CustomLossInput, where the installed Tinker has none."""

    name: str
    rank: Rank

    def __post_init__(self) -> None:
        if self.rank not in (0, 1, 2):
            raise ValueError(f"The rank of {self.name!r} is {self.rank!r}: must be 0, 1 or 2.")


@dataclass(frozen=True)
class _LossHandle:
    """Tinker's LossHandle, where the installed Tinker has none.

    Attributes:
        inputs: logprobs, then the keys of loss_fn_inputs that the loss reads, in the order of its parameters.
        session_id: of the ServiceClient that created it; other clients refuse it.
        loss_id: always None: the loss is evaluated by the client.
    """

    name: str
    inputs: tuple[Any, ...]
    session_id: str
    graph: torch.fx.GraphModule = field(repr=False, compare=False)
    loss_id: str | None = None

    @property
    def input_names(self) -> tuple[str, ...]:
        return tuple(read.name for read in self.inputs[1:])


if TYPE_CHECKING:
    from tinker import LossHandle, PerDatumLossFn
    from tinker.types import CustomLossInput
else:
    # Older Tinkers lack them.
    LossHandle = getattr(tinker, "LossHandle", _LossHandle)
    PerDatumLossFn = getattr(tinker, "PerDatumLossFn", Callable[..., tuple[Any, Mapping[str, Any]]])
    CustomLossInput = getattr(types, "CustomLossInput", _LossInput)


def trace(fn: PerDatumLossFn, input_ranks: Mapping[str, Rank], session_id: str) -> LossHandle:
    """Records a loss as a LossHandle.

    Raises:
        ImportError: without torch.
        ValueError: for parameters, ranks or contents that a loss cannot have, named in the text.
    """
    import torch.fx

    name = _name(fn)
    inputs = _inputs(fn, input_ranks)
    try:
        with _tracing:
            graph = torch.fx.symbolic_trace(fn)
    except Exception as error:
        raise _refusal(
            f"{name} cannot be traced by torch.fx: {error}. A loss cannot branch on the values of its tensors, nor "
            "call libraries other than torch and math."
        ) from error
    for node in graph.graph.nodes:
        if (problem := _problem(node)) is not None:
            raise _refusal(f"{name} {problem}")
    return LossHandle(name=name, inputs=inputs, session_id=session_id, graph=graph)


def register(handle: LossHandle, losses: dict[tuple[Any, ...], LossHandle]) -> LossHandle:
    """Adds it to the losses of its session.

    Raises:
        ValueError: when one of them reads and computes the same, whatever it is called.
    """
    identity = (handle.graph.code, *((read.name, read.rank) for read in handle.inputs))
    same = losses.setdefault(identity, handle)
    if same is not handle:
        raise _refusal(
            f"this session already created {same.name!r} with the same traced loss; reuse its LossHandle"
        )
    return handle


def as_loss_fn(handle: LossHandle, data: Sequence[types.Datum]) -> LossFn:
    """The loss of this data: the sum over its samples, metrics combined as their suffixes say.

    The inputs are read now: what happens to `data` later changes nothing.

    Raises:
        ValueError: for a sample without an input that the loss reads, or with one of another rank.
    """
    for index, datum in enumerate(data):
        _check_ranks(handle, datum, index)
    inputs = [
        [datum.loss_fn_inputs[key].to_torch().clone() for key in handle.input_names]
        for datum in data
    ]

    def loss_fn(_: list[types.Datum], logprobs: list[Any]) -> tuple[Any, dict[str, float]]:
        results = [handle.graph(lp, *read) for lp, read in zip(logprobs, inputs, strict=True)]
        for loss, _metrics in results:
            if loss.ndim != 0:
                raise ValueError(
                    f"loss {handle.name!r} returned a tensor of shape {tuple(loss.shape)}: it must return a scalar."
                )
        first, *rest = (loss for loss, _metrics in results)
        return sum(rest, start=first), _combined([metrics for _loss, metrics in results])

    return loss_fn


def check_session(handle: LossHandle, session_id: str) -> None:
    if handle.session_id != session_id:
        raise ValueError(
            f"LossHandle {handle.name!r} was created in session {handle.session_id}, and can only be used by clients "
            f"of that session; this one's is {session_id}."
        )


def _check_ranks(handle: LossHandle, datum: types.Datum, index: int) -> None:
    logprobs, *read = handle.inputs
    # Its logprobs have the shape of its targets.
    for key, declared in [("target_tokens", logprobs), *((r.name, r) for r in read)]:
        tensor = datum.loss_fn_inputs.get(key)
        if tensor is None:
            raise ValueError(
                f"datum[{index}] has no loss_fn_inputs[{key!r}], which loss {handle.name!r} takes."
            )
        rank = 1 if tensor.shape is None else len(tensor.shape)
        if rank != declared.rank:
            raise ValueError(
                f"datum[{index}] loss_fn_inputs[{key!r}] has rank {rank}, but loss {handle.name!r} declared "
                f"{declared.name} with rank {declared.rank}."
            )


def _combined(metrics: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """A mean is over samples."""
    sums: defaultdict[str, float] = defaultdict(float)
    for of_sample in metrics:
        for name, value in of_sample.items():
            sums[name] += float(value.detach().item() if hasattr(value, "detach") else value)
    return {
        name: value / len(metrics) if name.endswith(":mean") else value
        for name, value in sums.items()
    }


def _inputs(fn: Callable[..., Any], input_ranks: Mapping[str, Rank]) -> tuple[Any, ...]:
    name = _name(fn)
    parameters = list(inspect.signature(fn).parameters.values())
    if not parameters or parameters[0].name != "logprobs":
        raise _refusal(
            f"the first parameter of {name} must be logprobs, and further ones the loss_fn_inputs that it reads, as "
            "in def loss(logprobs, advantages)"
        )
    if len(parameters) > _MAX_INPUTS:
        raise _refusal(
            f"{name} takes {len(parameters)} parameters: at most {_MAX_INPUTS} are possible, with logprobs"
        )
    for parameter in parameters:
        if (problem := _parameter_problem(parameter)) is not None:
            raise _refusal(f"{name} parameter {parameter.name!r} {problem}")
    names = [parameter.name for parameter in parameters]
    if set(input_ranks) != set(names):
        raise _refusal(
            f"input_ranks must give a rank for each parameter of {name} ({', '.join(names)}), got "
            f"{sorted(input_ranks)}"
        )
    if input_ranks["logprobs"] == 0:
        raise _refusal("logprobs has rank 1, one for each position, or 2, [positions, K]")
    return tuple(CustomLossInput(name=read, rank=input_ranks[read]) for read in names)


def _parameter_problem(parameter: inspect.Parameter) -> str | None:
    if not _INPUT_NAME.fullmatch(parameter.name):
        return "must be a name of at most 64 lowercase letters, digits and underscores"
    if parameter.kind not in (parameter.POSITIONAL_ONLY, parameter.POSITIONAL_OR_KEYWORD):
        return "must be a plain positional parameter: no *args, no **kwargs, nothing keyword-only"
    if parameter.default is not parameter.empty:
        return "has a default: each parameter names an input that every sample has"
    return None


def _problem(node: torch.fx.Node) -> str | None:
    """Why a recorded step cannot be part of a loss."""
    match node.op:
        case "call_function":
            return _function_problem(node.target)
        case "call_method":
            return _method_problem(str(node.target))
        case "call_module":
            return f"calls module {node.target!r}: use functions, as in torch.nn.functional, not torch.nn modules"
        case "get_attr":
            return f"captures a tensor ({node.target!r}): it can read only logprobs and the inputs that it names"
        case "output":
            return _output_problem(node.args[0])
    return None


def _function_problem(function: Any) -> str | None:
    module = getattr(function, "__module__", None) or ""
    if function is builtins.getattr or module.split(".")[0] in _CALLABLE_FROM:
        return None
    return (
        f"calls {getattr(function, '__qualname__', function)!r} from {module or 'an unknown module'!r}: only torch and "
        "math may be called"
    )


def _method_problem(method: str) -> str | None:
    import torch

    if not hasattr(torch.Tensor, method):
        return f"calls method {method!r}, which is not a torch.Tensor method"
    if method in _FORBIDDEN_METHODS:
        return f"calls {method}(): {_FORBIDDEN_METHODS[method]}"
    return None


def _output_problem(output: Any) -> str | None:
    if not (isinstance(output, (tuple, list)) and len(output) == 2):
        return "must return (loss, metrics)"
    loss, metrics = output
    if not _is_tensor(loss):
        return f"must return its loss as a torch.Tensor, got {loss!r}"
    if not isinstance(metrics, dict):
        return f"must return its metrics as a dict, got {metrics!r}"
    problems = (_metric_problem(name, value) for name, value in metrics.items())
    return next((problem for problem in problems if problem is not None), None)


def _metric_problem(name: Any, value: Any) -> str | None:
    if not (isinstance(name, str) and _METRIC_NAME.fullmatch(name)):
        return (
            f"metric {name!r} must be named custom/<name>:sum or custom/<name>:mean in lowercase: the suffix says how "
            "samples are combined"
        )
    if not _is_tensor(value):
        return f"metric {name!r} must be a torch.Tensor, got {value!r}"
    return None


def _is_tensor(value: Any) -> bool:
    """Whether the graph computes it: constants are recorded as the Python values that they are."""
    import torch.fx

    return isinstance(value, torch.fx.Node)


def _name(fn: Callable[..., Any]) -> str:
    return getattr(fn, "__name__", type(fn).__name__)


def _refusal(message: str) -> ValueError:
    return ValueError(f"create_custom_loss: {message}.")
