"""tinker_compat.install(): the name `tinker` itself gives our clients."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from pathlib import Path

import pytest
import tinker

import tinker_compat
from tests.compat.conftest import MODEL
from tests.compat.data import greedy, prompt

REPOSITORY = Path(__file__).parents[2]
# Tinker does without it, and it takes a second to import.
WITHOUT_TORCH = "import sys; sys.modules['torch'] = None\n"


def run(code: str, *paths: Path) -> None:
    """In a fresh interpreter, where every warning is an error."""
    path = os.pathsep.join(str(p) for p in (REPOSITORY, *paths))
    # An older Tinker may go first.
    path = os.pathsep.join([p for p in (os.environ.get("PYTHONPATH"), path) if p])
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", WITHOUT_TORCH + code],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr


LIBRARY = """
import tinker
from tinker import BadRequestError, SamplingClient, ServiceClient, types
from tinker.lib.public_interfaces import APIFuture
from tinker.lib.public_interfaces.rest_client import RestClient
from tinker.types.tensor_data import TensorData

def connect():
    return tinker.ServiceClient(), isinstance(ServiceClient(), tinker.ServiceClient)
"""


def test_install_gives_libraries_our_clients_and_tinkers_rest(tmp_path):
    (tmp_path / "library.py").write_text(LIBRARY)
    run(
        """
import sys
import tinker, tinker_compat
hooks = list(sys.meta_path), list(sys.path_hooks)
tinker_compat.install()
tinker_compat.install()
assert (sys.meta_path, sys.path_hooks) == hooks, 'no import hook is needed'
import library
service, is_instance = library.connect()
assert type(service) is tinker_compat.ServiceClient and is_instance
assert library.SamplingClient is tinker_compat.SamplingClient is tinker.SamplingClient
assert library.RestClient is tinker_compat.RestClient
assert sys.modules['tinker'] is tinker is not tinker_compat and tinker.__name__ == 'tinker'
assert library.types is tinker.types and library.types.Datum is tinker_compat.Datum
assert issubclass(tinker_compat.TrainingClient, tinker.TrainingClient)
assert issubclass(tinker_compat.BackcompatTrainingClientFuture, library.APIFuture)
assert tinker.BadRequestError is tinker_compat.BadRequestError is library.BadRequestError
from tinker import *
assert ServiceClient is tinker_compat.ServiceClient
import tinker.cli.client
""",
        tmp_path,
    )


def test_install_adds_the_names_that_only_another_version_has():
    run(
        """
import tinker_compat
tinker_compat.install()
import tinker
from tinker import AdamOptimizerConfig, AdminClient, BillingError, LossHandle, RestClient, auth
from tinker import ExperimentalWarning, SidecarDiedError, SidecarError
from tinker.auth import get_tinker_token
from tinker.types import CheckpointArchiveUrlResponse, WhoamiResponse
from tinker.types.checkpoint_archive_url_response import CheckpointArchiveUrlResponse as again
from tinker.types.topk_prompt_logprobs import TopkPromptLogprobs
import tinker.types.topk_logprobs as module
assert again is CheckpointArchiveUrlResponse is tinker_compat.types.CheckpointArchiveUrlResponse
assert TopkPromptLogprobs is module.TopkLogprobs is tinker.types.topk_logprobs.TopkLogprobs
assert issubclass(SidecarDiedError, SidecarError) and issubclass(SidecarError, tinker.TinkerError)
assert issubclass(BillingError, tinker.APIStatusError)
assert get_tinker_token is tinker_compat.auth.get_tinker_token
for name in tinker_compat.__all__:
    assert name in tinker.__all__ and hasattr(tinker, name), name
try:
    tinker.no_such_name
except AttributeError as error:
    assert "module 'tinker' has no attribute 'no_such_name'" in str(error)
"""
    )


def test_uninstall_gives_everything_back():
    run(
        """
import sys
import tinker, tinker.lib.public_interfaces.rest_client, tinker_compat, tinker_compat.substitution

def state():
    names = [n for n in sys.modules if n.split('.')[0] == 'tinker']
    return {n: dict(vars(sys.modules[n])) for n in sorted(names)}

before = state()
tinker_compat.install()
assert state() != before
tinker_compat.uninstall()
assert state() == before
import multiprocessing.spawn
assert multiprocessing.spawn.get_preparation_data.__module__ == 'multiprocessing.spawn'
tinker_compat.uninstall()
tinker_compat.install()
assert tinker.ServiceClient is tinker_compat.ServiceClient
"""
    )


HOLDERS = {
    "library.SamplingClient": "from tinker import SamplingClient",
    "library.sample": "import tinker\nsample = tinker.SamplingClient",
    "library.Mine": "import tinker\nclass Mine(tinker.TrainingClient):\n    pass",
    "a SamplingClient that was made already": (
        "import tinker\n"
        "kept = object.__new__(tinker.lib.public_interfaces.sampling_client.SamplingClient)"
    ),
}
if hasattr(tinker, "auth"):
    HOLDERS["library.get_tinker_token"] = "from tinker.auth import get_tinker_token"


@pytest.mark.parametrize("named", HOLDERS)
def test_install_is_refused_when_tinkers_own_is_in_use_naming_by_what(tmp_path, named):
    (tmp_path / "library.py").write_text(HOLDERS[named])
    run(
        f"""
import library, tinker, tinker_compat
own = tinker.ServiceClient
try:
    tinker_compat.install()
except RuntimeError as error:
    assert {named!r} in str(error) and 'comes too late' in str(error), error
else:
    raise AssertionError('not refused')
assert tinker.ServiceClient is own and not hasattr(tinker, 'no_such_name')
""",
        tmp_path,
    )


def test_a_library_that_only_imported_the_module_is_no_hindrance(tmp_path):
    (tmp_path / "library.py").write_text("import tinker\nfrom tinker import Datum, types\n")
    run(
        "import library, tinker_compat\n"
        "tinker_compat.install()\n"
        "assert library.tinker.ServiceClient is tinker_compat.ServiceClient\n",
        tmp_path,
    )


def test_auth_takes_any_key_and_none(monkeypatch, address):
    auth = tinker_compat.auth
    for variable in ("TINKER_API_KEY", "TOGETHER_API_KEY"):
        monkeypatch.delenv(variable, raising=False)
    assert (auth.get_tinker_token(), auth.tinker_has_credentials()) == (None, True)
    monkeypatch.setenv("TINKER_API_KEY", "local")
    assert (auth.get_tinker_token(), auth.tinker_has_credentials()) == ("local", True)
    monkeypatch.setenv("TOGETHER_POST_TRAINING_ADDRESS", address)
    assert auth.raise_if_tinker_not_accessible() is None
    monkeypatch.setenv("TINKER_API_KEY", "two\nlines")
    assert (auth.get_tinker_token(), auth.tinker_has_credentials()) == (None, False)
    with pytest.raises(tinker.TinkerError, match="TINKER_API_KEY"):
        auth.raise_if_tinker_not_accessible()


def test_auth_says_soon_that_there_is_no_server(monkeypatch):
    monkeypatch.setenv("TOGETHER_POST_TRAINING_ADDRESS", "localhost:1")
    with pytest.raises(tinker.APIConnectionError):
        tinker_compat.auth.raise_if_tinker_not_accessible()
    monkeypatch.setenv("TOGETHER_POST_TRAINING_ADDRESS", "https://example.org")
    with pytest.raises(tinker.TinkerError, match="web address"):
        tinker_compat.auth.raise_if_tinker_not_accessible()


def test_methods_can_be_patched_on_the_classes(client, sampler, monkeypatch):
    """As instrumentation does: the wrapper sees every call, made on a client or on the future of one."""
    calls = []

    def wrap(cls: type, name: str) -> None:
        original = getattr(cls, name)

        def wrapper(self, *args, **kwargs):
            calls.append((name, type(self).__name__))
            return original(self, *args, **kwargs)

        monkeypatch.setattr(cls, name, wrapper)

    for name in ("sample", "sample_async", "compute_logprobs"):
        wrap(tinker_compat.SamplingClient, name)
    for name in ("forward_backward", "optim_step", "save_weights_for_sampler"):
        wrap(tinker_compat.TrainingClient, name)
    client.optim_step(tinker.AdamParams()).result()
    sampler.sample(prompt(3), 1, greedy(1)).result()
    service = tinker_compat.ServiceClient(base_url=str(client.holder.connection.address))
    pending = service.create_sampling_client(base_model=MODEL)
    assert pending.compute_logprobs(prompt(3, 4)).result()[0] is None
    trained = service.create_lora_training_client(MODEL)
    trained.optim_step(tinker.AdamParams()).result()
    assert calls == [
        ("optim_step", "TrainingClient"),
        ("sample", "SamplingClient"),
        ("compute_logprobs", "BackcompatSamplingClientFuture"),
        ("optim_step", "BackcompatTrainingClientFuture"),
    ]
    assert asyncio.run(pending.sample_async(prompt(3), 1, greedy(1))).sequences[0].tokens == [4]
    assert calls[4:] == [
        ("sample_async", "BackcompatSamplingClientFuture"),
        ("sample", "BackcompatSamplingClientFuture"),
    ]
    service.close("success").result()
