"""The built wheel in clean environments: without the official SDK, and beside it."""

from __future__ import annotations

import base64
import csv
import hashlib
import zipfile
from pathlib import Path

import pytest

from tests.packaging.environments import OLDEST_TINKER, REPOSITORY, Environment, run

SWAP = """
import tinker
import together.post_training.tinker as swapped
import tinker_compat
from together.post_training.tinker import types
from together.post_training.tinker.types import Datum
from together.post_training.tinker.types.tensor_data import TensorData

assert swapped is tinker_compat, (swapped, tinker_compat)
assert types is swapped.types
assert types.Datum is tinker.types.Datum
assert Datum is tinker.Datum is swapped.Datum is swapped.types.Datum
assert TensorData is tinker.TensorData
assert swapped.BadRequestError is tinker.BadRequestError
assert swapped.__version__
missing = [name for name in tinker.__all__ if not hasattr(swapped, name)]
assert not missing, missing
"""

# As scripts of 0.23 are written: clients are used as they are returned.
TRAIN = """
import os
os.environ["TOGETHER_POST_TRAINING_STORE"] = os.path.abspath("store")
training = swapped.ServiceClient().create_lora_training_client("builtin:bigram16", rank=4)
datum = swapped.Datum(
    model_input=swapped.ModelInput.from_ints([3, 4, 5, 9]),
    loss_fn_inputs={"target_tokens": [4, 5, 9, 10], "weights": [1.0] * 4},
)
losses = []
for _ in range(3):
    passed = training.forward_backward([datum], "cross_entropy")
    training.optim_step(swapped.AdamParams(learning_rate=0.1))
    losses.append(passed.result().metrics["loss:sum"])
assert losses[2] < losses[0] / 2, losses
sampler = training.save_weights_and_get_sampling_client()
params = swapped.SamplingParams(max_tokens=4, temperature=0.0, stop=[])
sample = sampler.sample(swapped.ModelInput.from_ints([3]), 1, params).result()
assert sample.sequences[0].tokens == [4, 5, 9, 10], sample
"""


def test_wheel_ships_no_foreign_package_file(wheel: Path):
    names = zipfile.ZipFile(wheel).namelist()
    tops = {name.split("/")[0] for name in names if ".dist-info/" not in name}
    assert tops == {"backend", "tinker_compat", "together", "together_post_training"}
    together = [name for name in names if name.startswith("together/")]
    assert together == ["together/post_training/tinker.py"]
    assert not [name for name in names if "_alias" in name]


def test_wheel_holds_every_module_of_the_repository(wheel: Path):
    names = set(zipfile.ZipFile(wheel).namelist())
    modules = {
        path.relative_to(REPOSITORY).as_posix()
        for package in ("backend", "tinker_compat", "together_post_training")
        for path in (REPOSITORY / package).rglob("*.py")
    }
    assert {m for m in modules if "/_alias/" not in m} <= names


def test_wheel_gives_the_swapped_import_without_the_sdk(installed: Environment):
    installed.execute(SWAP)


def test_compat_gives_the_same_module_when_imported_first(installed: Environment):
    installed.execute("import tinker_compat\n" + SWAP)


def test_import_of_the_client_loads_no_library_that_tinker_does_not(installed: Environment):
    installed.execute(
        "import sys, tinker\n"
        "heavy = {'backend', 'peft', 'torch', 'transformers'}\n"
        "before = heavy & set(sys.modules)\n"
        "import tinker_compat\n"
        "assert heavy & set(sys.modules) == before, heavy & set(sys.modules)"
    )


def test_editable_install_gives_the_swapped_import(environment: Environment):
    environment.install("--editable", str(REPOSITORY))
    environment.execute(SWAP + "import backend.cli\n")
    assert (environment.directory / "bin" / "together-post-training").exists()


@pytest.mark.registry
def test_oldest_tinker_trains_and_samples(
    wheel: Path, oldest_tinker: str, environment: Environment
):
    assert f'"tinker>={OLDEST_TINKER}"' in (REPOSITORY / "pyproject.toml").read_text()
    environment.install(oldest_tinker, str(wheel))
    environment.execute(
        f"import tinker; assert tinker.__version__ == {OLDEST_TINKER!r}, tinker.__version__\n"
        + SWAP
        + TRAIN
    )


@pytest.mark.registry
@pytest.mark.parametrize("ours_first", [True, False])
def test_official_sdk_keeps_its_names_and_ours_stays_reachable(
    wheel: Path, official_sdk: tuple[str, ...], environment: Environment, ours_first: bool
):
    order = [(str(wheel),), official_sdk]
    for packages in order if ours_first else reversed(order):
        environment.install(*packages)
    environment.execute(
        "import importlib.util, together, tinker, tinker_compat\n"
        "assert together.__file__.endswith('together/__init__.py'), together\n"
        "assert together.Together(api_key='none').chat\n"
        "origin = importlib.util.find_spec('together.post_training.tinker').origin\n"
        "assert origin.endswith('together/post_training/tinker/__init__.py'), origin\n"
        "assert tinker_compat.Datum is tinker.Datum\n"
    )


@pytest.mark.registry
def test_script_can_be_run_against_ours_beside_the_official_sdk(
    wheel: Path, official_sdk: tuple[str, ...], environment: Environment
):
    environment.install(str(wheel), *official_sdk)
    script = environment.directory / "script.py"
    script.write_text(
        "import together, together.post_training.tinker as tinker, tinker_compat\n"
        "print(tinker is tinker_compat, together.__file__)\n"
    )
    plain = run(str(environment.python), "-I", "-m", "tinker_compat", str(script))
    assert plain.split() == ["True", str(environment.site_packages / "together" / "__init__.py")]
    report = run(str(environment.directory / "bin" / "together-post-training"), "doctor")
    assert "the official SDK" in report


@pytest.mark.registry
def test_uninstalling_leaves_the_official_sdk_whole(
    wheel: Path, official_sdk: tuple[str, ...], environment: Environment
):
    environment.install(*official_sdk)
    environment.install(str(wheel))
    assert not changed_files(environment, "together")
    environment.pip("uninstall", "--yes", "together-post-training")
    assert not changed_files(environment, "together")
    environment.execute("import together; together.Together")
    assert not (environment.site_packages / "tinker_compat").exists()


def changed_files(environment: Environment, distribution: str) -> list[str]:
    """Files of an installed distribution that are missing or differ from what its RECORD says."""
    (info,) = environment.site_packages.glob(f"{distribution}-*.dist-info")
    changed = []
    for name, digest, _ in csv.reader((info / "RECORD").read_text().splitlines()):
        path = environment.site_packages / name
        if not path.is_file() or (digest and digest != record_hash(path)):
            changed.append(name)
    return changed


def record_hash(path: Path) -> str:
    digest = hashlib.sha256(path.read_bytes()).digest()
    return "sha256=" + base64.urlsafe_b64encode(digest).rstrip(b"=").decode()
