"""A model's tokenizer: from its own directory, or from the server. Never from a hub."""

from __future__ import annotations

import functools
import os
import shutil
import tempfile
from collections.abc import Mapping
from concurrent.futures import Future
from pathlib import Path
from typing import Any

from tinker_compat.holder import Holder
from together_post_training.client.channel import Connection
from together_post_training.errors import Reason, fail
from together_post_training.v1 import catalog_pb2

_CACHE_VARIABLE = "TOGETHER_POST_TRAINING_CACHE"
# Paths, and models of the server's own.
_WITHOUT_VARIANTS = ("builtin:", "/", ".", "~")
_MARKERS = ("tokenizer.json", "tokenizer.model", "tekken.json", "vocab.json", "vocab.txt")


def get_tokenizer(holder: Holder, base_model: str) -> Any:
    """The transformers tokenizer of a model; loaded once.

    Raises:
        NotFoundError: where the server does not know the model, or the model has no tokenizer.
        ImportError: without transformers.
    """
    if base_model not in holder.tokenizers:
        directory = local_directory(base_model)
        if directory is None:
            cache = cache_directory(os.environ)
            fetched = holder.start(fetch(holder.connection, base_model, cache))
            # Not fetched.result(): async programs call this too, and have no other way.
            directory = Future.result(fetched)
        holder.tokenizers[base_model] = _load(directory)
    return holder.tokenizers[base_model]


def local_directory(base_model: str) -> Path | None:
    """The model's directory, if it is one of this machine and holds a tokenizer.

    What a name says of a variant (`org/model:peft:131072`) is no part of a tokenizer's.
    """
    names = [base_model]
    if not base_model.startswith(_WITHOUT_VARIANTS):
        names.append(base_model.partition(":")[0])
    for name in filter(None, names):
        directory = os.path.expanduser(name)
        if any(os.path.isfile(os.path.join(directory, marker)) for marker in _MARKERS):
            return Path(directory).absolute()
    return None


def cache_directory(environ: Mapping[str, str]) -> Path:
    """Where tokenizers are kept, by digest."""
    if environ.get(_CACHE_VARIABLE):
        return Path(environ[_CACHE_VARIABLE]) / "tokenizers"
    base = environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "together-post-training" / "tokenizers"


async def fetch(connection: Connection, base_model: str, cache: Path) -> Path:
    """A directory that holds the model's tokenizer, as the server gave it."""
    request = catalog_pb2.GetTokenizerRequest(base_model=base_model)
    return store(await connection.call("catalog.GetTokenizer", request), cache)


def store(reply: catalog_pb2.GetTokenizerResponse, cache: Path) -> Path:
    """Writes the files under the digest's name, whole or not at all.

    Raises:
        PostTrainingError: INTERNAL, for names that would leave the directory.
    """
    for name in (reply.digest, *(file.filename for file in reply.files)):
        if not name or name.startswith(".") or Path(name).name != name or "\\" in name:
            raise fail(Reason.INTERNAL, f"The server sent a tokenizer file named {name!r}.")
    directory = cache / reply.digest
    if directory.is_dir():
        return directory
    cache.mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(prefix=".incomplete-", dir=cache))
    try:
        for file in reply.files:
            (scratch / file.filename).write_bytes(file.data)
        scratch.rename(directory)
    except OSError:
        # Another process may have been faster.
        if not directory.is_dir():
            raise
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    return directory


@functools.lru_cache(maxsize=32)
def _load(directory: Path) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(
        os.fspath(directory), local_files_only=True, trust_remote_code=False
    )
