"""Base models as directories: found where they lie, and told of by file where something is missing."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from backend.trainer import base_model, model_directory
from tests import models
from together_post_training.errors import PostTrainingError, Reason

SHARDS = "model.safetensors.index.json"


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return models.rand(tmp_path_factory.mktemp("models") / "whole")


@pytest.fixture
def copied(whole: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(whole, tmp_path / "org" / "model"))


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache of the hub's. No call leaves this machine."""
    cache = tmp_path / "hub"
    cache.mkdir()
    # Read when the library is imported.
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(cache))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)

    def refuse(*args, **kwargs):
        raise AssertionError(f"a model is looked for on the network: {args}")

    monkeypatch.setattr("socket.getaddrinfo", refuse)
    monkeypatch.setattr("socket.create_connection", refuse)
    return cache


def cache(hub: Path, name: str, source: Path) -> Path:
    """Puts a model into the hub's cache, as a download does."""
    folder = hub / f"models--{name.replace('/', '--')}"
    (folder / "refs").mkdir(parents=True)
    (folder / "refs" / "main").write_text("0" * 40)
    return Path(shutil.copytree(source, folder / "snapshots" / ("0" * 40)))


def refusal(source: str | Path) -> PostTrainingError:
    with pytest.raises(PostTrainingError) as error:
        base_model.load("asked for", str(source))
    return error.value


def configure(**changes: object) -> Callable[[Path], None]:
    def change(directory: Path) -> None:
        path = directory / "config.json"
        settings = json.loads(path.read_text()) | changes
        path.write_text(json.dumps({k: v for k, v in settings.items() if v is not None}))

    return change


def write(name: str, data: bytes) -> Callable[[Path], None]:
    def change(directory: Path) -> None:
        (directory / name).write_bytes(data)

    return change


def remove(name: str) -> Callable[[Path], None]:
    return lambda directory: (directory / name).unlink()


def cut_off(directory: Path) -> None:
    path = directory / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-10])


def split(directory: Path) -> None:
    """Of two parts, one is there."""
    (directory / "model.safetensors").rename(directory / "model-00001-of-00002.safetensors")
    parts = {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}
    (directory / SHARDS).write_text(json.dumps({"metadata": {}, "weight_map": parts}))


def make_adapter(directory: Path) -> None:
    (directory / "config.json").rename(directory / "adapter_config.json")


@pytest.mark.parametrize(
    ("fault", "reason", "said"),
    [
        (remove("config.json"), Reason.MODEL_NOT_FOUND, "has no config.json"),
        (make_adapter, Reason.MODEL_NOT_FOUND, "holds an adapter and no model"),
        (remove("model.safetensors"), Reason.MODEL_NOT_FOUND, "lacks the weights: none of model.saf"),
        (split, Reason.MODEL_NOT_FOUND, "lacks model-00002-of-00002.safetensors, which model.saf"),
        (cut_off, Reason.INCOMPATIBLE_CHECKPOINT, "model.safetensors in /"),
        (write("model.safetensors", b"not at all"), Reason.INCOMPATIBLE_CHECKPOINT, "model.safetensors in /"),
        (write("config.json", b"{"), Reason.INCOMPATIBLE_CHECKPOINT, "config.json in /"),
        (write("config.json", b"[]"), Reason.INCOMPATIBLE_CHECKPOINT, "names no model_type"),
        (configure(model_type=None), Reason.INCOMPATIBLE_CHECKPOINT, "names no model_type"),
        (configure(model_type="frobnicator"), Reason.UNIMPLEMENTED, "'frobnicator'"),
        (configure(model_type="t5"), Reason.UNIMPLEMENTED, "'t5'"),
        (configure(model_type="qwen2_vl"), Reason.UNIMPLEMENTED, "'qwen2_vl'"),
        (
            configure(model_type="own", auto_map={"AutoConfig": "configuration_own.OwnConfig"}),
            Reason.UNIMPLEMENTED,
            "is not run",
        ),
    ],
)  # fmt: skip
def test_fault_of_a_directory_is_told_of_by_file(copied: Path, fault, reason, said):
    fault(copied)
    error = refusal(copied)
    assert error.reason is reason
    assert said in error.message
    assert str(copied) in error.message
    assert "Traceback" not in error.message


def test_index_that_names_no_parts_is_told_of(copied: Path):
    split(copied)
    (copied / SHARDS).write_text("{}")
    assert SHARDS in refusal(copied).message


def test_directory_wins_over_the_cache_and_is_relative_to_here(
    copied: Path, hub: Path, monkeypatch
):
    cached = cache(hub, "org/model", copied)
    assert model_directory.find("org/model") == cached
    monkeypatch.chdir(copied.parents[1])
    assert model_directory.find("org/model") == copied
    monkeypatch.setenv("HOME", str(copied.parents[1]))
    assert model_directory.find("~/org/model") == copied
    # A directory of this name that is no model hides nothing.
    (copied / "config.json").unlink()
    assert model_directory.find("org/model") == cached


def test_cached_model_that_is_not_whole_is_told_of_with_what_to_do(copied: Path, hub: Path):
    cached = cache(hub, "org/cached", copied)
    (cached / "model.safetensors").unlink()
    error = refusal("org/cached")
    assert error.reason is Reason.MODEL_NOT_FOUND
    assert f"{cached} lacks the weights" in error.message
    assert "`hf download org/cached`" in error.message
    (cached / "config.json").unlink()
    assert f"{cached} lacks config.json" in refusal("org/cached").message


def test_model_that_is_nowhere_is_told_of_with_where_it_was_looked_for(
    hub: Path, tmp_path: Path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    message = refusal("org/nowhere").message
    for said in (f"{tmp_path}/org/nowhere", str(hub), "`hf download org/nowhere`"):
        assert said in message


@pytest.mark.parametrize(
    "name",
    [
        "org/model/variant",
        "~nobody-of-this-name/x",
        "x" * 300,
        "a" * 5000,
        "a\0b",
        "..",
        "org//model",
        "é/ü",
    ],
)
def test_name_that_is_no_repository_is_plainly_not_found(
    hub: Path, tmp_path: Path, monkeypatch, name
):
    monkeypatch.chdir(tmp_path)
    assert refusal(name).reason is Reason.MODEL_NOT_FOUND


def test_cached_models_are_those_that_can_be_used(copied: Path, hub: Path):
    cache(hub, "org/good", copied)
    cache(hub, "gpt2-like", copied)
    configure(model_type="t5")(cache(hub, "org/other", copied))
    remove("model.safetensors")(cache(hub, "org/half", copied))
    (hub / "models--org--empty").mkdir()
    (hub / "datasets--org--data").mkdir()
    assert model_directory.cached_models() == ["gpt2-like", "org/good"]


def test_window_is_known_before_the_model_is_loaded(copied: Path, hub: Path):
    assert model_directory.max_context_length(str(copied)) == models.MAX_SEQ_LENGTH
    assert model_directory.max_context_length("org/nowhere") is None
    write("config.json", b"{")(copied)
    assert model_directory.max_context_length(str(copied)) is None


def test_tokenizer_needs_more_than_its_settings(copied: Path):
    write("tokenizer_config.json", b"{}")(copied)
    assert not model_directory.has_tokenizer(copied)
    assert base_model.load("m", str(copied)).tokenizer_dir is None
    write("tokenizer.json", b"{}")(copied)
    assert model_directory.has_tokenizer(copied)
