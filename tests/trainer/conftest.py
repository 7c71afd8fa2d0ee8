"""Tiny models, made once, and trainers on them."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
import torch

from backend.trainer import base_model
from backend.trainer.base_model import BaseModel
from backend.trainer.torch_trainer import TorchTrainer
from tests import models


@pytest.fixture(scope="session", autouse=True)
def _one_thread() -> None:
    """Tiny products gain nothing from threads, and pay for waking them."""
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def directory_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """The directory of models.rand's model of a type, or of models.succ16's."""

    @cache
    def make(model_type: str, *, tied: bool = False) -> Path:
        directory = tmp_path_factory.mktemp(model_type) / "model"
        if model_type == "succ16":
            return models.succ16(directory)
        return models.rand(directory, model_type, tied=tied)

    return make


@pytest.fixture(scope="session")
def base_of(directory_of: Callable[..., Path]) -> Callable[..., BaseModel]:
    """The same, loaded."""

    @cache
    def load(model_type: str, *, tied: bool = False) -> BaseModel:
        return base_model.load(model_type, str(directory_of(model_type, tied=tied)))

    return load


@pytest.fixture(params=["llama", "llama-tied"])
def rand(request: pytest.FixtureRequest) -> tuple[str, bool]:
    """(model type, whether the head is the embedding), for base_of and directory_of."""
    return "llama", request.param == "llama-tied"


@pytest.fixture
def trainer(base_of: Callable[..., BaseModel]) -> TorchTrainer:
    """On a random Llama."""
    return TorchTrainer(base_of("llama"))


@pytest.fixture
def succ16(base_of: Callable[..., BaseModel]) -> TorchTrainer:
    """On the closed-form bigram."""
    return TorchTrainer(base_of("succ16"))
