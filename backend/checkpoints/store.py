"""Checkpoints by path: saved, listed, loaded, expired.

Methods block on the disk: call them from a worker thread.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from backend.checkpoints import peft_files
from backend.checkpoints.folder import CheckpointFolder
from backend.checkpoints.manifest import (
    MANIFEST,
    OPTIMIZER,
    PEFT_CONFIG,
    WEIGHTS,
    FileEntry,
    Manifest,
)
from backend.trainer.base import Adapter, LoraConfig, OptimizerState, Weights
from together_post_training.errors import PostTrainingError, Reason, fail
from together_post_training.names import CheckpointPath

log = logging.getLogger(__name__)

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
            base_location: where PEFT finds the base model; empty: under its name.

        Raises:
            PostTrainingError: CHECKPOINT_EXISTS.
        """
        if not isinstance(weights, Adapter):
            raise fail(Reason.UNIMPLEMENTED, "Full weights cannot be saved yet.")
        files = {
            WEIGHTS: peft_files.encode_adapter(weights),
            PEFT_CONFIG: peft_files.peft_config(weights, base_location or manifest.base_model),
        }
        if optimizer is not None:
            files[OPTIMIZER] = peft_files.encode_optimizer(optimizer)
        whole = replace(manifest, files=tuple(_entry(name, files[name]) for name in files))
        try:
            self._folder.write(
                _relative(manifest.path),
                {**files, MANIFEST: whole.to_json()},
                may_replace=lambda version: self._may_replace(manifest.path, version, overwrite),
            )
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
            weights = _read_verified(manifest, version, WEIGHTS)
            moments = _read_verified(manifest, version, OPTIMIZER) if optimizer else None
        return LoadedCheckpoint(
            manifest=manifest,
            weights=_decode(
                manifest, WEIGHTS, lambda: peft_files.decode_adapter(weights, _lora_of(manifest))
            ),
            optimizer=None
            if moments is None
            else _decode(manifest, OPTIMIZER, lambda: peft_files.decode_optimizer(moments)),
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


def _entry(name: str, data: bytes) -> FileEntry:
    return FileEntry(name=name, size_bytes=len(data), sha256=hashlib.sha256(data).hexdigest())


def _read_verified(manifest: Manifest, version: Path, name: str) -> bytes:
    expected = manifest.file(name)
    if expected is None:
        raise _damaged(manifest, name, "the checkpoint has no such file")
    try:
        data = (version / name).read_bytes()
    except FileNotFoundError:
        raise _damaged(manifest, name, "the file is missing") from None
    if len(data) != expected.size_bytes:
        raise _damaged(manifest, name, f"{len(data)} bytes of {expected.size_bytes}")
    if hashlib.sha256(data).hexdigest() != expected.sha256:
        raise _damaged(manifest, name, "its SHA-256 is not the one it was saved with")
    return data


def _decode(manifest: Manifest, name: str, decode: Callable):
    try:
        return decode()
    except ValueError as error:
        raise _damaged(manifest, name, str(error)) from None


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


def _lora_of(manifest: Manifest) -> LoraConfig:
    if not isinstance(manifest.weights, LoraConfig):
        raise fail(Reason.UNIMPLEMENTED, "Checkpoints of full weights cannot be read yet.")
    return manifest.weights
