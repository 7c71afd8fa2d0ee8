"""Several sessions in one row, and the check that a model is computed as transformers does."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from backend.trainer.adapter_slot import AdapterSlot
from backend.trainer.base import AdamParams, LoraConfig
from backend.trainer.lora import Segment
from backend.trainer.packed_model import PackedModel, pack, whole_row
from tests.conformance.data import random_sample
from together_post_training.errors import PostTrainingError, Reason

SHOW_GRADIENT = AdamParams(learning_rate=0.0, beta1=0.0)
CONFIGS = (
    LoraConfig(rank=3, alpha=6, seed=1),
    LoraConfig(rank=5, alpha=32, seed=2, train_mlp=False),
    LoraConfig(rank=2, alpha=8, seed=3, train_attn=False, train_mlp=False),
)
LENGTHS = (9, 9, 4, 12, 1, 6)


def slots_of(model: PackedModel) -> list[AdapterSlot]:
    """B is random too."""
    slots = []
    for config in CONFIGS:
        slot = AdapterSlot(config, model.layers(config))
        generator = torch.Generator().manual_seed(config.seed)
        slot.weights.data.normal_(std=0.2, generator=generator)
        slots.append(slot)
    return slots


def gradient_of(slot: AdapterSlot) -> np.ndarray:
    slot.commit_pass(1)
    slot.optim_step(SHOW_GRADIENT)
    return np.concatenate([t.ravel() for t in slot.optimizer_state().moments["exp_avg"].values()])


@pytest.mark.parametrize("chunk_values", [1, 2**23])
def test_mixed_sessions_get_what_each_gets_alone(base_of, chunk_values):
    """Three sessions of other ranks, scales and modules, and the base, in one forward and backward."""
    model = PackedModel(base_of("llama"), chunk_values)
    samples = [random_sample(i, 128, n) for i, n in enumerate(LENGTHS)]
    owners = (0, 0, 1, 2, 2, None)
    row = pack(samples)
    gradient = torch.randn(row.input_ids.shape[1], generator=torch.Generator().manual_seed(0))
    together, alone = slots_of(model), slots_of(model)
    segments, start = [], 0
    for owner, n in zip(owners, LENGTHS, strict=True):
        slot = None if owner is None else together[owner]
        segments.append(
            Segment(
                start=start,
                stop=start + n,
                weights={} if slot is None else slot.by_path,
                anchor=None if slot is None else slot.weights,
            )
        )
        start += n
    logprobs = model.forward(row, segments, for_backward=True).score_and_backward(gradient)
    assert torch.equal(model.forward(row, segments).logprobs(), logprobs)
    start = 0
    for owner, one in zip(owners, samples, strict=True):
        stop = start + one.num_tokens
        single = pack([one])
        if owner is None:
            got = model.forward(single, [whole_row(single)]).logprobs()
        else:
            slot = alone[owner]
            whole = whole_row(single, slot.by_path, slot.weights)
            got = model.forward(single, [whole], for_backward=True).score_and_backward(
                gradient[start:stop]
            )
        torch.testing.assert_close(logprobs[start:stop], got, rtol=0, atol=1e-5)
        start = stop
    for one, other in zip(together, alone, strict=True):
        got, wanted = gradient_of(one), gradient_of(other)
        assert np.linalg.norm(got - wanted) < 1e-5 * np.linalg.norm(wanted)


def test_model_that_is_not_computed_as_transformers_does_is_refused(base_of):
    """Stands for any feature that nobody thought of: here, logits that the model's own forward scales."""
    base = base_of("llama")

    def halve(module, inputs, output):
        output.logits *= 0.5
        return output

    hook = base.module.register_forward_hook(halve)
    try:
        with pytest.raises(PostTrainingError, match="'llama'") as error:
            PackedModel(base)
    finally:
        hook.remove()
    assert error.value.reason is Reason.UNIMPLEMENTED
