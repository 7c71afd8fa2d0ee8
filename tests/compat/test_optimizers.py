"""Tinker's optimisers: what is sent for each, and what a run with one does."""

from __future__ import annotations

import warnings
from types import SimpleNamespace

import numpy as np
import pytest
from tinker import types

import tinker_compat as tinker
from tests.compat.conftest import MODEL
from tests.compat.data import datum
from tinker_compat.optimizers import from_config, to_config, to_optim_step

pytestmark = pytest.mark.skipif(
    not hasattr(types, "DimuonOptimizerConfig"), reason="older Tinkers know AdamW alone"
)


def muon_config(**fields):
    return types.optimizer.OptimizerConfigBase(type="muon", **fields)


def open_config(family: str, **fields):
    return types.optimizer.OptimizerConfigBase(type=family, **fields)


def open_params(family: str, **fields):
    return types.optimizer.OptimParamsBase(type=family, **fields)


def muon_params(**fields):
    return types.optimizer.OptimParamsBase(type="muon", **fields)


def logprobs(client) -> np.ndarray:
    return client.forward([datum()], "cross_entropy").result().loss_fn_outputs[0]["logprobs"].data


def train(client, params) -> dict[str, float]:
    client.forward_backward([datum()], "cross_entropy")
    return client.optim_step(params).result().metrics


@pytest.mark.parametrize(
    "params",
    [
        {},
        {"learning_rate": 0.0, "beta1": 0.0, "beta2": 0.0, "eps": 0.0},
        {"learning_rate": 3e-5, "weight_decay": 0.1, "grad_clip_norm": 1.0},
    ],
)
def test_adam_parameters_are_all_sent_zeros_too(params):
    """OP-03: Tinker's defaults (eps 1e-12, no clipping) hold whatever the server's are."""
    given = types.AdamParams(**params)
    for form in (given, params):
        message = to_optim_step(form).adam
        assert {f.name: v for f, v in message.ListFields()} == given.model_dump()


def test_dimuon_parameters_are_all_sent():
    sent = to_optim_step(tinker.DimuonParams(learning_rate=0.0, beta1=0.0, grad_clip_norm=2.0))
    shown = {f.name: v for f, v in sent.dimuon.ListFields()}
    assert shown == {"learning_rate": 0.0, "beta1": 0.0, "grad_clip_norm": 2.0}


def test_clipping_at_a_negative_norm_clips_nothing_as_dimuons_documentation_says():
    sent = to_optim_step(tinker.DimuonParams(learning_rate=0.1, grad_clip_norm=-1.0))
    assert sent.dimuon.HasField("grad_clip_norm")
    assert sent.dimuon.grad_clip_norm == 0.0


@pytest.mark.parametrize(
    ("family", "own"),
    [("adamw", types.AdamParams), ("dimuon", lambda **f: types.DimuonParams(**f))],
)
def test_open_types_named_as_tinkers_own_are_those(family, own):
    assert to_optim_step(open_params(family, learning_rate=0.5)) == to_optim_step(
        own(learning_rate=0.5)
    )
    with pytest.raises(ValueError, match="momentum"):
        to_optim_step(open_params(family, learning_rate=0.5, momentum=0.9))


def test_muon_parameters_are_sent_as_given_and_no_others():
    sent = to_optim_step(muon_params(momentum=0.0, adam=types.AdamParams(eps=1e-6))).muon
    assert [f.name for f, _ in sent.ListFields()] == ["momentum", "adam"]
    assert (sent.adam.eps, sent.adam.beta2) == (1e-6, 0.95)
    assert to_optim_step(muon_params()).WhichOneof("params") == "muon"


@pytest.mark.parametrize(
    ("params", "error", "named"),
    [
        (None, TypeError, "AdamParams"),
        (0.1, TypeError, "AdamParams"),
        (SimpleNamespace(type="lion"), tinker.BadRequestError, "lion"),
        (lambda: muon_params(beta1=0.9), tinker.BadRequestError, "muon has no beta1"),
        (lambda: muon_params(momentum="much"), TypeError, "momentum is 'much'"),
    ],
)
def test_parameters_that_cannot_be_sent_are_refused_by_name(params, error, named):
    with pytest.raises(error, match=named):
        to_optim_step(params() if callable(params) else params)


@pytest.mark.parametrize(
    "make",
    [
        lambda: types.AdamOptimizerConfig(),
        lambda: types.DimuonOptimizerConfig(),
        lambda: muon_config(scaling_strategy="match_adam"),
        lambda: muon_config(scaling_strategy="original"),
    ],
)
def test_an_optimizer_comes_back_as_it_was_sent(make):
    assert from_config(to_config(make())) == make()


def test_no_optimizer_is_adamw_and_muon_matches_it_by_default():
    assert from_config(to_config(None)) == types.AdamOptimizerConfig()
    assert from_config(to_config(muon_config())) == muon_config(scaling_strategy="match_adam")


@pytest.mark.parametrize(
    ("optimizer", "named"),
    [
        (SimpleNamespace(type="lion"), "AdamOptimizerConfig"),
        ("adamw", "DimuonOptimizerConfig"),
        (SimpleNamespace(type="dimuon", version=2), "version 2"),
        (lambda: muon_config(scaling_strategy="loud"), "loud.*original"),
        (lambda: muon_config(nesterov=False), "nesterov.*scaling_strategy"),
        (lambda: open_config("adamw", beta1=0.5), "adamw has no beta1.*each optim_step"),
        (lambda: open_config("dimuon", beta1=0.5), "dimuon has no beta1.*version"),
    ],
)
def test_optimizers_that_are_not_there_are_refused_by_name(service, optimizer, named):
    given = optimizer() if callable(optimizer) else optimizer
    with pytest.raises(tinker.BadRequestError, match=named):
        service.create_lora_training_client(MODEL, optimizer=given)


def test_a_dimuon_run_trains_shows_its_optimizer_and_says_what_it_is_once(service):
    client = service.create_lora_training_client(
        MODEL, rank=4, optimizer=tinker.DimuonOptimizerConfig()
    ).result()
    assert client.get_info().optimizer_config == tinker.DimuonOptimizerConfig()
    before = logprobs(client)
    with pytest.warns(UserWarning, match="Dimuon's formula is not public") as told:
        metrics = train(client, tinker.DimuonParams(learning_rate=0.05))
    assert len(told) == 1
    assert metrics["step:max"] == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        train(client, tinker.DimuonParams(learning_rate=0.05))
    assert logprobs(client)[2] > before[2] + 0.1


def test_the_parameters_of_another_optimizer_are_refused_and_the_gradient_stays(service, client):
    client.forward_backward([datum()], "cross_entropy").result()
    with pytest.raises(tinker.APIError, match=r"optimiser is adamw.*for dimuon") as refused:
        client.optim_step(tinker.DimuonParams(learning_rate=0.1)).result()
    assert "send those of adamw" in str(refused.value)
    other = service.create_lora_training_client(MODEL, rank=4, seed=1).result()
    for each in (client, other):
        if each is other:
            each.forward_backward([datum()], "cross_entropy")
        each.optim_step(tinker.AdamParams(learning_rate=0.1)).result()
    np.testing.assert_array_equal(logprobs(client), logprobs(other))


def test_a_run_resumes_with_its_optimizer_or_with_another(service):
    params = muon_params(learning_rate=0.05)
    client = service.create_lora_training_client(
        MODEL, rank=4, optimizer=muon_config(scaling_strategy="original")
    ).result()
    train(client, params)
    path = client.save_state("half").result().path
    same = service.create_training_client_from_state_with_optimizer(path).result()
    assert same.get_info().optimizer_config == muon_config(scaling_strategy="original")
    for each in (client, same):
        train(each, params)
    np.testing.assert_array_equal(logprobs(client), logprobs(same))
    other = service.create_training_client_from_state(
        path, optimizer=types.DimuonOptimizerConfig()
    ).result()
    assert other.get_info().optimizer_config == types.DimuonOptimizerConfig()
    with pytest.raises(tinker.APIError, match=r"muon.*dimuon"):
        other.load_state_with_optimizer(path).result()
    other.load_state(path).result()
    plain = service.create_training_client_from_state(path).result()
    assert plain.get_info().optimizer_config == types.AdamOptimizerConfig()
    assert train(plain, types.AdamParams())["step:max"] == 1
