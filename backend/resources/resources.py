"""The model resources of this server: opened once each, shared by everyone who asks."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable

from backend.resources.catalog import Catalog, ModelSpec, split_variant
from backend.resources.resource import Resource, resource_id
from together_post_training.errors import Reason, fail

log = logging.getLogger(__name__)


class Resources:
    """Owned by the event loop."""

    def __init__(
        self, catalog: Catalog, open_resource: Callable[[ModelSpec], Awaitable[Resource]]
    ) -> None:
        self.catalog = catalog
        self._open = open_resource
        self._opening: dict[str, asyncio.Task[Resource]] = {}
        self._ready: dict[str, Resource] = {}

    async def get(self, base_model: str) -> Resource:
        """The model's resource, once it is loaded.

        Raises:
            PostTrainingError: MODEL_NOT_FOUND, also for a variant with a longer window than the model has, or what kept
                the model from being loaded.
        """
        ready = self._ready.get(base_model)
        if ready is not None:
            return ready
        spec = self.catalog.resolve(base_model)
        resource = self._ready.get(spec.name) or await self._load(spec)
        if spec.name != base_model:
            _check_window(base_model, resource)
        return resource

    async def open_all(self) -> None:
        for spec in self.catalog.specs:
            await self.get(spec.name)

    def ready(self, base_model: str) -> Resource | None:
        return self._ready.get(base_model)

    def all_ready(self) -> list[Resource]:
        return list(self._ready.values())

    def by_id(self, wanted: str) -> Resource:
        """Raises MODEL_NOT_FOUND."""
        for resource in self._ready.values():
            if resource.id == wanted:
                return resource
        raise fail(
            Reason.MODEL_NOT_FOUND,
            f"Unknown model resource {wanted!r}: loaded are "
            + (", ".join(f"{resource_id(n)} ({n})" for n in self._ready) or "none")
            + ".",
            id=wanted,
        )

    async def close(self) -> None:
        for resource in self._ready.values():
            await resource.close()

    async def _load(self, spec: ModelSpec) -> Resource:
        task = self._opening.get(spec.name)
        if task is None:
            task = asyncio.create_task(self._open_once(spec), name=f"open {spec.name}")
            self._opening[spec.name] = task
        # Whoever hangs up leaves the model to the others who wait for it.
        return await asyncio.shield(task)

    async def _open_once(self, spec: ModelSpec) -> Resource:
        log.info("loading %r", spec.name)
        try:
            resource = await self._open(spec)
        finally:
            del self._opening[spec.name]
        self._ready[spec.name] = resource
        self.catalog.add(spec)
        log.info("loaded %r", spec.name)
        return resource


def _check_window(base_model: str, resource: Resource) -> None:
    _, wanted = split_variant(base_model)
    window = resource.model.limits.max_seq_length
    if wanted is not None and wanted > window:
        raise fail(
            Reason.MODEL_NOT_FOUND,
            f"Base model {base_model!r} asks for a window of {wanted} tokens, and {resource.name!r} has {window}. Ask "
            f"for that, or start the server with --model {base_model}=PATH and a model whose config.json has the "
            "window.",
            model=base_model,
            window=window,
            wanted=wanted,
        )
