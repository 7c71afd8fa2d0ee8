"""Tokens go through the experts that were recorded; what the router still says is how these are weighed."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch

from backend.trainer import base_model
from backend.trainer.base import Experts, FullConfig, LoraConfig, Pass, PassResult
from backend.trainer.base_model import BaseModel
from backend.trainer.routers import pack, routers_of
from backend.trainer.torch_trainer import TorchTrainer
from tests import models
from tests.conformance.data import adapter_of, random_sample
from tests.trainer import full_oracle, oracle
from tests.trainer.routed import Forced, each, random_experts
from tests.trainer.sessions import policy_samples, random_adapter, relative_error, take_gradient
from together_post_training.errors import PostTrainingError
from together_post_training.samples import Sample

Array = np.ndarray

# Both ways of an architecture that has a choice.
KINDS: dict[str, tuple[str, dict]] = {
    "qwen3_moe": ("qwen3_moe", {}),
    "qwen3_moe, normalised": ("qwen3_moe", {"norm_topk_prob": True}),
    "qwen2_moe": ("qwen2_moe", {}),
    "olmoe": ("olmoe", {}),
    "mixtral": ("mixtral", {}),
    "glm4_moe": ("glm4_moe", {"routed_scaling_factor": 1.5}),
    "glm4_moe, not normalised": ("glm4_moe", {"norm_topk_prob": False}),
}
LORA = LoraConfig(rank=3, alpha=6, seed=0)
LENGTHS = (9, 20, 9, 9, 14)
SAMPLES = [random_sample(i, 128, n) for i, n in enumerate(LENGTHS)]


@pytest.fixture(scope="module", params=KINDS)
def kind(request: pytest.FixtureRequest, tmp_path_factory) -> tuple[Path, BaseModel]:
    model_type, settings = KINDS[request.param]
    directory = models.rand(tmp_path_factory.mktemp(model_type) / "model", model_type, **settings)
    return directory, base_model.load(model_type, str(directory))


@pytest.fixture(scope="module")
def qwen3(tmp_path_factory) -> BaseModel:
    directory = tmp_path_factory.mktemp("qwen3_moe") / "model"
    return base_model.load("m", str(models.rand(directory, "qwen3_moe", norm_topk_prob=True)))


def num_layers(base: BaseModel) -> int:
    assert isinstance(base.info.experts, Experts)
    return base.info.experts.num_layers


def recorded(base: BaseModel) -> list[Array | None]:
    """Of SAMPLES: whole, all but the last token, none, whole in fewer bits, whole."""
    whole = [random_experts(10 + i, n, layers=num_layers(base)) for i, n in enumerate(LENGTHS)]
    return [whole[0], whole[1][:-1], None, whole[3].astype(np.uint8), whole[4]]


def session(trainer: TorchTrainer, name: str = "s", *, seed: int = 0) -> None:
    trainer.create_session(name, LORA)
    trainer.load(name, random_adapter(trainer, name, seed=seed), None)


def replay(
    trainer: TorchTrainer,
    routed: Sequence[Array | None] | None,
    samples: Sequence[Sample] = SAMPLES,
    *,
    backward: bool = True,
    name: str = "s",
    **options,
) -> tuple[list[Array], dict[str, Array]]:
    """(logprobs, gradient)."""
    work = Pass(session=name, samples=samples, backward=backward, routed_experts=routed, **options)
    logprobs = list(trainer.run(work).logprobs)
    return logprobs, take_gradient(trainer, name) if backward else {}


def same(one: Sequence[Array], other: Sequence[Array]) -> bool:
    return all(np.array_equal(a, b) for a, b in zip(one, other, strict=True))


def own_choices(base: BaseModel, trainer: TorchTrainer, sample: Sample) -> Array:
    """What the routers of a session's model choose, int16 (T, L, K)."""
    chosen: list[torch.Tensor] = []
    hooks = [
        router.register_forward_hook(lambda _, __, out: chosen.append(out[2]))
        for router in routers_of(trainer._packed._view)
    ]
    replay(trainer, None, [sample], backward=False)
    for hook in hooks:
        hook.remove()
    assert len(chosen) == num_layers(base)
    return torch.stack(chosen, dim=1).to(torch.int16).numpy()


def test_base_model_says_which_experts_it_has(base_of):
    assert base_of("qwen3_moe").info.experts == Experts(num_layers=2, num_experts=4, per_token=2)
    assert base_of("glm4_moe").info.experts == Experts(num_layers=1, num_experts=4, per_token=2)
    assert base_of("llama").info.experts is None


def test_base_model_of_an_unknown_router_says_so(tmp_path):
    directory = models.rand(
        tmp_path / "m", "granitemoe", num_local_experts=4, num_experts_per_tok=2
    )
    assert base_model.load("m", str(directory)).info.experts == "unknown"


def test_replaying_what_the_router_chose_changes_no_bit(kind):
    _, base = kind
    trainer = TorchTrainer(base)
    session(trainer)
    logprobs, gradient = replay(trainer, None, SAMPLES[1:2])
    chosen = own_choices(base, trainer, SAMPLES[1])
    again, gradient_again = replay(trainer, [chosen], SAMPLES[1:2])
    assert same(logprobs, again)
    assert same(list(gradient.values()), list(gradient_again.values()))


@pytest.mark.parametrize("loss", ["cross_entropy", "importance_sampling"])
def test_replayed_logprobs_and_gradients_equal_autograd_in_float64(kind, loss):
    """LoRA on every layer, the experts' too; losses that are differentiated before and after the logprobs are known."""
    directory, base = kind
    trainer, routed = TorchTrainer(base, token_budget=32), recorded(base)
    session(trainer)
    plain = oracle.load(directory, adapter_of(trainer, "s"))
    forced = Forced(plain.model)
    wanted = [plain.logprobs([SAMPLES[i]])[0] for i in each(forced, routed)]
    samples = policy_samples(SAMPLES, [lp.astype(np.float32) for lp in wanted])
    if loss == "cross_entropy":
        samples = [
            Sample(tokens=s.tokens, inputs={k: s.inputs[k] for k in ("target_tokens", "weights")})
            for s in samples
        ]
    logprobs, gradient = replay(trainer, routed, samples, loss=loss)
    assert_near(logprobs, wanted)
    forward, _ = replay(trainer, routed, samples, backward=False, loss=loss)
    assert_near(forward, wanted)
    parts = [plain.gradient([samples[i]], loss, {})[1] for i in each(forced, routed)]
    total = {name: np.sum([part[name] for part in parts], axis=0) for name in parts[0]}
    assert relative_error(gradient, total) < 2e-5


def test_replay_of_full_weights_trains_the_router_as_autograd_in_float64(kind):
    directory, base = kind
    if base.module.config.model_type == "glm4_moe":
        pytest.skip("its full weights cannot be trained: the router's bias is no parameter")
    trainer, routed = TorchTrainer(base), recorded(base)
    trainer.create_session("s", FullConfig())
    plain = full_oracle.load(directory)
    forced = Forced(plain.module)
    wanted = [plain.logprobs([SAMPLES[i]])[0] for i in each(forced, routed)]
    for i in each(forced, routed):
        plain.backward([SAMPLES[i]])
    logprobs, gradient = replay(trainer, routed)
    assert_near(logprobs, wanted)
    assert relative_error(gradient, plain.gradient()) < 2e-5
    routers = {n: g for n, g in gradient.items() if n.endswith((".gate.weight", "router.weight"))}
    assert len(routers) == num_layers(base)
    assert all(np.abs(g).max() > 1e-3 for g in routers.values())


def assert_near(got: Sequence[Array], wanted: Sequence[Array]) -> None:
    """float32 against float64, on weights so large that a fault shows as whole nats."""
    for ours, theirs in zip(got, wanted, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=0, atol=1e-4)


def test_other_experts_give_other_logprobs(qwen3):
    trainer, routed = TorchTrainer(qwen3), recorded(qwen3)
    session(trainer)
    free, _ = replay(trainer, None, backward=False)
    replayed, _ = replay(trainer, routed, backward=False)
    moved = [float(np.abs(a - b).max()) for a, b in zip(free, replayed, strict=True)]
    assert [gap > 0.5 for gap in moved] == [True, True, False, True, True]
    assert moved[2] < 1e-4


@pytest.mark.parametrize("token_budget", [1, 25, 4096])
def test_law_4_micro_batches_and_order_change_nothing_that_is_replayed(qwen3, token_budget):
    divided, whole = TorchTrainer(qwen3, token_budget=token_budget), TorchTrainer(qwen3)
    routed = recorded(qwen3)
    order = [3, 0, 4, 2, 1]
    for trainer in (divided, whole):
        session(trainer)
    wanted, gradient = replay(whole, routed)
    got, other = replay(divided, [routed[i] for i in order], [SAMPLES[i] for i in order])
    assert_near(got, [wanted[i] for i in order])
    assert relative_error(other, gradient) < 1e-5


def test_layers_that_are_computed_again_replay_to_the_bit(kind):
    _, base = kind
    results = []
    for activation_bytes in (2**30, 1):
        trainer = TorchTrainer(base, token_budget=128, activation_bytes=activation_bytes)
        session(trainer)
        results.append(replay(trainer, recorded(base)))
    (logprobs, gradient), (again, gradient_again) = results
    assert same(logprobs, again)
    assert same(list(gradient.values()), list(gradient_again.values()))


def test_full_weights_that_are_computed_again_replay_to_the_bit(qwen3):
    results = []
    for activation_bytes in (2**30, 1):
        trainer = TorchTrainer(qwen3, token_budget=128, activation_bytes=activation_bytes)
        trainer.create_session("s", FullConfig())
        results.append(replay(trainer, recorded(qwen3)))
    assert same(list(results[0][1].values()), list(results[1][1].values()))


def test_law_9_sessions_side_by_side_replay_their_own(qwen3):
    """One with experts for most samples, one without any, one with others for the same samples."""
    together, alone = TorchTrainer(qwen3), TorchTrainer(qwen3)
    others = [random_experts(50 + i, n) for i, n in enumerate(LENGTHS)]
    routed = {"a": recorded(qwen3), "b": None, "c": others}
    works = [
        Pass(session=name, samples=SAMPLES, backward=True, routed_experts=some)
        for name, some in routed.items()
    ]
    for trainer in (together, alone):
        for seed, name in enumerate(routed):
            session(trainer, name, seed=seed)
    outcomes = together.run_batch(works)
    for work, outcome in zip(works, outcomes, strict=True):
        assert isinstance(outcome, PassResult), outcome
        wanted, gradient = replay(alone, work.routed_experts, name=work.session)
        assert_near(outcome.logprobs, wanted)
        assert relative_error(take_gradient(together, work.session), gradient) < 1e-5


def test_nothing_is_replayed_after_a_pass_or_a_failure(qwen3):
    trainer = TorchTrainer(qwen3)
    session(trainer)
    free, _ = replay(trainer, None, backward=False)
    replay(trainer, recorded(qwen3))
    bad = [np.full(len(s.tokens), np.nan, np.float32) for s in SAMPLES]
    with pytest.raises(PostTrainingError):
        replay(trainer, recorded(qwen3), gradients=bad)
    again, _ = replay(trainer, None, backward=False)
    assert same(free, again)


def test_packed_experts_leave_the_rest_to_the_router():
    packed = pack([None, random_experts(0, 2), random_experts(1, 3)], [2, 3, 3])
    assert packed is not None
    assert packed.shape == (8, 2, 2)
    free = (packed == -1).all(dim=2).all(dim=1)
    assert free.tolist() == [True, True, False, False, True, False, False, False]
    assert pack([None, None], [2, 3]) is None
    assert pack([], [2, 3]) is None
