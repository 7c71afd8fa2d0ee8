"""One module under two names, with Tinker's own objects in it."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
from pathlib import Path

import pytest
import tinker

import tinker_compat
from tinker_compat.additions import ADDITIONS

REPOSITORY = Path(__file__).parents[2]
OURS = {
    "AdminClient",
    "BackcompatSamplingClientFuture",
    "BackcompatTrainingClientFuture",
    "RestClient",
    "SamplingClient",
    "ServiceClient",
    "TrainingClient",
    # Modules with names that Tinker's lack.
    "auth",
    "types",
}


# Tinker does without torch, which takes seconds to import; and whatever insists on it fails here.
WITHOUT_TORCH = "import sys; sys.modules['torch'] = None\n"
PATH = os.pathsep.join([str(REPOSITORY), str(REPOSITORY / "tinker_compat/_alias")])


def run(code: str) -> None:
    """In a fresh interpreter, where nothing was imported before and every warning is an error."""
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", WITHOUT_TORCH + code],
        env={**os.environ, "PYTHONPATH": PATH},
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr


def test_every_exported_name_is_tinkers_own_object_but_for_the_clients():
    for name in tinker.__all__:
        is_same = getattr(tinker_compat, name) is getattr(tinker, name)
        assert is_same != (name in OURS), name
    # ... and, where the installed version lacks names of another, ours.
    assert set(tinker.__all__) | OURS | set(ADDITIONS[""]) == set(tinker_compat.__all__)
    assert all(hasattr(tinker_compat, name) for name in tinker_compat.__all__)


def test_types_are_tinkers_own_in_our_module_of_them():
    classes = {n: v for n, v in vars(tinker.types).items() if isinstance(v, type)}
    assert len(classes) > 50
    assert all(getattr(tinker_compat.types, name) is value for name, value in classes.items())


def test_both_names_are_the_same_module():
    run(
        "import together.post_training.tinker as a, tinker_compat as b\n"
        "from together.post_training import tinker as c\n"
        "assert a is b is c is sys.modules['together.post_training.tinker']\n"
        "import together\n"
        "assert together.__file__ is None and together.post_training.tinker is b\n"
    )


@pytest.mark.parametrize("package", ["together.post_training.tinker", "tinker_compat"])
def test_submodules_and_their_contents_are_tinkers_own(package):
    run(
        f"""
from {package} import types
from {package}.types import Datum
from {package}.types.tensor_data import TensorData
import {package}.types.datum as datum_module
import {package} as swapped
import tinker
assert types is swapped.types and types.Datum is Datum
assert Datum is tinker.Datum is datum_module.Datum
assert TensorData is tinker.TensorData is swapped.types.tensor_data.TensorData
assert datum_module is sys.modules['tinker.types.datum']
assert datum_module.__spec__.name == datum_module.__name__ == 'tinker.types.datum'
assert issubclass(swapped.BadRequestError, tinker.TinkerError)
assert (swapped.__version__, swapped.__title__) == (tinker.__version__, tinker.__title__)
copies = [n for n, m in sys.modules.items() if n.startswith('tinker.') and m.__name__ != n]
assert copies == [], copies
"""
    )


def test_deep_imports_that_scripts_use_lead_to_our_clients_and_tinkers_rest():
    run(
        """
import together.post_training.tinker as swapped
from together.post_training.tinker.lib.public_interfaces import APIFuture, ServiceClient
from together.post_training.tinker.lib.public_interfaces.service_client import ServiceClient as again
from together.post_training.tinker.lib.public_interfaces.training_client import TrainingClient
from together.post_training.tinker.lib.retry_handler import RetryConfig
from together.post_training.tinker._client import AsyncTinker
import tinker, tinker.lib.retry_handler
assert ServiceClient is again is swapped.ServiceClient is not tinker.ServiceClient
assert TrainingClient is swapped.TrainingClient
assert swapped.lib.public_interfaces.sampling_client.SamplingClient is swapped.SamplingClient
assert APIFuture is tinker.APIFuture
assert RetryConfig is tinker.lib.retry_handler.RetryConfig
assert tinker.lib.public_interfaces.ServiceClient is tinker.ServiceClient, 'tinker itself is untouched'
"""
    )


def test_importing_adds_no_heavy_library_to_what_tinker_imports():
    run(
        """
import tinker
before = {name.split('.')[0] for name in sys.modules}
import tinker_compat
added = {name.split('.')[0] for name in sys.modules} - before
assert not added & {'transformers', 'peft', 'backend', 'IPython'}, added
"""
    )


def test_a_name_that_tinker_does_not_have_is_an_attribute_error():
    with pytest.raises(AttributeError, match="no_such_name"):
        tinker_compat.no_such_name  # noqa: B018
    with pytest.raises(ModuleNotFoundError, match="no_such_module"):
        importlib.import_module("tinker_compat.types.no_such_module")
    assert not hasattr(tinker_compat, "__wrapped__")


def test_the_official_sdks_modules_are_left_alone_where_it_is_installed():
    run(
        """
import types
name = 'together.post_training.tinker'
for package in ('together', 'together.post_training', name):
    sys.modules[package] = types.ModuleType(package)
    sys.modules[package].__path__ = []
import tinker_compat
try:
    import together.post_training.tinker.types
except ModuleNotFoundError:
    pass
else:
    raise AssertionError('ours was imported in its place')
import tinker_compat.types
"""
    )


SCRIPT = """
import sys
import together.post_training.tinker as tinker
from together.post_training import tinker as again
from together.post_training.tinker.types import Datum
assert tinker is again
print(tinker.ServiceClient.__module__, Datum.__module__, sys.argv[1:], __name__)
"""


@pytest.mark.parametrize("sdk", ["absent", "without post-training", "present"])
def test_a_script_can_be_run_against_ours_whatever_is_installed(tmp_path, sdk):
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    (tmp_path / "torch.py").write_text("raise ImportError('without')")
    if sdk != "absent":
        package = tmp_path / "together"
        package.mkdir()
        (package / "__init__.py").write_text("real = True")
        if sdk == "present":
            (package / "post_training" / "tinker").mkdir(parents=True)
            (package / "post_training" / "__init__.py").write_text("")
            (package / "post_training" / "tinker" / "__init__.py").write_text("real = True")
    done = subprocess.run(
        [sys.executable, "-m", "tinker_compat", str(script), "a", "--b"],
        env={**os.environ, "PYTHONPATH": f"{tmp_path}{os.pathsep}{PATH}"},
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.stdout.strip() == "tinker_compat.service_client tinker ['a', '--b'] __main__", (
        done.stderr
    )
