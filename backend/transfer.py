"""`import-adapter` and `export`: weights into a store and out of it, in formats that other programs read and write.

Neither needs a server; one may be using the store meanwhile.
"""

from __future__ import annotations

import argparse
import re
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from backend.checkpoints.manifest import ADAPTER_WEIGHTS, PEFT_CONFIG, Manifest
from backend.config import DEFAULT_STORE
from backend.resources.builtin import BIGRAM, BUILTIN_MODELS
from backend.resources.catalog import ModelSpec
from backend.trainer.base import Adapter
from together_post_training.errors import PostTrainingError, Reason, fail
from together_post_training.names import (
    CheckpointPath,
    check_checkpoint_name,
    check_session_id,
    parse_checkpoint_path,
)

if TYPE_CHECKING:
    from backend.checkpoints.store import CheckpointStore, LoadedCheckpoint

_DTYPES = ("float32", "bfloat16", "float16")


def add_commands(commands, model: Callable[[str], ModelSpec]) -> None:
    """`commands`: argparse's subparsers. `model`: reads NAME[=PATH]."""
    adopt = commands.add_parser(
        "import-adapter", help="make a checkpoint of an adapter that PEFT saved"
    )
    adopt.add_argument("directory", type=Path, help="adapter_config.json and *.safetensors in it")
    adopt.add_argument(
        "--model",
        type=model,
        required=True,
        metavar="NAME[=PATH]",
        help="the base model, as the server that will use it calls it",
    )
    adopt.add_argument("--session", default="imported", help="the first part of its path")
    adopt.add_argument("--name", help="the last part of its path (default: the directory's name)")
    adopt.set_defaults(run=import_adapter)
    export = commands.add_parser("export", help="write a checkpoint as a Hugging Face directory")
    export.add_argument("path", help="tinker://... as saving it returned")
    export.add_argument("directory", type=Path, help="what to make; it must not exist, or be empty")
    export.add_argument(
        "--model", type=model, metavar="NAME[=PATH]", help="where the base model is"
    )
    how = export.add_mutually_exclusive_group()
    how.add_argument(
        "--merged", action="store_true", help="a model with the adapter in its weights (default)"
    )
    how.add_argument("--adapter", action="store_true", help="the adapter alone, for PEFT")
    export.add_argument("--dtype", choices=_DTYPES, help="of a merged model (default: float32)")
    export.set_defaults(run=export_checkpoint)
    for command in (adopt, export):
        command.add_argument("--store", type=Path, default=DEFAULT_STORE, help="the server's store")


def import_adapter(options: argparse.Namespace) -> str:
    """Returns the checkpoint's path. See `import_peft.read_adapter` for what is refused."""
    # Here and below: the command line also works where only the client is installed.
    from backend.checkpoints.import_peft import read_adapter
    from backend.checkpoints.store import CheckpointStore

    name = check_checkpoint_name(options.name or _name_of(options.directory))
    base = _base_directory(options.model)
    imported = read_adapter(options.directory, base)
    manifest = Manifest(
        session=check_session_id(options.session),
        name=name,
        kind="inference",
        base_model=options.model.name,
        weights=imported.adapter.lora,
        policy_version=0,
        create_time_s=time.time(),
        expire_time_s=None,
        user_metadata={},
    )
    location = str(base) if base else imported.base_model
    root = _root(options.store)
    root.mkdir(parents=True, exist_ok=True, mode=0o700)
    store = CheckpointStore(root / "checkpoints", time.time)
    with _saying(Reason.CHECKPOINT_EXISTS, "Here, --name and --session choose another name."):
        store.save(manifest, imported.adapter, None, overwrite=False, base_location=location)
    return str(manifest.path)


def export_checkpoint(options: argparse.Namespace) -> str:
    """Returns the directory's path."""
    from backend.checkpoints.store import CheckpointStore
    from backend.trainer import export

    path = parse_checkpoint_path(options.path)
    root = _root(options.store)
    if not (root / "checkpoints").is_dir():
        raise fail(Reason.CHECKPOINT_NOT_FOUND, f"There is no store at {root}.", store=root)
    export.check_free(options.directory)
    store = CheckpointStore(root / "checkpoints", time.time)
    with _saying(Reason.CHECKPOINT_NOT_FOUND, f"The store is {root}; --store names another."):
        loaded = store.load(path, optimizer=False)
    if options.adapter:
        _check_adapter_alone(options, loaded)
        with export.directory_to_fill(options.directory) as scratch:
            _copy_adapter(store, path, scratch)
    else:
        spec = _spec(options.model, loaded.manifest)
        export.export_merged(
            loaded.weights,
            options.directory,
            base=spec.name,
            path=spec.path,
            dtype=options.dtype or "float32",
        )
    return str(options.directory)


def _copy_adapter(store: CheckpointStore, path: CheckpointPath, directory: Path) -> None:
    """The files that PEFT reads, byte by byte."""
    for piece in store.pieces(path):
        if piece.filename in (ADAPTER_WEIGHTS, PEFT_CONFIG):
            with (directory / piece.filename).open("ab") as file:
                file.write(piece.data)


@contextmanager
def _saying(reason: Reason, hint: str) -> Iterator[None]:
    """Adds what there is to do on a command line."""
    try:
        yield
    except PostTrainingError as error:
        if error.reason is not reason:
            raise
        raise replace(error, message=f"{error.message} {hint}") from None


def _check_adapter_alone(options: argparse.Namespace, loaded: LoadedCheckpoint) -> None:
    """Raises for options of a merged model, and for full weights."""
    for name in ("model", "dtype"):
        if getattr(options, name) is not None:
            raise fail(
                Reason.INVALID_ARGUMENT,
                f"--{name} says nothing about an adapter, which is exported as it is: leave it out.",
                option=name,
            )
    if not isinstance(loaded.weights, Adapter):
        raise fail(
            Reason.WRONG_CHECKPOINT_KIND,
            f"Checkpoint {options.path!r} holds full weights, no adapter: leave --adapter out.",
            path=options.path,
        )


def _spec(given: ModelSpec | None, manifest: Manifest) -> ModelSpec:
    name = manifest.base_model
    if given is not None and given.name != name:
        raise fail(
            Reason.INVALID_ARGUMENT,
            f"--model {given.name}: this checkpoint's base model is called {name!r}. Say --model {name}=PATH.",
            model=given.name,
            expected=name,
        )
    if name == BIGRAM.name:
        raise fail(
            Reason.UNIMPLEMENTED,
            f"{name} is no transformers model: only its adapter can be exported.",
        )
    return given or ModelSpec(name=name, path=name)


def _base_directory(spec: ModelSpec) -> Path | None:
    """None: the model is not here; the server that uses the adapter may have it."""
    if spec.path == BIGRAM.name:
        return None
    from backend.trainer import base_model

    try:
        return base_model.find(spec.path)
    except PostTrainingError as error:
        # No server will ever have a builtin model of another name.
        is_misnamed = spec.path.startswith("builtin:") and spec.path not in BUILTIN_MODELS
        if error.reason is not Reason.MODEL_NOT_FOUND or is_misnamed:
            raise
        return None


def _root(store: Path) -> Path:
    return store.expanduser().resolve()


def _name_of(directory: Path) -> str:
    return re.sub(r"[^A-Za-z0-9_\-.]+", "-", directory.resolve().name).strip("-.") or "adapter"
