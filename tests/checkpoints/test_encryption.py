"""External checkpoints: an inference checkpoint's files, or the same ones for the owners of age keys alone."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from pyrage import decrypt, x25519  # pyright: ignore[reportAttributeAccessIssue]

from backend.checkpoints.encryption import MAX_RECIPIENTS, check_recipients
from backend.checkpoints.manifest import ADAPTER_WEIGHTS, MANIFEST, PEFT_CONFIG, Manifest
from backend.checkpoints.store import CheckpointStore
from backend.checkpoints.version_files import PIECE_BYTES
from backend.trainer import base_model
from backend.trainer.base import FullConfig, FullWeights
from tests.checkpoints.data import Clock, adapter, assert_same_tensors, manifest
from together_post_training.errors import PostTrainingError, Reason


@pytest.fixture
def store(tmp_path: Path) -> CheckpointStore:
    return CheckpointStore(tmp_path, Clock())


def key() -> tuple[x25519.Identity, str]:
    identity = x25519.Identity.generate()
    return identity, str(identity.to_public())


def downloaded(store: CheckpointStore, made: Manifest) -> dict[str, bytes]:
    files: dict[str, bytes] = {}
    for piece in store.pieces(made.path):
        files[piece.filename] = files.get(piece.filename, b"") + piece.data
    return files


def external(name: str, **fields) -> Manifest:
    return manifest(name, kind="external", **fields)


def test_external_checkpoint_has_the_files_of_an_inference_one_and_is_read_like_it(
    store: CheckpointStore,
):
    inference = store.save(manifest(kind="inference"), adapter(), None, overwrite=False)
    made = store.save(external("a"), adapter(), None, overwrite=False)
    assert str(made.path) == "tinker://run:train:0/external_weights/a"
    assert made.files == inference.files
    assert_same_tensors(store.load(made.path, optimizer=False).weights, adapter())
    with pytest.raises(PostTrainingError, match="under external_weights/") as caught:
        store.load(made.path, optimizer=True)
    assert caught.value.reason == Reason.WRONG_CHECKPOINT_KIND


def test_encrypted_files_are_readable_for_each_owner_and_for_nobody_else(
    store: CheckpointStore, tmp_path: Path
):
    """Of more than one piece of age's, which are 64 KiB."""
    (one, for_one), (other, for_other), (stranger, _) = key(), key(), key()
    weights = adapter(size=50_000)
    plain = downloaded(
        store, store.save(manifest(kind="inference"), weights, None, overwrite=False)
    )
    made = store.save(
        external("a"), weights, None, overwrite=False, age_recipients=(for_one, for_other)
    )
    files = downloaded(store, made)
    assert set(files) == {ADAPTER_WEIGHTS + ".age", PEFT_CONFIG + ".age", MANIFEST}
    assert len(files[ADAPTER_WEIGHTS + ".age"]) > PIECE_BYTES
    for name in (ADAPTER_WEIGHTS, PEFT_CONFIG):
        for identity in (one, other):
            assert decrypt(files[name + ".age"], [identity]) == plain[name]
        with pytest.raises(Exception, match="No matching keys"):
            decrypt(files[name + ".age"], [stranger])
    (there,) = (tmp_path / "run:train:0" / "external_weights").iterdir()
    assert {path.name for path in there.iterdir()} == set(files)
    for data in files.values():
        for tensor in weights.tensors.values():
            assert tensor.tobytes()[:64] not in data
    assert made.size_bytes == sum(len(data) for name, data in files.items() if name != MANIFEST)


def test_encrypted_checkpoint_cannot_be_loaded_and_says_why(store: CheckpointStore):
    made = store.save(external("a"), adapter(), None, overwrite=False, age_recipients=(key()[1],))
    assert store.get(made.path).is_encrypted
    for optimizer in (False, True):
        with pytest.raises(PostTrainingError, match="encrypted for the owners") as caught:
            store.load(made.path, optimizer=optimizer)
        assert caught.value.reason == Reason.WRONG_CHECKPOINT_KIND
    copy = store.copy(made.path, "other", None)
    assert (
        downloaded(store, copy)[PEFT_CONFIG + ".age"]
        == (downloaded(store, made)[PEFT_CONFIG + ".age"])
    )
    with pytest.raises(PostTrainingError, match="encrypted"):
        store.load(copy.path, optimizer=False)


@pytest.mark.parametrize("is_encrypted", [False, True])
def test_external_checkpoint_of_full_weights_is_a_whole_model(
    store: CheckpointStore, is_encrypted: bool
):
    identity, recipient = key()
    weights = FullWeights(tensors={"model.norm.weight": np.ones(4, np.float32)})
    base = base_model.load("builtin:tiny", device="cpu").info.location

    def save(made: Manifest, *recipients: str) -> Manifest:
        return store.save(
            replace(made, weights=FullConfig()),
            weights,
            None,
            overwrite=False,
            base_location=base,
            age_recipients=recipients,
        )

    made = save(external("a"), recipient) if is_encrypted else save(external("a"))
    inference = save(manifest(kind="inference"))
    files, plain = downloaded(store, made), downloaded(store, inference)
    del files[MANIFEST], plain[MANIFEST]
    assert {"config.json", "model.safetensors", "tokenizer.json"} <= set(plain)
    if is_encrypted:
        assert all(name.endswith(".age") for name in files)
        files = {n.removesuffix(".age"): decrypt(data, [identity]) for n, data in files.items()}
    assert files == plain


def test_recipients_are_public_keys(store: CheckpointStore):
    good = tuple(key()[1] for _ in range(3))
    assert check_recipients(good) == good
    assert check_recipients([]) == ()
    assert check_recipients(good[:1] * MAX_RECIPIENTS) == good[:1] * MAX_RECIPIENTS
    wrong_sum = good[0][:-1] + ("q" if good[0][-1] != "q" else "p")
    for bad in ("", "age1", "me@example.org", "ssh-ed25519 AAAA", wrong_sum, f" {good[0]}", "日本"):
        with pytest.raises(PostTrainingError) as caught:
            check_recipients([good[0], bad])
        assert caught.value.reason == Reason.INVALID_ARGUMENT
        assert f"age_recipients[1] is {bad!r}" in caught.value.message
    with pytest.raises(PostTrainingError, match="holds 101 keys: at most 100"):
        check_recipients(good[:1] * (MAX_RECIPIENTS + 1))


def test_secret_key_is_refused_without_repeating_it():
    secret = str(key()[0])
    assert secret.startswith("AGE-SECRET-KEY-1")
    for given in (secret, secret.lower(), f" {secret}\n"):
        with pytest.raises(PostTrainingError, match="is a secret key") as caught:
            check_recipients([given])
        shown = f"{caught.value} {caught.value.metadata}".upper()
        assert secret[16:].upper() not in shown
