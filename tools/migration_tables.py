"""Writes the tables of MIGRATION.md: what each call of Tinker's SDK does here.

    .venv/bin/python -m tools.migration_tables           writes them
    .venv/bin/python -m tools.migration_tables --check   exit status 1 if that would change anything

Nothing in the tables is written by hand. Every public method of Tinker's clients is called here once for each of its
parameters, with a value other than the default, and the tables say what happened: accepted, accepted with a warning,
or refused with an error.
"""

from __future__ import annotations

import base64
import datetime
import inspect
import json
import sys
import typing
import warnings
from collections.abc import Callable, Coroutine, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tinker
from tinker import types

import tinker_compat
from backend.services import wire
from tinker_compat.conversion import fill_model_input
from tinker_compat.optimizers import to_optim_step
from tinker_compat.sample_conversion import sample_request
from together_post_training import losses
from together_post_training.errors import PostTrainingError
from together_post_training.v1 import data_pb2

DOCUMENT = Path(__file__).resolve().parents[1] / "MIGRATION.md"
BEGIN, END = "<!-- tables: begin -->", "<!-- tables: end -->"
CLIENTS = ("ServiceClient", "TrainingClient", "SamplingClient", "RestClient")

_DATUM = tinker.Datum(
    model_input=tinker.ModelInput.from_ints([1, 2]),
    loss_fn_inputs={"target_tokens": tinker.TensorData(data=[2, 3], dtype="int64")},
)
_HANDLE = base64.urlsafe_b64encode(
    json.dumps(
        {"address": "grpc://localhost:1", "snapshot": "name", "base_model": "model"}
    ).encode()
).decode()


class _Reached(Exception):
    """The call was accepted: it went on to the server."""


class _Core:
    """Stands where a client keeps its connection, and stops every call that gets there."""

    def __getattr__(self, name: str) -> Any:
        raise _Reached


class _Holder:
    """A client's, which starts nothing."""

    def start(self, coroutine: Coroutine[Any, Any, Any]) -> None:
        coroutine.close()
        raise _Reached


# A value other than the default, by the name of the parameter: of the method if it is given, else of any.
_PROBES: Mapping[str, Any] = {
    "access_scope": "accessible",
    "adam_params": tinker.AdamParams(),
    "api_key": "key",
    "base_model": "model",
    "base_url": "grpc://localhost:1",
    "checkpoint_id": "weights/name",
    "data": [_DATUM],
    "day": datetime.date(2026, 1, 1),
    "default_headers_overrides": {"header": "value"},
    "destination_project_id": "project",
    "detail": "text",
    "display_name": "text",
    "ending_before": "2026-02-01",
    "event_type": "checkpoints",
    "fn": lambda logprobs: (logprobs.sum(), {}),
    "handle": _HANDLE,
    "holder": _Holder(),
    "include_prompt_logprobs": True,
    "input_ranks": {"logprobs": 1},
    "kind": "inflight",
    "TrainingClient.forward_backward_custom.loss_fn": lambda data, lps: (lps[0].sum(), {}),
    "limit": 5,
    "loss_fn": "ppo",
    "loss_fn_config": {"clip_low_threshold": 0.9},
    "loss_type_input": "logprobs",
    "age_encryption_recipients": ["recipient"],
    "model_path": "tinker://run/sampler_weights/name",
    "name": "name",
    "num_samples": 2,
    "offset": 5,
    "optim_params": tinker.AdamParams(),
    "optimizer": tinker.DimuonOptimizerConfig(),
    "overwrite": True,
    "path": "tinker://run/weights/name",
    "project_id": "project",
    "prompt": tinker.ModelInput.from_ints([1, 2]),
    "prompt_alt_tokens_k": 1,
    "prompt_logprobs_last_n": 1,
    "queue_state": "paused_capacity",
    "queue_state_reason": "text",
    "rank": 8,
    "record_stability_info": True,
    "request": types.SessionSearchRequest(),
    "retry_config": object(),
    "sampler_id": "snapshots/name",
    "sampling_params": tinker.SamplingParams(),
    "sampling_session_id": "snapshots/name",
    "seed": 1,
    "session_id": "session",
    "starting_on": "2026-01-01",
    "status": "errored",
    "target_prompt_logprobs": tinker.TensorData(data=[1, 2], dtype="int64", shape=[2, 1]),
    "RestClient.get_external_weights_urls.tinker_path": "tinker://run/external_weights/name",
    "tinker_path": "tinker://run/weights/name",
    "topk_prompt_logprobs": 1,
    "topk_sample_logprobs": 1,
    "train_attn": False,
    "train_mlp": False,
    "train_unembed": False,
    "training_run_id": "run",
    "ttl_seconds": 3600,
    "user_metadata": {"key": "value"},
    "weights_access_token": "token",
}
# Given along with a parameter of a method, because it makes no sense alone.
_ALONG = {"sample.prompt_logprobs_last_n": ("include_prompt_logprobs",)}
# Methods that need one of these and take no two.
_ALTERNATIVES = {
    "optim_step": ("optim_params", "adam_params"),
    "ServiceClient.create_sampling_client": ("model_path", "base_model"),
    "SamplingClient.create": ("model_path", "base_model", "sampling_session_id"),
    "RestClient.copy_weights": ("destination_project_id",),
}


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a call did: "accepted", "warns" or "refused", and the words it used."""

    kind: str
    text: str = ""


@dataclass(frozen=True, slots=True)
class Row:
    call: str
    outcome: Outcome


def observe(call: Callable[[], Any]) -> Outcome:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            result = call()
            if inspect.iscoroutine(result):
                result.send(None)
        except (_Reached, StopIteration):
            pass
        except (tinker.TinkerError, PostTrainingError, ValueError, TypeError) as error:
            return Outcome("refused", str(error))
    if caught:
        return Outcome("warns", str(caught[-1].message))
    return Outcome("accepted")


def client_rows(name: str) -> Iterator[Row]:
    """For each public method of a client: a row for every parameter that is not simply accepted, else one row."""
    theirs, ours = getattr(tinker, name), getattr(tinker_compat, name)
    if name in ("ServiceClient", "RestClient"):
        yield from _method_rows(name, theirs, ours)
    for method in sorted(vars(theirs)):
        call = f"{name}.{method}"
        if method.startswith("_"):
            continue
        if isinstance(inspect.getattr_static(theirs, method), property):
            yield Row(call, observe(lambda m=method: getattr(_client(ours), m)))
        elif not hasattr(ours, method):
            yield Row(call, Outcome("refused", "there is no such method here"))
        else:
            yield from _method_rows(
                call,
                getattr(theirs, method),
                lambda m=method, **given: getattr(_client(ours), m)(**given),
            )


def _client(cls: type) -> Any:
    client = object.__new__(cls)
    has_holder = cls in (tinker_compat.ServiceClient, tinker_compat.RestClient)
    vars(client).update({"holder" if has_holder else "_core": _Core()})
    return client


def _method_rows(call: str, theirs: Callable[..., Any], ours: Callable[..., Any]) -> Iterator[Row]:
    parameters = [
        p
        for p in inspect.signature(theirs).parameters.values()
        if p.name != "self"
        and not p.name.startswith("_")
        and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)
    ]
    alternatives = _lookup(_ALTERNATIVES, call, "") or ()
    required = [p.name for p in parameters if p.default is p.empty] + list(alternatives[:1])
    plain = _observe_with(ours, call, required)
    if plain.kind == "refused":
        yield Row(call, plain)
        return
    is_plain = plain.kind == "accepted"
    if not is_plain:
        yield Row(call, plain)
    for name in (p.name for p in parameters):
        others = [n for n in required if n not in alternatives or name not in alternatives]
        along = _lookup(_ALONG, call, name) or ()
        outcome = _observe_with(ours, call, dict.fromkeys([*others, *along, name]))
        if outcome != plain:
            is_plain = False
            yield Row(f"{call}({name}=...)", outcome)
    if is_plain:
        yield Row(call, plain)


def _observe_with(ours: Callable[..., Any], call: str, names: Iterable[str]) -> Outcome:
    given = {name: _lookup(_PROBES, call, name) for name in names}
    assert None not in given.values(), f"{call}: no probe for one of {list(names)}"
    return observe(lambda: ours(**given))


def _lookup(table: Mapping[str, Any], call: str, parameter: str) -> Any:
    """The most specific entry: Client.method.parameter, method.parameter, parameter."""
    client, _, method = call.removesuffix("_async").rpartition(".")
    keys = [
        ".".join(filter(None, parts))
        for parts in ((client, method, parameter), (method, parameter), (parameter,))
    ]
    return next((table[key] for key in keys if key in table), None)


def field_rows() -> Iterator[Row]:
    """The fields of what calls are given: each, when set, must change what is sent."""
    fields = {
        "max_tokens": 5,
        "seed": 1,
        "stop": ["x"],
        "temperature": 0.5,
        "top_k": 3,
        "top_p": 0.5,
    }
    prompt = tinker.ModelInput.from_ints([1])
    for name in tinker.SamplingParams.model_fields:
        given = tinker.SamplingParams(**{name: fields[name]})
        before, after = (sample_request(prompt, 1, p) for p in (tinker.SamplingParams(), given))
        yield Row(f"SamplingParams.{name}", _compare(before, after))
    for params in (tinker.AdamParams(), tinker.DimuonParams(learning_rate=0.1)):
        for name in (n for n in type(params).model_fields if n != "type"):
            given = params.model_copy(update={name: 0.25})
            before, after = to_optim_step(params), to_optim_step(given)
            yield Row(f"{type(params).__name__}.{name}", _compare(before, after))
    chunks = (
        tinker.EncodedTextChunk(tokens=[1]),
        tinker.types.ImageChunk(data=b"x", format="png"),
        tinker.types.ImageAssetPointerChunk(location="x", format="png"),
        tinker.DmelChunk(dmel=b"x"),
    )
    for chunk in chunks:
        yield Row(type(chunk).__name__, observe(lambda c=chunk: _send_prompt(c)))


def _compare(before: Any, after: Any) -> Outcome:
    return Outcome("accepted") if before != after else Outcome("refused", "has no effect")


def _send_prompt(chunk: Any) -> None:
    """Through the client's and the server's conversion."""
    message = data_pb2.ModelInput()
    fill_model_input(message, tinker.ModelInput(chunks=[chunk]), what="The prompt")
    wire.tokens(message, "The prompt")


def loss_rows() -> Iterator[Row]:
    for name in typing.get_args(tinker.types.LossFnType):
        yield Row(name, observe(lambda n=name: losses.contract(n)))


def name_lines() -> Iterator[str]:
    """Which names are Tinker's own objects, which are ours."""
    names = sorted(n for n in tinker.__all__)
    genuine = [n for n in names if getattr(tinker_compat, n) is getattr(tinker, n)]
    ours = [n for n in names if n not in genuine]
    yield (
        f"Of the {len(names)} names that `tinker` {tinker.__version__} exports, {len(genuine)} are its own objects: "
        "all data types, all exceptions, `APIFuture`. These are replaced: "
        + ", ".join(f"`{name}`" for name in ours)
        + "."
    )


def tables() -> str:
    lines = ["### Names", "", *name_lines(), ""]
    for client in CLIENTS:
        lines += [f"### {client}", "", *_section(list(client_rows(client)), client), ""]
    others = [Row(name, observe(getattr(tinker_compat, name))) for name in ("AdminClient",)]
    lines += ["### Other classes", "", *_section(others, ""), ""]
    lines += ["### What calls are given", "", *_section(list(field_rows()), ""), ""]
    lines += ["### Losses", "", *_section(list(loss_rows()), ""), ""]
    return "\n".join(lines)


def _section(rows: list[Row], client: str) -> Iterator[str]:
    """What is accepted in one line, everything else in a table, calls that end alike in one row."""
    groups: dict[Outcome, list[str]] = {}
    for row in _without_twins(rows):
        groups.setdefault(row.outcome, []).append(f"`{row.call.removeprefix(client + '.')}`")
    accepted = groups.pop(Outcome("accepted"), [])
    in_part = {
        call.partition("(")[0] + "`" for calls in groups.values() for call in calls if "(" in call
    }
    if accepted:
        but = f"; but for the parameters below also {', '.join(sorted(in_part))}" if in_part else ""
        yield f"Accepted: {', '.join(accepted)}{but}."
        yield ""
    if groups:
        yield "| call | here | what it says |"
        yield "|---|---|---|"
    for outcome, calls in groups.items():
        text = outcome.text.replace("|", "\\|")
        yield f"| {'<br>'.join(calls)} | {outcome.kind} | {text} |"


def _without_twins(rows: list[Row]) -> list[Row]:
    """Drops an `_async` method that does what its twin does."""
    seen = {(row.call, row.outcome) for row in rows}
    return [
        row
        for row in rows
        if "_async" not in row.call or (row.call.replace("_async", ""), row.outcome) not in seen
    ]


def render(document: str) -> str:
    """The document with its tables as they are now."""
    head, _, rest = document.partition(BEGIN)
    _, _, tail = rest.partition(END)
    assert tail, f"{DOCUMENT.name} needs the lines {BEGIN} and {END}"
    return f"{head}{BEGIN}\n\n{tables()}{END}{tail}"


def main() -> int:
    document = DOCUMENT.read_text()
    fresh = render(document)
    if "--check" in sys.argv[1:]:
        return int(fresh != document)
    DOCUMENT.write_text(fresh)
    return 0


if __name__ == "__main__":
    sys.exit(main())
