"""Independent answers: plain transformers and PEFT, one sequence at a time, in float64, through autograd."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import torch
from peft import PeftModel
from torch import Tensor
from transformers import AutoModelForCausalLM

from backend.checkpoints import peft_files
from backend.trainer.base import Adapter
from together_post_training.samples import Sample

Array = np.ndarray


def plain_logprobs(directory: Path, samples: Sequence[Sample]) -> list[Array]:
    """Of the base model, float64."""
    model = _plain(directory)
    with torch.no_grad():
        return [_target_logprobs(model, sample).numpy() for sample in samples]


@dataclass(frozen=True, slots=True, kw_only=True)
class Oracle:
    """A base model under one adapter, which plain PEFT read from a file."""

    model: PeftModel

    def logprobs(self, samples: Sequence[Sample]) -> list[Array]:
        with torch.no_grad():
            return [_target_logprobs(self.model, sample).numpy() for sample in samples]

    def gradient(
        self, samples: Sequence[Sample], loss: str, params: Mapping[str, float]
    ) -> tuple[float, dict[str, Array]]:
        """(the loss of the batch, its gradient by the names of the adapter's file), float64."""
        self.model.zero_grad()
        total = torch.zeros((), dtype=torch.float64)
        for sample in samples:
            inputs = {k: torch.as_tensor(np.array(v)) for k, v in sample.inputs.items()}
            lp = _target_logprobs(self.model, sample)
            total = total + LOSSES[loss](lp, inputs, params)
        total.backward()
        gradients = {
            name.replace(".default", ""): p.grad.numpy().copy()
            for name, p in self.model.named_parameters()
            if p.grad is not None
        }
        return total.item(), gradients


def load(directory: Path, adapter: Adapter) -> Oracle:
    """Through the files that PEFT reads, as anyone would load what we save."""
    base = _plain(directory)
    with TemporaryDirectory() as folder:
        for name, data in (
            ("adapter_config.json", peft_files.peft_config(adapter, str(directory))),
            ("adapter_model.safetensors", peft_files.encode_adapter(adapter)),
        ):
            (Path(folder) / name).write_bytes(data)
        with warnings.catch_warnings():
            # PEFT warns of an adapter on a tied head: it trains the head apart from the embedding, as we do.
            warnings.filterwarnings("ignore", message="Model has `tie_word_embeddings=True`")
            # One setting serves a GPT-2's transposed layers and its head: PEFT finds out which each is.
            warnings.filterwarnings("ignore", message="fan_in_fan_out is set to")
            warnings.filterwarnings("error", message=".*missing.*|.*unexpected.*")
            model = PeftModel.from_pretrained(base, folder, is_trainable=True)
    return Oracle(model=model.double())


def _plain(directory: Path):
    # Transformers' faster experts know no float64.
    return AutoModelForCausalLM.from_pretrained(
        directory, dtype=torch.float64, experts_implementation="eager"
    )


def _target_logprobs(model, sample: Sample) -> Tensor:
    tokens = torch.from_numpy(np.array(sample.tokens))[None]
    logprobs = model(input_ids=tokens, use_cache=False).logits[0].log_softmax(-1)
    targets = torch.from_numpy(np.array(sample.inputs["target_tokens"]))
    picked = logprobs.gather(1, targets.reshape(len(targets), -1))
    return picked.reshape(targets.shape)


# The formulas of Tinker's loss reference, differentiated by autograd.


def _weight(lp: Tensor, x: Mapping[str, Tensor]) -> Tensor | float:
    return x.get("weights", 1.0)


def _cross_entropy(lp, x, params):
    return -(_weight(lp, x) * lp).sum()


def _importance_sampling(lp, x, params):
    return -(_weight(lp, x) * (lp - x["logprobs"]).exp() * x["advantages"]).sum()


def _ppo(lp, x, params):
    ratio = (lp - x["logprobs"]).exp()
    clipped = ratio.clamp(params["clip_low_threshold"], params["clip_high_threshold"])
    return -(
        _weight(lp, x) * torch.minimum(ratio * x["advantages"], clipped * x["advantages"])
    ).sum()


def _cispo(lp, x, params):
    ratio = (lp - x["logprobs"]).exp()
    clipped = ratio.clamp(params["clip_low_threshold"], params["clip_high_threshold"]).detach()
    return -(_weight(lp, x) * clipped * lp * x["advantages"]).sum()


def _dro(lp, x, params):
    penalty = 0.5 * params["beta"] * (lp - x["logprobs"]) ** 2
    return -(_weight(lp, x) * (lp * x["advantages"] - penalty)).sum()


LOSSES = {
    "cross_entropy": _cross_entropy,
    "importance_sampling": _importance_sampling,
    "ppo": _ppo,
    "cispo": _cispo,
    "dro": _dro,
}
