"""Tokenizers: from the model's own directory, else from the server, never from a hub."""

from __future__ import annotations

import asyncio
import hashlib
import json
from pathlib import Path

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers

import tinker_compat as tinker
from tinker_compat.tokenizer import cache_directory, store
from together_post_training.errors import PostTrainingError
from together_post_training.v1 import catalog_pb2

VOCABULARY = {"hello": 0, "world": 1, "?": 2}


def tokenizer_files(directory: Path) -> dict[str, bytes]:
    tokenizer = Tokenizer(models.WordLevel(VOCABULARY, unk_token="?"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.save(str(directory / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "unk_token": "?"}
    (directory / "tokenizer_config.json").write_text(json.dumps(config))
    return {path.name: path.read_bytes() for path in directory.iterdir()}


def reply(files: dict[str, bytes]) -> catalog_pb2.GetTokenizerResponse:
    digest = hashlib.sha256(repr(sorted(files.items())).encode()).hexdigest()
    message = catalog_pb2.GetTokenizerResponse(digest=digest)
    for name, data in files.items():
        message.files.add(filename=name, data=data)
    return message


@pytest.fixture
def files(tmp_path: Path) -> dict[str, bytes]:
    directory = tmp_path / "served"
    directory.mkdir()
    return tokenizer_files(directory)


@pytest.fixture(autouse=True)
def _cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TOGETHER_POST_TRAINING_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")


def test_a_tokenizer_comes_from_the_server_once_and_is_kept(fake, files, tmp_path):
    fake.tokenizers["org/model"] = reply(files)
    service = tinker.ServiceClient(base_url=fake.address)
    training = service.create_lora_training_client("org/model").result()
    sampler = service.create_sampling_client(base_model="org/model")
    tokenizer = training.get_tokenizer()
    assert tokenizer.encode("hello world", add_special_tokens=False) == [0, 1]
    assert sampler.get_tokenizer() is training.get_tokenizer() is tokenizer
    assert len(fake.received("GetTokenizer")) == 1
    (kept,) = (tmp_path / "cache" / "tokenizers").iterdir()
    assert {path.name: path.read_bytes() for path in kept.iterdir()} == files


def test_a_tokenizer_of_a_directory_on_this_machine_needs_no_server(fake, tmp_path):
    directory = tmp_path / "model"
    directory.mkdir()
    tokenizer_files(directory)
    service = tinker.ServiceClient(base_url=fake.address)
    training = service.create_lora_training_client(str(directory)).result()
    assert training.get_tokenizer().decode([1]) == "world"
    assert fake.received("GetTokenizer") == []


def test_a_tokenizer_can_be_had_inside_a_running_loop_without_a_warning(fake, files, caplog):
    fake.tokenizers["org/model"] = reply(files)
    service = tinker.ServiceClient(base_url=fake.address)

    async def main() -> str:
        training = await service.create_lora_training_client_async("org/model")
        return training.get_tokenizer().decode([0])

    assert asyncio.run(main()) == "hello"
    assert [r for r in caplog.records if r.name.startswith("tinker_compat")] == []


def test_a_model_without_a_tokenizer_says_so(service):
    training = service.create_lora_training_client("builtin:bigram16").result()
    with pytest.raises(tinker.APIStatusError, match=r"bigram16.*no tokenizer.*token ids"):
        training.get_tokenizer()


@pytest.mark.parametrize("name", ["../evil", "/etc/evil", "a/b", ".hidden", "", "..", "a\\b"])
def test_files_that_would_leave_their_directory_are_refused(tmp_path, name):
    message = reply({"tokenizer.json": b"{}"})
    message.files.add(filename=name, data=b"x")
    with pytest.raises(PostTrainingError, match="tokenizer file named"):
        store(message, tmp_path)
    assert list(tmp_path.rglob("*evil*")) == []


def test_a_digest_that_would_leave_the_cache_is_refused(tmp_path):
    message = catalog_pb2.GetTokenizerResponse(digest="../elsewhere")
    with pytest.raises(PostTrainingError, match="elsewhere"):
        store(message, tmp_path)


def test_the_same_tokenizer_is_written_once(tmp_path):
    message = reply({"tokenizer.json": b"{}"})
    directory = store(message, tmp_path)
    (directory / "mark").touch()
    assert store(message, tmp_path) == directory
    assert (directory / "mark").exists()
    assert [p.name for p in tmp_path.iterdir()] == [message.digest]


def test_the_cache_follows_the_environment():
    assert cache_directory({"TOGETHER_POST_TRAINING_CACHE": "/a"}) == Path("/a/tokenizers")
    assert cache_directory({"XDG_CACHE_HOME": "/b"}) == Path("/b/together-post-training/tokenizers")
    assert cache_directory({}).parts[-3:] == (".cache", "together-post-training", "tokenizers")
