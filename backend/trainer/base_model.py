"""The frozen base model: found, loaded, checked, and shared by every engine that computes with it.

A model resource loads its weights once. Trainer and generator each take a `view`: a module tree of their own, to
wrap and configure as they like, over the same parameters.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
import transformers
from torch import Tensor, nn
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    AttentionInterface,
    AutoConfig,
    AutoModelForCausalLM,
)
from transformers.configuration_utils import PretrainedConfig
from transformers.masking_utils import AttentionMaskInterface
from transformers.modeling_utils import PreTrainedModel
from transformers.utils import logging as transformers_logging

from backend.trainer import builtin_models, model_directory, storage
from backend.trainer.base import ModelInfo
from backend.trainer.routers import experts_of
from together_post_training.errors import PostTrainingError, Reason, fail
from together_post_training.samples import Limits

# Settings of a config that change attention or logits in ways the engines do not compute. A value counts as set
# unless it is None, False or (for multipliers) 1.
_UNSUPPORTED = {
    "attn_logit_softcapping": "soft-capped attention logits",
    "final_logit_softcapping": "soft-capped output logits",
    "logit_scale": "scaled output logits",
    "logits_scaling": "scaled output logits",
    "lm_head_multiplier": "scaled output logits",
    "attention_sink": "attention sinks",
    "attention_sinks": "attention sinks",
    "use_bidirectional_attention": "bidirectional attention",
    "quantization_config": "quantised weights",
}
# Their frequencies depend on the longest sequence of a batch, so that neighbours would change a sequence's result.
_UNSUPPORTED_ROPE = ("dynamic", "longrope")
# Architectures whose attention has sinks without a setting that says so.
_WITH_SINKS = ("gpt_oss",)


_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}

# How a model is kept; "auto": float32 on a CPU, bfloat16 on a GPU. And where.
DType = Literal["auto", "float32", "bfloat16"]
Device = Literal["auto", "cpu", "cuda"]


@dataclass(frozen=True, slots=True, kw_only=True)
class BaseModel:
    """One loaded base model. Nobody writes to it.

    module: in eval mode, no parameter requires a gradient.
    tokenizer_dir: where the tokenizer's files lie; None where the model came without one.
    """

    info: ModelInfo
    module: PreTrainedModel
    tokenizer_dir: Path | None

    @property
    def device(self) -> torch.device:
        return self.module.device

    @property
    def dtype(self) -> torch.dtype:
        """What hidden states are computed in. Weights may be kept in less; see `load`."""
        dtype = self.module.config.dtype
        assert isinstance(dtype, torch.dtype)
        return dtype

    @property
    def check_tolerance(self) -> float:
        """How far a model's own log-probabilities and an engine's may lie apart, for the engine to be right.

        What such a check finds (a scaled or capped logit, say) is far larger.
        """
        return 1e-3 if self.dtype == torch.float32 else 0.5

    @torch.no_grad()
    def plain_logprobs(self, tokens_T: Tensor) -> Tensor:
        """The model's own, of every next token: float32 (T, V)."""
        logits = self.module(tokens_T[None].to(self.device), use_cache=False).logits
        return logits[0].float().log_softmax(dim=1)

    def view(self, attention: str) -> PreTrainedModel:
        """A module tree that shares every parameter and buffer, with modules and a config of its own.

        Args:
            attention: a name registered with transformers' AttentionInterface and AttentionMaskInterface.
        """
        if attention not in AttentionInterface() or attention not in AttentionMaskInterface():
            raise ValueError(f"attention {attention!r} is not registered with transformers")
        shared = {id(t): t for t in (*self.module.parameters(), *self.module.buffers())}
        view = copy.deepcopy(self.module, shared)
        view.config._attn_implementation = attention
        return view


def load(
    name: str,
    path: str | None = None,
    *,
    dtype: DType = "auto",
    device: Device = "auto",
    compute: Literal["auto", "bfloat16"] = "auto",
) -> BaseModel:
    """Loads a model into memory.

    Args:
        name: what clients call it; also where to find it, unless `path` says.
        path: a builtin model, a directory in Hugging Face's format, or the id of a model in the local Hugging Face
            cache. Nothing is downloaded, and no code that lies beside the weights is run.
        dtype: what weights are kept in. "auto": float32 on a CPU, bfloat16 on a GPU.
        device: "auto": a GPU if there is one.
        compute: what a bfloat16 model is computed in. "auto": float32 on a CPU, where it costs little and its numbers
            are exactly those of the rounded weights; bfloat16 on a GPU. Log-probabilities are float32 always.

    Raises:
        PostTrainingError: MODEL_NOT_FOUND, naming the files that are missing; INCOMPATIBLE_CHECKPOINT when the weights
            cannot be read or do not fit the architecture; UNIMPLEMENTED for an architecture or a feature that the
            engines do not compute; INVALID_ARGUMENT for a GPU that is not there.
    """
    place = find_device(device)
    kept = default_dtype(place) if dtype == "auto" else _DTYPES[dtype]
    source = path or name
    directory = find(source)
    check_supported(_read_config(source, directory))
    model_directory.check_weights(source, directory)
    module = _load_module(source, directory, kept)
    if kept == torch.bfloat16 and place.type == "cpu" and compute == "auto":
        storage.compute_in_float32(module)
    nn.Module.to(module, place)
    return BaseModel(
        info=_describe(name, directory, module),
        module=module,
        tokenizer_dir=directory if model_directory.has_tokenizer(directory) else None,
    )


def find_device(wanted: Device = "auto") -> torch.device:
    """Raises INVALID_ARGUMENT for a GPU that torch does not see."""
    has_gpu = torch.cuda.is_available()
    if wanted == "cuda" and not has_gpu:
        raise fail(
            Reason.INVALID_ARGUMENT,
            f"Device 'cuda': torch {torch.__version__} sees no GPU here. Use --device cpu, or install a build of torch "
            "for this machine's GPU and its driver.",
            device=wanted,
        )
    return torch.device("cuda" if has_gpu and wanted != "cpu" else "cpu")


def default_dtype(device: torch.device) -> torch.dtype:
    """What weights are kept in there."""
    return torch.float32 if device.type == "cpu" else torch.bfloat16


def check_supported(config: PretrainedConfig) -> None:
    """Raises UNIMPLEMENTED, naming the setting that the engines cannot compute with."""
    for key, what in _UNSUPPORTED.items():
        value = getattr(config, key, None)
        if value not in (None, False, 1, 1.0):
            raise _unsupported(config, f"{what} ({key}={value})")
    if config.model_type in _WITH_SINKS:
        raise _unsupported(config, "attention sinks")
    rope = getattr(config, "rope_parameters", None) or {}
    for parameters in (rope, *(v for v in rope.values() if isinstance(v, dict))):
        if parameters.get("rope_type") in _UNSUPPORTED_ROPE:
            raise _unsupported(config, f"rope_type {parameters['rope_type']!r}")


def _unsupported(config: PretrainedConfig, what: str) -> PostTrainingError:
    return fail(
        Reason.UNIMPLEMENTED,
        f"Model type {config.model_type!r} has {what}, which this server's engines do not compute yet.",
        model_type=config.model_type,
        feature=what,
    )


def find(source: str) -> Path:
    """The directory of a model in Hugging Face's format; see `load` and `model_directory.find`."""
    if source.startswith(builtin_models.PREFIX):
        return builtin_models.directory(source)
    return model_directory.find(source)


def _read_config(source: str, directory: Path) -> PretrainedConfig:
    """Raises UNIMPLEMENTED for an architecture that there is no causal language model of."""
    said = model_directory.read_config(source, directory)
    architecture = said["model_type"]
    try:
        config = AutoConfig.from_pretrained(
            directory, local_files_only=True, trust_remote_code=False
        )
    except (ValueError, KeyError):
        raise _no_language_model(source, architecture, own_code="auto_map" in said) from None
    except (OSError, TypeError, AttributeError) as error:
        raise model_directory.damaged(
            source, directory, model_directory.CONFIG, str(error)
        ) from None
    has_window = isinstance(getattr(config, "max_position_embeddings", None), int)
    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING or not has_window:
        raise _no_language_model(source, architecture, own_code=False)
    return config


def _no_language_model(source: str, architecture: str, *, own_code: bool) -> PostTrainingError:
    why = (
        "its code lies beside its weights, and is not run"
        if own_code
        else f"transformers {transformers.__version__} has no causal language model of that kind with a window of "
        "positions"
    )
    return fail(
        Reason.UNIMPLEMENTED,
        f"Model {source!r} has the architecture {architecture!r} (model_type in its config.json), which cannot be "
        f"served: {why}.",
        model=source,
        model_type=architecture,
    )


def _load_module(source: str, directory: Path, dtype: torch.dtype) -> PreTrainedModel:
    with without_progress_bar():
        # The option's return type is not in the signature.
        module, report = AutoModelForCausalLM.from_pretrained(  # pyright: ignore[reportGeneralTypeIssues]
            directory,
            dtype=dtype,
            attn_implementation="sdpa",
            local_files_only=True,
            trust_remote_code=False,
            ignore_mismatched_sizes=True,
            output_loading_info=True,
        )
    _check_complete(source, report)
    _take_off_disk(module)
    module.eval()
    module.requires_grad_(False)
    return module


@contextmanager
def without_progress_bar() -> Iterator[None]:
    """Reading takes a second or two: whoever starts a server wants its own lines alone."""
    was_enabled = transformers_logging.is_progress_bar_enabled()
    transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        if was_enabled:
            transformers_logging.enable_progress_bar()


def _take_off_disk(module: PreTrainedModel) -> None:
    """Tensors are read as maps of the file: whoever wrote to it later would change the model in mid-training."""
    for tensor in (*module.parameters(), *module.buffers()):
        tensor.data = tensor.detach().clone()


def _check_complete(source: str, report: dict) -> None:
    """transformers would fill what is missing with random weights, and go on."""
    faults = {
        "missing": sorted(report["missing_keys"]),
        "unexpected": sorted(report["unexpected_keys"]),
        "misshapen": sorted(str(key[0]) for key in report["mismatched_keys"]),
    }
    if not any(faults.values()):
        return
    listed = "; ".join(f"{kind}: {', '.join(keys)}" for kind, keys in faults.items() if keys)
    raise fail(
        Reason.INCOMPATIBLE_CHECKPOINT,
        f"The weights of {source!r} do not fit its config.json ({listed}). Use a complete checkpoint of this "
        "architecture.",
        model=source,
        **{kind: ",".join(keys) for kind, keys in faults.items()},
    )


def _describe(name: str, directory: Path, module: PreTrainedModel) -> ModelInfo:
    head = module.get_output_embeddings()
    assert head is not None, "a causal language model has an output head"
    return ModelInfo(
        name=name,
        location=str(directory),
        architecture=type(module).__name__,
        limits=Limits(
            vocab_size=head.weight.shape[0],
            max_seq_length=module.config.max_position_embeddings,
        ),
        eos_tokens=_eos_tokens(module),
        experts=experts_of(module),
    )


def _eos_tokens(module: PreTrainedModel) -> tuple[int, ...]:
    """From the generation config, where chat models list the end of a turn too, else from the config."""
    for config in (module.generation_config, module.config):
        eos = getattr(config, "eos_token_id", None)
        if eos is not None:
            return (eos,) if isinstance(eos, int) else tuple(eos)
    return ()
