"""Whether a server computes this model, and an adapter of it, as the trainer does: asked once, before anybody samples.

A server may have been started with other weights, or without the setting that makes its log-probabilities those of the
untempered distribution; and SGLang computes some architectures otherwise than transformers on some devices, without a
word (sliding windows on a CPU, 0.5.23).
"""

from __future__ import annotations

import logging
from dataclasses import dataclass

import numpy as np

from backend.generator.base import SampleCall, Stop
from backend.generator.sglang.facts import Facts
from backend.generator.sglang.generator import SglangGenerator
from backend.trainer.base import Adapter, LoraConfig, Pass, Trainer
from backend.trainer.base_model import BaseModel
from together_post_training.errors import PostTrainingError, Reason, fail
from together_post_training.samples import Sample

log = logging.getLogger(__name__)

Array = np.ndarray

_SESSION = "agreement of the generator"
_SNAPSHOT = "agreement"
_NUM_PROMPT, _NUM_SAMPLED = 24, 4
_LONGEST_PROMPT = 1024
_TEMPERATURE = 2.0
_SIZE_OF_B = 0.05
_IGNORE_WINDOWS = ("torch_native",)


async def check_agreement(
    generator: SglangGenerator, trainer: Trainer, base: BaseModel, facts: Facts
) -> None:
    """Samples from the base model and from a random adapter, and compares with the trainer.

    Raises:
        PostTrainingError: UNIMPLEMENTED, with the difference.
    """
    _check_windows(base, facts)
    prompt = _prompt(base)
    gap = await _gap(generator, trainer, prompt, None)
    if not gap.largest < base.check_tolerance:
        raise fail(
            Reason.UNIMPLEMENTED,
            f"SGLang's log-probabilities of {base.info.name!r} differ from the trainer's by {gap}. Either it serves "
            "other weights, or was started without SGLANG_RETURN_ORIGINAL_LOGPROB=1, or it computes this model "
            f"(model type {base.module.config.model_type!r}) in another way: use --generator embedded then.",
            gap=gap.largest,
        )
    log.info("SGLang agrees with the trainer on the base model: they differ by %s", gap)
    if not facts.enable_lora:
        log.warning(
            "this SGLang server was started without --enable-lora: it cannot sample from adapters"
        )
        return
    gap = await _adapter_gap(generator, trainer, prompt)
    if gap is None:
        return
    if not gap.largest < base.check_tolerance:
        raise fail(
            Reason.UNIMPLEMENTED,
            f"SGLang's log-probabilities of {base.info.name!r} with an adapter differ from the trainer's by {gap}: "
            "use --generator embedded.",
            gap=gap.largest,
        )
    log.info("SGLang agrees with the trainer on an adapter: they differ by %s", gap)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Gap:
    """The largest differences of log-probabilities, in nats."""

    prompt: float
    sampled: float

    @property
    def largest(self) -> float:
        """NaN if either is."""
        return float(np.maximum(self.prompt, self.sampled))

    def __str__(self) -> str:
        return f"{self.prompt:.2g} on a prompt and {self.sampled:.2g} on tokens sampled at temperature {_TEMPERATURE:g}"


async def _adapter_gap(generator: SglangGenerator, trainer: Trainer, prompt: Array) -> _Gap | None:
    """None: this server has no adapters of this model."""
    adapter = _random_adapter(trainer)
    try:
        await generator.add_snapshot(_SNAPSHOT, adapter)
        try:
            return await _gap(generator, trainer, prompt, adapter)
        finally:
            generator.drop_snapshot(_SNAPSHOT)
    except PostTrainingError as error:
        if error.reason is not Reason.UNIMPLEMENTED:
            raise
        log.warning("SGLang cannot sample from adapters of this model: %s", error.message)
        return None


async def _gap(
    generator: SglangGenerator, trainer: Trainer, prompt: Array, adapter: Adapter | None
) -> _Gap:
    result = await generator.sample(
        SampleCall(
            snapshot=None if adapter is None else _SNAPSHOT,
            prompt=prompt,
            num_samples=1,
            max_tokens=_NUM_SAMPLED,
            seed=0,
            temperature=_TEMPERATURE,
            top_p=1.0,
            top_k=0,
            stop=Stop(),
            prompt_logprobs=True,
        )
    )
    (sequence,) = result.sequences
    assert result.prompt_logprobs is not None
    ours = _forward(trainer, adapter, np.concatenate([prompt, sequence.tokens.astype(np.int64)]))
    num_scored = len(prompt) - 1
    return _Gap(
        prompt=float(np.abs(ours[:num_scored] - result.prompt_logprobs[1:]).max()),
        sampled=float(np.abs(ours[num_scored:] - sequence.logprobs).max()),
    )


def _forward(trainer: Trainer, adapter: Adapter | None, tokens: Array) -> Array:
    lora = LoraConfig(rank=1, alpha=1.0, seed=0) if adapter is None else adapter.lora
    trainer.create_session(_SESSION, lora)
    try:
        if adapter is not None:
            trainer.load(_SESSION, adapter, None)
        sample = Sample(tokens=tokens[:-1], inputs={"target_tokens": tokens[1:]})
        return trainer.run(Pass(session=_SESSION, samples=[sample])).logprobs[0]
    finally:
        trainer.delete_session(_SESSION)


def _random_adapter(trainer: Trainer) -> Adapter:
    """On all that SGLang may know how to serve: not on experts."""
    fresh = _fresh(trainer, LoraConfig(rank=2, alpha=4.0, seed=0))
    if fresh.targets is not None and fresh.targets.parameters:
        fresh = _fresh(trainer, LoraConfig(rank=2, alpha=4.0, seed=0, train_mlp=False))
    rng = np.random.default_rng(0)
    tensors = {
        name: rng.normal(scale=_SIZE_OF_B, size=tensor.shape).astype(np.float32)
        if ".lora_B." in name
        else tensor
        for name, tensor in fresh.tensors.items()
    }
    return Adapter(lora=fresh.lora, tensors=tensors, targets=fresh.targets)


def _fresh(trainer: Trainer, lora: LoraConfig) -> Adapter:
    trainer.create_session(_SESSION, lora)
    try:
        weights = trainer.weights(_SESSION)
    finally:
        trainer.delete_session(_SESSION)
    assert isinstance(weights, Adapter)
    return weights


def _prompt(base: BaseModel) -> Array:
    """Longer than the model's sliding window, where that is short enough to be tried."""
    limits = base.info.limits
    window = _sliding_window(base)
    wanted = window + _NUM_PROMPT if window < _LONGEST_PROMPT else _NUM_PROMPT
    length = max(min(wanted, limits.max_seq_length - _NUM_SAMPLED), 2)
    return np.random.default_rng(1).integers(0, limits.vocab_size, length)


def _sliding_window(base: BaseModel) -> int:
    """0: none."""
    config = base.module.config
    if not getattr(config, "use_sliding_window", True):
        return 0
    return getattr(config, "sliding_window", None) or 0


def _check_windows(base: BaseModel, facts: Facts) -> None:
    window = _sliding_window(base)
    is_wide = _LONGEST_PROMPT <= window < base.info.limits.max_seq_length
    if is_wide and facts.attention in _IGNORE_WINDOWS:
        raise fail(
            Reason.UNIMPLEMENTED,
            f"{base.info.name!r} attends to windows of {window} tokens, which SGLang's attention backend "
            f"{facts.attention!r} ignores: use --generator embedded, or another --attention-backend (--sglang-args).",
            sliding_window=window,
            attention_backend=facts.attention,
        )
