"""What each of Tinker's names and parameters is here. Pure: from surfaces and observations to findings."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum

from tools.compatibility.calls import Fates, Outcome
from tools.compatibility.observe import Observation, client_name
from tools.compatibility.probes import internal
from tools.compatibility.surface import Member, Name, Parameter, Surface


class Verdict(Enum):
    SAME = "same"
    SUPERSET = "superset"
    WARNED = "warned"
    REFUSED = "refused"
    # Between two versions of Tinker's own objects.
    CHANGED = "changed by Tinker"
    INTERNAL = "not for callers"
    GAP = "unaccounted for"


_OF_OUTCOMES = {
    "accepted": Verdict.SAME,
    "warns": Verdict.WARNED,
    "refused": Verdict.REFUSED,
    "broken": Verdict.GAP,
}


@dataclass(frozen=True, slots=True)
class Finding:
    """subject: a path, "Client.method" or "Client.method(parameter)". text: why, or what is different."""

    subject: str
    verdict: Verdict
    text: str = ""

    @property
    def group(self) -> str:
        """The class or module that it is listed under."""
        return self.subject.partition("(")[0].rpartition(".")[0] or "tinker"


def compare(theirs: Surface, seen: Observation) -> list[Finding]:
    """Everything that a script for that version may write, beside the installed version that was seen."""
    found = [f for path, name in theirs.names.items() for f in _name(path, name, theirs, seen)]
    if seen.installed == theirs.version:
        found += [_of_outcome(field, outcome) for field, outcome in seen.fields.items()]
    return found


def _name(path: str, name: Name, theirs: Surface, seen: Observation) -> Iterator[Finding]:
    ours = seen.ours.names.get(path)
    client = client_name(path, name)
    if ours is None:
        yield Finding(path, Verdict.GAP, "is not there")
    elif ours.kind != name.kind:
        yield Finding(path, Verdict.GAP, f"is a {ours.kind}, not a {name.kind}")
    elif name.first != path:
        yield _alias(path, name, ours, seen)
    elif client is not None:
        yield from _client(client, name, ours, seen.fates[theirs.version])
    elif ours.is_genuine and seen.installed == theirs.version:
        yield Finding(path, Verdict.SAME)
    else:
        yield from _other(path, name, ours)


def _alias(path: str, name: Name, ours: Name, seen: Observation) -> Finding:
    first = seen.ours.names.get(name.first)
    if first is None or first.first != ours.first:
        return Finding(path, Verdict.GAP, f"is another object than {name.first}")
    return Finding(path, Verdict.SAME)


def _client(client: str, name: Name, ours: Name, fates: dict[str, Fates]) -> Iterator[Finding]:
    yield Finding(client, Verdict.SAME)
    constructor = f"{client}.__init__"
    yield from _method(constructor, name.parameters, ours.parameters, fates)
    is_refused = constructor in fates and fates[constructor].plain.kind == "refused"
    for member, its in name.members.items():
        subject = f"{client}.{member}"
        mine = ours.members.get(member)
        if is_refused:
            yield Finding(subject, Verdict.REFUSED, fates[constructor].plain.text)
        elif reason := internal(subject):
            yield Finding(subject, Verdict.INTERNAL, reason)
        elif its.kind == "property":
            # What is set when a client is made is not on its class.
            yield _of_outcome(subject, fates[subject].plain)
        elif mine is None:
            yield Finding(subject, Verdict.GAP, "is not there")
        elif wrong := _kind(its, mine):
            yield Finding(subject, Verdict.GAP, wrong)
        elif member.startswith("__") or its.kind == "attribute":
            yield Finding(subject, Verdict.SAME)
        else:
            yield from _method(subject, its.parameters, mine.parameters, fates)


def _method(
    subject: str,
    theirs: tuple[Parameter, ...],
    ours: tuple[Parameter, ...],
    fates: dict[str, Fates],
) -> Iterator[Finding]:
    if reason := internal(subject, theirs):
        yield Finding(subject, Verdict.INTERNAL, reason)
        return
    known = fates[subject]
    outcome = known.plain
    more = _more(theirs, ours)
    if outcome.kind == "accepted" and more:
        yield Finding(subject, Verdict.SUPERSET, f"also takes {', '.join(more)}")
    else:
        yield _of_outcome(subject, outcome)
    for name, of_parameter in known.parameters.items():
        yield _of_parameter(f"{subject}({name})", name, of_parameter, theirs, ours)


def _of_parameter(
    subject: str,
    name: str,
    outcome: Outcome,
    theirs: tuple[Parameter, ...],
    ours: tuple[Parameter, ...],
) -> Finding:
    needed, optional = ({p.name for p in ps if p.default is None} for ps in (theirs, ours))
    if outcome.kind == "accepted" and name in needed and name not in optional:
        defaults = {p.name: p.default for p in ours}
        if name in defaults:
            return Finding(subject, Verdict.SUPERSET, f"may be left out ({defaults[name]})")
    return _of_outcome(subject, outcome)


def _of_outcome(subject: str, outcome: Outcome) -> Finding:
    return Finding(subject, _OF_OUTCOMES[outcome.kind], outcome.text)


def _more(theirs: tuple[Parameter, ...], ours: tuple[Parameter, ...]) -> list[str]:
    """Parameters that only ours have, if ours names them."""
    known = {p.name for p in theirs}
    return [p.name for p in ours if p.name not in known and not p.kind.startswith("VAR_")]


def _kind(theirs: Member, ours: Member) -> str | None:
    """What is wrong with it. Properties may be attributes."""
    is_called = [its.kind in ("method", "coroutine") for its in (theirs, ours)]
    if is_called[0] != is_called[1] or (is_called[0] and theirs.kind != ours.kind):
        return f"is a {ours.kind}, not a {theirs.kind}"
    return None


def _other(path: str, name: Name, ours: Name) -> Iterator[Finding]:
    """An object of ours in the place of Tinker's, or one of Tinker's of another version."""
    wrong = Verdict.CHANGED if ours.is_genuine else Verdict.GAP
    differences = [*_parameters(name, ours), *_members(name, ours)]
    if name.value != ours.value:
        differences.append(f"is {ours.value}, not {name.value}")
    if differences:
        yield Finding(path, wrong, "; ".join(differences))
    else:
        yield Finding(path, Verdict.SAME)


def _parameters(theirs: Name, ours: Name) -> Iterator[str]:
    mine = {p.name: p for p in ours.parameters}
    if any(p.kind.startswith("VAR_") for p in ours.parameters) or internal("", theirs.parameters):
        return
    for place, parameter in enumerate(theirs.parameters):
        if parameter.kind.startswith("VAR_") or parameter.name.startswith("_"):
            continue
        found = mine.pop(parameter.name, None)
        if found is None:
            yield f"no {parameter.name}"
        elif found.default is None and parameter.default is not None:
            yield f"{parameter.name} must be given"
        elif parameter.kind == "POSITIONAL_OR_KEYWORD" and (
            found.kind != parameter.kind or ours.parameters.index(found) != place
        ):
            yield f"{parameter.name} is in another place"
    for parameter in mine.values():
        if parameter.default is None and not parameter.kind.startswith("VAR_"):
            yield f"{parameter.name} must be given, too"


def _members(theirs: Name, ours: Name) -> Iterator[str]:
    for member, its in theirs.members.items():
        mine = ours.members.get(member)
        if mine is None:
            yield f"no {member}"
        elif wrong := _kind(its, mine):
            yield f"{member} {wrong}"
