"""Checkpoints by path: saved, listed, loaded, published, copied, expired.

What becomes of a checkpoint later is a new version of it, with the same files under another manifest: so that it takes
effect at once and whole, and no version ever changes. Whoever changes a checkpoint has seen the one that he replaces.

Methods block on the disk: call them from a worker thread.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from backend.checkpoints import refusals, version_files
from backend.checkpoints.folder import CheckpointFolder
from backend.checkpoints.manifest import MANIFEST, Manifest
from backend.checkpoints.version_files import Piece
from backend.trainer.base import OptimizerState, Weights
from together_post_training.errors import PostTrainingError
from together_post_training.names import CheckpointPath

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedCheckpoint:
    """optimizer: present if asked for."""

    manifest: Manifest
    weights: Weights
    optimizer: OptimizerState | None


class CheckpointStore:
    """Several servers may use one root at once. `clock`: seconds since 1970."""

    def __init__(self, root: Path, clock: Callable[[], float]) -> None:
        self._folder = CheckpointFolder(root)
        self._clock = clock
        # By the id of its version. Versions never change, so a manifest is read once.
        self._manifests: dict[str, Manifest] = {}

    def save(
        self,
        manifest: Manifest,
        weights: Weights,
        optimizer: OptimizerState | None,
        *,
        overwrite: bool,
        base_location: str = "",
        age_recipients: Sequence[str] = (),
    ) -> Manifest:
        """Writes it; `manifest` comes without files and is returned with them.

        Args:
            base_location: the directory of the base model; empty: PEFT finds it under its name, and full weights have
                no other files beside them.
            age_recipients: public keys; the files are readable for their owners alone. None: for everybody.

        Raises:
            PostTrainingError: CHECKPOINT_EXISTS, and what `model_files.write_companions` raises.
        """
        writing = self._folder.writing(
            _relative(manifest.path),
            may_replace=lambda version: self._may_replace(manifest.path, version, overwrite),
        )
        try:
            with writing as version:
                return version_files.write(
                    version, manifest, weights, optimizer, base_location, age_recipients
                )
        except FileExistsError:
            raise refusals.exists(manifest.path) from None

    def check_free(self, path: CheckpointPath) -> None:
        """Raises CHECKPOINT_EXISTS."""
        with self._folder.reading(_relative(path)) as version:
            if not self._may_replace(path, version, overwrite=False):
                raise refusals.exists(path)

    def get(self, path: CheckpointPath) -> Manifest:
        """Raises CHECKPOINT_NOT_FOUND."""
        found = self._find(path)
        if found is None:
            raise refusals.not_found(path)
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
            raise refusals.not_found(path)

    def set_ttl(self, path: CheckpointPath, ttl_s: float | None) -> Manifest:
        """Counted from now; None: it never expires. Raises CHECKPOINT_NOT_FOUND."""
        expire_time_s = _after(self._clock(), ttl_s)
        return self._change(path, lambda manifest: replace(manifest, expire_time_s=expire_time_s))

    def publish(self, path: CheckpointPath) -> Manifest:
        """Of several who do it at once, one does. Raises CHECKPOINT_NOT_FOUND, ALREADY_PUBLIC."""

        def published(manifest: Manifest) -> Manifest:
            if manifest.is_public:
                raise refusals.already_public(path)
            return replace(manifest, is_public=True)

        return self._change(path, published)

    def unpublish(self, path: CheckpointPath) -> Manifest:
        """Of several who do it at once, one does. Raises CHECKPOINT_NOT_FOUND, NOT_PUBLIC."""

        def unpublished(manifest: Manifest) -> Manifest:
            if not manifest.is_public:
                raise refusals.not_public(path)
            return replace(manifest, is_public=False)

        return self._change(path, unpublished)

    def copy(self, path: CheckpointPath, session: str, ttl_s: float | None) -> Manifest:
        """Under another session's id, with its kind and name. A copy of it that is there already is the answer.

        Raises:
            PostTrainingError: CHECKPOINT_NOT_FOUND, CHECKPOINT_EXISTS, INCOMPATIBLE_CHECKPOINT.
        """
        with self._reading(path) as (version, source):
            now = self._clock()
            made = replace(
                source,
                session=session,
                create_time_s=now,
                expire_time_s=_after(now, ttl_s),
                is_public=False,
                copied_from=str(path),
            )
            if (there := self._same_copy(made)) is not None:
                return there
            writing = self._folder.writing(
                _relative(made.path),
                may_replace=lambda taken: self._may_replace(made.path, taken, overwrite=False),
            )
            try:
                with writing as target:
                    version_files.share(version, target, made)
            except FileExistsError:
                if (there := self._same_copy(made)) is not None:
                    return there
                raise refusals.not_copied_over(made.path, path) from None
            return made

    def load(self, path: CheckpointPath, *, optimizer: bool) -> LoadedCheckpoint:
        """Reads and verifies it.

        Raises:
            PostTrainingError: CHECKPOINT_NOT_FOUND; WRONG_CHECKPOINT_KIND when an optimiser is asked for and the
                checkpoint has none, or it is encrypted; INCOMPATIBLE_CHECKPOINT naming the file that is damaged.
        """
        with self._reading(path) as (version, manifest):
            if manifest.is_encrypted:
                raise refusals.encrypted(manifest)
            if optimizer and not manifest.has_optimizer:
                raise refusals.no_optimizer(manifest)
            return LoadedCheckpoint(
                manifest=manifest,
                weights=version_files.read_weights(manifest, version),
                optimizer=version_files.read_moments(manifest, version) if optimizer else None,
            )

    def pieces(
        self, path: CheckpointPath, filename: str = "", offset: int = 0
    ) -> Generator[Piece, None, None]:
        """All files, one after the other; or one, from an offset on. See `version_files.pieces`.

        What is being read stays whole if the checkpoint is deleted meanwhile.
        """
        with self._reading(path) as (version, manifest):
            yield from version_files.pieces(manifest, version, filename, offset)

    def sweep(self) -> int:
        """Removes what has expired, and what killed servers left; the number of checkpoints removed."""
        expired = [(link, v) for link, v, m in self._all(None) if m.is_expired(self._clock())]
        # One that was replaced in between stays.
        num_removed = sum(
            self._folder.delete(Path(link), self._folder.directory(version))
            for link, version in expired
        )
        self._folder.remove_orphans()
        self._forget_gone()
        return num_removed

    @contextmanager
    def _reading(self, path: CheckpointPath) -> Iterator[tuple[Path, Manifest]]:
        """The version's directory, which stays for as long, and its manifest. Raises CHECKPOINT_NOT_FOUND."""
        with self._folder.reading(_relative(path)) as version:
            manifest = self._current(path, version)
            if manifest is None or version is None:
                raise refusals.not_found(path)
            yield version, manifest

    def _change(self, path: CheckpointPath, changed: Callable[[Manifest], Manifest]) -> Manifest:
        """Tries until nobody else changed, replaced or deleted it in between; `changed` may refuse what is there."""
        while True:
            with self._reading(path) as (version, before):
                after = changed(before)
                try:
                    with self._folder.writing(
                        _relative(path), may_replace=self._is_still(version, before)
                    ) as made:
                        version_files.share(version, made, after)
                except FileExistsError:
                    continue
                return after

    def _is_still(self, version: Path, manifest: Manifest) -> Callable[[Path | None], bool]:
        return lambda there: there == version and not manifest.is_expired(self._clock())

    def _same_copy(self, made: Manifest) -> Manifest | None:
        """What is there in its place, if it is a copy of the same: all but when it was made, and what may change."""
        try:
            there = self._find(made.path)
        except PostTrainingError:  # It is damaged, and so no copy.
            return None
        if there is None:
            return None
        alike = replace(
            there,
            create_time_s=made.create_time_s,
            expire_time_s=made.expire_time_s,
            is_public=made.is_public,
        )
        return there if alike == made else None

    def _forget_gone(self) -> None:
        for version in [
            v for v in self._manifests.copy() if not self._folder.directory(v).is_dir()
        ]:
            self._manifests.pop(version, None)

    def _all(self, session: str | None) -> Iterator[tuple[str, str, Manifest]]:
        """Every link with its version's id and manifest; unreadable ones are logged and left out."""
        for link, known in self._folder.versions(session):
            try:
                version, manifest = self._peek(link, known)
            except PostTrainingError as error:
                log.warning("checkpoint %s is left out: %s", link, error)
                continue
            if manifest is None:
                continue
            if _location(manifest.path) != link:
                log.warning("checkpoint %s is left out: it says that it is %s", link, manifest.path)
                continue
            yield link, version, manifest

    def _peek(self, link: str, known: str | None) -> tuple[str, Manifest | None]:
        """known: the id of the version that was there."""
        if known is not None and known in self._manifests:
            # Its files need not be held, which takes most of the time where there are thousands.
            return known, self._manifests[known]
        with self._folder.reading(Path(link)) as version:
            return "" if version is None else version.name, self._read_manifest(version)

    def _may_replace(self, path: CheckpointPath, version: Path | None, overwrite: bool) -> bool:
        """Nothing, and an expired one, always; never another's, whose name differs only where the file system sees no
        difference.
        """
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
        if version.name not in self._manifests:
            try:
                data = (version / MANIFEST).read_bytes()
                self._manifests[version.name] = Manifest.from_json(data)
            except FileNotFoundError:
                return None
            except (ValueError, KeyError, TypeError, IsADirectoryError, PermissionError) as error:
                raise refusals.unreadable_manifest(version, error) from None
        return self._manifests[version.name]


def _after(now_s: float, ttl_s: float | None) -> float | None:
    return None if ttl_s is None else now_s + ttl_s


def _relative(path: CheckpointPath) -> Path:
    return Path(_location(path))


def _location(path: CheckpointPath) -> str:
    return f"{path.session}/{path.folder}/{path.name}"
