"""Which base models this server serves, under which names.

A name may say more than the model: `org/model:peft:131072` is `org/model`, with a window of 131072 tokens.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from backend.resources.builtin import BUILTIN_MODELS
from together_post_training.errors import PostTrainingError, Reason, fail

_WITHOUT_VARIANTS = ("builtin:", "/", ".", "~")


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


def split_variant(name: str) -> tuple[str, int | None]:
    """(the model's name, the window that the variant asks for, in tokens). Paths and builtin models have none."""
    if name.startswith(_WITHOUT_VARIANTS):
        return name, None
    model, *variant = name.split(":")
    window = variant[-1] if variant else ""
    return model, int(window) if window.isascii() and window.isdigit() else None


class Catalog:
    """`load_on_demand`: any model that the engines find is served when it is asked for.

    trusts_paths: the server runs where its one client does, so that relative paths may lead anywhere.
    """

    def __init__(
        self, specs: tuple[ModelSpec, ...], *, load_on_demand: bool, trusts_paths: bool = False
    ) -> None:
        self._specs = {spec.name: spec for spec in specs}
        self.load_on_demand = load_on_demand
        self._trusts_paths = trusts_paths

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
        """The model of this name, or the one that it is a variant of.

        Raises:
            PostTrainingError: MODEL_NOT_FOUND, with the names of those that are served.
        """
        spec = self._specs.get(name) or self._specs.get(split_variant(name)[0])
        if spec is not None:
            return spec
        if not self.load_on_demand or not name or "\0" in name:
            raise self._unknown(name)
        if ".." in Path(name).parts and not self._trusts_paths:
            raise self._unknown(name)
        # A directory may be called anything.
        is_directory = os.path.isfile(os.path.join(name, "config.json"))
        model = name if is_directory else split_variant(name)[0]
        return ModelSpec(name=model, path=model)

    def canonical(self, name: str) -> str:
        """What `resolve` calls a model of this name that is served; others keep their name."""
        return name if name in self._specs else split_variant(name)[0]

    def add(self, spec: ModelSpec) -> None:
        """One that was loaded on demand is served from then on."""
        self._specs.setdefault(spec.name, spec)

    def _unknown(self, name: str) -> PostTrainingError:
        served = ", ".join(spec.name for spec in self.listed) or "none yet"
        hint = (
            "Ask for one of those, or for any model that this server can find: a directory on its machine (absolute, "
            "or relative without '..'), or a Hugging Face id in its cache."
            if self.load_on_demand
            else "Ask for one of those, or start the server with --model or --load-on-demand."
        )
        return fail(
            Reason.MODEL_NOT_FOUND,
            f"Unknown base model {name!r}: this server serves {served}. {hint}",
            model=name,
            served=served,
        )
