"""A directory that shadows the names of a hub: transformers and `datasets` take what lies where they run."""

from __future__ import annotations

import hashlib
import shutil
import tempfile
from pathlib import Path

import torch
import transformers

from tests.cookbook import conversations, data_sets, models


def prepare(cache: Path) -> Path:
    """The directory, made once for every version of what makes it."""
    directory = cache / f"hub-{_digest()}"
    if not directory.exists():
        scratch = Path(tempfile.mkdtemp(prefix=".incomplete-", dir=cache))
        models.save(scratch)
        data_sets.save(scratch)
        try:
            scratch.rename(directory)
        except OSError:
            # Another run was faster.
            shutil.rmtree(scratch)
    return directory


def _digest() -> str:
    """`datasets` keeps what it made of a directory of this name whatever becomes of the files: new files, new name."""
    digest = hashlib.sha256(f"{torch.__version__} {transformers.__version__}".encode())
    for module in (conversations, models, data_sets):
        assert module.__file__ is not None
        digest.update(Path(module.__file__).read_bytes())
    return digest.hexdigest()[:16]
