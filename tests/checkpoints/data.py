"""Adapters and manifests for tests of checkpoints."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from backend.checkpoints.manifest import Manifest
from backend.operations.work import CheckpointKind
from backend.trainer.base import Adapter, LoraConfig, OptimizerState, Weights

LORA = LoraConfig(rank=2, alpha=8.0, seed=2**63, train_attn=False)
NAMES = (
    "base_model.model.model.layers.0.mlp.up_proj.lora_A.weight",
    "base_model.model.model.layers.0.mlp.up_proj.lora_B.weight",
    "base_model.model.lm_head.lora_A.weight",
    "base_model.model.lm_head.lora_B.weight",
)


class Clock:
    def __init__(self, now: float = 1_000_000.0) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now


def random_tensors(seed: int, size: int = 3) -> dict[str, np.ndarray]:
    stream = np.random.default_rng(seed)
    return {name: stream.standard_normal((2, size)).astype(np.float32) for name in NAMES}


def adapter(seed: int = 0, size: int = 3) -> Adapter:
    return Adapter(lora=LORA, tensors=random_tensors(seed, size))


def optimizer(seed: int = 1) -> OptimizerState:
    return OptimizerState(
        num_steps=seed,
        moments={"exp_avg": random_tensors(seed), "exp_avg_sq": random_tensors(seed + 1)},
    )


def manifest(
    name: str = "a", kind: CheckpointKind = "training", session: str = "run:train:0", **fields
) -> Manifest:
    made = Manifest(
        session=session,
        name=name,
        kind=kind,
        base_model="builtin:tiny",
        weights=LORA,
        policy_version=5,
        create_time_s=1_000_000.0,
        expire_time_s=None,
        user_metadata={"note": "größer"},
    )
    return replace(made, **fields)


def assert_same_tensors(got: Weights, expected: Adapter) -> None:
    assert isinstance(got, Adapter)
    assert got.lora == expected.lora
    assert got.tensors.keys() == expected.tensors.keys()
    for name, tensor in expected.tensors.items():
        np.testing.assert_array_equal(got.tensors[name], tensor)
