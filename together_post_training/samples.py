"""Samples: the one place that knows which arrays belong together and how long each must be.

Alignment: for tokens t0..tn-1 the model input is t0..tn-2, and every per-token array has n-1 values, the first
of which belongs to predicting t1. `build` makes samples from whole sequences; `check` refuses what cannot be
aligned, naming the sample, the key and both lengths.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from together_post_training import losses
from together_post_training.errors import Reason, fail

Array = np.ndarray


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """One training example.

    tokens: int64 (N,), what the model reads.
    inputs: by name, arrays of shape (N,) or, for some losses, (N, K); int64 target_tokens, float32 others.
    """

    tokens: Array
    inputs: Mapping[str, Array] = field(default_factory=dict)

    @property
    def num_tokens(self) -> int:
        return len(self.tokens)


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What a model can read."""

    vocab_size: int
    max_seq_length: int


def build(tokens: Sequence[int] | Array, **per_token: Sequence[float] | Array) -> Sample:
    """A sample from a whole sequence of n tokens and arrays with one value for each of them.

    The last token is dropped from the model input, the first value from every array, and `target_tokens` is made:
    six tokens give five positions. The value for a token is the one that belongs to predicting that token.

    Raises:
        PostTrainingError: LENGTH_MISMATCH, EMPTY_INPUT.
    """
    whole = np.asarray(tokens, dtype=np.int64)
    if whole.ndim != 1 or whole.size < 2:
        raise fail(
            Reason.EMPTY_INPUT,
            f"A sample needs a flat sequence of at least 2 tokens, got shape {whole.shape}.",
        )
    inputs: dict[str, Array] = {"target_tokens": whole[1:]}
    for key, values in per_token.items():
        array = np.asarray(values, dtype=np.float32)
        if len(array) != len(whole):
            raise _length_mismatch(0, key, expected=len(whole), got=len(array))
        inputs[key] = array[1:]
    return Sample(tokens=whole[:-1], inputs=inputs)


def check(samples: Sequence[Sample], loss: str, limits: Limits) -> list[Sample]:
    """The samples with inputs of the right dtypes, ready for an engine.

    Integers are accepted where floats are expected.

    Raises:
        PostTrainingError: for the first fault, naming the sample's index, the key and the value.
    """
    contract = losses.contract(loss)
    if not samples:
        raise fail(Reason.EMPTY_INPUT, "No samples: send at least one.")
    return [_check_one(i, sample, loss, contract, limits) for i, sample in enumerate(samples)]


def check_gradients(samples: Sequence[Sample], gradients: Sequence[Array]) -> list[Array]:
    """Custom gradients as float32 arrays, one of its target_tokens' shape for each sample."""
    if len(samples) != len(gradients):
        raise fail(
            Reason.LENGTH_MISMATCH,
            f"{len(samples)} samples need as many gradients, got {len(gradients)}.",
        )
    checked = []
    for i, (sample, gradient) in enumerate(zip(samples, gradients, strict=True)):
        expected = sample.inputs["target_tokens"].shape
        if gradient.shape != expected:
            raise fail(
                Reason.LENGTH_MISMATCH,
                f"Sample {i}: the gradient has shape {list(gradient.shape)}, target_tokens {list(expected)}.",
                sample=i,
            )
        checked.append(_as_float(i, "gradient", gradient))
    return checked


def check_tokens(tokens: Array, limits: Limits, *, what: str) -> None:
    """Raises EMPTY_INPUT or TOKEN_OUT_OF_RANGE."""
    if not tokens.size:
        raise fail(Reason.EMPTY_INPUT, f"{what} is empty: it needs at least one token.", what=what)
    # In one look: as unsigned numbers, negative ids are larger than any vocabulary.
    if tokens.dtype == np.int64 and tokens.view(np.uint64).max() < limits.vocab_size:
        return
    low, high = int(tokens.min()), int(tokens.max())
    if low < 0 or high >= limits.vocab_size:
        bad = low if low < 0 else high
        raise fail(
            Reason.TOKEN_OUT_OF_RANGE,
            f"{what} holds token id {bad}: this model's ids are 0 to {limits.vocab_size - 1}.",
            what=what,
            token=bad,
            vocab_size=limits.vocab_size,
        )


def _check_one(
    index: int, sample: Sample, loss: str, contract: losses.LossContract, limits: Limits
) -> Sample:
    check_tokens(sample.tokens, limits, what=f"Sample {index}: model_input")
    if sample.num_tokens > limits.max_seq_length:
        raise fail(
            Reason.SEQUENCE_TOO_LONG,
            f"Sample {index} has {sample.num_tokens} tokens: this model's window is {limits.max_seq_length}.",
            sample=index,
            num_tokens=sample.num_tokens,
            max_seq_length=limits.max_seq_length,
        )
    _check_keys(index, sample, loss, contract)
    targets = _check_targets(index, sample, loss, contract, limits)
    inputs = {"target_tokens": targets}
    for key, values in sample.inputs.items():
        if key != "target_tokens":
            inputs[key] = _check_values(index, key, values, targets.shape)
    return Sample(tokens=sample.tokens, inputs=inputs)


def _check_keys(index: int, sample: Sample, loss: str, contract: losses.LossContract) -> None:
    readable = (*contract.inputs, *contract.optional)
    for key in (*contract.inputs, *contract.provided):
        if key not in sample.inputs:
            raise fail(
                Reason.MISSING_INPUT,
                f"Sample {index} lacks {key!r}: loss {loss!r} needs {_needs(contract)}.",
                sample=index,
                key=key,
                loss=loss,
            )
    for key in sample.inputs:
        if key not in readable and key not in contract.provided:
            raise fail(
                Reason.UNKNOWN_INPUT,
                f"Sample {index} has an input {key!r} that loss {loss!r} does not read; it reads "
                f"{', '.join(readable)}. "
                "Remove it, or use the loss it belongs to.",
                sample=index,
                key=key,
                loss=loss,
            )


def _needs(contract: losses.LossContract) -> str:
    needed = ", ".join(contract.inputs)
    if not contract.provided:
        return needed
    return (
        f"{needed} and provenance spans of sequences that this server sampled, from whose record it takes "
        f"{', '.join(contract.provided)}"
    )


def _check_targets(
    index: int, sample: Sample, loss: str, contract: losses.LossContract, limits: Limits
) -> Array:
    targets = sample.inputs["target_tokens"]
    if targets.dtype.kind not in "iu":
        raise fail(
            Reason.WRONG_DTYPE,
            f"Sample {index}: target_tokens are {targets.dtype}, must be int64.",
            sample=index,
            key="target_tokens",
            dtype=targets.dtype,
        )
    if targets.ndim not in ((1, 2) if contract.takes_2d else (1,)):
        accepted = "(N,) or (N, K)" if contract.takes_2d else "(N,)"
        raise fail(
            Reason.LENGTH_MISMATCH,
            f"Sample {index}: target_tokens have shape {list(targets.shape)}; loss {loss!r} takes {accepted}.",
            sample=index,
            key="target_tokens",
        )
    if len(targets) != sample.num_tokens:
        raise _length_mismatch(index, "target_tokens", expected=sample.num_tokens, got=len(targets))
    check_tokens(targets, limits, what=f"Sample {index}: target_tokens")
    return targets.astype(np.int64, copy=False)


def _check_values(index: int, key: str, values: Array, shape: tuple[int, ...]) -> Array:
    if values.ndim == 0 or len(values) != shape[0]:
        got = 0 if values.ndim == 0 else len(values)
        raise _length_mismatch(index, key, expected=shape[0], got=got)
    if values.shape != shape:
        raise fail(
            Reason.LENGTH_MISMATCH,
            f"Sample {index}: {key} has shape {list(values.shape)}, target_tokens {list(shape)}; they must be equal.",
            sample=index,
            key=key,
        )
    return _as_float(index, key, values)


def _as_float(index: int, key: str, values: Array) -> Array:
    if values.dtype.kind not in "iuf":
        raise fail(
            Reason.WRONG_DTYPE,
            f"Sample {index}: {key} is {values.dtype}, must be float32 (or integers).",
            sample=index,
            key=key,
            dtype=values.dtype,
        )
    floats = values
    if values.dtype != np.float32:
        with np.errstate(over="ignore"):  # what becomes infinite is refused below
            floats = values.astype(np.float32)
    if not np.isfinite(floats).all():
        where = int(np.flatnonzero(~np.isfinite(floats.ravel()))[0])
        raise fail(
            Reason.NOT_FINITE,
            f"Sample {index}: {key}[{where}] is {floats.ravel()[where]}; all values must be finite.",
            sample=index,
            key=key,
            position=where,
        )
    return floats


def _length_mismatch(index: int, key: str, *, expected: int, got: int):
    return fail(
        Reason.LENGTH_MISMATCH,
        f"Sample {index}: {key} has {got} values, but the model input has {expected} tokens; they must be equal "
        "(drop the last token from the model input, and the first value from every array).",
        sample=index,
        key=key,
        expected=expected,
        got=got,
    )
