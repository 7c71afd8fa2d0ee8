"""Which base models this server serves, under which names."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from backend.resources.builtin import BUILTIN_MODELS
from together_post_training.errors import PostTrainingError, Reason, fail


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSpec:
    """name: what clients ask for. path: a builtin model, a directory, or a Hugging Face id."""

    name: str
    path: str


def parse_spec(text: str) -> ModelSpec:
    """`NAME` or `NAME=PATH`.

    Raises:
        ValueError: for an empty part.
    """
    name, separator, path = text.partition("=")
    if not name or (separator and not path):
        raise ValueError(f"--model {text!r}: expected NAME or NAME=PATH")
    return ModelSpec(name=name, path=path or name)


class Catalog:
    """`load_on_demand`: any model that the engines find is served when it is asked for."""

    def __init__(self, specs: tuple[ModelSpec, ...], *, load_on_demand: bool) -> None:
        self._specs = {spec.name: spec for spec in specs}
        self.load_on_demand = load_on_demand

    @property
    def specs(self) -> tuple[ModelSpec, ...]:
        return tuple(self._specs.values())

    @property
    def listed(self) -> tuple[ModelSpec, ...]:
        """With the builtin models, where they are loaded on demand."""
        if not self.load_on_demand:
            return self.specs
        builtin = (model.name for model in BUILTIN_MODELS.values() if model.is_installed)
        unnamed = (name for name in builtin if name not in self._specs)
        return self.specs + tuple(ModelSpec(name=name, path=name) for name in unnamed)

    def resolve(self, name: str) -> ModelSpec:
        """Raises MODEL_NOT_FOUND, with the names of those that are served."""
        if name in self._specs:
            return self._specs[name]
        if self.load_on_demand and name and not _escapes(name):
            return ModelSpec(name=name, path=name)
        raise self._unknown(name)

    def add(self, spec: ModelSpec) -> None:
        """One that was loaded on demand is served from then on."""
        self._specs.setdefault(spec.name, spec)

    def _unknown(self, name: str) -> PostTrainingError:
        served = ", ".join(spec.name for spec in self.listed) or "none yet"
        hint = (
            "Ask for one of those, or for any model that this server can find."
            if self.load_on_demand
            else "Ask for one of those, or start the server with --model or --load-on-demand."
        )
        return fail(
            Reason.MODEL_NOT_FOUND,
            f"Unknown base model {name!r}: this server serves {served}. {hint}",
            model=name,
            served=served,
        )


def _escapes(name: str) -> bool:
    """Relative paths of a client would be looked up where the server happens to run."""
    return ".." in Path(name).parts or "\0" in name
