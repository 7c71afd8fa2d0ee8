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
from together_post_training.errors import Reason, fail
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
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "vocab.txt",
    "chat_template.jinja",
    "config.json",
)


class CatalogService(catalog_pb2_grpc.CatalogServiceServicer):
    def __init__(self, resources: Resources) -> None:
        self._resources = resources

    async def ListModels(self, request: pb.ListModelsRequest, context: Context):
        return pb.ListModelsResponse(
            models=[self._model(spec) for spec in self._resources.catalog.listed]
        )

    async def GetTokenizer(self, request: pb.GetTokenizerRequest, context: Context):
        resource = await self._resources.get(request.base_model)
        if resource.tokenizer_dir is None:
            raise fail(
                Reason.UNIMPLEMENTED,
                f"Model {request.base_model!r} has no tokenizer: send token ids.",
                model=request.base_model,
            )
        return await asyncio.to_thread(_read_tokenizer, resource.tokenizer_dir)

    async def GetServerInfo(self, request: pb.GetServerInfoRequest, context: Context):
        return pb.ServerInfo(
            version=server_version(),
            max_chunk_samples=MAX_CHUNK_SAMPLES,
            max_chunk_bytes=MAX_CHUNK_BYTES,
        )

    def _model(self, spec: ModelSpec) -> pb.Model:
        resource = self._resources.ready(spec.name)
        if resource is None:
            known = BUILTIN_MODELS.get(spec.path)
            return pb.Model(
                name=spec.name,
                max_context_length=None if known is None else known.max_seq_length,
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
