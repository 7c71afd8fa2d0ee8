"""The files of one version of a checkpoint: written, shared, verified, read."""

from __future__ import annotations

import hashlib
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar

from backend.checkpoints import model_files, peft_files, refusals
from backend.checkpoints.encryption import encrypt
from backend.checkpoints.manifest import (
    ADAPTER_WEIGHTS,
    FULL_WEIGHTS,
    MANIFEST,
    OPTIMIZER,
    PEFT_CONFIG,
    FileEntry,
    Manifest,
)
from backend.checkpoints.optimizer_file import read_optimizer, write_optimizer
from backend.trainer.base import FullConfig, FullWeights, OptimizerState, Weights

T = TypeVar("T")

PIECE_BYTES = 1024 * 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    filename: str
    offset: int
    data: bytes
    size_bytes: int


def write(
    version: Path,
    manifest: Manifest,
    weights: Weights,
    optimizer: OptimizerState | None,
    base_location: str,
    age_recipients: Sequence[str],
) -> Manifest:
    """All files; the manifest with them."""
    names = _write_plain(version, manifest, weights, optimizer, base_location)
    if age_recipients:
        names = [encrypt(version / name, age_recipients) for name in names]
    files = tuple(_entry(version / name) for name in names)
    whole = replace(manifest, files=files, is_encrypted=bool(age_recipients))
    (version / MANIFEST).write_bytes(whole.to_json())
    return whole


def share(source: Path, version: Path, manifest: Manifest) -> None:
    """The files of another version, which never change either, under another manifest: linked where the file system
    can, else copied.

    Raises:
        PostTrainingError: INCOMPATIBLE_CHECKPOINT, naming a file that is missing.
    """
    for file in manifest.files:
        try:
            _link(source / file.name, version / file.name)
        except FileNotFoundError:
            raise refusals.damaged(manifest, file.name, "the file is missing") from None
    (version / MANIFEST).write_bytes(manifest.to_json())


def read_weights(manifest: Manifest, version: Path) -> Weights:
    """Raises INCOMPATIBLE_CHECKPOINT, naming a file that is damaged."""
    lora = manifest.weights
    if isinstance(lora, FullConfig):
        return _read(manifest, version, manifest.weights_file, model_files.read_weights)
    return _read(
        manifest,
        version,
        manifest.weights_file,
        lambda path: peft_files.decode_adapter(path.read_bytes(), lora),
    )


def read_moments(manifest: Manifest, version: Path) -> OptimizerState:
    """Raises INCOMPATIBLE_CHECKPOINT, naming a file that is damaged."""
    return _read(manifest, version, OPTIMIZER, read_optimizer)


def pieces(manifest: Manifest, version: Path, filename: str, offset: int) -> Iterator[Piece]:
    """All files, one after the other, the manifest last.

    Args:
        filename: only this one; empty: all.
        offset: from this byte of it on.

    Raises:
        PostTrainingError: INVALID_ARGUMENT for a file that is none of the checkpoint's, and an offset beyond its end;
            INCOMPATIBLE_CHECKPOINT, naming a file that is missing.
    """
    names = (*(file.name for file in manifest.files), MANIFEST)
    # Nothing else is ever opened, whatever the name says.
    if filename and filename not in names:
        raise refusals.no_such_file(manifest.path, filename, names)
    for name in (filename,) if filename else names:
        try:
            yield from _file_pieces(manifest, version / name, offset)
        except FileNotFoundError:
            raise refusals.damaged(manifest, name, "the file is missing") from None


def _file_pieces(manifest: Manifest, path: Path, start: int) -> Iterator[Piece]:
    """At least one, which may be empty."""
    with open(path, "rb") as file:
        size = os.fstat(file.fileno()).st_size
        if not 0 <= start <= size:
            raise refusals.beyond_end(manifest.path, path.name, start, size)
        file.seek(start)
        for offset in range(start, max(size, start + 1), PIECE_BYTES):
            data = file.read(PIECE_BYTES)
            yield Piece(filename=path.name, offset=offset, data=data, size_bytes=size)


def _write_plain(
    directory: Path,
    manifest: Manifest,
    weights: Weights,
    optimizer: OptimizerState | None,
    base_location: str,
) -> list[str]:
    """All files but the manifest; their names."""
    names = [manifest.weights_file]
    if isinstance(weights, FullWeights):
        model_files.write_weights(directory / FULL_WEIGHTS, weights)
        if manifest.kind != "training" and base_location:
            names += model_files.write_companions(directory, Path(base_location))
    else:
        names.append(PEFT_CONFIG)
        (directory / ADAPTER_WEIGHTS).write_bytes(peft_files.encode_adapter(weights))
        config = peft_files.peft_config(weights, base_location or manifest.base_model)
        (directory / PEFT_CONFIG).write_bytes(config)
    if optimizer is not None:
        names.append(OPTIMIZER)
        write_optimizer(directory / OPTIMIZER, optimizer)
    return names


def _link(source: Path, target: Path) -> None:
    try:
        os.link(source, target)
    except FileNotFoundError:
        raise
    except OSError:  # No links here, or too many of this file.
        shutil.copyfile(source, target)


def _entry(path: Path) -> FileEntry:
    return FileEntry(name=path.name, size_bytes=path.stat().st_size, sha256=_sha256(path))


def _sha256(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _read(manifest: Manifest, version: Path, name: str, read: Callable[[Path], T]) -> T:
    """Of a verified file."""
    _verify(manifest, version, name)
    try:
        return read(version / name)
    except ValueError as error:
        raise refusals.damaged(manifest, name, str(error)) from None


def _verify(manifest: Manifest, version: Path, name: str) -> None:
    expected = manifest.file(name)
    if expected is None:
        raise refusals.damaged(manifest, name, "the checkpoint has no such file")
    try:
        size = (version / name).stat().st_size
    except FileNotFoundError:
        raise refusals.damaged(manifest, name, "the file is missing") from None
    if size != expected.size_bytes:
        raise refusals.damaged(manifest, name, f"{size} bytes of {expected.size_bytes}")
    if _sha256(version / name) != expected.sha256:
        raise refusals.damaged(manifest, name, "its SHA-256 is not the one it was saved with")
