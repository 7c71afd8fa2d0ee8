from __future__ import annotations

from pathlib import Path

import gguf
import pytest

from backend.resources.builtin import BUILTIN_MODELS, BuiltinModel
from backend.resources.catalog import Catalog, ModelSpec, split_variant
from backend.trainer import base_model, bigram, builtin_models
from backend.trainer.base import ModelInfo
from tests import models
from tests.services.harness import MODEL, refusal, serving
from together_post_training.errors import PostTrainingError, Reason
from together_post_training.v1 import catalog_pb2 as c
from together_post_training.v1 import sessions_pb2


@pytest.fixture(autouse=True)
def _empty_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))


def test_models_loaded_on_demand_list_the_builtin_ones(tmp_path: Path):
    with serving(tmp_path, models=(), load_on_demand=True) as running:
        before = running.caller.catalog.ListModels(c.ListModelsRequest()).models
        assert {m.name: (m.max_context_length, m.vocab_size) for m in before} == {
            "builtin:tiny": (1024, 259),
            "builtin:smollm2-135m": (8192, 49152),
            "builtin:bigram16": (1024, 16),
        }
        assert not any(m.loaded for m in before)
        assert all(m.trainable and m.sampleable for m in before)
        running.caller.session()
        after = running.caller.catalog.ListModels(c.ListModelsRequest()).models
        assert sorted(m.name for m in after) == sorted(m.name for m in before)
        assert [m.name for m in after if m.loaded] == [MODEL]


def test_length_of_a_model_that_is_not_loaded_is_absent_unless_it_is_builtin(tmp_path: Path):
    """Nothing can be asked of a server before its models are loaded, so these are added to one that runs."""
    with serving(tmp_path) as running:
        catalog = running.server._resources.catalog
        catalog.add(ModelSpec(name="mine", path="/somewhere"))
        catalog.add(ModelSpec(name="small", path="builtin:tiny"))
        _, mine, small = running.caller.catalog.ListModels(c.ListModelsRequest()).models
    assert not mine.HasField("max_context_length")
    assert not mine.HasField("vocab_size")
    assert (small.name, small.max_context_length) == ("small", 1024)


def test_builtin_model_is_installed_with_all_its_packages():
    for packages, expected in (
        ((), True),
        (("numpy",), True),
        (("numpy", "no_such_package"), False),
    ):
        model = BuiltinModel(name="m", max_seq_length=1, vocab_size=1, packages=packages)
        assert model.is_installed is expected


def test_builtin_models_are_told_as_they_are():
    assert set(BUILTIN_MODELS) == {*builtin_models.NAMES, MODEL}
    for info in (base_model.load("builtin:tiny").info, bigram.load(MODEL).info):
        assert _told(info) == (info.limits.max_seq_length, info.limits.vocab_size)
    fields = _smollm2_reader().fields
    told = BUILTIN_MODELS["builtin:smollm2-135m"]
    assert told.max_seq_length == fields["llama.context_length"].contents()
    assert told.vocab_size == fields["llama.vocab_size"].contents()


def _told(info: ModelInfo) -> tuple[int, int]:
    told = BUILTIN_MODELS[info.name]
    return told.max_seq_length, told.vocab_size


def _smollm2_reader() -> gguf.GGUFReader:
    package = builtin_models._package_dir(builtin_models._SMOLLM2_PACKAGE)
    assert package is not None
    return gguf.GGUFReader(package / builtin_models._SMOLLM2_FILE)


# Names


def catalog(*names: str, **options: bool) -> Catalog:
    specs = tuple(ModelSpec(name=name, path=f"/served/{name}") for name in names)
    return Catalog(specs, **{"load_on_demand": False} | options)


def test_name_of_a_variant_is_the_models_unless_it_is_served_itself():
    served = catalog("org/model", "org/other:peft:64")
    assert served.resolve("org/model:peft:131072").name == "org/model"
    assert served.resolve("org/other:peft:64").path == "/served/org/other:peft:64"
    with pytest.raises(PostTrainingError, match="Unknown base model 'org/other:peft:128'"):
        served.resolve("org/other:peft:128")
    on_demand = catalog(load_on_demand=True)
    assert on_demand.resolve("a/b:peft:64") == ModelSpec(name="a/b", path="a/b")
    assert on_demand.resolve("a/b/c") == ModelSpec(name="a/b/c", path="a/b/c")


def test_directory_may_be_called_like_a_variant(tmp_path: Path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "org" / "model:8k").mkdir(parents=True)
    (tmp_path / "org" / "model:8k" / "config.json").write_text("{}")
    assert catalog(load_on_demand=True).resolve("org/model:8k").path == "org/model:8k"
    assert catalog(load_on_demand=True).resolve("/a:b/c").path == "/a:b/c"


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("org/model", ("org/model", None)),
        ("org/model:peft", ("org/model", None)),
        ("org/model:peft:131072", ("org/model", 131072)),
        ("org/model:²", ("org/model", None)),
        ("builtin:tiny", ("builtin:tiny", None)),
        ("~/a:1", ("~/a:1", None)),
        ("", ("", None)),
    ],
)
def test_variant_of_a_name_says_the_window(name, expected):
    assert split_variant(name) == expected


@pytest.mark.parametrize(
    "name", ["../..", "../../etc", "a/../../x", "/etc", "~", "", ".", "a\0b", "x" * 5000]
)
def test_name_that_tries_to_leave_is_an_unknown_model_on_a_server_that_loads_none(shared, name):
    request = sessions_pb2.CreateSessionRequest(
        base_model=name, lora=sessions_pb2.LoraConfig(rank=4)
    )
    for call, message in (
        (shared.caller.sessions.CreateSession, request),
        (shared.caller.catalog.GetTokenizer, c.GetTokenizerRequest(base_model=name)),
    ):
        refused = refusal(call, message)
        assert refused.reason == "MODEL_NOT_FOUND"
        assert f"this server serves {MODEL}" in refused.message or len(name) > 1000
        assert "etc" not in refused.message.replace(repr(name), "")


def test_paths_that_lead_upwards_are_for_a_client_of_the_same_directory_alone():
    with pytest.raises(PostTrainingError, match=r"relative without '\.\.'") as error:
        catalog(load_on_demand=True).resolve("../model")
    assert error.value.reason is Reason.MODEL_NOT_FOUND
    ours = catalog(load_on_demand=True, trusts_paths=True)
    assert ours.resolve("../model").path == "../model"


def test_variant_is_served_by_the_one_model_that_is_loaded(tmp_path: Path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    models.rand(tmp_path / "org" / "model")
    with serving(tmp_path / "store", models=(), load_on_demand=True) as running:
        lora = sessions_pb2.LoraConfig(rank=4)
        for name in ("org/model:peft:64", "org/model", "org/model:peft"):
            run = running.caller.session(base_model=name, lora=lora)
            assert run.shown.base_model == "org/model"
        assert len(running.server._resources.all_ready()) == 1
        run.save("a")
        resumed = running.caller.session(resume_from=run.path("a"), base_model="org/model:peft:64")
        assert resumed.shown.base_model == "org/model"
        longer = sessions_pb2.CreateSessionRequest(base_model="org/model:peft:65", lora=lora)
        resuming = sessions_pb2.CreateSessionRequest(
            base_model="org/model:peft:65", resume_from=run.path("a")
        )
        for request in (longer, resuming):
            refused = refusal(running.caller.sessions.CreateSession, request)
            assert refused.reason == "MODEL_NOT_FOUND"
            assert "65 tokens, and 'org/model' has 64" in refused.message
        request = sessions_pb2.CreateSessionRequest(
            base_model="org/other:peft:64", resume_from=run.path("a")
        )
        assert "org/other" in refusal(running.caller.sessions.CreateSession, request).message


def test_models_that_are_not_loaded_are_listed_with_their_window(tmp_path: Path, monkeypatch):
    model = models.rand(tmp_path / "model")
    snapshot = tmp_path / "hub" / "models--org--cached" / "snapshots" / "0"
    snapshot.parent.mkdir(parents=True)
    snapshot.symlink_to(model)
    (snapshot.parents[1] / "refs").mkdir()
    (snapshot.parents[1] / "refs" / "main").write_text("0")
    with serving(tmp_path / "store", load_on_demand=True) as running:
        running.server._resources.catalog.add(ModelSpec(name="mine", path=str(model)))
        found = running.caller.catalog.ListModels(c.ListModelsRequest()).models
    lengths = {m.name: m.max_context_length for m in found}
    assert (lengths["mine"], lengths["org/cached"]) == (models.MAX_SEQ_LENGTH,) * 2
    assert [m.name for m in found].count(MODEL) == 1
