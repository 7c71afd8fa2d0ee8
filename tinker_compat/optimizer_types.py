"""Optimisers as Tinker describes them, for a Tinker that has no types for them yet (before 0.38.0)."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field
from tinker import types


class OptimizerConfigBase(BaseModel):
    """What a session is made with; keeps fields that it does not know."""

    model_config = ConfigDict(frozen=True, extra="allow")

    type: str


class AdamOptimizerConfig(OptimizerConfigBase):
    model_config = ConfigDict(extra="forbid")

    type: Literal["adamw"] = "adamw"  # pyright: ignore[reportIncompatibleVariableOverride]


class DimuonOptimizerConfig(OptimizerConfigBase):
    model_config = ConfigDict(extra="forbid")

    type: Literal["dimuon"] = "dimuon"  # pyright: ignore[reportIncompatibleVariableOverride]
    version: Literal[1] = 1


class OptimParamsBase(BaseModel):
    """What one step is taken with; keeps fields that it does not know."""

    model_config = ConfigDict(frozen=True, extra="allow")

    type: str


class DimuonParams(OptimParamsBase):
    """grad_clip_norm: none at 0 and below."""

    model_config = ConfigDict(extra="forbid", allow_inf_nan=False)

    type: Literal["dimuon"] = "dimuon"  # pyright: ignore[reportIncompatibleVariableOverride]
    learning_rate: float = Field(ge=0)
    grad_clip_norm: float = 0.0
    beta1: float = Field(default=0.9, ge=0, lt=1)


OptimizerConfig = AdamOptimizerConfig | OptimizerConfigBase
OptimParams = types.AdamParams | OptimParamsBase
