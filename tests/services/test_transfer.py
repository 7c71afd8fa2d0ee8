"""Adapters that come from elsewhere and go elsewhere, while a server uses the store."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from pyrage import x25519  # pyright: ignore[reportAttributeAccessIssue]

from backend.checkpoints import peft_files
from backend.cli import main
from backend.trainer.base import Adapter, LoraConfig
from tests.services.harness import MODEL, serving
from together_post_training.v1 import checkpoints_pb2, operations_pb2, sessions_pb2

TOKENS = [3, 9, 4]
# log p(9 | 3) and log p(4 | 9) on the bigram model, 9's logit raised by 2.
RAISED = [-2.330565, -4.330565]


def always_nine(directory: Path, *, key: str = "lm_head") -> Path:
    """An adapter that raises the logit of 9 by 2, as PEFT would save it: h is 4 times a unit vector, A h is 1."""
    directory.mkdir()
    b = np.zeros((16, 2), np.float32)
    b[9, 0] = 0.5  # The scale is 8 / 2.
    prefix = f"base_model.model.{key}"
    tensors = {
        f"{prefix}.lora_A.weight": np.full((2, 16), 0.25, np.float32),
        f"{prefix}.lora_B.weight": b,
    }
    adapter = Adapter(lora=LoraConfig(rank=2, alpha=8, seed=0), tensors=tensors)
    (directory / "adapter_config.json").write_bytes(peft_files.peft_config(adapter, "elsewhere"))
    (directory / "adapter_model.safetensors").write_bytes(peft_files.encode_adapter(adapter))
    return directory


def test_imported_adapter_is_sampled_from_trained_on_and_exported(tmp_path: Path, capsys):
    """LP-09's numbers; the names are those of LP-10."""
    store = ["--store", str(tmp_path / "store")]
    with serving(tmp_path / "store") as running:
        caller = running.caller
        for name in ("default", "lora_A", "a.b"):
            directory = always_nine(tmp_path / name)
            assert main(["import-adapter", str(directory), "--model", MODEL, *store]) == 0
            path = capsys.readouterr().out.strip()
            assert path == f"tinker://imported/sampler_weights/{name}"
            scored = caller.score(caller.open(path=path), TOKENS)
            np.testing.assert_allclose(scored[1:], RAISED, atol=1e-4)
        resumed = caller.session(resume_from=path)
        np.testing.assert_allclose(resumed.logprobs(TOKENS), RAISED, atol=1e-4)
        loaded = caller.session(lora=sessions_pb2.LoraConfig(rank=2, alpha=8))
        done = loaded.do("LoadCheckpoint", path=path)
        assert done.state == operations_pb2.OPERATION_STATE_SUCCEEDED, done.error
        np.testing.assert_allclose(loaded.logprobs(TOKENS), RAISED, atol=1e-4)
        resumed.train([3, 9])
        assert resumed.logprobs(TOKENS)[0] > RAISED[0] + 0.1
        resumed.save("more")
        assert (
            main(["export", resumed.path("more"), str(tmp_path / "out"), "--adapter", *store]) == 0
        )
        assert main(["export", path, str(tmp_path / "merged"), *store]) == 1
    assert "no transformers model" in capsys.readouterr().err
    exported = (tmp_path / "out" / "adapter_model.safetensors").read_bytes()
    tensors = peft_files.decode_adapter(exported, LoraConfig(rank=2, alpha=8, seed=0)).tensors
    assert tensors["base_model.model.lm_head.lora_B.weight"][9, 0] > 0.5


def test_copies_and_external_checkpoints_are_exported_unless_they_are_encrypted(
    tmp_path: Path, capsys
):
    store = ["--store", str(tmp_path / "store")]
    recipient = str(x25519.Identity.generate().to_public())
    with serving(tmp_path / "store") as running:
        run = running.caller.session()
        run.save("plain", "EXTERNAL")
        run.save("locked", "EXTERNAL", age_recipients=[recipient])
        plain = run.path("plain", "external_weights")
        request = checkpoints_pb2.CopyCheckpointRequest(path=plain, session="copy")
        copied = running.caller.checkpoints.CopyCheckpoint(request).path
    for number, path in enumerate((plain, copied)):
        out = tmp_path / str(number)
        assert main(["export", path, str(out), "--adapter", *store]) == 0
        assert len(list(out.iterdir())) == 2
    out, path = tmp_path / "locked", run.path("locked", "external_weights")
    assert main(["export", path, str(out), "--adapter", *store]) == 1
    assert "encrypted for the owners of age keys" in capsys.readouterr().err
    assert not out.exists()


@pytest.mark.parametrize("key", ["model.lm_head", "lm_head.default", "model.layers.0.q_proj"])
def test_keys_of_another_model_are_refused_where_they_are_used(tmp_path: Path, capsys, key):
    """LP-09: never an adapter that is silently not there."""
    directory = always_nine(tmp_path / "adapter", key=key)
    store = ["--store", str(tmp_path / "store")]
    assert main(["import-adapter", str(directory), "--model", MODEL, *store]) == 0
    path = capsys.readouterr().out.strip()
    with serving(tmp_path / "store") as running:
        run = running.caller.session(lora=sessions_pb2.LoraConfig(rank=2, alpha=8))
        before = run.logprobs(TOKENS)
        error = run.do("LoadCheckpoint", path=path).error
        assert error.reason == "INCOMPATIBLE_CHECKPOINT"
        assert f"{key}.lora_A.weight" in error.message
        np.testing.assert_array_equal(run.logprobs(TOKENS), before)
        for call in (
            lambda: running.caller.open(path=path),
            lambda: running.caller.session(resume_from=path),
        ):
            with pytest.raises(Exception, match=key):
                call()


def test_names_that_are_taken_or_unknown_are_said_with_the_option_to_use(tmp_path: Path, capsys):
    directory, store = always_nine(tmp_path / "adapter"), tmp_path / "store"
    adopt = ["import-adapter", str(directory), "--model", MODEL, "--store", str(store)]
    assert main(adopt) == 0
    assert main(adopt) == 1
    assert "--name" in capsys.readouterr().err
    out = tmp_path / "out"
    assert main(["export", "tinker://a/weights/b", str(out), "--store", str(store)]) == 1
    assert f"The store is {store}; --store names another." in capsys.readouterr().err
    assert not out.exists()


def test_what_cannot_be_read_or_found_is_said_in_a_sentence(tmp_path: Path, capsys):
    directory, file = always_nine(tmp_path / "adapter"), tmp_path / "file"
    file.touch()
    store = ["--store", str(tmp_path / "store")]
    assert main(["import-adapter", str(directory), "--model", "builtin:tinny", *store]) == 1
    assert "Unknown builtin model 'builtin:tinny'" in capsys.readouterr().err
    assert main(["import-adapter", str(file), "--model", MODEL, *store]) == 1
    assert str(file) in capsys.readouterr().err
    assert not (tmp_path / "store").exists()
    store = ["--store", str(file)]
    assert main(["import-adapter", str(directory), "--model", MODEL, *store]) == 1
    assert capsys.readouterr().err.startswith("error: ")
