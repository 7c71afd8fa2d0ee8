"""Tokenizers: from the model's own directory, else from the server, never from a hub."""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers

import tinker_compat as tinker
from tests import models as tiny_models
from tests.services.harness import serving
from tinker_compat.tokenizer import cache_directory, local_directory, store
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


def test_a_variants_tokenizer_is_the_models(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    directory = tmp_path / "org" / "model"
    directory.mkdir(parents=True)
    tokenizer_files(directory)
    assert local_directory("org/model:peft:131072") == directory
    assert local_directory("org/model/variant") is None
    assert local_directory("org/model/../model") == directory / ".." / "model"
    for name in ("", "builtin:tiny", "x" * 5000, "a\0b", "~nobody-of-this-name"):
        assert local_directory(name) is None


@pytest.fixture
def on_demand(tmp_path, monkeypatch):
    """A client of a server that runs where it does."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    with serving(tmp_path / "store", models=(), load_on_demand=True) as running:
        client = tinker.ServiceClient(base_url=running.address)
        yield client
        client.close("success").result()


def use(client: tinker.ServiceClient, base_model: str) -> tuple[str | None, str]:
    """Trains and samples with a model of a directory: (what it is called, what its tokenizer makes of token 1)."""
    training = client.create_lora_training_client(base_model, rank=4).result()
    tokens = training.get_tokenizer().encode("hello world", add_special_tokens=False)
    datum = tinker.Datum(
        model_input=tinker.ModelInput.from_ints(tokens[:1]),
        loss_fn_inputs={
            "target_tokens": tinker.TensorData(data=tokens[1:], dtype="int64"),
            "weights": tinker.TensorData(data=[1.0], dtype="float32"),
        },
    )
    training.forward_backward([datum], "cross_entropy").result()
    sampler = client.create_sampling_client(base_model=base_model).result()
    params = tinker.SamplingParams(max_tokens=2, stop=[])
    sample = sampler.sample(tinker.ModelInput.from_ints(tokens), 1, params).result()
    assert len(sample.sequences[0].tokens) == 2
    assert sampler.get_tokenizer().decode(tokens) == "hello world"
    return training.get_info().model_data.model_name, training.get_tokenizer().decode([1])


def test_a_model_of_a_directory_is_trained_and_sampled_under_any_of_its_names(
    on_demand, tmp_path, monkeypatch
):
    directory = tiny_models.rand(tmp_path / "Qwen" / "Qwen3-8B")
    tokenizer_files(directory)
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in ("Qwen/Qwen3-8B", str(directory), "~/Qwen/Qwen3-8B"):
        assert use(on_demand, name) == (name, "world")
    assert use(on_demand, "Qwen/Qwen3-8B:peft:64") == ("Qwen/Qwen3-8B", "world")
    listed = on_demand.get_server_capabilities().supported_models
    lengths = {model.model_name: model.max_context_length for model in listed}
    assert lengths["Qwen/Qwen3-8B"] == lengths[str(directory)] == tiny_models.MAX_SEQ_LENGTH


def test_a_tokenizer_of_the_servers_directory_needs_none_of_the_clients(
    on_demand, tmp_path, monkeypatch
):
    directory = tiny_models.rand(tmp_path / "org" / "model")
    tokenizer_files(directory)
    training = on_demand.create_lora_training_client("org/model", rank=4).result()
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    monkeypatch.chdir(elsewhere)
    assert training.get_tokenizer().decode([0]) == "hello"


def test_a_directory_without_a_tokenizer_trains_and_says_what_is_missing(on_demand, tmp_path):
    directory = tiny_models.rand(tmp_path / "bare")
    training = on_demand.create_lora_training_client("bare", rank=4).result()
    with pytest.raises(tinker.BadRequestError, match=r"no tokenizer.*tokenizer\.json") as error:
        training.get_tokenizer()
    assert str(directory) in str(error.value)


def test_a_tokenizer_that_is_damaged_is_told_of_where_it_lies(on_demand, tmp_path):
    directory = tiny_models.rand(tmp_path / "damaged")
    (directory / "tokenizer.json").write_text("{")
    with pytest.raises(tinker.APIStatusError, match=r"tokenizer in .*damaged cannot be read"):
        on_demand.create_lora_training_client("damaged", rank=4).result()


@pytest.mark.parametrize(
    "name", ["org/nowhere", "org/nowhere:peft:64", "org/no/where", "/no/where"]
)
def test_a_model_that_is_nowhere_is_not_found_at_once(on_demand, name):
    with pytest.raises(tinker.NotFoundError, match=r"no directory /.*Nothing is downloaded"):
        on_demand.create_sampling_client(base_model=name).result()


EMBEDDED = """
import sys, tinker_compat as tinker
service = tinker.ServiceClient()
for name in sys.argv[1:]:
    training = service.create_lora_training_client(name, rank=4).result()
    print(training.get_info().model_data.model_name, training.get_tokenizer().decode([1]))
"""


@pytest.mark.slow
def test_an_embedded_server_finds_models_where_the_script_runs(tmp_path):
    tokenizer_files(tiny_models.rand(tmp_path / "here" / "Qwen" / "Qwen3-8B"))
    tokenizer_files(tiny_models.rand(tmp_path / "beside"))
    names = ["Qwen/Qwen3-8B", "./Qwen/Qwen3-8B", "../beside"]
    environment = {
        **{
            k: v for k, v in os.environ.items() if not k.startswith(("TOGETHER_", "TINKER_", "HF_"))
        },
        "TOGETHER_POST_TRAINING_STORE": str(tmp_path / "store"),
        "PYTHONPATH": str(Path(tinker.__file__).parents[1]),
    }
    done = subprocess.run(
        [sys.executable, "-c", EMBEDDED, *names],
        cwd=tmp_path / "here",
        env=environment,
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.stdout.splitlines() == [f"{name} world" for name in names], done.stderr
