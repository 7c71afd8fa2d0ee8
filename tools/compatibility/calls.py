"""Calls methods of this package's clients and says what came of it: the one place that knows how."""

from __future__ import annotations

import ast
import asyncio
import contextlib
import inspect
import os
import re
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

import tinker
from tinker import types

import tinker_compat
from tools.compatibility.probes import (
    ADDRESS,
    ALONG,
    ALTERNATIVES,
    NEEDED,
    PROBES,
    SO_ANYWAY,
    lookup,
)
from tools.compatibility.recorder import MODEL, Recorder, without_ids
from tools.compatibility.surface import Parameter

CLIENTS = ("ServiceClient", "TrainingClient", "SamplingClient", "RestClient")
_REFUSALS = (tinker.TinkerError, ValueError, TypeError, AttributeError)
_TIMEOUT_S = 30.0


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a call did: "accepted", "warns" or "refused", and the words it used. "broken": it cannot be called so."""

    kind: str
    text: str = ""


ACCEPTED = Outcome("accepted")


@dataclass(frozen=True, slots=True)
class Call:
    """effect: what was sent to the server, and what was returned. told: warnings."""

    outcome: Outcome
    effect: str = ""
    told: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Fates:
    """What becomes of a method's parameters; only of the plain call, where that is refused already."""

    plain: Outcome
    parameters: dict[str, Outcome]


def fates(call: str, parameters: Sequence[Parameter]) -> Fates:
    """Of a method such as "TrainingClient.forward": calls ours as callers of Tinker's with these parameters may.

    Each parameter is given by name, with a value other than the default; by its place, behind the defaults of those
    before it; and with its default. The three must fit together, and the first must have an effect.
    """
    method = Method(call, parameters)
    if unknown := [name for name in method.required() if not lookup(PROBES, call, name)]:
        nothing = Outcome("broken", f"nothing is known to give as {', '.join(unknown)}")
        return Fates(nothing, {p.name: nothing for p in parameters})
    plain = method.call(method.required())
    if plain.outcome.kind in ("refused", "broken"):
        return Fates(
            plain.outcome, {p.name: method.binding(p) or plain.outcome for p in parameters}
        )
    found = {p.name: method.fate(p, plain) for p in parameters}
    return Fates(plain.outcome, found)


def is_there(call: str) -> bool:
    client, _, member = call.partition(".")
    return hasattr(getattr(tinker_compat, client, None), member)


def method(call: str) -> Callable[[Mapping[str, Any]], Call]:
    """A method, to be called by what differs from the plain call."""
    given = {
        name: lookup(PROBES, call, name)[0]
        for name, parameter in inspect.signature(_target(call)).parameters.items()
        if parameter.default is parameter.empty
    }
    return lambda more: run(call, (), given | dict(more))


def property_fate(call: str) -> Outcome:
    """Of what is read from a client."""
    client, _, name = call.partition(".")
    try:
        with Recorder().in_place():
            getattr(make_client(client), name)
    except AttributeError:
        return Outcome("broken", "is not there")
    except tinker.TinkerError as error:
        return Outcome("refused", str(error))
    return ACCEPTED


class Method:
    def __init__(self, call: str, parameters: Sequence[Parameter]) -> None:
        self._call = call
        self._parameters = parameters
        self._alternatives: tuple[str, ...] = lookup(ALTERNATIVES, call, "") or ()

    def required(self, but_for: str = "") -> list[str]:
        """What must be given beside a parameter."""
        needed = [p.name for p in self._parameters if p.default is None and not is_variable(p)]
        needed = needed or list(self._alternatives[:1])
        needed += lookup(NEEDED, self._call, "") or ()
        both = set(self._alternatives) if but_for in self._alternatives else set()
        return [name for name in needed if name not in both | {but_for}]

    def fate(self, parameter: Parameter, plain: Call) -> Outcome:
        name = parameter.name
        if broken := self.binding(parameter):
            return broken
        values = lookup(PROBES, self._call, name)
        if not values:
            return Outcome("broken", "nothing is known to call it with")
        value = values[-1]
        along = lookup(ALONG, self._call, name) or ()
        more = dict(value) if is_variable(parameter) else {name: value}
        given = self.call([*self.required(name), *along], more)
        before = self.call([*self.required(), *along]) if along else plain
        if name in (lookup(NEEDED, self._call, "") or ()):
            before = Call(ACCEPTED)
        outcome = difference(before, given) or without_effect(self._call, name)
        if outcome.kind == "broken" or is_variable(parameter) or along:
            return outcome
        return self._by_place(parameter, value, given) or self._default(parameter, plain) or outcome

    def binding(self, parameter: Parameter) -> Outcome | None:
        """Whether our signature has it at all."""
        try:
            signature = inspect.signature(_target(self._call))
            if parameter.kind == "VAR_KEYWORD":
                signature.bind_partial(no_such_parameter=1)
            elif not is_variable(parameter):
                signature.bind_partial(**{parameter.name: 1})
        except (AttributeError, TypeError) as error:
            return Outcome("broken", str(error))
        return None

    def _by_place(self, parameter: Parameter, value: Any, by_name: Call) -> Outcome | None:
        """The same call with everything up to this parameter given by place. None: it is the same."""
        if not parameter.kind.startswith("POSITIONAL"):
            return None
        before = self._parameters[: self._parameters.index(parameter)]
        needed = self.required(parameter.name)
        arguments: list[Any] = []
        for earlier in before:
            if earlier.name in needed:
                arguments.append(lookup(PROBES, self._call, earlier.name)[0])
            elif (default := literal(earlier.default or "")) is not ...:
                arguments.append(default)
            else:
                return None
        later = [name for name in needed if name not in {p.name for p in before}]
        by_place = self.call(later, positional=[*arguments, value])
        if by_place == by_name:
            return None
        return Outcome("broken", f"means something else by its place: {by_place.outcome.text}")

    def _default(self, parameter: Parameter, plain: Call) -> Outcome | None:
        """Giving the default must be as giving nothing. None: it is."""
        default = literal(parameter.default or "")
        is_needed = parameter.name in (lookup(NEEDED, self._call, "") or ())
        if default is ... or is_needed or parameter.name in self._alternatives:
            return None
        given = self.call(self.required(parameter.name), {parameter.name: default})
        if given == plain:
            return None
        if given.outcome.kind == "warns":
            return given.outcome
        return Outcome(
            "broken", f"its default, {parameter.default}, is not what is done without it"
        )

    def call(
        self,
        names: Iterable[str],
        more: Mapping[str, Any] | None = None,
        positional: Sequence[Any] = (),
    ) -> Call:
        given = {name: lookup(PROBES, self._call, name)[0] for name in names} | dict(more or {})
        return run(self._call, positional, given)


def difference(before: Call, after: Call) -> Outcome | None:
    """What one more parameter brought about. None: nothing."""
    if after.outcome.kind in ("refused", "broken"):
        return after.outcome
    new = [text for text in after.told if text not in before.told]
    if new:
        return Outcome("warns", new[-1])
    return ACCEPTED if after.effect != before.effect else None


def literal(text: str) -> Any:
    """A default's value, or ... where it is no plain one."""
    try:
        return ast.literal_eval(text)
    except (SyntaxError, ValueError):
        return ...


def is_variable(parameter: Parameter) -> bool:
    return parameter.kind.startswith("VAR_")


def without_effect(call: str, name: str) -> Outcome:
    reason = lookup(SO_ANYWAY, call, name)
    return Outcome("accepted", reason) if reason else Outcome("broken", "has no effect")


def _target(call: str) -> Any:
    client, _, method = call.partition(".")
    cls = getattr(tinker_compat, client)
    # A class's own signature lacks `self`.
    return cls if method == "__init__" else _Bound(cls, method).signed


class _Bound:
    """A method as its callers see it, without an object."""

    def __init__(self, cls: type, name: str) -> None:
        static = inspect.getattr_static(cls, name)
        function = getattr(cls, name)
        is_bound = isinstance(static, staticmethod | classmethod)
        self.signed = function if is_bound else function.__get__(object.__new__(cls))


def run(call: str, positional: Sequence[Any], given: Mapping[str, Any]) -> Call:
    """A method of a fresh client that is connected to nobody."""
    recorder = Recorder()
    with (
        _without_environment(),
        recorder.in_place(),
        warnings.catch_warnings(record=True) as caught,
    ):
        warnings.simplefilter("ignore")
        returned = ""
        try:
            function = _method(call, recorder)
            recorder.sent.clear()
            warnings.simplefilter("always")
            returned = _described(_settled(function(*positional, **given)))
        except _REFUSALS as error:
            # Answers are made up: what cannot be made of them is no refusal.
            if isinstance(error, tinker.TinkerError) or not recorder.sent:
                return Call(_refusal(error, call, given))
    effect = without_ids("\n".join([*recorder.sent, returned]))
    told = [without_ids(str(warning.message)) for warning in caught if _is_ours(warning)]
    return Call(Outcome("warns", told[-1]) if told else ACCEPTED, effect, tuple(told))


def _refusal(error: Exception, call: str, given: Mapping[str, Any]) -> Outcome:
    """Errors that speak of something else are accidents."""
    text = without_ids(str(error))
    types_named = [name for name in re.findall(r"[A-Z]\w+", text) if hasattr(types, name)]
    names = [*call.split("."), *given, *types_named]
    if isinstance(error, tinker.TinkerError) or any(name in text for name in names):
        return Outcome("refused", text)
    return Outcome("broken", f"fails with {type(error).__name__}: {text}")


def _is_ours(warning: warnings.WarningMessage) -> bool:
    return not issubclass(warning.category, ResourceWarning)


@contextlib.contextmanager
def _without_environment():
    """Nobody's settings decide what is written down."""
    kept = dict(os.environ)
    for name in kept:
        if name.startswith(("TINKER_", "TOGETHER_")):
            del os.environ[name]
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(kept)


def _method(call: str, recorder: Recorder) -> Callable[..., Any]:
    client, _, name = call.partition(".")
    if name == "__init__":
        return getattr(tinker_compat, client)
    made = make_client(client)
    if call == "ServiceClient.close":
        # Whether it waits is the one difference between one status and another.
        made.holder.start_operation(_unfinished(recorder), lambda: None, lambda: None)
    return getattr(made, name)


def make_client(name: str) -> Any:
    service = tinker_compat.ServiceClient(base_url=ADDRESS, api_key="tml-key")
    return {
        "ServiceClient": lambda: service,
        "TrainingClient": lambda: service.create_lora_training_client(MODEL).result(_TIMEOUT_S),
        "SamplingClient": lambda: service.create_sampling_client(base_model=MODEL).result(
            _TIMEOUT_S
        ),
        "RestClient": lambda: tinker_compat.RestClient(service.holder),
    }[name]()


async def _unfinished(recorder: Recorder) -> None:
    """An operation that nobody waits for, but who says so."""
    await asyncio.sleep(0.02)
    recorder.sent.append("the last operation has ended")


def _settled(result: Any) -> Any:
    """What a caller ends up with, having waited for everything."""
    if inspect.iscoroutine(result):
        result = asyncio.run(result)
    if isinstance(result, tinker.APIFuture):
        result = result.result(_TIMEOUT_S)
    return result.result(_TIMEOUT_S) if isinstance(result, Future) else result


def _described(result: Any) -> str:
    """What can be seen of a result; a client is used once."""
    holder = getattr(result, "holder", None)
    if holder is None:
        return f"{result!r} {getattr(getattr(result, 'graph', None), 'code', '')}"
    connection = holder.connection
    if isinstance(result, tinker_compat.ServiceClient):
        result.create_lora_training_client(MODEL).result(_TIMEOUT_S)
    elif isinstance(result, tinker_compat.SamplingClient):
        result.get_base_model()
        prompt = tinker.ModelInput.from_ints([1])
        with contextlib.suppress(ValueError, AttributeError):
            result.sample(prompt, 1, tinker.SamplingParams()).result(_TIMEOUT_S)
    server = getattr(connection.server, "address", "embedded")
    return f"{type(result).__name__} {server} {connection.key} {connection.headers}"
