"""Where a base model's files lie, and whether they are all there. Nothing is downloaded. No torch.

A directory wins over the hub's cache, as in transformers: what lies in ./Qwen/Qwen3-8B is Qwen/Qwen3-8B.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from huggingface_hub import constants, snapshot_download, try_to_load_from_cache
from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError
from safetensors import SafetensorError, safe_open

from backend.trainer.families import FAMILIES
from together_post_training.errors import PostTrainingError, Reason, fail

CONFIG = "config.json"
# Each of them is a tokenizer, or the most of one.
TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "tekken.json", "vocab.json", "vocab.txt")
_ADAPTER_CONFIG = "adapter_config.json"
# One of them, or an index of files with parts of it; in the order in which transformers looks.
_WEIGHTS = ("model.safetensors", "pytorch_model.bin")
_CACHE_PREFIX = "models--"


def find(source: str) -> Path:
    """The directory with a model's files, of which config.json is there; see `check_weights` for the others.

    Args:
        source: a directory (absolute, relative to where this process runs, or with ~), or the id of a model in the
            local Hugging Face cache.

    Raises:
        PostTrainingError: MODEL_NOT_FOUND, saying what is missing and where it was looked for.
    """
    directory = local_directory(source) or _cached_directory(source)
    if directory is None:
        raise _not_found(source)
    return directory


def local_directory(source: str) -> Path | None:
    """None: there is none of this name with a config.json."""
    path = _as_path(source)
    return path.resolve() if path is not None and _is_file(path / CONFIG) else None


def read_config(source: str, directory: Path) -> Mapping[str, Any]:
    """What config.json says. Raises INCOMPATIBLE_CHECKPOINT for one that says nothing."""
    try:
        config = json.loads((directory / CONFIG).read_bytes())
    except (OSError, ValueError) as error:
        raise damaged(source, directory, CONFIG, str(error)) from None
    if not isinstance(config, dict) or not isinstance(config.get("model_type"), str):
        raise damaged(source, directory, CONFIG, "it names no model_type")
    return config


def has_tokenizer(directory: Path) -> bool:
    return any(_is_file(directory / name) for name in TOKENIZER_FILES)


def cached_models() -> list[str]:
    """Those of the local Hugging Face cache that are whole, of architectures that can be trained; by name."""
    root = Path(constants.HF_HUB_CACHE)
    folders = sorted(root.glob(f"{_CACHE_PREFIX}*"))
    names = (path.name.removeprefix(_CACHE_PREFIX).replace("--", "/") for path in folders)
    return [name for name in names if _is_usable(name)]


def max_context_length(source: str) -> int | None:
    """What config.json says, for a model that is not loaded. None: it does not, or there is none."""
    directory = local_directory(source) or _cached_directory(source)
    if directory is None:
        return None
    try:
        length = read_config(source, directory).get("max_position_embeddings")
    except PostTrainingError:
        return None
    return length if isinstance(length, int) else None


def damaged(source: str, directory: Path, filename: str, what: str) -> PostTrainingError:
    return fail(
        Reason.INCOMPATIBLE_CHECKPOINT,
        f"Model {source!r}: {filename} in {directory} cannot be read: {what}. Copy or download it again.",
        model=source,
        directory=directory,
        file=filename,
    )


def check_weights(source: str, directory: Path) -> None:
    """Looks at names, sizes and headers, so that what a broken download left is told of by name.

    Raises:
        PostTrainingError: MODEL_NOT_FOUND for files that are missing, INCOMPATIBLE_CHECKPOINT for one that is cut off.
    """
    for name in _weight_files(source, directory):
        if not name.endswith(".safetensors"):
            continue
        try:
            with safe_open(directory / name, framework="numpy"):
                pass
        except (SafetensorError, OSError) as error:
            raise damaged(source, directory, name, str(error)) from None


def _is_usable(name: str) -> bool:
    try:
        directory = _cached_directory(name)
        if directory is None or read_config(name, directory)["model_type"] not in FAMILIES:
            return False
        _weight_files(name, directory)
    except PostTrainingError:
        return False
    return True


def _weight_files(source: str, directory: Path) -> list[str]:
    """Raises MODEL_NOT_FOUND, naming those that are missing."""
    for name in _WEIGHTS:
        if _is_file(directory / name):
            return [name]
        index = f"{name}.index.json"
        if _is_file(directory / index):
            names = _indexed(source, directory, index)
            if missing := [part for part in names if not _is_file(directory / part)]:
                raise _incomplete(source, directory, f"{', '.join(missing)}, which {index} names")
            return names
    raise _incomplete(
        source,
        directory,
        f"the weights: none of {', '.join(f'{name} and {name}.index.json' for name in _WEIGHTS)}",
    )


def _indexed(source: str, directory: Path, index: str) -> list[str]:
    try:
        parts = set(json.loads((directory / index).read_bytes())["weight_map"].values())
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise damaged(source, directory, index, repr(error)) from None
    return sorted(map(str, parts))


def _cached_directory(source: str) -> Path | None:
    try:
        if isinstance(path := try_to_load_from_cache(source, CONFIG), str):
            return Path(path).parent
        # Another revision than the main one, perhaps; or one whose config.json was never fetched.
        directory = Path(snapshot_download(source, local_files_only=True))
    except (LocalEntryNotFoundError, HFValidationError, OSError, ValueError):
        return None
    if not _is_file(directory / CONFIG):
        raise _incomplete(source, directory, CONFIG)
    return directory


def _incomplete(source: str, directory: Path, what: str) -> PostTrainingError:
    is_cached = Path(constants.HF_HUB_CACHE) in directory.parents
    remedy = f"run `hf download {source}`" if is_cached else "copy the whole model there"
    return fail(
        Reason.MODEL_NOT_FOUND,
        f"Model {source!r} is not whole: {directory} lacks {what}. Nothing is downloaded by itself: {remedy} on the "
        "machine of the server.",
        model=source,
        directory=directory,
    )


def _not_found(source: str) -> PostTrainingError:
    looked = [_why_not_local(source)]
    remedy = "give a directory with the model's files"
    if _is_repository(source):
        looked.append(f"the Hugging Face cache {constants.HF_HUB_CACHE} has no such model")
        remedy = f"run `hf download {source}` on the machine of the server, or {remedy}"
    return fail(
        Reason.MODEL_NOT_FOUND,
        f"Model {source!r} was not found: {', and '.join(looked)}. Nothing is downloaded by itself: {remedy}.",
        model=source,
    )


def _why_not_local(source: str) -> str:
    path = _as_path(source)
    if path is None or not _is_directory(path):
        return f"there is no directory {path or source}"
    if _is_file(path / _ADAPTER_CONFIG):
        return (
            f"{path} holds an adapter and no model (serve the model that it belongs to, and bring it in with "
            "`together-post-training import-adapter`)"
        )
    return f"{path} has no {CONFIG}"


def _as_path(source: str) -> Path | None:
    """Absolute. None: no path at all."""
    if not source or "\0" in source:
        return None
    try:
        return Path(source).expanduser().absolute()
    except RuntimeError:  # Of a user that there is not.
        return None


def _is_repository(source: str) -> bool:
    try:
        try_to_load_from_cache(source, CONFIG)
    except (HFValidationError, OSError, ValueError):
        return False
    return True


def _is_file(path: Path) -> bool:
    try:
        return path.is_file()
    except OSError:  # A name that is too long, or a directory that may not be read.
        return False


def _is_directory(path: Path) -> bool:
    try:
        return path.is_dir()
    except OSError:
        return False
