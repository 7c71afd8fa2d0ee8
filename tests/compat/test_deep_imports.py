"""What public scripts import from below `tinker`: it resolves here, whichever name the package is reached by."""

from __future__ import annotations

import importlib
import logging
import sys
from collections.abc import Iterator

import pytest
import tinker

import tinker_compat
from tests.compat.conftest import MODEL
from tests.compat.data import datum, prompt
from tinker_compat.aliases import SWAPPED, swap_in

PUBLIC = "lib.public_interfaces"
# Ours, wherever they are found.
CLIENTS = {
    f"{PUBLIC}.ServiceClient",
    f"{PUBLIC}.TrainingClient",
    f"{PUBLIC}.SamplingClient",
    f"{PUBLIC}.RestClient",
    f"{PUBLIC}.AdminClient",
    f"{PUBLIC}.service_client.ServiceClient",
    f"{PUBLIC}.training_client.TrainingClient",
    f"{PUBLIC}.training_client.SamplingClient",
    f"{PUBLIC}.sampling_client.SamplingClient",
    f"{PUBLIC}.rest_client.RestClient",
    f"{PUBLIC}.admin_client.AdminClient",
    f"{PUBLIC}.backcompat_training_client_future.BackcompatTrainingClientFuture",
    f"{PUBLIC}.backcompat_sampling_client_future.BackcompatSamplingClientFuture",
}
# Tinker's own objects.
GENUINE = {
    "types.tensor_data.TensorData",
    "types.datum.Datum",
    "types.image_chunk.ImageChunk",
    "types.model_input.ModelInput",
    "types.sampling_params.SamplingParams",
    "types.LossFnType",
    "types.ImageAssetPointerChunk",
    "types.GetServerCapabilitiesResponse",
    "types.FutureRetrieveRequest",
    f"{PUBLIC}.APIFuture",
    f"{PUBLIC}.AwaitableConcurrentFuture",
    f"{PUBLIC}.api_future.APIFuture",
    f"{PUBLIC}.api_future.AwaitableConcurrentFuture",
    f"{PUBLIC}.service_client.RetryConfig",
    f"{PUBLIC}.training_client.combine_fwd_bwd_output_results",
    f"{PUBLIC}.sampling_client.QueueState",
    "lib.retry_handler.RetryConfig",
    "lib.client_connection_pool_type.ClientConnectionPoolType",
    "lib.api_future_impl._APIFuture",
    "lib.api_future_impl._CombinedAPIFuture",
    "lib.internal_client_holder.InternalClientHolder",
    "lib.queue_state_logger.QueueStateLogger",
    "lib.telemetry.Telemetry",
    "_client.AsyncTinker",
    "_compat.model_dump",
    "_exceptions.TinkerError",
    "_models.BaseModel",
    "proto.tinker_public_pb2",
}
# Of one version or the other: Tinker's object where the installed one has it, else ours.
EITHER = {
    "auth.get_tinker_token",
    "auth.raise_if_tinker_not_accessible",
    "auth.tinker_has_credentials",
    "types.CheckpointArchiveUrlResponse",
    "types.WhoamiResponse",
    "types.DimuonParams",
    "types.checkpoint_archive_url_response.CheckpointArchiveUrlResponse",
    "types.optimizer.OptimizerConfigBase",
    "types.topk_logprobs.TopkLogprobs",
    "types.topk_prompt_logprobs.TopkPromptLogprobs",
    "lib.experimental.ExperimentalWarning",
    f"{PUBLIC}.LossHandle",
    f"{PUBLIC}.custom_loss.LossHandle",
}


def find(package: str, path: str) -> object:
    """As `from package.module import name` does."""
    module, _, name = f"{package}.{path}".rpartition(".")
    scope: dict[str, object] = {}
    exec(f"from {module} import {name}", scope)
    return scope[name]


@pytest.fixture
def swapped(monkeypatch) -> Iterator[None]:
    """`together.post_training.tinker`, which is not on the path of these tests."""
    for package in ("together", "together.post_training", SWAPPED):
        monkeypatch.delitem(sys.modules, package, raising=False)
    before = set(sys.modules)
    swap_in()
    yield
    for name in set(sys.modules) - before:
        if name.startswith("together."):
            del sys.modules[name]


@pytest.fixture
def installed() -> Iterator[None]:
    tinker_compat.install()
    yield
    tinker_compat.uninstall()


@pytest.mark.parametrize("path", sorted(CLIENTS))
def test_a_client_below_any_name_is_ours(swapped, installed, path):
    ours = getattr(tinker_compat, path.rpartition(".")[2])
    for package in ("tinker_compat", SWAPPED, "tinker"):
        assert find(package, path) is ours, package


@pytest.mark.parametrize("path", sorted(GENUINE))
def test_what_is_not_a_client_is_tinkers_own_below_any_name(swapped, path):
    theirs = find("tinker", path)
    assert find("tinker_compat", path) is theirs
    assert find(SWAPPED, path) is theirs


@pytest.mark.parametrize("path", sorted(EITHER))
def test_what_one_version_has_is_there_below_any_name(swapped, installed, path):
    found = find("tinker_compat", path)
    assert found is find(SWAPPED, path) is find("tinker", path)


def test_attributes_lead_down_without_imports():
    assert tinker_compat.lib.public_interfaces.sampling_client.QueueState.ACTIVE.value == "active"
    assert tinker_compat.types.tensor_data.TensorData is tinker.TensorData


def test_a_sampling_client_is_created_from_a_holder(service):
    create = tinker_compat.SamplingClient.create
    first = create(service.holder, base_model=MODEL).result()
    assert type(first) is tinker_compat.SamplingClient
    assert first.get_base_model() == MODEL
    again = create(service.holder, sampling_session_id=first._sampling_session_id).result()
    assert again.get_base_model() == MODEL
    named = create(service.holder, sampling_session_id=first._sampling_session_id, base_model="n")
    assert named.result().get_base_model() == "n"
    scores = [c.compute_logprobs(prompt(3, 4)).result() for c in (first, again, named.result())]
    assert scores[0] == scores[1] == scores[2]
    with pytest.raises(ValueError, match="Either model_path or base_model must be provided"):
        create(service.holder)
    with pytest.raises(ValueError, match="model_path must start with 'tinker://'"):
        create(service.holder, model_path="/tmp/x").result()


def test_a_sampling_client_is_created_from_a_holder_and_a_path(client):
    path = client.save_weights_for_sampler("deep").result().path
    sampler = tinker_compat.SamplingClient.create(client.holder, model_path=path).result()
    assert sampler.get_base_model() == MODEL
    assert sampler.compute_logprobs(prompt(3, 4)).result()[0] is None


def test_the_hook_of_queue_states_logs_a_pause(sampler, caplog):
    states = tinker_compat.lib.public_interfaces.sampling_client.QueueState
    with caplog.at_level(logging.WARNING):
        sampler.on_queue_state_change(states.ACTIVE, None)
        assert caplog.records == []
        sampler.on_queue_state_change(states.PAUSED_CAPACITY, None)
        sampler.on_queue_state_change(states.PAUSED_RATE_LIMIT, "busy")
    assert [r.getMessage().split(": ")[1] for r in caplog.records] == ["paused_capacity", "busy"]


@pytest.mark.filterwarnings("ignore:Dimuon.s formula is not public")
def test_optimisers_of_another_version_train(service):
    config = tinker_compat.DimuonOptimizerConfig()
    client = service.create_lora_training_client(MODEL, rank=4, optimizer=config)
    opened = tinker_compat.types.optimizer.OptimParamsBase
    for params in (
        tinker_compat.DimuonParams(learning_rate=0.1),
        opened(type="dimuon", learning_rate=0.1),  # pyright: ignore[reportCallIssue]
    ):
        client.forward_backward([datum()], "cross_entropy")
        done = client.optim_step(params).result()
    assert done.metrics["step:max"] == 2
    with pytest.raises(ValueError, match="beta1"):
        client.optim_step(opened(type="dimuon", learning_rate=0.1, beta1=2.0))  # pyright: ignore[reportCallIssue]


NEWER = ["types.SessionStatus", "types.session_status", "PromptProvenanceSpan"]


@pytest.mark.parametrize("path", NEWER)
def test_a_name_that_only_a_newer_tinker_can_bring_says_so(path, monkeypatch):
    module, _, name = f"tinker_compat.{path}".rpartition(".")
    package = importlib.import_module(module)
    theirs = sys.modules["tinker.types" if "types" in module else "tinker"]
    if name in vars(theirs):
        monkeypatch.delattr(theirs, name)
        monkeypatch.setattr(tinker, "__version__", "0.23.1")
        if name in vars(package):
            monkeypatch.delattr(package, name)
        monkeypatch.delitem(sys.modules, f"tinker_compat.{path}", raising=False)
    says = rf"tinker\.{path} needs tinker 0\.38\.0, and 0\.23\.1 is installed"
    with pytest.raises(AttributeError, match=says):
        getattr(package, name)
    assert not hasattr(package, name)
    with pytest.raises(ImportError, match=says):
        exec(f"from {module} import {name}")
