"""What is said of checkpoints that cannot be had, made or read."""

from __future__ import annotations

from pathlib import Path

from backend.checkpoints.encryption import SUFFIX
from backend.checkpoints.manifest import MANIFEST, OPTIMIZER, Manifest
from together_post_training.errors import PostTrainingError, Reason, fail
from together_post_training.names import CheckpointPath


def exists(path: CheckpointPath) -> PostTrainingError:
    return fail(
        Reason.CHECKPOINT_EXISTS,
        f"Checkpoint '{path.name}' already exists ({path}). Choose another name, set overwrite, or delete it first.",
        path=path,
        name=path.name,
    )


def not_copied_over(path: CheckpointPath, source: CheckpointPath) -> PostTrainingError:
    return fail(
        Reason.CHECKPOINT_EXISTS,
        f"Checkpoint '{path.name}' already exists ({path}) and is no copy of {source} as it is now. Copy to another "
        "session, or delete it first.",
        path=path,
        name=path.name,
        source=source,
    )


def not_found(path: CheckpointPath) -> PostTrainingError:
    return fail(
        Reason.CHECKPOINT_NOT_FOUND,
        f"Unknown checkpoint {str(path)!r}: it was never saved, was deleted, or has expired.",
        path=path,
    )


def already_public(path: CheckpointPath) -> PostTrainingError:
    return fail(
        Reason.ALREADY_PUBLIC,
        f"Checkpoint {str(path)!r} is public already: there is nothing to publish.",
        path=path,
    )


def not_public(path: CheckpointPath) -> PostTrainingError:
    return fail(
        Reason.NOT_PUBLIC,
        f"Checkpoint {str(path)!r} is not public: there is nothing to take back.",
        path=path,
    )


def no_optimizer(manifest: Manifest) -> PostTrainingError:
    folder = manifest.path.folder
    return fail(
        Reason.WRONG_CHECKPOINT_KIND,
        f"Checkpoint {str(manifest.path)!r} has no optimiser state ({OPTIMIZER}): {manifest.kind} checkpoints under "
        f"{folder}/ hold weights only. Load it without the optimiser, or save a training checkpoint (weights/).",
        path=manifest.path,
        missing=OPTIMIZER,
    )


def encrypted(manifest: Manifest) -> PostTrainingError:
    return fail(
        Reason.WRONG_CHECKPOINT_KIND,
        f"Checkpoint {str(manifest.path)!r} is encrypted for the owners of age keys (*{SUFFIX}): nothing can be loaded "
        "or sampled from it. Download and decrypt it, or save a checkpoint without recipients.",
        path=manifest.path,
    )


def unreadable_manifest(version: Path, error: Exception) -> PostTrainingError:
    return fail(
        Reason.INCOMPATIBLE_CHECKPOINT,
        f"{version / MANIFEST} cannot be read ({error!r}): it is damaged, or written by another version of this "
        "server.",
        file=MANIFEST,
    )


def damaged(manifest: Manifest, name: str, what: str) -> PostTrainingError:
    return fail(
        Reason.INCOMPATIBLE_CHECKPOINT,
        f"Checkpoint {str(manifest.path)!r} is damaged: {name}: {what}. Nothing was done.",
        path=manifest.path,
        file=name,
    )


def no_such_file(path: CheckpointPath, name: str, names: tuple[str, ...]) -> PostTrainingError:
    return fail(
        Reason.INVALID_ARGUMENT,
        f"Checkpoint {str(path)!r} has no file {name!r}: it has {', '.join(names)}.",
        path=path,
        parameter="filename",
        value=name,
    )


def beyond_end(path: CheckpointPath, name: str, offset: int, size: int) -> PostTrainingError:
    return fail(
        Reason.INVALID_ARGUMENT,
        f"offset is {offset}: it must be 0 to {size}, the size of {name} in {path}. If another checkpoint took its "
        "place meanwhile, start over.",
        path=path,
        parameter="offset",
        value=offset,
        size_bytes=size,
    )
