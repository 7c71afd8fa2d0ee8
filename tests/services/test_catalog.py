from __future__ import annotations

from pathlib import Path

import gguf

from backend.resources.builtin import BUILTIN_MODELS, BuiltinModel
from backend.resources.catalog import ModelSpec
from backend.trainer import base_model, bigram, builtin_models
from backend.trainer.base import ModelInfo
from tests.services.harness import MODEL, serving
from together_post_training.v1 import catalog_pb2 as c


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
