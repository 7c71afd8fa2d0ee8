"""What a checkpoint is: written beside its tensors as manifest.json."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field

from pydantic import TypeAdapter

from backend.operations.work import CheckpointKind
from backend.trainer.base import ADAMW, FullConfig, LoraConfig, OptimizerConfig, WeightsConfig
from together_post_training.names import CheckpointFolder, CheckpointPath

FORMAT_VERSION = 1
MANIFEST = "manifest.json"
ADAPTER_WEIGHTS = "adapter_model.safetensors"
FULL_WEIGHTS = "model.safetensors"
PEFT_CONFIG = "adapter_config.json"
OPTIMIZER = "optimizer.safetensors"

FOLDERS: Mapping[CheckpointKind, CheckpointFolder] = {
    "training": "weights",
    "inference": "sampler_weights",
    "external": "external_weights",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class FileEntry:
    name: str
    size_bytes: int
    sha256: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """Never changes: what becomes of a checkpoint later, such as another expire_time_s, makes another version of it.

    create_time_s, expire_time_s: since 1970; expire_time_s None: never. Times are kept to the microsecond.
    copied_from: the path of the checkpoint that it was made of; empty: none.
    is_encrypted: every file is, and named *.age; only this manifest can be read here.
    """

    session: str
    name: str
    kind: CheckpointKind
    base_model: str
    weights: WeightsConfig
    policy_version: int
    create_time_s: float
    expire_time_s: float | None
    user_metadata: Mapping[str, str]
    optimizer: OptimizerConfig = ADAMW
    is_public: bool = False
    copied_from: str = ""
    is_encrypted: bool = False
    files: tuple[FileEntry, ...] = field(default=())

    @property
    def path(self) -> CheckpointPath:
        return CheckpointPath(session=self.session, folder=FOLDERS[self.kind], name=self.name)

    @property
    def has_optimizer(self) -> bool:
        return any(file.name == OPTIMIZER for file in self.files)

    @property
    def weights_file(self) -> str:
        return ADAPTER_WEIGHTS if isinstance(self.weights, LoraConfig) else FULL_WEIGHTS

    @property
    def size_bytes(self) -> int:
        return sum(file.size_bytes for file in self.files)

    def is_expired(self, now_s: float) -> bool:
        return self.expire_time_s is not None and now_s >= self.expire_time_s

    def file(self, name: str) -> FileEntry | None:
        return next((file for file in self.files if file.name == name), None)

    def to_json(self) -> bytes:
        content = {"format_version": FORMAT_VERSION, "path": str(self.path), **asdict(self)}
        weights = content.pop("weights")
        content["lora"] = weights if isinstance(self.weights, LoraConfig) else None
        return (json.dumps(content, indent=2) + "\n").encode()

    @staticmethod
    def from_json(data: bytes) -> Manifest:
        """Raises ValueError, KeyError or TypeError for what is not a manifest of this version."""
        content = json.loads(data)
        if not isinstance(content, dict):
            raise TypeError("no object")
        if content.pop("format_version") != FORMAT_VERSION:
            raise ValueError("unknown format_version")
        content.pop("path")
        lora = content.pop("lora")
        content["weights"] = FullConfig() if lora is None else _lora(lora)
        content["optimizer"] = OptimizerConfig(**content.get("optimizer", {}))
        content["files"] = tuple(FileEntry(**file) for file in content["files"])
        manifest = Manifest(**content)
        if _TYPES.validate_python(asdict(manifest)) != manifest:
            raise TypeError("values of other types")
        return manifest


_TYPES = TypeAdapter(Manifest)


def _lora(content: dict) -> LoraConfig:
    names = tuple(content.pop("target_modules", ()))
    return LoraConfig(**content, target_modules=names)
