"""What this package does with everything that Tinker's callers may write, beside the `tinker` that is installed.

python -m tools.compatibility.observe < surfaces.json      prints an Observation as JSON
"""

from __future__ import annotations

import dataclasses
import sys
import typing
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pydantic
import tinker
from tinker import types

from tools.compatibility import calls
from tools.compatibility.calls import ACCEPTED, CLIENTS, Fates, Outcome
from tools.compatibility.probes import GIVEN, Given, datum, internal, tensor
from tools.compatibility.recorder import Recorder
from tools.compatibility.surface import Name, Surface, surface

LOSSES = "LossFnType"
# Refused as a whole: there are no objects whose methods could be called.
ADMIN = "AdminClient"


@dataclass(frozen=True, slots=True)
class Observation:
    """installed: version of `tinker`.

    ours: what the paths of all surfaces lead to here.
    fates: by the version that the surface is of, then by method, such as "TrainingClient.forward".
    fields: of the installed version's types that methods are given, such as "SamplingParams.seed"; and losses.
    """

    installed: str
    ours: Surface
    fates: dict[str, dict[str, Fates]]
    fields: dict[str, Outcome]


SURFACES = pydantic.TypeAdapter(list[Surface])
OBSERVATION = pydantic.TypeAdapter(Observation)


def observe(surfaces: Sequence[Surface]) -> Observation:
    warnings.simplefilter("ignore")
    paths = dict.fromkeys(path for theirs in surfaces for path in theirs.names)
    return Observation(
        installed=str(tinker.__version__),
        ours=surface("tinker_compat", list(paths), str(tinker.__version__)),
        fates={theirs.version: dict(_fates(theirs)) for theirs in surfaces},
        fields=dict(_fields()) | dict(_losses()),
    )


def client_name(path: str, name: Name) -> str | None:
    """Of a client's class, at the first path to it: its name."""
    last = path.rpartition(".")[2]
    return (
        last if last in (*CLIENTS, ADMIN) and name.kind == "class" and name.first == path else None
    )


def _fates(theirs: Surface) -> Iterator[tuple[str, Fates]]:
    for path, name in theirs.names.items():
        client = client_name(path, name)
        if client is not None:
            yield from _client_fates(client, name)


def _client_fates(client: str, name: Name) -> Iterator[tuple[str, Fates]]:
    methods: Mapping[str, Any] = {
        "__init__": name.parameters,
        **{
            member: its.parameters
            for member, its in name.members.items()
            if its.kind in ("method", "coroutine") and not member.startswith("__")
        },
    }
    if client == ADMIN:
        methods = {"__init__": name.parameters}
    for method, parameters in methods.items():
        call = f"{client}.{method}"
        if internal(call, parameters) is None and calls.is_there(call):
            public = [p for p in parameters if not p.name.startswith("_")]
            yield call, calls.fates(call, public)
    for member, its in name.members.items():
        if its.kind == "property" and client != ADMIN:
            yield f"{client}.{member}", Fates(calls.property_fate(f"{client}.{member}"), {})


def _fields() -> Iterator[tuple[str, Outcome]]:
    for name, given in GIVEN.items():
        cls = getattr(types, name, None)
        if cls is not None:
            yield from _type_fields(name, cls, given)


def _type_fields(name: str, cls: Any, given: Given) -> Iterator[tuple[str, Outcome]]:
    plain = _give(cls, given, {})
    for field, annotation in _annotations(cls).items():
        known = [names for names in given.fields if field in _names(names)]
        if plain.outcome.kind in ("refused", "broken"):
            yield f"{name}.{field}", plain.outcome
        elif _is_constant(annotation):
            yield f"{name}.{field}", ACCEPTED
        elif not known:
            yield f"{name}.{field}", Outcome("broken", "nothing is known to set it to")
        else:
            value = given.fields[known[0]]
            values = dict(
                zip(_names(known[0]), value if len(_names(known[0])) > 1 else [value], strict=True)
            )
            after = _give(cls, given, values)
            yield (
                f"{name}.{field}",
                calls.difference(plain, after) or calls.without_effect(given.call, field),
            )


def _names(names: str | tuple[str, ...]) -> tuple[str, ...]:
    return (names,) if isinstance(names, str) else names


def _give(cls: Any, given: Given, fields: Mapping[str, Any]) -> calls.Call:
    value = given.wrap(cls(**{**given.base, **fields}))
    return calls.method(given.call)({given.parameter: value})


def _annotations(cls: Any) -> dict[str, Any]:
    """Of what a caller may set."""
    if dataclasses.is_dataclass(cls):
        public = [f.name for f in dataclasses.fields(cls) if not f.name.startswith("_")]
        return dict.fromkeys(public) | ({"data": None} if hasattr(cls, "data") else {})
    return {name: field.annotation for name, field in cls.model_fields.items()}


def _is_constant(annotation: Any) -> bool:
    return typing.get_origin(annotation) is typing.Literal and len(typing.get_args(annotation)) == 1


def _losses() -> Iterator[tuple[str, Outcome]]:
    inputs = {
        "target_tokens": tensor((2, 3)),
        "logprobs": tensor((-1, -1), "float32"),
        "advantages": tensor((1, 1), "float32"),
    }
    forward = calls.method("TrainingClient.forward_backward")
    for loss in typing.get_args(types.LossFnType):
        used = inputs if loss != "cross_entropy" else {"target_tokens": inputs["target_tokens"]}
        done = forward({"data": [datum(loss_fn_inputs=used)], "loss_fn": loss})
        yield f"{LOSSES}.{loss}", done.outcome


if __name__ == "__main__":
    given = SURFACES.validate_json(sys.stdin.buffer.read())
    # Also for what clients say in the background, between calls.
    with Recorder().in_place():
        sys.stdout.buffer.write(OBSERVATION.dump_json(observe(given)))
