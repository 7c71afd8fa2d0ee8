"""CatalogService: what this server can do."""

from __future__ import annotations

import asyncio
import hashlib
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import grpc.aio

from backend.resources.builtin import BUILTIN_MODELS
from backend.resources.catalog import ModelSpec
from backend.resources.resources import Resources
from backend.trainer import model_directory
from together_post_training.errors import PostTrainingError, Reason, fail
from together_post_training.v1 import catalog_pb2 as pb
from together_post_training.v1 import catalog_pb2_grpc

Context = grpc.aio.ServicerContext

# As Tinker's clients split their calls.
MAX_CHUNK_SAMPLES = 1024
MAX_CHUNK_BYTES = 5_000_000

# What transformers' AutoTokenizer looks for in a directory; config.json tells it the kind of model.
_TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "tekken.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "vocab.txt",
    "chat_template.jinja",
    "chat_template.json",
    "config.json",
)


class CatalogService(catalog_pb2_grpc.CatalogServiceServicer):
    def __init__(self, resources: Resources) -> None:
        self._resources = resources

    async def ListModels(self, request: pb.ListModelsRequest, context: Context):
        listed = self._resources.catalog.listed
        if self._resources.catalog.load_on_demand:
            names = {spec.name for spec in listed}
            cached = await asyncio.to_thread(model_directory.cached_models)
            listed += tuple(ModelSpec(name=n, path=n) for n in cached if n not in names)
        waiting = [spec for spec in listed if self._resources.ready(spec.name) is None]
        lengths = await asyncio.to_thread(lambda: {s.name: _known_length(s) for s in waiting})
        models = [self._model(spec, lengths.get(spec.name)) for spec in listed]
        return pb.ListModelsResponse(models=models)

    async def GetTokenizer(self, request: pb.GetTokenizerRequest, context: Context):
        resource = await self._resources.get(request.base_model)
        if resource.tokenizer_dir is None:
            raise _no_tokenizer(request.base_model, resource.model.location)
        return await asyncio.to_thread(_read_tokenizer, resource.tokenizer_dir)

    async def GetServerInfo(self, request: pb.GetServerInfoRequest, context: Context):
        return pb.ServerInfo(
            version=server_version(),
            max_chunk_samples=MAX_CHUNK_SAMPLES,
            max_chunk_bytes=MAX_CHUNK_BYTES,
        )

    def _model(self, spec: ModelSpec, max_context_length: int | None) -> pb.Model:
        """`max_context_length`: where the model is not loaded, what is known of it."""
        resource = self._resources.ready(spec.name)
        if resource is None:
            known = BUILTIN_MODELS.get(spec.path)
            return pb.Model(
                name=spec.name,
                max_context_length=max_context_length,
                trainable=True,
                sampleable=True,
                vocab_size=None if known is None else known.vocab_size,
            )
        return pb.Model(
            name=spec.name,
            max_context_length=resource.model.limits.max_seq_length,
            trainable=True,
            sampleable=True,
            loaded=True,
            architecture=resource.model.architecture,
            vocab_size=resource.model.limits.vocab_size,
        )


def _known_length(spec: ModelSpec) -> int | None:
    """Of a model that is not loaded."""
    known = BUILTIN_MODELS.get(spec.path)
    return known.max_seq_length if known else model_directory.max_context_length(spec.path)


def _no_tokenizer(model: str, location: str) -> PostTrainingError:
    message = f"Model {model!r} has no tokenizer: send token ids."
    if location:
        message = (
            f"Model {model!r} has no tokenizer: {location} has none of "
            f"{', '.join(model_directory.TOKENIZER_FILES)}. Copy it there and start the server again, or send token "
            "ids."
        )
    return fail(Reason.UNIMPLEMENTED, message, model=model)


def server_version() -> str:
    try:
        return version("together-post-training")
    except PackageNotFoundError:
        return "unknown (not installed as a package)"


def _read_tokenizer(directory: Path) -> pb.GetTokenizerResponse:
    response = pb.GetTokenizerResponse()
    digest = hashlib.sha256()
    for name in _TOKENIZER_FILES:
        path = directory / name
        if path.is_file():
            data = path.read_bytes()
            response.files.add(filename=name, data=data)
            digest.update(f"{name}\0{len(data)}\0".encode() + data)
    response.digest = digest.hexdigest()
    return response
