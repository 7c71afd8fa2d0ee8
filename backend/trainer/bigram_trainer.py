"""The bigram model behind the trainer's Protocol.

Gradients are in closed form, all arithmetic is float64. What is kept from step to step (weights,
moments) is float32, as it is saved, so that resuming from a checkpoint changes nothing. Losses read
the float32 log-probabilities that are returned, so that sending them back gives a ratio of exactly 1.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from backend.trainer.base import (
    ADAMW,
    Adapter,
    Array,
    FullConfig,
    FullWeights,
    LoraConfig,
    ModelInfo,
    OptimizerConfig,
    OptimizerState,
    OptimParams,
    Pass,
    PassResult,
    Weights,
    WeightsConfig,
)
from backend.trainer.bigram import HEAD, LORA_A, LORA_B, BigramModel
from backend.trainer.checks import (
    check_adapter,
    check_full_weights,
    check_lora,
    check_room_for_full_weights,
    require_adapter,
)
from backend.trainer.dropout import Dropout, SampleRows
from backend.trainer.objective import Objective
from backend.trainer.param_checks import check_optim
from backend.trainer.reference_optimizer import ReferenceOptimizer
from together_post_training.errors import PostTrainingError, Reason, fail
from together_post_training.samples import Sample

_HEAD_PATH = "lm_head"
# What Muon steps; the head itself is AdamW's, as in every model.
_MATRICES = (LORA_A, LORA_B)


@dataclass(slots=True, kw_only=True)
class _Session:
    """Owned by the trainer. `gradient`: float64 sums since the last step; None before the first pass. num_samples: of
    the passes that are in it."""

    weights: Weights
    optimizer: ReferenceOptimizer
    gradient: dict[str, Array] | None = None
    num_samples: int = 0
    # log p of the current weights, (V, V); made when first asked for.
    logprobs: Array | None = field(default=None, repr=False)

    def add(self, gradient: dict[str, Array], num_samples: int) -> None:
        self.gradient = _sum(self.gradient, gradient)
        self.num_samples += num_samples

    def clear(self) -> None:
        self.gradient, self.num_samples = None, 0


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Drawn:
    """What a pass's tokens are computed with. Dropout drops the one input of A that is not 0, and the token sees the
    base alone, or keeps it, and the token sees an adapter that is so much the stronger.

    table, base: log p, (V, V), under these weights and without. kept: which target sees which; None: all these weights.
    """

    weights: Weights
    table: Array
    base: Array | None = None
    kept: Sequence[Array] | None = None

    def logprobs(self, i: int, sample: Sample) -> Array:
        """float32, the shape of the i-th sample's targets."""
        logprobs = _target_logprobs(self.table, sample)
        if self.kept is None or self.base is None:
            return logprobs
        return np.where(self.kept[i], logprobs, _target_logprobs(self.base, sample))

    def kept_part(self, i: int, derivative: Array) -> Array:
        """With 0 for targets that do not see the weights."""
        return derivative if self.kept is None else np.where(self.kept[i], derivative, 0)


class BigramTrainer:
    """See `backend.trainer.base.Trainer`."""

    def __init__(self, model: BigramModel) -> None:
        self._model = model
        self._sessions: dict[str, _Session] = {}

    @property
    def model(self) -> ModelInfo:
        return self._model.info

    @property
    def merge_tokens(self) -> int:
        return 0

    def create_session(
        self, session: str, weights: WeightsConfig, optimizer: OptimizerConfig = ADAMW
    ) -> None:
        if session in self._sessions:
            raise fail(
                Reason.SESSION_EXISTS, f"Session {session!r} exists already.", session=session
            )
        made = self._full_weights() if isinstance(weights, FullConfig) else self._adapter(weights)
        self._sessions[session] = _Session(
            weights=made, optimizer=ReferenceOptimizer(optimizer, made.tensors, _MATRICES)
        )

    def delete_session(self, session: str) -> None:
        self._session(session)
        del self._sessions[session]

    def run(self, work: Pass) -> PassResult:
        assert work.routed_experts is None, "a bigram model has no experts"
        state = self._session(work.session)
        objective = Objective(work)
        drawn = self._drawn(state, work)
        logprobs = [drawn.logprobs(i, sample) for i, sample in enumerate(work.samples)]
        derivatives = objective.evaluate(range(len(logprobs)), logprobs)
        if work.backward:
            gradient = self._gradient(drawn, work.samples, derivatives)
            _require_finite(gradient, work.session, "the gradient of")
            state.add(gradient, len(work.samples))
        return PassResult(logprobs=logprobs, metrics=objective.metrics())

    def run_batch(self, works: Sequence[Pass]) -> list[PassResult | PostTrainingError]:
        """One by one: there is nothing to gain from rows in common."""
        return [self._attempt(work) for work in works]

    def has_gradients(self, session: str) -> bool:
        return self._session(session).gradient is not None

    def clear_gradients(self, session: str) -> None:
        self._session(session).clear()

    def optim_step(self, session: str, params: OptimParams) -> dict[str, float]:
        state = self._session(session)
        check_optim(params, state.optimizer.config)
        assert state.gradient is not None, "optim_step is called only with gradients"
        gradient = state.gradient
        state.clear()
        tensors, metrics = state.optimizer.step(state.weights.tensors, gradient, params)
        state.weights, state.logprobs = replace(state.weights, tensors=tensors), None
        return metrics

    # Weights and moments are values: steps and loads replace them, so handing them out copies nothing.

    def weights(self, session: str) -> Weights:
        return self._session(session).weights

    def optimizer_state(self, session: str) -> OptimizerState:
        return self._session(session).optimizer.state

    def load(self, session: str, weights: Weights, optimizer: OptimizerState | None) -> None:
        state = self._session(session)
        shapes = {name: array.shape for name, array in state.weights.tensors.items()}
        if isinstance(state.weights, FullWeights):
            check_full_weights(weights, shapes)
        else:
            check_adapter(require_adapter(weights), state.weights.lora, shapes)
        if optimizer is not None:
            state.optimizer.check(optimizer)
        state.weights = replace(state.weights, tensors=weights.tensors)
        state.optimizer.load(optimizer)
        state.logprobs = None
        state.clear()

    def _attempt(self, work: Pass) -> PassResult | PostTrainingError:
        try:
            return self.run(work)
        except PostTrainingError as error:
            return error

    def _drawn(self, state: _Session, work: Pass) -> _Drawn:
        weights = state.weights
        if not work.backward or isinstance(weights, FullWeights) or not weights.lora.dropout:
            if state.logprobs is None:
                state.logprobs = self._model.logprobs(weights)
            return _Drawn(weights=weights, table=state.logprobs)
        dropout = Dropout(
            seed=weights.lora.seed,
            step=state.optimizer.state.num_steps,
            probability=weights.lora.dropout,
            samples=[
                SampleRows(number=state.num_samples + i, num_tokens=sample.num_tokens)
                for i, sample in enumerate(work.samples)
            ],
        )
        alpha = weights.lora.alpha * dropout.factor
        strengthened = replace(weights, lora=replace(weights.lora, alpha=alpha))
        return _Drawn(
            weights=strengthened,
            table=self._model.logprobs(strengthened),
            base=self._model.logprobs(None),
            kept=_kept_tokens(dropout, work.samples, self._model.vocab_size),
        )

    def _gradient(
        self, drawn: _Drawn, samples: Sequence[Sample], derivatives: Sequence[Array]
    ) -> dict[str, Array]:
        """d objective / d A and B, from d lp(j | i) / d logit k = (k == j) - p(k | i)."""
        by_logit = np.zeros_like(drawn.table)  # [i, k]
        for i, (sample, derivative) in enumerate(zip(samples, derivatives, strict=True)):
            targets = sample.inputs["target_tokens"]
            np.add.at(by_logit, (_contexts(sample), targets), drawn.kept_part(i, derivative))
        by_logit -= by_logit.sum(axis=1, keepdims=True) * np.exp(drawn.table)
        by_head = self._model.hidden_scale * by_logit.T  # (V, V)
        if isinstance(drawn.weights, FullWeights):
            return {HEAD: by_head}
        by_product = drawn.weights.lora.scale * by_head
        a, b = (drawn.weights.tensors[name].astype(np.float64) for name in (LORA_A, LORA_B))
        return {LORA_A: b.T @ by_product, LORA_B: by_product @ a.T}

    def _adapter(self, lora: LoraConfig) -> Adapter:
        check_lora(lora, self.model)
        _check_targets(lora, self._model.name)
        return Adapter(lora=lora, tensors=_fresh_tensors(lora, self._model.vocab_size))

    def _full_weights(self) -> FullWeights:
        running = [n for n, s in self._sessions.items() if isinstance(s.weights, FullWeights)]
        check_room_for_full_weights(running, self._model.name)
        return FullWeights(tensors={HEAD: self._model.head.astype(np.float32)})

    def _session(self, session: str) -> _Session:
        state = self._sessions.get(session)
        if state is None:
            raise fail(Reason.SESSION_NOT_FOUND, f"Unknown session {session!r}.", session=session)
        return state


def _check_targets(lora: LoraConfig, model: str) -> None:
    for name in lora.module_names:
        if name != _HEAD_PATH:
            raise fail(
                Reason.INVALID_ARGUMENT,
                f"target_modules: {name!r} is no layer of {model}, which has nothing but {_HEAD_PATH!r}.",
                target_module=name,
                available=_HEAD_PATH,
            )
    if not lora.module_names and not lora.train_unembed:
        raise fail(
            Reason.INVALID_ARGUMENT,
            f"Nothing to train: {model} has no attention or MLP layers, only an output head; set train_unembed.",
        )


def _fresh_tensors(lora: LoraConfig, vocab_size: int) -> dict[str, Array]:
    """A uniform in +-1/sqrt(V), as PEFT draws it; B = 0."""
    stream = np.random.Generator(np.random.Philox(key=lora.seed % 2**64))
    bound = vocab_size**-0.5
    a = stream.uniform(-bound, bound, size=(lora.rank, vocab_size))
    return {
        LORA_A: a.astype(np.float32),
        LORA_B: np.zeros((vocab_size, lora.rank), dtype=np.float32),
    }


def _contexts(sample: Sample) -> Array:
    """For each target, the token it follows: the shape of the targets, (N,) or (N, K)."""
    return _per_target(sample.tokens, sample)


def _per_target(per_token: Array, sample: Sample) -> Array:
    targets = sample.inputs["target_tokens"]
    return np.broadcast_to(per_token.reshape(-1, *[1] * (targets.ndim - 1)), targets.shape)


def _kept_tokens(dropout: Dropout, samples: Sequence[Sample], vocab_size: int) -> list[Array]:
    """bool, of each sample's targets: whether the token that it follows is kept as an input of A."""
    rows = dropout.kept(_HEAD_PATH, vocab_size)
    tokens = np.concatenate([sample.tokens for sample in samples])
    per_token = rows[np.arange(len(tokens)), tokens]
    parts = np.split(per_token, np.cumsum([sample.num_tokens for sample in samples])[:-1])
    return [_per_target(part, sample) for part, sample in zip(parts, samples, strict=True)]


def _target_logprobs(table: Array, sample: Sample) -> Array:
    """float32, the shape of the targets."""
    return table[_contexts(sample), sample.inputs["target_tokens"]].astype(np.float32)


def _sum(kept: dict[str, Array] | None, added: dict[str, Array]) -> dict[str, Array]:
    return added if kept is None else {name: kept[name] + added[name] for name in added}


def _require_finite(tensors: Mapping[str, Array], session: str, what: str) -> None:
    for name, array in tensors.items():
        if not np.isfinite(array).all():
            raise _non_finite(session, f"{what} {name} is not finite")


def _non_finite(session: str, what: str) -> PostTrainingError:
    return fail(
        Reason.NON_FINITE_LOSS,
        f"Session {session!r}: {what}; weights and moments stay as they were.",
        session=session,
    )
