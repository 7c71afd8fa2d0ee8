"""Checkpoints of full weights: bitwise, and for inference a directory like any other model's."""

from __future__ import annotations

import json
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from backend.checkpoints.manifest import FULL_WEIGHTS, MANIFEST, OPTIMIZER, Manifest
from backend.checkpoints.store import CheckpointStore
from backend.trainer import base_model
from backend.trainer.base import (
    AdamParams,
    Adapter,
    FullConfig,
    FullWeights,
    OptimizerState,
    Weights,
)
from backend.trainer.torch_trainer import TorchTrainer
from tests import models
from tests.checkpoints.data import Clock, adapter, manifest
from tests.conformance.data import changed, forward, random_sample, train
from together_post_training.errors import PostTrainingError, Reason


@pytest.fixture
def store(tmp_path: Path) -> CheckpointStore:
    return CheckpointStore(tmp_path / "checkpoints", Clock())


def directory(tmp_path: Path, made: Manifest) -> Path:
    return tmp_path / "checkpoints" / made.session / made.path.folder / made.name


def full(seed: int = 0, size: int = 4) -> FullWeights:
    stream = np.random.default_rng(seed)
    shapes = {"model.embed_tokens.weight": (8, size), "model.norm.weight": (size,)}
    return FullWeights(
        tensors={n: stream.standard_normal(s).astype(np.float32) for n, s in shapes.items()}
    )


def moments(weights: FullWeights) -> OptimizerState:
    tensors = {name: 2 * tensor for name, tensor in weights.tensors.items()}
    return OptimizerState(num_steps=3, moments={"exp_avg": tensors, "exp_avg_sq": tensors})


def save(
    store: CheckpointStore, weights: Weights, optimizer=None, base: Path | str = "", **fields
) -> Manifest:
    config = weights.lora if isinstance(weights, Adapter) else FullConfig()
    made = manifest(**{"weights": config, "kind": "inference"} | fields)
    return store.save(made, weights, optimizer, overwrite=False, base_location=str(base))


def test_full_weights_load_bitwise_what_was_saved(store: CheckpointStore):
    weights = full()
    saved = save(store, weights, moments(weights), kind="training")
    assert [file.name for file in saved.files] == [FULL_WEIGHTS, OPTIMIZER]
    loaded = store.load(saved.path, optimizer=True)
    assert loaded.manifest == saved
    assert isinstance(loaded.weights, FullWeights)
    assert not changed(loaded.weights, weights)
    wanted = moments(weights)
    assert loaded.optimizer is not None
    assert loaded.optimizer.num_steps == wanted.num_steps
    for name, tensors in wanted.moments.items():
        for tensor in tensors:
            np.testing.assert_array_equal(loaded.optimizer.moments[name][tensor], tensors[tensor])


def test_manifest_of_full_weights_survives_json(store: CheckpointStore):
    saved = save(store, full())
    assert Manifest.from_json(saved.to_json()) == saved
    assert json.loads(saved.to_json())["lora"] is None


def test_full_weights_and_adapters_lie_side_by_side(store: CheckpointStore):
    paths = [save(store, full(), name="full").path, save(store, adapter(), name="lora").path]
    kinds = [type(store.load(path, optimizer=False).weights) for path in paths]
    assert kinds == [FullWeights, Adapter]


@pytest.mark.parametrize("name", [FULL_WEIGHTS, OPTIMIZER])
@pytest.mark.parametrize("fault", ["flipped", "short", "gone"])
def test_damaged_file_of_full_weights_is_named(
    store: CheckpointStore, tmp_path: Path, name: str, fault: str
):
    saved = save(store, full(), moments(full()), kind="training")
    path = directory(tmp_path, saved) / name
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    {
        "flipped": lambda: path.write_bytes(data),
        "short": lambda: path.write_bytes(data[:-4]),
        "gone": path.unlink,
    }[fault]()
    with pytest.raises(PostTrainingError) as caught:
        store.load(saved.path, optimizer=True)
    assert caught.value.reason == Reason.INCOMPATIBLE_CHECKPOINT
    assert name in caught.value.message


def test_files_of_full_weights_are_all_downloaded(store: CheckpointStore, tmp_path: Path):
    base = models.rand(tmp_path / "base")
    saved = save(store, full(), base=base)
    names = list(dict.fromkeys(piece.filename for piece in store.pieces(saved.path)))
    assert names == [FULL_WEIGHTS, "config.json", "generation_config.json", MANIFEST]
    data = b"".join(p.data for p in store.pieces(saved.path) if p.filename == FULL_WEIGHTS)
    assert data == (directory(tmp_path, saved) / FULL_WEIGHTS).read_bytes()


def test_inference_checkpoint_without_the_base_models_files_is_refused_whole(
    store: CheckpointStore, tmp_path: Path
):
    with pytest.raises(PostTrainingError) as caught:
        save(store, full(), base=tmp_path / "gone")
    assert caught.value.reason == Reason.UNAVAILABLE
    assert "config.json" in caught.value.message
    assert store.list() == []
    assert list((tmp_path / "checkpoints" / ".data").iterdir()) == []


def test_saving_full_weights_needs_no_second_copy_of_them(store: CheckpointStore):
    weights = full(size=2**18)
    num_bytes = sum(t.nbytes for t in weights.tensors.values())
    tracemalloc.start()
    try:
        save(store, weights)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < num_bytes / 4


@pytest.mark.parametrize("model_type", ["llama", "qwen3_moe"])
def test_inference_checkpoint_is_a_model_for_plain_transformers_and_for_this_server(
    store: CheckpointStore, tmp_path: Path, model_type: str
):
    location = models.rand(tmp_path / "base", model_type, tied=model_type == "llama")
    # As most models say of themselves; transformers would round what it loads to it.
    config = json.loads((location / "config.json").read_text())
    (location / "config.json").write_text(json.dumps(config | {"dtype": "bfloat16"}))
    trainer = TorchTrainer(base_model.load("base", str(location), dtype="float32", device="cpu"))
    trainer.create_session("full", FullConfig())
    samples = [random_sample(i, 128, 12) for i in range(4)]
    train(trainer, "full", samples, adam=AdamParams(learning_rate=1e-3))
    wanted = forward(trainer, "full", samples)
    saved = save(store, trainer.weights("full"), base=location)

    plain = AutoModelForCausalLM.from_pretrained(directory(tmp_path, saved))
    assert plain.dtype == torch.float32
    again = TorchTrainer(base_model.load("again", str(directory(tmp_path, saved)), device="cpu"))
    again.create_session("full", FullConfig())
    assert not changed(again.weights("full"), trainer.weights("full"))
    for one, logprobs in zip(samples, wanted, strict=True):
        tokens = torch.from_numpy(np.array(one.tokens))[None]
        with torch.no_grad():
            lp = plain(tokens, use_cache=False).logits[0].log_softmax(-1).numpy()
        theirs = lp[np.arange(12), one.inputs["target_tokens"]]
        np.testing.assert_allclose(theirs, logprobs, atol=1e-4)


def test_inference_checkpoint_brings_the_tokenizer(store: CheckpointStore, tmp_path: Path):
    base = base_model.load("builtin:tiny", device="cpu")
    saved = save(store, full(), base=base.info.location)
    text = "To be, or not to be"
    there = AutoTokenizer.from_pretrained(directory(tmp_path, saved))
    here = AutoTokenizer.from_pretrained(base.tokenizer_dir)
    assert there(text).input_ids == here(text).input_ids
    message = [{"role": "user", "content": text}]
    assert there.apply_chat_template(message, tokenize=False) == here.apply_chat_template(
        message, tokenize=False
    )
