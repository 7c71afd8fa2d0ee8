"""Checkpoints by path: saved, listed, loaded, expired.

Methods block on the disk: call them from a worker thread.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar

from backend.checkpoints import model_files, peft_files
from backend.checkpoints.folder import CheckpointFolder
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
from together_post_training.errors import PostTrainingError, Reason, fail
from together_post_training.names import CheckpointPath

log = logging.getLogger(__name__)

T = TypeVar("T")

PIECE_BYTES = 1024 * 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedCheckpoint:
    """optimizer: present if asked for."""

    manifest: Manifest
    weights: Weights
    optimizer: OptimizerState | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    filename: str
    offset: int
    data: bytes
    size_bytes: int


class CheckpointStore:
    """Several servers may use one root at once. `clock`: seconds since 1970."""

    def __init__(self, root: Path, clock: Callable[[], float]) -> None:
        self._folder = CheckpointFolder(root)
        self._clock = clock
        # Versions never change, so a manifest is read once.
        self._manifests: dict[Path, Manifest] = {}

    def save(
        self,
        manifest: Manifest,
        weights: Weights,
        optimizer: OptimizerState | None,
        *,
        overwrite: bool,
        base_location: str = "",
    ) -> Manifest:
        """Writes it; `manifest` comes without files and is returned with them.

        Args:
            base_location: the directory of the base model; empty: PEFT finds it under its name, and full weights have
                no other files beside them.

        Raises:
            PostTrainingError: CHECKPOINT_EXISTS, and what `model_files.write_companions` raises.
        """
        writing = self._folder.writing(
            _relative(manifest.path),
            may_replace=lambda version: self._may_replace(manifest.path, version, overwrite),
        )
        try:
            with writing as version:
                names = _write(version, manifest, weights, optimizer, base_location)
                whole = replace(manifest, files=tuple(_entry(version / name) for name in names))
                (version / MANIFEST).write_bytes(whole.to_json())
        except FileExistsError:
            raise _exists(manifest.path) from None
        return whole

    def check_free(self, path: CheckpointPath) -> None:
        """Raises CHECKPOINT_EXISTS."""
        with self._folder.reading(_relative(path)) as version:
            if version is not None and not self._may_replace(path, version, overwrite=False):
                raise _exists(path)

    def get(self, path: CheckpointPath) -> Manifest:
        """Raises CHECKPOINT_NOT_FOUND."""
        found = self._find(path)
        if found is None:
            raise _not_found(path)
        return found

    def list(self, session: str | None = None) -> list[Manifest]:
        """Newest first."""
        found = [m for _, _, m in self._all(session) if not m.is_expired(self._clock())]
        return sorted(found, key=lambda m: (-m.create_time_s, str(m.path)))

    def delete(self, path: CheckpointPath) -> None:
        """Also a damaged one. Raises CHECKPOINT_NOT_FOUND."""
        try:
            is_there = self._find(path) is not None
        except PostTrainingError:
            is_there = True
        if not is_there or not self._folder.delete(_relative(path)):
            raise _not_found(path)

    def load(self, path: CheckpointPath, *, optimizer: bool) -> LoadedCheckpoint:
        """Reads and verifies it.

        Raises:
            PostTrainingError: CHECKPOINT_NOT_FOUND; WRONG_CHECKPOINT_KIND when an optimiser is asked for and the
                checkpoint has none; INCOMPATIBLE_CHECKPOINT naming the file that is damaged.
        """
        with self._folder.reading(_relative(path)) as version:
            manifest = self._current(path, version)
            if manifest is None or version is None:
                raise _not_found(path)
            if optimizer and not manifest.has_optimizer:
                raise _no_optimizer(manifest)
            return LoadedCheckpoint(
                manifest=manifest,
                weights=_read(manifest, version, manifest.weights_file, _weights_reader(manifest)),
                optimizer=_read(manifest, version, OPTIMIZER, read_optimizer)
                if optimizer
                else None,
            )

    def pieces(self, path: CheckpointPath) -> Generator[Piece, None, None]:
        """All files, one after the other. What is being read stays whole if the checkpoint is deleted meanwhile."""
        with self._folder.reading(_relative(path)) as version:
            manifest = self._current(path, version)
            if manifest is None or version is None:
                raise _not_found(path)
            for name in (*(file.name for file in manifest.files), MANIFEST):
                yield from _file_pieces(version / name)

    def sweep(self) -> int:
        """Removes what has expired, and what killed servers left; the number of checkpoints removed."""
        expired = [(link, v) for link, v, m in self._all(None) if m.is_expired(self._clock())]
        # One that was replaced in between stays.
        num_removed = sum(self._folder.delete(link, version) for link, version in expired)
        self._folder.remove_orphans()
        return num_removed

    def _all(self, session: str | None) -> Iterator[tuple[Path, Path, Manifest]]:
        """Every link with its version and manifest; unreadable ones are logged and left out."""
        for link in self._folder.links(session):
            try:
                with self._folder.reading(link) as version:
                    manifest = self._read_manifest(version)
            except PostTrainingError as error:
                log.warning("checkpoint %s is left out: %s", link, error)
                continue
            if version is not None and manifest is not None:
                yield link, version, manifest

    def _may_replace(self, path: CheckpointPath, version: Path, overwrite: bool) -> bool:
        """An expired one always; never another's, whose name differs only where the file system sees no difference."""
        try:
            manifest = self._read_manifest(version)
        except PostTrainingError:
            return overwrite
        if manifest is None:
            return True
        return manifest.is_expired(self._clock()) or (overwrite and manifest.path == path)

    def _find(self, path: CheckpointPath) -> Manifest | None:
        with self._folder.reading(_relative(path)) as version:
            return self._current(path, version)

    def _current(self, path: CheckpointPath, version: Path | None) -> Manifest | None:
        """The manifest, unless it has expired, or is another's on a file system that ignores case."""
        manifest = self._read_manifest(version)
        if manifest is None or manifest.path != path or manifest.is_expired(self._clock()):
            return None
        return manifest

    def _read_manifest(self, version: Path | None) -> Manifest | None:
        if version is None:
            return None
        if version not in self._manifests:
            try:
                data = (version / MANIFEST).read_bytes()
                self._manifests[version] = Manifest.from_json(data)
            except FileNotFoundError:
                return None
            except (ValueError, KeyError, TypeError) as error:
                raise fail(
                    Reason.INCOMPATIBLE_CHECKPOINT,
                    f"{version / MANIFEST} cannot be read ({error!r}): it is damaged, or written by another version of "
                    "this server.",
                    file=MANIFEST,
                ) from None
        return self._manifests[version]


def _relative(path: CheckpointPath) -> Path:
    return Path(path.session, path.folder, path.name)


def _write(
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
        if manifest.kind == "inference" and base_location:
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


def _entry(path: Path) -> FileEntry:
    return FileEntry(name=path.name, size_bytes=path.stat().st_size, sha256=_sha256(path))


def _sha256(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _weights_reader(manifest: Manifest) -> Callable[[Path], Weights]:
    lora = manifest.weights
    if isinstance(lora, FullConfig):
        return model_files.read_weights
    return lambda path: peft_files.decode_adapter(path.read_bytes(), lora)


def _read(manifest: Manifest, version: Path, name: str, read: Callable[[Path], T]) -> T:
    """Of a verified file. Raises INCOMPATIBLE_CHECKPOINT, naming a file that is damaged."""
    _verify(manifest, version, name)
    try:
        return read(version / name)
    except ValueError as error:
        raise _damaged(manifest, name, str(error)) from None


def _verify(manifest: Manifest, version: Path, name: str) -> None:
    expected = manifest.file(name)
    if expected is None:
        raise _damaged(manifest, name, "the checkpoint has no such file")
    try:
        size = (version / name).stat().st_size
    except FileNotFoundError:
        raise _damaged(manifest, name, "the file is missing") from None
    if size != expected.size_bytes:
        raise _damaged(manifest, name, f"{size} bytes of {expected.size_bytes}")
    if _sha256(version / name) != expected.sha256:
        raise _damaged(manifest, name, "its SHA-256 is not the one it was saved with")


def _file_pieces(path: Path) -> Iterator[Piece]:
    size = path.stat().st_size
    with open(path, "rb") as file:
        for offset in range(0, max(size, 1), PIECE_BYTES):
            data = file.read(PIECE_BYTES)
            yield Piece(filename=path.name, offset=offset, data=data, size_bytes=size)


def _exists(path: CheckpointPath) -> PostTrainingError:
    return fail(
        Reason.CHECKPOINT_EXISTS,
        f"Checkpoint '{path.name}' already exists ({path}). Choose another name, set overwrite, or delete it first.",
        path=path,
        name=path.name,
    )


def _not_found(path: CheckpointPath) -> PostTrainingError:
    return fail(
        Reason.CHECKPOINT_NOT_FOUND,
        f"Unknown checkpoint {str(path)!r}: it was never saved, was deleted, or has expired.",
        path=path,
    )


def _no_optimizer(manifest: Manifest) -> PostTrainingError:
    return fail(
        Reason.WRONG_CHECKPOINT_KIND,
        f"Checkpoint {str(manifest.path)!r} has no optimiser state ({OPTIMIZER}): {manifest.kind} checkpoints under "
        "sampler_weights/ hold weights only. Load it without the optimiser, or save a training checkpoint (weights/).",
        path=manifest.path,
        missing=OPTIMIZER,
    )


def _damaged(manifest: Manifest, name: str, what: str) -> PostTrainingError:
    return fail(
        Reason.INCOMPATIBLE_CHECKPOINT,
        f"Checkpoint {str(manifest.path)!r} is damaged: {name}: {what}. Nothing was loaded.",
        path=manifest.path,
        file=name,
    )
